"""SteppedEngine: what the handles of foreign engines share: a step for each request, one session, errors by name."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import msgspec

from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineUnreachableError,
    StateError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.handles.chunk_turns import OpenSession
from weightsync.observe import LONG_RUN_BYTES, Recorder
from weightsync.types import (
    AbortRequest,
    AnyUpdateRequest,
    AuditRequest,
    BeginRequest,
    CommitRequest,
    Deadline,
    DescribeRequest,
    EngineOp,
    EngineReply,
    EngineRequest,
    InitRequest,
    LiveLayer,
    PauseRequest,
    ResumeRequest,
    StageRequest,
    UpdateRequest,
    Version,
)


class SteppedEngine(abc.ABC):
    """An `EngineHandle` over another system's own calls. Thread-safe. One handle a trainer; others may describe at any
    time.

    Args:
        peer: how the calls' errors name the engine.
        engine_id: name for messages; `peer` where not given.
    """

    def __init__(self, peer: str, engine_id: str | None) -> None:
        self._peer = peer
        self._engine_id = engine_id or peer
        self._session = OpenSession()
        self._run_id: str | None = None  # of the latest init of this handle
        self._group: str | None = None  # likewise; None since a call was lost: nobody knows any more which it is in
        self._paused_by: str | None = None
        self._world_size = 1
        self._log = Recorder(self._engine_id, max_bytes=LONG_RUN_BYTES)

    @property
    def engine_id(self) -> str:
        return self._engine_id

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        deadline = Deadline(timeout_s)
        try:
            match request:
                case DescribeRequest():
                    reply = self._describe(deadline)
                    return msgspec.structs.replace(reply, layers=self._layers(deadline)) if request.layers else reply
                case AuditRequest():
                    return self._audit(deadline)
                case InitRequest():
                    self._init(request, deadline)
                case BeginRequest():
                    self._begin(request, deadline)
                case UpdateRequest(update=update):
                    session = self._session.turns(update.session)
                    with session.turn(update.seq, deadline), self._log.phase("load", detail=f"chunk {update.seq}"):
                        self._update(update, deadline)
                    return self._reply(drain=False)
                case StageRequest():
                    self._session.turns(request.session)
                    return self._stage(request, deadline)
                case PauseRequest():
                    self._session.turns(request.session)
                    self._pause(request, deadline)
                case CommitRequest():
                    self._commit(request, self._session.turns(request.session).version, deadline)
                case ResumeRequest():
                    self._resume(request, deadline)
                case AbortRequest():
                    self._abort(request, deadline)
                case _:
                    raise StateError(f"an engine has no step {op}")
        except WeightSyncError as error:
            if isinstance(error, (EngineUnreachableError, DeadlineExceededError)):
                self._group = None
            if error.peer in (None, self._peer):
                error.peer = self._engine_id
            raise
        return self._reply()

    @abc.abstractmethod
    def close(self) -> None:
        """Closes connections. A pause of this handle's that an abort could not end is tried once more, for seconds;
        else nothing is changed on the engine. Idempotent."""

    @abc.abstractmethod
    def _describe(self, deadline: Deadline) -> EngineReply: ...

    def _layers(self, deadline: Deadline) -> tuple[LiveLayer, ...]:
        """See `DescribeRequest.layers`."""
        return ()

    def _audit(self, deadline: Deadline) -> EngineReply:
        """See `AuditRequest`.

        Raises:
            UnsupportedError: this engine does not read its live weights again.
        """
        raise UnsupportedError("this engine does not read its live weights again: it has no plug-in that does")

    @abc.abstractmethod
    def _init(self, request: InitRequest, deadline: Deadline) -> None: ...

    @abc.abstractmethod
    def _begin(self, request: BeginRequest, deadline: Deadline) -> None: ...

    @abc.abstractmethod
    def _update(self, update: AnyUpdateRequest, deadline: Deadline) -> None:
        """In its turn; so are the steps below: in the session that is open."""

    @abc.abstractmethod
    def _stage(self, request: StageRequest, deadline: Deadline) -> EngineReply: ...

    @abc.abstractmethod
    def _pause(self, request: PauseRequest, deadline: Deadline) -> None: ...

    @abc.abstractmethod
    def _commit(self, request: CommitRequest, version: Version, deadline: Deadline) -> None: ...

    @abc.abstractmethod
    def _resume(self, request: ResumeRequest, deadline: Deadline) -> None: ...

    @abc.abstractmethod
    def _abort(self, request: AbortRequest, deadline: Deadline) -> None: ...

    @abc.abstractmethod
    def _reply(self, *, drain: bool = True) -> EngineReply:
        """What is believed of the engine; what was timed since the last time, where it is to `drain` that."""


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raises ConfigError where a setting is none of those that there are."""
    if value not in allowed:
        raise ConfigError(f"{name} is one of {', '.join(map(str, allowed))}, not {value!r}")
