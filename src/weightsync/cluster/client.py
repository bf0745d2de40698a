"""RayEngine: an engine behind a Ray actor handle."""

from __future__ import annotations

from typing import Any, NamedTuple

from weightsync.cluster.engine_actor import ASKS, URGENT, group_of
from weightsync.cluster.post import Mailbox
from weightsync.cluster.ray_calls import get, submit
from weightsync.cluster.wire import read_answer
from weightsync.errors import EngineUnreachableError, InvalidRequestError, WeightSyncError
from weightsync.net.messages import encode
from weightsync.types import EngineOp, EngineReply, EngineRequest, InitRequest


class Whereabouts(NamedTuple):
    """Where an actor runs.

    Attributes:
        node_id: the node, as Ray names it.
        node_ip: its IP address in the cluster.
        pid: the actor's process id there.
    """

    node_id: str
    node_ip: str
    pid: int


class RayEngine:
    """An `EngineHandle` that calls an `EngineActor`. Thread-safe; may be sent to other actors, as a copy.

    Args:
        actor: the actor's handle.
        engine_id: name for messages; unique among the engines of a client.
    """

    def __init__(self, actor: Any, *, engine_id: str) -> None:
        self.actor = actor
        self._engine_id = engine_id

    @property
    def engine_id(self) -> str:
        """Name of the engine."""
        return self._engine_id

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        """Calls one step; see `EngineHandle.call` for what it raises."""
        ref = self._submit("call", op.value, encode(request), timeout_s, group=group_of(op))
        body = self._get(ref, op.value, timeout_s)
        return read_answer(body, EngineReply, peer=self._engine_id, what=op.value)

    def ask(self, method: str, *args: Any, timeout_s: float, **options: Any) -> Any:
        """Calls a public method of what the engine's factory built, e.g. generate.

        Arguments and result cross as Ray sends them; an error comes back typed.

        Raises:
            EngineUnreachableError: the actor is gone.
            DeadlineExceededError: no answer within `timeout_s`; the method goes on over there.
            WeightSyncError: what the method raised; an `EngineError` with its words where that was not one of ours.
        """
        told = self._get(self._submit("ask", method, args, options, group=ASKS), method, timeout_s)
        try:
            body, value = told
        except (TypeError, ValueError):
            body, value = told, None
        read_answer(body, type(None), peer=self._engine_id, what=method)
        return value

    def ready(self, *, timeout_s: float) -> Whereabouts:
        """Waits until the engine is built.

        Raises:
            EngineUnreachableError: the actor died, e.g. as its factory can't be imported over there.
            DeadlineExceededError: it is not there in time: not scheduled, or still being built.
            WeightSyncError: what the factory raised.
        """
        body = self._get(self._submit("ready", group=URGENT), "ready", timeout_s)
        return read_answer(body, Whereabouts, peer=self._engine_id, what="ready")

    def replace(self, actor: Any) -> None:
        """From here on calls go to another actor; those under way end as they may."""
        self.actor = actor  # one assignment: other threads see the old one or the new one

    def _submit(self, method: str, *args: Any, group: str) -> Any:
        return submit(self.actor, method, *args, group=group, peer=self._engine_id)

    def _get(self, ref: Any, what: str, timeout_s: float) -> Any:
        return get(ref, timeout_s=timeout_s, peer=self._engine_id, what=what, lost=self._lost)

    def _lost(self, words: str) -> WeightSyncError:
        return EngineUnreachableError(f"the actor of {self._engine_id} is gone {words}", peer=self._engine_id)


class EngineThroughController:
    """Training rank 0's view of an engine: its init goes by the controller, everything else straight to the actor.

    Args:
        engine: the actor.
        mailbox: where the controller fetches init requests.
    """

    def __init__(self, engine: RayEngine, mailbox: Mailbox) -> None:
        self.engine = engine
        self._mailbox = mailbox

    @property
    def engine_id(self) -> str:
        """Name of the engine."""
        return self.engine.engine_id

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        """Calls one step; see `EngineHandle.call` for what it raises."""
        if op is not EngineOp.INIT:
            return self.engine.call(op, request, timeout_s=timeout_s)
        if not isinstance(request, InitRequest):
            raise InvalidRequestError(f"init takes an InitRequest, not a {type(request).__name__}")
        body = self._mailbox.send(self.engine_id, request, timeout_s=timeout_s)
        return read_answer(body, EngineReply, peer=self.engine_id, what=op.value)

    def ask(self, method: str, *args: Any, timeout_s: float, **options: Any) -> Any:
        """See `RayEngine.ask`."""
        return self.engine.ask(method, *args, timeout_s=timeout_s, **options)
