"""A rollout service in this process, with agents and engines that do what a test says. Nothing is moved."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.rollout.fakes import manifest
from weightsync.errors import EngineUnreachableError, StateError, TransferAbortedError, VersionError
from weightsync.plan.safetensors import plan_layout
from weightsync.rollout import engine_group, follower
from weightsync.rollout.pulled import Pulled
from weightsync.rollout.service import RolloutService
from weightsync.rollout.settings import RolloutConfig
from weightsync.types import Deadline, EngineOp, EngineReply, EngineRequest, Version
from weightsync.types.publication import AgentVersion, ModelStatus, NotifyRequest, Transport

MODEL = "default"
LOOK_S = 0.1


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 3.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


def with_life(kind: Any, life: str | None, **fields: Any) -> Any:
    """One of `kind`, of that life of a trainer."""
    known = getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__
    return kind(**fields, **({"life": life} if "life" in known else {}))


class Agent:
    """What an agent has; or what asking it raises, or does."""

    def __init__(self, run_id: str, number: int, life: str = "one") -> None:
        self.run_id, self.number, self.life = run_id, number, life
        self.raises: BaseException | None = None
        self.stands: threading.Event | None = None
        self.num_asked = 0

    def newest(self) -> Version:
        self.num_asked += 1
        if self.stands is not None:
            self.stands.wait(3.0)
        if self.raises is not None:
            raise self.raises
        return Version(run_id=self.run_id, number=self.number)


class Engine:
    """An engine that answers every step well, but where a test says otherwise.

    Attributes:
        dead: it answers nothing.
        holds: a step with an event here is answered when that is set, whatever the caller's patience.
    """

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.dead = False
        self.holds: dict[EngineOp, threading.Event] = {}
        self.renew()

    def renew(self) -> None:
        self.version: Version | None = None
        self.calls: list[EngineOp] = []
        self._group: str | None = None
        self._next: Version | None = None

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        self.calls.append(op)
        if op in self.holds:
            self.holds[op].wait(10.0)
        if self.dead:
            raise EngineUnreachableError("dead", peer=self.engine_id)
        if op is EngineOp.INIT:
            self._group = request.info.group_name
        elif op is EngineOp.BEGIN:
            self._next = request.manifest.version
        elif op is EngineOp.COMMIT:
            self.version = self._next
        proved = True if op is EngineOp.STAGE else None
        return EngineReply(engine_id=self.engine_id, version=self.version, group=self._group, digests_equal=proved)


class World:
    """Agents by URL, engines by name, and a service between them."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.engines: dict[str, Engine] = {}
        self.held: list[Version] = []
        self.senders_of_pulls: list[str] = []
        self.service: RolloutService

    def serve(self, *names: str, **options: Any) -> RolloutService:
        """A service that knows the first agent, and serves what that has."""
        first, agent = next(iter(self.agents.items()))
        self.engines = {name: Engine(name) for name in names}
        settings = {"pull_timeout_s": 20.0, "load_timeout_s": 5.0, "pause_timeout_s": 1.0, **options}
        self.service = RolloutService({MODEL: list(self.engines.values())}, RolloutConfig(senders=(first,), **settings))
        self.service.start()
        if agent.raises is None:
            self.notify(first, agent.run_id, agent.number)
        return self.service

    def register(self, endpoint: str) -> None:
        self.service.register_sender(MODEL, endpoint)

    def notify(self, endpoint: str, run_id: str, number: int, wait_s: float | None = 3.0) -> ModelStatus:
        return self.service.notify(
            NotifyRequest(run_id=run_id, model_id=MODEL, version=number, sender_endpoint=endpoint, wait_s=wait_s)
        )

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
            self._agent = made.agents[endpoint]

        def get_version(self, *, timeout_s: float, **_: Any) -> AgentVersion:
            newest = self._agent.newest()
            return with_life(
                AgentVersion, self._agent.life, model_id=MODEL, run_id=newest.run_id, version=newest.number
            )

        def close(self) -> None:
            pass

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
        ) -> Pulled:
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
                return with_life(
                    Pulled, agent.life, manifest=whole, segment="weightsync-1-none", transport=Transport.TCP,
                    offsets={part.name: part.offset for part in plan_layout(whole.tensors).parts}, num_attempts=1,
                    release=functools.partial(made.held.remove, newest),
                )  # fmt: skip
            raise TransferAbortedError("cancelled") if self._stop.is_set() else StateError("late")

    monkeypatch.setattr(follower, "AgentClient", Client)
    monkeypatch.setattr(follower, "Puller", Puller)
    monkeypatch.setattr(follower, "LOOK_EVERY_S", LOOK_S)
    monkeypatch.setattr(engine_group, "_ASK_S", 0.3)
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
