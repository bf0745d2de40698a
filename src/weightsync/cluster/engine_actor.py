"""An engine in a Ray actor of its own, behind the same HTTP server as everywhere; RayEngine finds and calls it."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from weightsync.cluster.actors import ActorHandle, Address, Answer, StartedActor
from weightsync.cluster.ray_calls import here
from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    WeightSyncError,
)
from weightsync.handles.http import HttpEngine
from weightsync.types import Deadline, EngineHandle, EngineOp, EngineReply, EngineRequest

LOOPBACK = "127.0.0.1"
_RAYS_WORD_S = 1.0
"""How long Ray is asked for what became of an actor whose server does not answer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineContext:
    """What an engine factory is told.

    Attributes:
        engine_id: name of the engine.
        index: number of the engine, from 0.
    """

    engine_id: str
    index: int


EngineFactory = Callable[[EngineContext], Any]
"""Called in the actor's process. Gives an `EngineHandle` (e.g. an `EmbeddedEngine`), or an object whose attribute
`engine` is one; `RayEngine.ask` calls that object's methods."""


class EngineActor(StartedActor):
    """The actor's class; `start` starts one.

    Args:
        factory: builds it, in this process's main thread.
    """

    num_asks = 8

    def __init__(self, context: EngineContext, factory: EngineFactory) -> None:
        super().__init__(context.engine_id, peer=context.engine_id)
        self._lock = threading.Lock()
        self._addresses: dict[bool, Address] = {}
        with self._starting("building the engine failed"):
            built = factory(context)
            self._keep("", built)
            self._engine = engine_of(built)

    def listen(self, loopback: bool = False) -> Answer:
        """Answers its `Address`: on loopback, or on its node's address. It listens there since it was first asked for
        it, with a token of its own."""

        def step() -> list[str]:
            from weightsync.engine.server import EngineServer

            with self._lock:
                if not self._built:
                    raise EngineError("the engine was closed", peer=self._name)
                if loopback not in self._addresses:
                    token = secrets.token_hex(32)
                    server = EngineServer(self._engine, host=LOOPBACK if loopback else here()[1], token=token)
                    self._addresses[loopback] = Address(server.start(), token)
                    self._closing.callback(server.close)
                return list(self._addresses[loopback])

        return self._answer("the engine's server did not start", step)


class _Reached(NamedTuple):
    """An actor, where its server listens, and a connection to it."""

    actor: Any
    address: Address
    engine: HttpEngine


class RayEngine(ActorHandle):
    """An `EngineHandle` of an `EngineActor`: Ray says where it listens, the steps go there by HTTP. Thread-safe; may be
    sent to other actors, as a copy.

    Args:
        engine_id: name for messages; unique among the engines of a client.
        loopback: whether all who call it are on its node; else it is called at its node's address.
    """

    def __init__(self, actor: Any, *, engine_id: str, loopback: bool = False) -> None:
        super().__init__(actor, name=engine_id)
        self.loopback = loopback
        self._reached: _Reached | None = None

    @property
    def engine_id(self) -> str:
        return self.name

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        """Calls one step; see `EngineHandle.call` for what it raises.

        Where nobody answers, or a stranger does (who knows no such token, at a port that was given away again), Ray is
        asked for the reason. A describe goes on to the actor that Ray has started again; another step does not: it may
        have happened.
        """
        deadline = Deadline(timeout_s)
        reached = self._reach(deadline)
        try:
            return reached.engine.call(op, request, timeout_s=deadline.remaining_s)
        except (EngineUnreachableError, AuthError) as error:
            fresh = self._after(error, deadline)
            if op is not EngineOp.DESCRIBE or fresh is None or fresh.address == reached.address:
                raise
            return fresh.engine.call(op, request, timeout_s=deadline.remaining_s)

    def ask(self, method: str, *args: Any, timeout_s: float, **options: Any) -> Any:
        """Calls a public method of what the engine's factory built, e.g. generate.

        Arguments and result cross as Ray sends them; an error comes back typed.

        Raises:
            EngineUnreachableError: the actor is gone.
            DeadlineExceededError: no answer within `timeout_s`; the method goes on over there.
            WeightSyncError: what the method raised; an `EngineError` with its words where that was not one of ours.
        """
        return self._ask("", method, args, options, timeout_s)

    def address(self, *, timeout_s: float = 10.0) -> Address:
        """Where it listens, for an `HttpEngine`; see `ready` for errors."""
        return self.urgent("listen", self.loopback, kind=Address, timeout_s=timeout_s)

    def _reach(self, deadline: Deadline) -> _Reached:
        actor, reached = self.actor, self._reached
        if reached is None or reached.actor is not actor:
            url, token = address = self.address(timeout_s=deadline.remaining_s)
            reached = self._reached = _Reached(actor, address, HttpEngine(url, engine_id=self.name, token=token))
        return reached

    def _after(self, error: WeightSyncError, deadline: Deadline) -> _Reached | None:
        """Where it listens now; None where Ray does not know in time.

        Raises:
            EngineUnreachableError: Ray says that the actor is gone.
        """
        self._reached = None
        try:
            return self._reach(Deadline(min(_RAYS_WORD_S, deadline.remaining_s)))
        except EngineUnreachableError as gone:
            raise gone from error
        except DeadlineExceededError:
            return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reached": None}


def engine_of(built: Any) -> EngineHandle:
    """The engine that a user's factory built.

    Raises:
        ConfigError: it built none.
    """
    engine = getattr(built, "engine", built)
    if not callable(getattr(engine, "call", None)):
        raise ConfigError(
            "an engine factory returns an EngineHandle, or an object with one as `engine`, "
            f"not a {type(built).__name__}"
        )
    return engine  # type: ignore[no-any-return]
