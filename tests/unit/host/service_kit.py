"""A rollout service in this process, with agents and engines that do what a test says. Nothing is moved."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from tests.unit.host.fakes import manifest
from weightsync.clients.agent import AgentClient
from weightsync.clients.host import RolloutClient
from weightsync.errors import EngineUnreachableError, StateError, TransferAbortedError, VersionError
from weightsync.handles.fanout import in_thread
from weightsync.host import engine_group, pulls
from weightsync.host import model_updater as follower
from weightsync.host.followed import FollowedRun
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.host.staged_version import StagedVersion
from weightsync.plan.safetensors import plan_layout
from weightsync.types import Deadline, EngineOp, EngineReply, EngineRequest, Version
from weightsync.types.service import ModelStatus, NotifyRequest
from weightsync.types.transfer_messages import AgentVersion, Transport

MODEL = "default"
LOOK_S = 0.1
NEWS = threading.Condition()
"""Notified when an agent has something new, or time was skipped."""


class Clock:
    """Seconds that pass as always, and that a test may skip."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped_s


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


def with_incarnation(kind: Any, incarnation: str | None, **fields: Any) -> Any:
    """One of `kind`, of that life of a trainer."""
    known = getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__
    return kind(**fields, **({"incarnation": incarnation} if "incarnation" in known else {}))


class Agent:
    """What an agent has; or what asking it raises, or does.

    Attributes:
        waits: it lets a request wait until there is something newer.
        ending: its trainer closes it.
    """

    def __init__(self, run_id: str, number: int, incarnation: str = "one", *, waits: bool = True) -> None:
        self.run_id, self.number, self.incarnation, self.waits = run_id, number, incarnation, waits
        self.raises: BaseException | None = None
        self.stands: threading.Event | None = None
        self.ending = False
        self.num_asked = 0

    def __setattr__(self, name: str, value: Any) -> None:
        with NEWS:
            super().__setattr__(name, value)
            NEWS.notify_all()

    def newest(self) -> Version:
        if self.stands is not None:
            self.stands.wait(20.0)
        if self.raises is not None:
            raise self.raises
        return Version(run_id=self.run_id, number=self.number)

    def answer(self, after: Version | None, wait_s: float, clock: Clock, closed: threading.Event) -> Version:
        """As a real one answers a request that may wait."""
        self.num_asked += 1
        end_s = clock() + wait_s
        with NEWS:
            while (
                self.waits
                and not self.ending
                and self.raises is None
                and after == Version(run_id=self.run_id, number=self.number)
            ):
                if closed.is_set():
                    raise TransferAbortedError("this client was closed")
                if (left_s := end_s - clock()) <= 0:
                    break
                NEWS.wait(left_s)
        return self.newest()


class Engine:
    """An engine that answers every step well, but where a test says otherwise.

    Attributes:
        dead: it answers nothing.
        checksum: its own, of what it has loaded.
        half_loaded: a load in place has failed, and none came since.
        holds: a step with an event here is answered when that is set, whatever the caller's patience.
    """

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.dead = False
        self.checksum: str | None = None
        self.holds: dict[EngineOp, threading.Event] = {}
        self.renew()

    def renew(self) -> None:
        self.version: Version | None = None
        self.calls: list[EngineOp] = []
        self.half_loaded = False
        self._group: str | None = None
        self._next: Version | None = None
        self._digest: str | None = None

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        self.calls.append(op)
        if op in self.holds:
            self.holds[op].wait(60.0)
        if self.dead:
            raise EngineUnreachableError("dead", peer=self.engine_id)
        if op is EngineOp.INIT:
            self._group = request.info.group_name
        elif op is EngineOp.BEGIN:
            self._next, self._digest = request.manifest.version, request.manifest.model_digest
        elif op is EngineOp.COMMIT:
            self.version, self.half_loaded = self._next, False
        proved = {"digests_equal": True, "model_digest": self._digest} if op is EngineOp.STAGE else {}
        sums = {"checksum": self.checksum} if op is EngineOp.STAGE else {}
        whole = not self.half_loaded
        return EngineReply(
            engine_id=self.engine_id, version=self.version, group=self._group, serving=whole, intact=whole, **proved,
            **sums,
        )  # fmt: skip


class World:
    """Agents by URL, engines by name, and a service between them."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.engines: dict[str, Engine] = {}
        self.held: list[Version] = []
        self.senders_of_pulls: list[str] = []
        self.clock = Clock()
        self.service: RolloutService
        self.url: str

    def serve(self, *names: str, **options: Any) -> RolloutService:
        """A service that knows the first agent, and serves what that has."""
        first, agent = next(iter(self.agents.items()))
        self.engines = {name: Engine(name) for name in names}
        settings = {"pull_timeout_s": 20.0, "load_timeout_s": 5.0, "pause_timeout_s": 1.0, **options}
        self.service = RolloutService({MODEL: list(self.engines.values())}, RolloutConfig(senders=(first,), **settings))
        self.url = self.service.start()
        if agent.raises is None:
            self.notify(first, agent.run_id, agent.number)
        return self.service

    def register(self, endpoint: str) -> None:
        self.service.register_sender(MODEL, endpoint)

    def notify(self, endpoint: str, run_id: str, number: int, wait_s: float | None = 20.0) -> ModelStatus:
        request = NotifyRequest(run_id=run_id, model_id=MODEL, version=number, sender_endpoint=endpoint, wait_s=wait_s)
        with contextlib.closing(RolloutClient(self.url)) as client:
            return client.notify_version(request)

    def notify_aside(self, *asked: Any, wait_s: float = 20.0) -> Future[ModelStatus]:
        """As `notify`, in a thread of its own; returns when the service knows of it."""
        count = self.followed.count
        told = in_thread(lambda: self.notify(*asked, wait_s=wait_s), name="notifies")
        wait_until(lambda: self.followed.count > count or told.done(), "it is told")
        return told

    def skip(self, seconds: float) -> None:
        """So much time passes, at once."""
        self.clock.skipped_s += seconds
        updater = self.service._models[MODEL]
        for condition in (NEWS, updater._changed):
            with condition:
                condition.notify_all()

    @property
    def followed(self) -> FollowedRun:
        return self.service._models[MODEL]._followed

    @property
    def asks_nobody(self) -> bool:
        return not self.service._models[MODEL]._upstream._lines

    @property
    def status(self) -> ModelStatus:
        return self.service.status().models[MODEL]

    def serves(self, name: str, text: str | None) -> bool:
        version = self.engines[name].version
        return (None if version is None else str(version)) == text


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()

    class Client:
        def __init__(self, endpoint: str, **_: Any) -> None:
            self.url = self.peer = endpoint
            self._agent, self._closed = made.agents[endpoint], threading.Event()

        current_run = AgentClient.current_run

        def get_version(self, *, after: Version | None = None, wait_s: float, timeout_s: float) -> AgentVersion:
            newest = self._agent.answer(after, wait_s, made.clock, self._closed)
            return with_incarnation(
                AgentVersion,
                self._agent.incarnation,
                model_id=MODEL,
                run_id=newest.run_id,
                version=newest.number,
                ending=self._agent.ending,
            )

        def close(self) -> None:
            with NEWS:
                self._closed.set()
                NEWS.notify_all()

    class Puller:
        def __init__(self, endpoint: str, *_: Any, **__: Any) -> None:
            self.endpoint, self._stop = endpoint, threading.Event()

        @property
        def cancelled(self) -> bool:
            return self._stop.is_set()

        def cancel(self) -> None:
            self._stop.set()

        close = cancel

        def pull(
            self, *, deadline: Deadline, at_least: Callable[[], Version], retrying: Callable[[Any], None], **_: Any
        ) -> StagedVersion:
            while not self._stop.is_set() and not deadline.expired:
                wanted, agent = at_least(), made.agents[self.endpoint]
                try:
                    newest = agent.newest()
                    if newest.run_id != wanted.run_id or wanted.is_newer_than(newest):
                        raise VersionError(f"{newest} is the newest there, {wanted} was announced")
                except (VersionError, EngineUnreachableError) as error:
                    retrying(error)
                    self._stop.wait(0.02)
                    continue
                made.senders_of_pulls.append(self.endpoint)
                made.held.append(newest)
                whole = manifest(newest.number, run_id=newest.run_id, seed=0)
                return with_incarnation(
                    StagedVersion, agent.incarnation, manifest=whole, segment="weightsync-1-none",
                    transport=Transport.TCP,
                    offsets={part.name: part.offset for part in plan_layout(whole.tensors).parts}, num_attempts=1,
                    release=functools.partial(made.held.remove, newest),
                )  # fmt: skip
            raise TransferAbortedError("cancelled") if self._stop.is_set() else StateError("late")

    monkeypatch.setattr(follower, "client_at", Client)
    monkeypatch.setattr(follower, "CLOCK", made.clock)
    monkeypatch.setattr(pulls, "Puller", Puller)
    monkeypatch.setattr(follower, "LOOK_EVERY_S", LOOK_S)
    monkeypatch.setattr("weightsync.host.served_versions._ASK_S", 0.3)
    monkeypatch.setattr(engine_group, "_LET_GO_S", 0.3, raising=False)
    yield made
    for agent in made.agents.values():
        if agent.stands is not None:
            agent.stands.set()
    for engine in made.engines.values():
        for hold in engine.holds.values():
            hold.set()
    with contextlib.suppress(AttributeError):
        made.service.close()
