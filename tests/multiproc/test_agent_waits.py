"""Waiting at an agent for what is newer: over its HTTP alone, by a bounded number of requests, none with a thread."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.multiproc.pull_kit import wait_until
from weightsync import EmbeddedEngine, ModuleWeightLoader
from weightsync.clients.agent import AgentClient
from weightsync.host.puller import Puller
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Deadline, Version
from weightsync.types.transfer_messages import AgentVersion, Transport

TOKEN = "a-token-for-tests-only"
MAX_WAITERS = 1024
NUM_MORE = 200


class Beside:
    """A manager, its agent, and a client of it."""

    def __init__(self) -> None:
        self.manager = WeightManager("m", token=TOKEN, run_id="run")
        self.manager.start()
        self.client = AgentClient(self.manager.endpoint, token=TOKEN)
        self.number = 0

    def publish(self) -> Version:
        self.number += 1
        self.manager.offload([("w", torch.full((4,), float(self.number)))], self.number)
        self.manager.wait_published(self.number, timeout_s=60)
        return Version(run_id="run", number=self.number)

    @property
    def agent(self) -> psutil.Process:
        return psutil.Process(self.manager.agent_pid)

    def waiting(self, path: str, *, peer: str = "127.0.0.1") -> socket.socket:
        """A request that is sent, and its answer not read."""
        url = urlsplit(self.manager.endpoint)
        made = socket.create_connection((url.hostname, url.port), timeout=20, source_address=(peer, 0))
        head = f"GET {path} HTTP/1.1\r\nhost: {url.netloc}\r\nauthorization: Bearer {TOKEN}\r\n\r\n"
        made.sendall(head.encode())
        return made

    def close(self) -> None:
        self.client.close()
        self.manager.close()


everybodys: list[Beside] = []


@pytest.fixture(scope="module", autouse=True)
def beside() -> Iterator[Beside]:
    there = Beside()
    everybodys.append(there)
    yield there
    everybodys.clear()
    there.close()


def in_background(ask: Any) -> tuple[threading.Thread, list[Any]]:
    told: list[Any] = []

    def run() -> None:
        told.append(ask())
        told.append(time.monotonic())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, told


def test_an_agent_listens_on_two_ports_alone(beside: Beside) -> None:
    """HTTP, and blocks. Seen to fail: a third one, of ZMQ, took gigabytes from whoever had no password."""
    listening = [each for each in beside.agent.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    assert len(listening) == 2


def test_who_waits_is_told_as_soon_as_a_version_is_published(beside: Beside) -> None:
    before = beside.publish()
    thread, told = in_background(lambda: beside.client.get_version(after=before, wait_s=50))
    wait_until(lambda: num_connections(beside) >= 1, "it waits")
    assert told == []
    now = beside.publish()
    done_s = time.monotonic()
    thread.join(20)
    assert (told[0].run_id, told[0].version) == (now.run_id, now.number)
    assert told[1] - done_s < 20
    begun_s = time.monotonic()
    assert beside.client.get_version(after=before, wait_s=50).version == now.number, "what is there is told at once"
    other = Version(run_id="another", number=10**9)
    assert beside.client.get_version(after=other, wait_s=50).version == now.number, "another run is no older one"
    assert time.monotonic() - begun_s < 20


def test_a_wait_ends(beside: Beside) -> None:
    now = beside.publish()
    begun_s = time.monotonic()
    said = beside.client.get_version(after=now, wait_s=0.3)
    assert said.version == now.number
    assert 0.3 <= time.monotonic() - begun_s < 10


@pytest.mark.parametrize(
    "query",
    ["wait_s=nan", "wait_s=-1", "wait_s=61", "wait_s=1e400", "wait_s=x", "after=7", "after=/7", "after=run/-1",
     "after=run/" + "9" * 30, "after=" + "r" * 300 + "/1", "after=%00/1"],
)  # fmt: skip
def test_a_wait_that_makes_no_sense_is_refused(beside: Beside, query: str) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    answer = httpx.get(f"{beside.manager.endpoint}/get_version?{query}", headers=headers, trust_env=False, timeout=20)
    assert (answer.status_code, answer.json()["error"]) == (422, "InvalidRequestError")


@settings(max_examples=80, deadline=None, database=None, derandomize=True)
@given(
    st.sampled_from(["/get_version", "/get_transfers"]),
    st.one_of(
        st.none(), st.text(max_size=40), st.integers().map(str), st.from_regex(r"\w{1,9}/\d{1,25}", fullmatch=True)
    ),
    st.one_of(st.none(), st.text(max_size=10), st.floats(max_value=0.01).map(str)),
)
def test_whatever_is_asked_is_answered_or_refused(path: str, after: str | None, wait_s: str | None) -> None:
    beside = everybodys[0]
    query = urlencode({name: said for name, said in (("after", after), ("wait_s", wait_s)) if said is not None})
    answer = httpx.get(
        f"{beside.manager.endpoint}{path}?{query}", headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False,
        timeout=20,
    )  # fmt: skip
    assert answer.status_code in (200, 422), answer.text
    assert isinstance(answer.json(), dict)


def test_ended_transfers_are_told(beside: Beside) -> None:
    """Each once, also to who waits; a number of an agent before this one begins at the first."""
    now = beside.publish()
    newest = beside.client.ended_transfers().newest
    thread, told = in_background(lambda: beside.client.ended_transfers(after=newest, wait_s=50))
    with contextlib.closing(
        Puller(beside.manager.endpoint, "m", receiver_id="who", token=TOKEN, transport=Transport.TCP)
    ) as puller:
        puller.pull(deadline=Deadline(20)).release()
    thread.join(20)
    (ended,) = told[0].ended
    assert (ended.number, ended.run_id, ended.version, ended.receiver_id, ended.ok) == (
        newest + 1, "run", now.number, "who", True,
    )  # fmt: skip
    assert beside.client.ended_transfers(after=told[0].newest, wait_s=0.05).ended == ()
    assert ended in beside.client.ended_transfers(after=10**9, wait_s=50).ended


def num_connections(beside: Beside) -> int:
    port = urlsplit(beside.manager.endpoint).port
    found = beside.agent.net_connections("inet")
    return sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in found)


def test_a_crowd_of_waiters_is_bounded_and_takes_no_thread(beside: Beside) -> None:
    """What is too much of a crowd is answered at once, and the crowd's own; receivers, and who waits elsewhere, go on.
    Seen to fail: one peer took all places, and nobody else could wait."""
    now = beside.publish()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, limits[1]), limits[1]))
    threads, memory = beside.agent.num_threads(), beside.agent.memory_info().rss
    path = f"/get_version?after={now}&wait_s=60"
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        honest = [stack.enter_context(beside.waiting(path)) for _ in range(3)]
        crowd = [stack.enter_context(beside.waiting(path, peer="127.0.0.2")) for _ in range(MAX_WAITERS + NUM_MORE)]
        wait_until(lambda: len(answered(crowd)) == NUM_MORE + len(honest), "the rest waits", timeout_s=40)
        later = [stack.enter_context(beside.waiting(path)) for _ in range(5)]
        wait_until(lambda: len(answered(crowd)) == NUM_MORE + 8, "the crowd makes room", timeout_s=20)
        assert answered(honest + later) == []
        assert beside.agent.num_threads() <= threads + 2
        assert beside.agent.memory_info().rss < memory + (128 << 20)
        with contextlib.closing(
            Puller(beside.manager.endpoint, "m", receiver_id="r", token=TOKEN, transport=Transport.TCP)
        ) as puller:
            puller.pull(deadline=Deadline(20)).release()
        told_early = answered(crowd)
        for each in told_early:
            said = answer_of(each)
            assert b"wait here already" in said or f'"version":{now.number}'.encode() in said
        waits = [each for each in crowd if each not in told_early]
        for each in waits[:8]:
            each.close()
        more = [stack.enter_context(beside.waiting(path, peer="127.0.0.3")) for _ in range(8)]
        then = beside.publish()
        for each in honest + later + more + waits[8:]:
            assert f'"version":{then.number}'.encode() in answer_of(each)


def answered(connections: list[socket.socket]) -> list[socket.socket]:
    """Those with something to read."""
    ready = select.poll()
    for each in connections:
        ready.register(each, select.POLLIN)
    there = {number for number, _ in ready.poll(0)}
    return [each for each in connections if each.fileno() in there]


def answer_of(connection: socket.socket) -> bytes:
    """Head and body, which may come one after the other."""
    said = b""
    while not said.endswith(b"}"):
        part = connection.recv(4096)
        assert part, said
        said += part
    return said


def test_closing_answers_who_waits(beside: Beside) -> None:
    with contextlib.closing(Beside()) as other:
        now = other.publish()
        thread, told = in_background(lambda: other.client.get_version(after=now, wait_s=50))
        wait_until(lambda: num_connections(other) >= 1, "it waits")
        begun_s = time.monotonic()
        other.manager.close()
        thread.join(20)
        assert time.monotonic() - begun_s < 10
        assert isinstance(told[0], AgentVersion)
        assert told[0].version == now.number


def test_who_follows_and_is_between_two_requests_is_told_of_the_end_too() -> None:
    """Seen to fail: a host that had just heard of the last version found nobody, and took its trainer for dead."""
    with contextlib.closing(Beside()) as other, contextlib.closing(other.client):
        url = urlsplit(other.manager.endpoint)
        before = other.publish()
        with other.waiting(f"/get_version?after={before}&wait_s=30") as follower:
            now = other.publish()
            assert f'"version":{now.number}'.encode() in answer_of(follower)
            closing = threading.Thread(target=other.manager.close)
            head = f"GET /get_version?after={now}&wait_s=30 HTTP/1.1\r\nhost: {url.netloc}\r\n"
            asks = f"{head}authorization: Bearer {TOKEN}\r\n\r\n".encode()
            headers = {"authorization": f"Bearer {TOKEN}"}
            with httpx.Client(base_url=other.manager.endpoint, headers=headers, trust_env=False) as looking:
                closing.start()
                wait_until(
                    lambda: looking.get("/get_version").json()["ending"], "it closes, and waits for its follower"
                )
                follower.sendall(asks)
            assert b'"ending":true' in answer_of(follower)
            closing.join(20)
            assert not closing.is_alive()


def test_a_service_that_polls_hears_of_a_version_at_once(beside: Beside) -> None:
    """Seen to fail: `poll_s` later."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.zeros(4))

    engine = EmbeddedEngine.of(ModuleWeightLoader(Model()))
    config = RolloutConfig(senders=(beside.manager.endpoint,), sender_token=TOKEN, poll_s=3600.0)
    first = beside.publish()
    with contextlib.closing(RolloutService({"m": engine}, config)) as service:
        service.start()
        served = lambda: service.status().models["m"].version  # noqa: E731
        wait_until(lambda: served() == first.number, "the first one is served", timeout_s=30)
        for _ in range(2):
            now = beside.publish()
            wait_until(lambda: served() == now.number, "the next one is served", timeout_s=20)  # noqa: B023
