"""Publishers at random speed, receivers of every kind, and a record of every version that anybody took as good.

Each seed is a run of its own, which begins at version 0 again; a few follow each other at one agent. The weather is
decided by the seed alone; who meets whom when is not, so a failure names its seed and is looked for with many versions.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch

from tests.multiproc.busy import NUM_TURNS, busy_cores
from tests.multiproc.pull_hook import Hook
from tests.multiproc.pull_kit import (
    BLOCK_BYTES,
    MODEL,
    SLACK_S,
    SPARSE,
    Receiver,
    Run,
    Trainer,
    is_right,
    run_of,
    shm_of,
    wait_until,
)
from tests.standins.processes import Child, children
from weightsync.codec import delta, model_digest
from weightsync.errors import WeightSyncError
from weightsync.host.puller import GRACE_S, Puller
from weightsync.memory import reclaim_dead
from weightsync.trainer import publisher as manager
from weightsync.transfer.tcp import TcpSource
from weightsync.types import Deadline
from weightsync.types.transfer_messages import Transport

GUARD_S = 0.4
PULL_S = 2.0
EVENTS = ["kill", "kill", "stop", "leave", "none"]
PACES = [(0.0,), (0.01,), (0.0, 0.0, 0.01, 0.1), (0.005, 0.05)]
SPEEDS = [0.0, 0.0, 0.01, 0.1]
RUNS_AN_AGENT = 5


def publisher_main(kib: int, conn: Connection) -> None:
    """Publishes whole runs, as fast as it is told to, and says how each offload went."""
    torch.set_num_threads(1)
    manager.BLOCK_BYTES = BLOCK_BYTES
    run: Run | None = None
    while (order := conn.recv()) is not None:
        seed, pauses, is_last = order
        if run is None:
            run = Run(seed, kib, guard_s=GUARD_S)
        else:
            run.begin_anew(seed)
        conn.send(("offload", 0, run.offload(0)))
        run.wm.wait_published(0, timeout_s=40.0)  # a new agent takes seconds to be ready
        conn.send(("endpoint", run.wm.endpoint))
        for version, pause in enumerate(pauses, start=1):
            time.sleep(pause)
            conn.send(("offload", version, run.offload(version)))
        conn.send(("last", None))
        conn.recv()  # everybody is there again
        version = len(pauses) + 1
        while not run.offload(version)["published"] and version < len(pauses) + 20:
            version += 1
        run.wm.wait_published(version, timeout_s=40.0)
        conn.send(("final", version))
        conn.recv()  # everybody has it
        if is_last:
            run.wm.close()
            run = None
        conn.send(("closed", None))


def follower_main(kib: int, conn: Connection) -> None:
    """Takes version after version of one run, fast or slowly, until it is told to rest."""
    torch.set_num_threads(1)
    weather = random.Random(os.getpid())
    receive = TcpSource._receive
    slow_s = 0.0

    def slowly(*args: Any) -> None:
        time.sleep(weather.random() * slow_s)
        receive(*args)

    TcpSource._receive = slowly  # type: ignore[method-assign]
    while (order := conn.recv()) is not None:
        endpoint, transport, mode, slow_s = order
        puller = Puller(endpoint, MODEL, receiver_id=f"r-{os.getpid()}", transport=transport, mode=mode, stall_s=2.0)
        last = None
        while not conn.poll(0.003):
            with contextlib.suppress(WeightSyncError):  # superseded again and again; what counts is what is taken
                newest = puller.newest(timeout_s=2.0)
                if newest is None or newest == last:
                    continue
                began_s = time.monotonic()
                how = "well"
                try:
                    taken = puller.pull(deadline=Deadline(PULL_S), at_least=lambda newest=newest: newest)
                except WeightSyncError as error:
                    how = str(error)
                    raise
                finally:
                    if (seconds := time.monotonic() - began_s) > PULL_S + GRACE_S + SLACK_S:
                        conn.send(("late", (seconds, how)))
                with taken as pulled:
                    right = is_right(pulled, kib)
                    time.sleep(weather.random() * slow_s)
                    last = pulled.version
                    conn.send(("took", (str(last), pulled.num_deltas), right and is_right(pulled, kib)))
        conn.recv()
        puller.close()
        conn.send(("rests", None))


class ModelUpdater:
    """The storm's view of one receiver."""

    def __init__(self, start: Callable[..., Child], kib: int) -> None:
        self.child = start(follower_main, kib, talk=True, name="follower")
        self.follows = False
        self.leaving = False
        self.stopped = False
        self.was_stopped = False
        self.killed = False
        self.last = ""

    def follow(self, endpoint: str, transport: Transport | None, mode: str, slow_s: float) -> None:
        self.child.conn.send((endpoint, transport, mode, slow_s))
        self.follows, self.was_stopped, self.last = True, False, ""

    def rest(self) -> None:
        self.child.conn.send("rest")
        self.leaving = True


class Storm:
    """One publisher and three receivers, seed after seed."""

    def __init__(self, start: Callable[..., Child], kib: int) -> None:
        self.start = start
        self.kib = kib
        self.publisher = start(publisher_main, kib, talk=True, name="publisher")
        self.followers = [ModelUpdater(start, kib) for _ in range(3)]
        self.pids = [self.publisher.pid, *(follower.child.pid for follower in self.followers)]
        self.num_taken = self.num_by_delta = self.num_over_gaps = 0

    def run(self, seed: int, versions: int, *, is_last: bool) -> None:
        """One run: its weather, then calm, in which everybody has to get the last version."""
        self.seed = seed
        self.random = random.Random(seed)
        self.said: dict[str, Any] = {}
        pace = self.random.choice(PACES)
        self.events = {self.random.randrange(1, versions): self.random.choice(EVENTS) for _ in range(versions // 6)}
        num_before, self.num_offloads = self.num_taken, 0
        self.publisher.conn.send((seed, [self.random.choice(pace) for _ in range(versions - 1)], is_last))
        self.endpoint = self.until("endpoint")
        for follower in self.followers:
            self.join(follower)
        self.until("last")
        assert self.num_offloads == versions
        self.mend()
        self.hear_until(lambda: not any(follower.leaving for follower in self.followers))
        self.mend()  # who had just left
        self.publisher.conn.send("go on")
        everybody = f"{run_of(seed)}/{self.until('final')}"
        self.hear_until(lambda: all(follower.last == everybody for follower in self.followers))
        assert self.num_taken > num_before
        for follower in self.followers:
            follower.rest()
        self.hear_until(lambda: not any(follower.leaving for follower in self.followers))
        self.publisher.conn.send("close")
        self.until("closed")
        assert len(shm_of(self.publisher.pid)) <= (0 if is_last else 3), f"seed {seed}"

    def until(self, what: str) -> Any:
        """Hears everybody until the publisher has said that; what it said."""
        self.hear_until(lambda: what in self.said)
        return self.said[what]

    def hear_until(self, over: Callable[[], bool], timeout_s: float = 40.0) -> None:
        """Hears everybody, and checks what they say; fails where nobody says anything for so long."""
        end = time.monotonic() + timeout_s
        while not over():
            by_conn = {each.child.conn: each for each in self.followers if each.child.process.is_alive()}
            for conn in wait([self.publisher.conn, *by_conn], timeout=0.2):
                assert isinstance(conn, Connection)
                with contextlib.suppress(EOFError, ConnectionResetError):  # it was killed
                    self.check(conn.recv(), by_conn.get(conn))
                    end = time.monotonic() + timeout_s
            where = [(each.last, each.follows, each.stopped) for each in self.followers]
            assert time.monotonic() < end, f"seed {self.seed}: stuck; {where}"
            assert self.publisher.process.is_alive(), f"seed {self.seed}: the publisher died: {self.publisher.result()}"

    def check(self, said: Any, follower: ModelUpdater | None) -> None:
        match said:
            case ("offload", version, how):
                self.num_offloads += 1
                copying_s = self.kib / (64 << 10)  # the copy itself, where ten processes share two cores
                assert how["seconds"] < GUARD_S + SLACK_S + copying_s, f"seed {self.seed}, version {version}: {how}"
                self.happens(self.events.pop(version, "none"))
            case ("took", (version, num_deltas), right):
                assert follower is not None
                assert right, f"seed {self.seed}: {version} was taken as good and is not"
                assert version.startswith(f"{run_of(self.seed)}/"), f"seed {self.seed}: {version} is another run's"
                assert not follower.last or _number(follower.last) < _number(version)
                follower.last = version
                self.num_taken += 1
                self.num_by_delta += num_deltas > 0
                self.num_over_gaps += num_deltas > 1
            case ("late", (seconds, how)):
                assert follower is not None
                assert follower.was_stopped, f"seed {self.seed}: a pull of {PULL_S} s took {seconds:.1f} s: {how}"
            case ("rests", _):
                assert follower is not None
                follower.follows = follower.leaving = False
            case (what, value):
                self.said[what] = value

    def happens(self, event: str) -> None:
        """Something befalls somebody; whom something befell before is whole again."""
        if event == "none":
            return
        self.mend()
        follower = self.random.choice(self.followers)
        if event == "kill":
            follower.child.kill()
            follower.killed = True
        elif event == "stop":
            follower.child.stop()
            follower.stopped = follower.was_stopped = True
        elif event == "leave" and not follower.leaving:
            follower.rest()

    def mend(self) -> None:
        """Whoever was stopped goes on, whoever was killed is replaced, whoever has left joins."""
        for index, follower in enumerate(self.followers):
            if follower.stopped:
                follower.child.cont()
                follower.stopped = False
            if follower.killed or not follower.child.process.is_alive():
                if not follower.killed:
                    follower.child.result()  # raises what it died of
                    raise AssertionError(f"seed {self.seed}: a follower ended by itself")
                self.followers[index] = follower = ModelUpdater(self.start, self.kib)
                self.pids.append(follower.child.pid)
            if not follower.follows:
                self.join(follower)

    def join(self, follower: ModelUpdater) -> None:
        transport = self.random.choice([None, None, Transport.TCP, Transport.TCP, Transport.SHM])
        mode = self.random.choice(["auto", "delta"]) if self.seed >= SPARSE else "auto"
        follower.follow(self.endpoint, transport, mode, self.random.choice(SPEEDS))

    def close(self) -> None:
        for follower in self.followers:
            follower.child.kill()
        self.publisher.kill()


def _number(version: str) -> int:
    return int(version.rsplit("/", 1)[1])


def storms(seeds: Sequence[int], versions: int, kib: int, lanes: int = 2) -> list[Storm]:
    """All seeds, in `lanes` sets of processes at once; then nothing of them is left in /dev/shm."""
    model_digest.warm_up()  # where no cache has them, an agent compiles for longer than a storm waits for its first one
    delta.warm_up()
    todo = list(seeds)
    lock = threading.Lock()
    with children() as start:

        def lane(_: int) -> Storm:
            storm = Storm(start, kib)
            try:
                while True:
                    with lock:
                        if not todo:
                            return storm
                        mine = [todo.pop(0) for _ in range(min(RUNS_AN_AGENT, len(todo)))]
                    for seed in mine:
                        storm.run(seed, versions, is_last=seed == mine[-1])
            finally:
                storm.close()

        with ThreadPoolExecutor(lanes) as pool:
            done = list(pool.map(lane, range(lanes)))
        pids = [pid for storm in done for pid in storm.pids]
        reclaim_dead()
        assert shm_of(*pids) == []
        assert sum(storm.num_taken for storm in done) > len(seeds) * 3
        return done


def test_a_short_storm() -> None:
    """8 runs of 50 versions: whatever anybody takes is what was published, no offload waits beyond its guard."""
    storms(range(8), versions=50, kib=512)


def _by_deltas(done: list[Storm], num_seeds: int) -> None:
    assert sum(storm.num_by_delta for storm in done) > num_seeds, "deltas were taken"
    assert sum(storm.num_over_gaps for storm in done) > 0, "and several at once, by receivers that missed versions"


def test_a_short_storm_of_deltas() -> None:
    """The same with versions that differ little, and receivers that take deltas."""
    _by_deltas(storms(range(SPARSE, SPARSE + 12), versions=50, kib=2048), 12)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("turn", range(NUM_TURNS))
def test_a_storm_on_a_busy_machine(turn: int) -> None:
    """Whole versions and deltas, each turn of other seeds."""
    first = 200 + 10 * turn
    with busy_cores():
        storms(range(first, first + 5), versions=50, kib=512)
        storms(range(SPARSE + first, SPARSE + first + 5), versions=50, kib=2048)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kib", [2048, 64 << 10])
def test_a_long_storm_of_deltas(kib: int) -> None:
    """More of it."""
    num_seeds = 40 if kib < 1 << 14 else 10
    seeds = range(SPARSE + 100, SPARSE + 100 + num_seeds)
    _by_deltas(storms(seeds, versions=200 if kib < 1 << 14 else 100, kib=kib), num_seeds)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kib", [512, 16 << 10, 128 << 10])
def test_a_long_storm(kib: int) -> None:
    """More of everything."""
    storms(range(100, 160 if kib < 1 << 16 else 110), versions=300 if kib < 1 << 14 else 100, kib=kib)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_one_receiver_stands_still(transport: str, tmp_path: Any) -> None:
    """Stopped within its transfer, or with a lease: the others get at least 95 % of the versions, and the trainer waits
    no longer than its guard. A version can be had when the next one comes a good moment after its proof: the trainer
    here waits for the two others, for some seconds at most.
    """
    versions, had = 40, 0
    stop = Hook(at="weightsync.host.staging:TargetMap.into", do="stop", path=str(tmp_path / "stop")).set()
    with children() as start:
        trainer = Trainer(start, 7, guard_s=GUARD_S)
        still = Receiver(start, hook=stop if transport == "tcp" else None)
        others = [Receiver(start), Receiver(start)]
        trainer.publish(0)
        still.pull(trainer.endpoint, transport=transport, timeout_s=120.0, hold=True, wait=transport == "shm")
        if transport == "tcp":
            stop.reached()
        else:
            still.child.stop()
        for version in range(1, versions + 1):
            said = trainer.publish(version)
            assert said["seconds"] < GUARD_S + SLACK_S
            for other, how in zip(others, ("tcp", None), strict=True):
                other.pull(trainer.endpoint, transport=how, timeout_s=5.0, at_least=(run_of(7), version), wait=False)
            taken = [other.answer() for other in others]
            assert all(each["right"] for each in taken)
            had += sum(each["version"].endswith(f"/{version}") for each in taken)
        assert had >= 0.95 * versions * len(others)
        assert trainer.ask("segments") == 3 or transport == "tcp"  # a stream that stands still is cut some time
        still.child.cont()
        if transport == "shm":
            assert still.ask("release"), "the lease held to the end"
            trainer.publish(versions + 1)
            trainer.publish(versions + 2)
            wait_until(lambda: trainer.ask("segments") == 2, "the third segment is there only beside a reader")
        else:
            said = still.answer()
            assert said["right"], said
            if not said["version"].endswith(f"/{versions}"):  # what it was sent was kept for it
                still.ask("release")
                said = still.pull(trainer.endpoint)
                assert (said["version"], said["right"]) == (f"{run_of(7)}/{versions}", True)
        trainer.ask("close")
        wait_until(lambda: not shm_of(trainer.pid), "the trainer's segments go")
