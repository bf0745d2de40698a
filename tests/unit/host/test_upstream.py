"""Upstream: one request an agent that waits there; real clients, a real server, and nothing that sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import Request

from tests.standins.threads import fail_starts
from tests.unit.host.service_kit import wait_until
from weightsync.clients.agent import AgentClient
from weightsync.clients.store import StoreClient
from weightsync.errors import StateError, StoreUnavailableError
from weightsync.host.agent_state import WAIT_S
from weightsync.host.followed import FollowedRun
from weightsync.host.upstream import Upstream
from weightsync.net.server import Api, ServerThread
from weightsync.types import Version
from weightsync.types.transfer_messages import AgentVersion

LONG_S = 30.0


class Agent:
    """An address where an agent answers: at once where it has something else than the caller, else when it has.

    Attributes:
        asked: `wait_s` of every request.
    """

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.number = 1
        self.model_id = "m"
        app = Api("test")
        app.answer("GET", "/get_version", self._get_version)
        self.server = ServerThread(app)
        self.url = self.server.start()

    async def _get_version(self, request: Request) -> dict[str, Any]:
        self.asked.append(float(request.query_params.get("wait_s", 0.0)))
        while self.asked[-1] and request.query_params.get("after") == f"run/{self.number}":
            if await request.is_disconnected():
                break
            await asyncio.sleep(0.005)
        return {"model_id": self.model_id, "run_id": "run", "version": self.number}

    def close(self) -> None:
        self.server.close()


class Kit:
    """A service's view of one agent."""

    def __init__(self, *endpoints: str, poll_s: float | None) -> None:
        self.changed = threading.Condition()
        self.run = FollowedRun(
            "m", clock=time.monotonic, settle=lambda _: None, taken_over=lambda: None, patience_s=10.0, timeout_s=100.0,
            poll_s=poll_s,
        )  # fmt: skip
        self.upstream = Upstream("m", self.run, self.changed, connect=AgentClient, on_answer=lambda: None)
        with self.changed:
            for endpoint in endpoints:
                self.run.know(endpoint)
            self.upstream.look()

    def newest(self, endpoint: str) -> Version | None:
        with self.changed:
            return self.run.agents[endpoint].newest

    def has(self, endpoint: str, number: int) -> None:
        wait_until(lambda: self.newest(endpoint) == Version(run_id="run", number=number), f"it has {number}")

    def close(self) -> None:
        self.upstream.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    with contextlib.closing(Agent()) as found:
        yield found


def test_one_request_waits_at_the_agent_and_brings_what_is_new(agent: Agent) -> None:
    with contextlib.closing(Kit(agent.url, poll_s=3600.0)) as kit:
        kit.has(agent.url, 1)
        for number in (2, 3):
            wait_until(lambda: agent.asked[-1] > WAIT_S - 1, "a request waits")
            agent.number = number
            kit.has(agent.url, number)
        assert kit.run.errors == {}


def test_who_connects_holds_no_lock() -> None:
    """Seen red: while a client of a store that is away was made, everybody waited who looked at the model."""
    begun, go = threading.Event(), threading.Event()

    def connect(_: str) -> Any:
        begun.set()
        assert go.wait(LONG_S)
        raise StoreUnavailableError("it is away")

    with contextlib.closing(Kit(poll_s=3600.0)) as kit:
        kit.upstream._connect = connect
        with kit.changed:
            kit.run.know("s3://bucket/run")
            kit.upstream.look()
        assert begun.wait(LONG_S)
        assert kit.changed.acquire(timeout=LONG_S)
        kit.changed.release()
        go.set()
        wait_until(lambda: "it is away" in str(kit.run.errors), "it is told")


def test_a_client_that_was_made_as_all_was_closed_is_closed() -> None:
    begun, go, closed = threading.Event(), threading.Event(), threading.Event()

    class Client:
        def close(self) -> None:
            closed.set()

    def connect(_: str) -> Any:
        begun.set()
        assert go.wait(LONG_S)
        return Client()

    kit = Kit(poll_s=3600.0)
    kit.upstream._connect = connect
    with kit.changed:
        kit.run.know("s3://bucket/run")
        kit.upstream.look()
    assert begun.wait(LONG_S)
    kit.close()
    go.set()
    assert closed.wait(LONG_S)


def test_a_claim_ends_the_request_that_waits_and_asks_at_once(agent: Agent) -> None:
    """Whoever waits for a version is not told after half a minute that there is none."""
    with contextlib.closing(Kit(agent.url, poll_s=3600.0)) as kit:
        kit.has(agent.url, 1)  # the first request is answered at once
        wait_until(lambda: len(agent.asked) > 1 and agent.asked[-1] > WAIT_S - 1, "a request waits")
        before = len(agent.asked)
        with kit.changed:
            claim = kit.run.claim(Version(run_id="run", number=5), agent.url, grace_s=0.0)
            kit.upstream.look()
        wait_until(lambda: claim.denied is not None, "it was denied")
        assert agent.asked[before] == 0.0
        wait_until(lambda: agent.asked[-1] > WAIT_S - 1, "a request waits again")
        assert kit.run.errors == {}, "nobody takes what was ended for a failure"


def test_where_there_is_no_reason_nobody_is_asked_and_no_thread_is_kept(agent: Agent) -> None:
    with contextlib.closing(Kit(agent.url, poll_s=None)) as kit:
        kit.has(agent.url, 1)
        wait_until(lambda: not kit.upstream._lines, "its thread has ended")
        asked = len(agent.asked)
        with kit.changed:
            kit.upstream.look()
        assert (not kit.upstream._lines, len(agent.asked)) == (True, asked)
        with kit.changed:
            kit.run.wake(agent.url)
            kit.upstream.look()
        wait_until(lambda: len(agent.asked) > asked, "it is asked again")


@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:9", "http://a..b:1"], ids=["none", "nobody", "no-name"])
def test_who_can_t_be_asked_is_told_why_and_keeps_no_other_out(agent: Agent, endpoint: str) -> None:
    with contextlib.closing(Kit(endpoint, agent.url, poll_s=None)) as kit:
        kit.has(agent.url, 1)
        wait_until(lambda: kit.run.errors.get(endpoint), "why")


def test_a_source_whose_client_can_t_be_made_is_tried_again(agent: Agent) -> None:
    """Seen red: its thread had ended, nobody asked it any more, and no error said so."""
    failed: list[str] = []

    def connect(endpoint: str) -> AgentClient:
        if not failed:
            failed.append(endpoint)
            raise StoreUnavailableError("it is away")
        return AgentClient(endpoint)

    with contextlib.closing(Kit(poll_s=0.05)) as kit:
        kit.upstream._connect = connect
        with kit.changed:
            kit.run.know(agent.url)
            kit.upstream.look()
        kit.has(agent.url, 1)
        assert failed == [agent.url]


def test_an_agent_of_another_model_is_no_agent(agent: Agent) -> None:
    agent.model_id = "other"
    with contextlib.closing(Kit(agent.url, poll_s=None)) as kit:
        wait_until(lambda: "serves model 'other', not 'm'" in kit.run.errors.get(agent.url, ""), "why")
        assert kit.newest(agent.url) is None


def test_a_thread_that_can_t_be_started_is_told_and_tried_again(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(Kit(poll_s=None)) as kit:
        with kit.changed:
            kit.run.know(agent.url)
            with monkeypatch.context() as patched:
                fail_starts(patched, "weightsync-ask-agent")
                with pytest.raises(StateError, match="new thread"):
                    kit.upstream.look()
            kit.upstream.look()
        kit.has(agent.url, 1)


@pytest.mark.parametrize("first", [True, False])
def test_one_that_can_have_no_thread_keeps_no_other_from_being_asked(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Seen red: the agents behind it were not asked, and nobody was told."""
    other, failed, start = "http://127.0.0.1:9", list[str](), Upstream._start

    def starts(self: Upstream, endpoint: str) -> None:
        if endpoint == other:
            failed.append(endpoint)
            raise StateError("can't start new thread")
        start(self, endpoint)

    monkeypatch.setattr(Upstream, "_start", starts)
    with contextlib.closing(Kit(poll_s=None)) as kit:
        with kit.changed:
            for endpoint in (other, agent.url) if first else (agent.url, other):
                kit.run.know(endpoint)
            with pytest.raises(StateError, match="new thread"):
                kit.upstream.look()
            assert failed == [other]
            assert list(kit.upstream._lines) == [agent.url]
        kit.has(agent.url, 1)


def test_no_store_is_closed_under_the_lock() -> None:
    """Seen red: that takes a call, and whoever asked for the model's status waited for it."""
    place, told = "s3://bucket/run", queue.SimpleQueue[bool]()

    class Store(StoreClient):
        def __init__(self) -> None:
            self._ended = threading.Event()

        def get_version(self, *, after: Version | None = None, wait_s: float = 0.0, timeout_s: float) -> AgentVersion:
            if after is not None:
                self._ended.wait(wait_s)
            return AgentVersion(model_id="m", run_id="run", version=1)

        def close(self) -> None:
            told.put(changed._is_owned())
            self._ended.set()

    def is_asked() -> bool:
        return kit.newest(place) is not None and kit.upstream._lines[place].ends_s is not None

    with contextlib.closing(Kit(poll_s=3600.0)) as kit:
        changed: Any = kit.changed
        kit.upstream._connect = lambda _: Store()
        with kit.changed:
            kit.run.know(place)
            kit.upstream.look()
        wait_until(is_asked, "a request waits")
        with kit.changed:
            kit.run.claim(Version(run_id="run", number=5), place, grace_s=None)
            kit.upstream.look()
        assert told.get(timeout=10.0) is False
        wait_until(is_asked, "a request waits again")
        kit.upstream.close()
        assert told.get(timeout=10.0) is False


def test_closing_ends_a_request_that_waits(agent: Agent) -> None:
    kit = Kit(agent.url, poll_s=3600.0)
    wait_until(lambda: agent.asked and agent.asked[-1] > WAIT_S - 1, "a request waits")
    kit.close()
    wait_until(lambda: not kit.upstream._lines, "its thread has ended")
    kit.close()
