"""The control plane: how long a controller takes to tell many instances, and to wake many waiters.

`notify_fanout`: a set is prepared and committed by the real `FleetMethod` on 100 instances, over the same on one. Each
instance is an HTTP endpoint that takes 50 ms for either call; all are in one process of their own, and say what a
rollout service says.

`gate_wakes`: 1,000 clients wait at `/wait_version`, each on a connection of its own, and the version is served; from
then to the last client's answer, over the time that as many requests take on the same connections when the gate is
open already. Both are one exchange a client, so a gate that polled, or woke them one by one, would show.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from bench.harness import BenchArgs, Row, facts
from weightsync.control.controller import WeightSyncController
from weightsync.control.method import SyncMethod
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.net.messages import decode, encode
from weightsync.net.server import ServerThread
from weightsync.types import Version
from weightsync.types.control import GateReply, WaitVersionRequest
from weightsync.types.fleet import CommitVersionsRequest, HeartbeatRequest, PrepareReply, PrepareRequest
from weightsync.types.service import ModelStatus, ServiceStatus

ROWS = {
    "notify_fanout": "a version prepared and committed on 100 instances of 50 ms a call, over the same on one",
    "gate_wakes": "1,000 waiters woken, from the served version to the last answer, over 1,000 open gates",
}
_TARGETS = {"notify_fanout": 2.0, "gate_wakes": 2.0}
_NUM_INSTANCES = 100
_DELAY_S = 0.05
_NUM_WAITERS = 1000
_WAIT_S = 120.0
_BEAT_S = 3.0
"""Seconds between two heartbeats of an instance."""
_LEASE_S = 3600.0
_QUIET_S = 1.0
"""For how long the server's CPU time is looked at."""
_MODEL, _RUN, _SENDER = "bench", "run", "http://127.0.0.1:1"
_TOKEN = "a-token-of-the-bench-alone"
_CONNECT_AT_ONCE = 100
"""A server keeps a few hundred connections of one address that have not shown the token yet."""


def run(args: BenchArgs) -> list[Row]:
    """Measures the rows that are wanted."""
    rows = []
    if "notify_fanout" in args.rows:
        rows.append(_notify_fanout(args))
    if "gate_wakes" in args.rows:
        rows.append(asyncio.run(_gate_wakes(args)))
    return rows


def _row(name: str, seconds: float, reference: float, args: BenchArgs, detail: dict[str, Any]) -> Row:
    return Row(
        row=name,
        ratio=seconds / reference,
        target=_TARGETS[name],
        detail={**facts(args), "seconds": {"measured": round(seconds, 5), "reference": round(reference, 5)}, **detail},
    )


@contextlib.contextmanager
def _process(main: Callable[[Connection], None]) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=main, args=(theirs,), daemon=True)
    process.start()
    try:
        yield mine
    finally:
        process.kill()
        process.join()


# --- notify_fanout ---


def _notify_fanout(args: BenchArgs) -> Row:
    with _process(_instances_main) as conn:
        url = conn.recv()
        many, few = _Fleet(url, _NUM_INSTANCES), _Fleet(url, 1)
        first_s = (many.sync(), few.sync())  # with this their clients are there
        times: dict[int, list[float]] = {_NUM_INSTANCES: [], 1: []}
        cpu_s = []
        for _ in range(args.repeats):
            times[1].append(few.sync())
            began = time.process_time()
            times[_NUM_INSTANCES].append(many.sync())
            cpu_s.append(time.process_time() - began)
        conn.send("calls")
        num_calls = conn.recv()
    assert num_calls == 2 * (_NUM_INSTANCES + 1) * (args.repeats + 1), num_calls
    return _row(
        "notify_fanout",
        statistics.median(times[_NUM_INSTANCES]),
        statistics.median(times[1]),
        args,
        {
            "num_instances": _NUM_INSTANCES,
            "delay_s": _DELAY_S,
            "num_calls_an_instance": 2,
            "fastest_s": round(min(times[_NUM_INSTANCES]), 4),
            "slowest_s": round(max(times[_NUM_INSTANCES]), 4),
            "controller_cpu_s": round(statistics.median(cpu_s), 4),
            "first_time_s": {"100": round(first_s[0], 4), "1": round(first_s[1], 4)},
        },
    )


class _Fleet:
    """A pool of so many instances that take part, and know it."""

    def __init__(self, url: str, num_instances: int) -> None:
        self._ahead_s = 0.0
        self._pool = RolloutPool(lease_s=_LEASE_S, clock=lambda: time.monotonic() + self._ahead_s)
        self._ahead_s = _LEASE_S  # a new pool lends nothing for one lease
        self._method = FleetMethod(self._pool)
        for number in range(num_instances):
            beat = HeartbeatRequest(
                instance_id=f"i{number}", incarnation="one", url=f"{url}/i{number}", lacks=(_MODEL,)
            )
            for _ in range(2):  # by the second one it has heard that it was let in, which a sync waits for
                assert self._pool.heartbeat(beat).state == "live"
        self._versions = itertools.count(1)

    def sync(self) -> float:
        """Seconds until all serve a new version."""
        version = Version(run_id=_RUN, number=next(self._versions))
        begin = time.perf_counter()
        self._method.trained(_MODEL, version, _SENDER)
        assert self._method.sync_weights(_MODEL, version) == version.number
        return time.perf_counter() - begin


def _instances_main(conn: Connection) -> None:
    """One server that is all instances: each has a path."""
    num_calls = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        reply: Any
        if scope["path"].endswith("/prepare_versions"):
            prepared = decode(body, PrepareRequest, what="a set")
            reply = PrepareReply(versions=prepared.versions, models={_MODEL: ModelStatus()})
        else:
            (served,) = decode(body, CommitVersionsRequest, what="a set").versions
            status = ModelStatus(run_id=served.run_id, version=served.version)
            reply = ServiceStatus(models={served.model_id: status})
        await asyncio.sleep(_DELAY_S)
        content = encode(reply)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    conn.send(ServerThread(app).start())
    while conn.recv() == "calls":
        conn.send(num_calls)


# --- gate_wakes ---


class _Told(SyncMethod):
    """Serves whatever it is asked to, at once.

    Args:
        pool: whose changes are told, as by every method that has one.
    """

    def __init__(self, pool: RolloutPool) -> None:
        self._pool = pool

    def subscribe(self, changed: Callable[[], None]) -> None:
        self._pool.subscribe(changed)

    def sync_weights(self, model_tag: str, version: Version) -> int:
        return version.number

    def evict_failed(self, model_tag: str) -> Sequence[str]:
        return ()


def _controller_main(conn: Connection) -> None:
    """A controller behind its HTTP face. Told a version it serves it; asked, it says how often the gate was looked at,
    and its CPU seconds."""
    pool = RolloutPool(lease_s=_LEASE_S)
    controller = WeightSyncController({"sync_mode": "fully-async"}, _Told(pool), model_tags=(_MODEL,))
    beating = threading.Event()
    num_looks = 0
    serves = controller.serves

    def counted(*args: Any) -> bool:
        nonlocal num_looks
        num_looks += 1
        return serves(*args)

    controller.serves = counted  # type: ignore[method-assign,assignment]

    def beat() -> None:
        """All instances, one after the other, each in its time."""
        for number in itertools.count():
            beating.wait()
            instance = number % _NUM_INSTANCES
            pool.heartbeat(
                HeartbeatRequest(
                    instance_id=f"i{instance}", incarnation="one", url="http://127.0.0.1:1", lacks=(_MODEL,)
                )
            )
            time.sleep(_BEAT_S / _NUM_INSTANCES)

    threading.Thread(target=beat, daemon=True).start()
    server = ControllerServer(controller, token=_TOKEN)
    conn.send(server.start())
    while True:
        order = conn.recv()
        if order == "looks":
            conn.send((num_looks, time.process_time()))
            continue
        if order == "beat":
            beating.clear() if beating.is_set() else beating.set()
            continue
        begin = time.perf_counter()
        controller.train_worker_notify_weight_update("trainer", _MODEL, _RUN, order)
        conn.send(begin)


class _Waiter:
    """One client, with a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.num_requests = 0
        self.answered_s = 0.0

    @classmethod
    async def connect(cls, url: str, served: int) -> _Waiter:
        """Waits for a version that is served already, which shows the token, and asks for the next one."""
        host, _, port = url.removeprefix("http://").rpartition(":")
        waiter = cls(*await asyncio.open_connection(host, int(port)))
        waiter.ask(served)
        await waiter.answer()
        waiter.ask(served + 1)  # a connection that asks for nothing is closed soon
        return waiter

    def ask(self, version: int) -> None:
        """Sends the one request."""
        body = encode(WaitVersionRequest(model_tag=_MODEL, run_id=_RUN, version=version, wait_s=_WAIT_S))
        head = (
            "POST /wait_version HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {_TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        self.num_requests += 1

    async def answer(self) -> None:
        """Returns when it may go on."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        reply = decode(await self._reader.readexactly(length), GateReply, what="the gate's answer")
        assert reply.answer == "continue"
        self.answered_s = time.perf_counter()

    def close(self) -> None:
        self._writer.close()


async def _gate_wakes(args: BenchArgs) -> Row:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the process that is started has it, too
    with _process(_controller_main) as conn:
        url = await asyncio.to_thread(conn.recv)
        conn.send(1)
        await asyncio.to_thread(conn.recv)
        waiters: list[_Waiter] = []
        while len(waiters) < _NUM_WAITERS:
            waiters += await asyncio.gather(*(_Waiter.connect(url, 1) for _ in range(_CONNECT_AT_ONCE)))
        asked, rounds = 2 * _NUM_WAITERS, []  # one look at the open gate, one at the closed one
        for version in range(2, args.repeats + 3):
            times, asked = await _round(conn, waiters, version, asked)
            rounds.append(times)
        del rounds[0]
        num_requests = {each.num_requests for each in waiters}
        for each in waiters:
            each.close()
    assert num_requests == {2 + 2 * (args.repeats + 1)}, "a waiter asked more than once"
    median = {name: round(statistics.median(each[name] for each in rounds), 5) for name in rounds[0]}
    return _row(
        "gate_wakes", median["last_s"], median["open_s"], args,
        {
            "num_waiters": _NUM_WAITERS,
            "requests_a_wait": 1,
            "looks_a_wait": median["looks"] / _NUM_WAITERS,
            "first_answer_s": median["first_s"],
            "last_answer_s": median["last_s"],
            "all_wait_server_cpu": median["quiet_cpu"],
            f"all_wait_{_NUM_INSTANCES}_instances_beat_server_cpu": median["beating_cpu"],
        },
    )  # fmt: skip


async def _round(
    conn: Connection, waiters: Sequence[_Waiter], version: int, asked: int
) -> tuple[dict[str, float], int]:
    """All wait for a version, which they have asked for; it is served, all ask for it once more, and for the next.

    Args:
        asked: how many looks the gate has had when all have asked; and the same for the next round comes back.
    """
    answers = asyncio.gather(*(each.answer() for each in waiters))
    while (await _looks(conn))[0] < asked:
        if answers.done():  # one was refused
            await answers
        await asyncio.sleep(0.02)
    quiet_cpu = await _cpu_share(conn)
    conn.send("beat")
    beating_cpu = await _cpu_share(conn)
    conn.send("beat")
    before, _ = await _looks(conn)
    assert not answers.done()
    conn.send(version)
    begin = await asyncio.to_thread(conn.recv)
    await answers
    done, _ = await _looks(conn)
    answered = [each.answered_s - begin for each in waiters]
    start = time.perf_counter()
    for each in waiters:
        each.ask(version)
    await asyncio.gather(*(each.answer() for each in waiters))
    open_s = max(each.answered_s for each in waiters) - start
    looks, _ = await _looks(conn)
    for each in waiters:
        each.ask(version + 1)
    return {
        "first_s": min(answered), "last_s": max(answered), "open_s": open_s, "quiet_cpu": quiet_cpu,
        "beating_cpu": beating_cpu, "looks": done - before,
    }, looks + len(waiters)  # fmt: skip


async def _cpu_share(conn: Connection) -> float:
    """How much of one core the server takes."""
    _, before = await _looks(conn)
    start = time.perf_counter()
    await asyncio.sleep(_QUIET_S)
    _, after = await _looks(conn)
    return (after - before) / (time.perf_counter() - start)


async def _looks(conn: Connection) -> tuple[int, float]:
    conn.send("looks")
    said: tuple[int, float] = await asyncio.to_thread(conn.recv)
    return said
