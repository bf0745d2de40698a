"""EmbeddedEngine: an engine of ours, with one or several workers, driven in-process or by `EngineServer`."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

import msgspec

from weightsync.codec.base import Codec
from weightsync.engine.audited import found_together
from weightsync.engine.gate import ServingGate
from weightsync.engine.worker import EngineWorker
from weightsync.engine.worker_calls import Worker, WorkerCalls
from weightsync.errors import DigestMismatchError, NoEnginesError, StateError, SyncInProgressError, WeightSyncError
from weightsync.handles.fanout import in_thread
from weightsync.load.base import WeightLoader
from weightsync.memory import LeaseReader
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
    PauseRequest,
    PhaseRecord,
    ResumeRequest,
    StageRequest,
    UpdateRequest,
    Version,
)
from weightsync.types.deadline import MAX_WAIT_S
from weightsync.types.process import of_one_process

_DESCRIBE_TIMEOUT_S = 3.0
_ABORT_TIMEOUT_S = 3.0
_DRAIN_TIMEOUT_S = 1.0
_ROLLBACK_TIMEOUT_S = 30.0

_logger = logging.getLogger(__name__)


@of_one_process
class EmbeddedEngine:
    """An `EngineHandle` whose workers hold torch modules.

    Generation goes through `generation()`; everything else through `call`, as if over a network.

    Args:
        workers: one a worker rank; with a single in-process worker use `EmbeddedEngine.of(loader)`.
        engine_id: a name that tells an operator which engine this is.
        lease: of the fleet's service on this host (`RolloutService.lease`): without it nothing is answered.
    """

    def __init__(
        self, workers: Sequence[Worker], *, engine_id: str = "engine-0", lease: LeaseReader | None = None
    ) -> None:
        if not workers:
            raise NoEnginesError("an engine has at least one worker")
        self._workers = WorkerCalls(workers, engine_id)
        self._engine_id = engine_id
        self._gate = ServingGate(lease)
        self.is_leased = lease is not None
        self._recorder = Recorder(engine_id, max_bytes=LONG_RUN_BYTES)
        self._pause_phase: tuple[str, contextlib.ExitStack] | None = None
        self._lock = threading.Lock()
        self._writes_live: bool | None = None
        self._open: str | None = None  # the session that the workers have open
        self._patching = False  # whether it has a base: then no live weight is written before its commit
        self._committing = False
        self._num_fulls = 0

    @classmethod
    def of(
        cls,
        loader: WeightLoader,
        *,
        engine_id: str = "engine-0",
        model_id: str | None = None,
        codec: Codec | None = None,
        lease: LeaseReader | None = None,
    ) -> EmbeddedEngine:
        """An engine of one worker in this process; see `EngineWorker` for the arguments."""
        worker = EngineWorker(loader, track=engine_id, model_id=model_id, codec=codec)
        return cls([worker], engine_id=engine_id, lease=lease)

    @property
    def engine_id(self) -> str:
        return self._engine_id

    @property
    def version(self) -> Version | None:
        """The version whose bytes it serves; None before the first commit."""
        return self._gate.version

    @contextlib.contextmanager
    def generation(self, *, timeout_s: float = 30.0) -> Iterator[Version | None]:
        """Surround each generation with this; gives the version it runs on: no commit comes in between.

            with engine.generation() as version:
                tokens = generate(prompt)
            spans = whole_span(version, len(tokens))  # as vLLM's answers have them: `VersionSpan`

        Raises:
            NotServingError: half-loaded, unleased, or paused for over `timeout_s`. Behind the body: discard the answer.
        """
        with self._gate.generation(timeout_s=timeout_s) as version:
            yield version

    def fence(self, reason: str) -> None:
        """Refuses to serve for good, e.g. because a worker died: the engine has to be restarted."""
        self._gate.die(reason)

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        """Runs one step; see `EngineHandle.call`. Workers that don't answer in time are a typed error."""
        deadline = Deadline(timeout_s)
        match request:
            case DescribeRequest():
                return self._describe(deadline)
            case AuditRequest():
                return self._verify(deadline)
            case InitRequest():
                self._init(request, deadline)
            case BeginRequest():
                self._begin(request, deadline)
            case UpdateRequest(update=update):
                self._update(update, deadline)
                return self._reply(drain=False)  # its phases go with the reply to stage
            case StageRequest():
                return self._stage(request, deadline)
            case PauseRequest():
                self._pause(request)
                return self._reply(drain=False)  # nobody waits for timings in a pause
            case CommitRequest():
                self._commit(request, deadline)
            case ResumeRequest():
                self._resume(request.session)
            case AbortRequest():
                self._abort(request.session, request.reason)
            case _:
                raise StateError(f"an engine has no step {op}")
        return self._reply()

    def close(self) -> None:
        """Closes all workers. Idempotent."""
        for worker in self._workers:
            worker.close()

    def _init(self, request: InitRequest, deadline: Deadline) -> None:
        """A trainer joins: whatever session there was is over, and so is its pause. A fence stays."""
        self._workers.step(lambda worker: worker.init(request), deadline)
        with self._lock:
            self._open = None
        self._gate.release_other(None)
        self._end_pause_phase()

    def _begin(self, request: BeginRequest, deadline: Deadline) -> None:
        with self._lock:
            if self._open == request.session:
                raise SyncInProgressError(f"session {request.session} is open already", state_left="it goes on")
            if self._committing:  # some workers have ended that session already
                raise SyncInProgressError(f"session {self._open} is being committed", state_left="it goes on")
        self._gate.begin(request.session)
        try:
            self._workers.step(lambda worker: worker.begin(request), deadline)
        except WeightSyncError:
            self._abort(request.session, "begin failed on a worker")
            raise
        with self._lock:
            self._open = request.session
            self._patching = request.base is not None
        self._gate.release_other(request.session)

    def _update(self, update: AnyUpdateRequest, deadline: Deadline) -> None:
        if self._writes_before_commit():
            why = "new weights are being written over the old ones"
            if not self._gate.fence_if_paused_by(update.session, why):
                raise StateError("this engine is loaded in place: pause it before the first chunk")
        try:
            self._workers.step(lambda worker: worker.update(update), deadline)
        except WeightSyncError:
            self._abort(update.session, "a chunk failed on a worker")
            raise

    def _stage(self, request: StageRequest, deadline: Deadline) -> EngineReply:
        try:
            replies = self._workers.step(lambda worker: worker.stage(request), deadline)
        except WeightSyncError:
            self._abort(request.session, "staging failed on a worker")
            raise
        unprovable = "; ".join(sorted({reply.unprovable for reply in replies if reply.unprovable}))
        return msgspec.structs.replace(
            self._reply(),
            digests_equal=None if unprovable else True,
            model_digest=replies[0].model_digest,
            unprovable=unprovable or None,
        )

    def _pause(self, request: PauseRequest) -> None:
        session = request.session
        stack = contextlib.ExitStack()
        stack.enter_context(self._recorder.phase("pause"))
        try:
            self._gate.pause(
                session, timeout_s=request.timeout_s, lease_s=request.lease_s, is_open=lambda: self._open == session
            )
        except WeightSyncError:
            stack.close()
            raise
        self._end_pause_phase()  # of a pause whose lease ran out
        with self._lock:
            self._pause_phase = (session, stack)

    def _commit(self, request: CommitRequest, deadline: Deadline) -> None:
        if not self._gate.fence_if_paused_by(request.session, "a commit is under way"):
            self._abort(request.session, "not paused at commit")
            raise StateError("commit comes while the session holds the pause; it does not", state_left="aborted")
        with self._lock:
            self._committing = True
            patching = self._patching
        try:
            versions = self._workers.step(lambda worker: worker.commit(request.session), deadline, settle=True)
        except WeightSyncError as error:
            if patching:
                self._rollback(request.session, error)
            self._abort(request.session, "commit failed on a worker")
            self._refuse_if_mixed(request.session, error)
            raise
        else:
            with self._lock:
                self._open = None
                self._num_fulls += not patching
                mine = self._num_fulls
                self._gate.serve(versions[0])
        finally:
            with self._lock:
                self._committing = False
        if patching:
            in_thread(lambda: self._audit(request.session, mine), name=f"{self._engine_id}-audit")

    def _rollback(self, session: str, error: WeightSyncError) -> None:
        """Undoes a patch where it was committed already. Whether all of them could is looked at afterwards."""
        reason = f"commit failed on a worker: {error.message}"
        try:
            self._workers.step(
                lambda worker: worker.rollback(session, reason), Deadline(_ROLLBACK_TIMEOUT_S), settle=True
            )
        except WeightSyncError as failed:
            _logger.error("engine %s: a patch was not undone on every worker: %s", self._engine_id, failed)

    def _audit(self, session: str, number: int) -> None:
        """Lets every worker read its live weights again, as soon as generation goes on; fences where one is wrong."""

        def audit(worker: Worker) -> None:
            try:
                worker.audit(session)
            except DigestMismatchError as error:
                self._fence_at(number, error.message)

        with contextlib.suppress(WeightSyncError), self._gate.generation(timeout_s=MAX_WAIT_S):
            pass  # the pause is over
        try:
            self._workers.step(audit, Deadline(MAX_WAIT_S), settle=True)
        except WeightSyncError as error:
            _logger.warning("engine %s could not be audited: %s", self._engine_id, error)

    def _verify(self, deadline: Deadline) -> EngineReply:
        with self._lock:
            if self._committing:
                raise StateError("a version is being committed: ask again when it is served")
            mine = self._num_fulls

        def verify(worker: Worker) -> EngineReply:
            reply = worker.verify(MAX_WAIT_S)  # beyond the deadline of who asks: wrong bytes are fenced then, too
            if reply.digests_equal is False:  # whoever waits for it yet
                self._fence_at(mine, reply.unhealthy or "its live weights are others")
            return reply

        replies = self._workers.step(verify, deadline, settle=True)
        return found_together(replies, self._describe(deadline))

    def _fence_at(self, number: int, why: str) -> None:
        """Its live weights were found to be others. A full load behind `number` has healed it."""
        with self._lock:
            if self._num_fulls == number:
                self._gate.fence(why)

    def _refuse_if_mixed(self, session: str, error: WeightSyncError) -> None:
        """After a failed commit: serve again only if every worker is whole and on the version served before."""
        try:
            replies = self._described()
        except WeightSyncError:
            self._gate.fence("a worker failed during a commit")
            return
        if all(reply.serving and reply.version == self._gate.version for reply in replies):
            self._gate.unfence(session)
        else:
            odd = next((reply.unhealthy for reply in replies if reply.unhealthy), "workers serve different versions")
            self._gate.fence(f"{odd}: {error.message}")

    def _resume(self, session: str) -> None:
        with self._recorder.phase("resume"):
            self._gate.resume(session)
        self._end_pause_phase(session)

    def _abort(self, session: str, reason: str) -> None:
        """Aborts on every worker; then serves the old version, or is fenced.

        Only the open session has anything to undo: a stranger's abort changes nothing.
        """
        aborted = True
        try:
            self._workers.step(lambda worker: worker.abort(session, reason), Deadline(_ABORT_TIMEOUT_S), settle=True)
        except WeightSyncError as error:
            aborted = False  # a load may run on, and write yet
            _logger.warning("%s: session %s was not aborted on every worker: %s", self._engine_id, session, error)
        with self._lock:
            if ours := self._open == session:
                self._open = None
            ours &= not self._committing  # the commit itself says whether its weights are whole, and which they are
        if ours and self._writes_before_commit():
            try:
                served = self._gate.version  # not what a commit that answered too late may have left behind
                whole = aborted and all(reply.serving and reply.version == served for reply in self._described())
            except WeightSyncError:
                whole = False
            if whole:
                self._gate.unfence(session)
            else:
                self._gate.fence(f"half-loaded: {reason}")
        self._gate.release(session)
        self._end_pause_phase(session)

    def _end_pause_phase(self, session: str | None = None) -> None:
        """Records the end of this session's pause; of anybody's, where no session is given."""
        with self._lock:
            before = self._pause_phase
            if before is None or session not in (None, before[0]):
                return
            self._pause_phase = None
        before[1].close()

    def _describe(self, deadline: Deadline) -> EngineReply:
        with self._lock:
            mine = self._num_fulls
        replies = self._workers.ask(lambda worker: worker.describe(), deadline.remaining_s)
        for reply in replies:
            if reply.digests_equal is False and not self._gate.fenced:  # told here before its audit has returned
                self._fence_at(mine, reply.unhealthy or "its live weights are others")
        groups = {reply.group for reply in replies}
        digests = {reply.model_digest for reply in replies}
        unhealthy = "; ".join(sorted({reply.unhealthy for reply in replies if reply.unhealthy}))
        reply = self._reply(drain=False)
        return msgspec.structs.replace(
            reply,
            group=groups.pop() if len(groups) == 1 else None,
            version=None if unhealthy else reply.version,
            model_digest=digests.pop() if len(digests) == 1 else None,
            run_id=replies[0].run_id,
            accepts=tuple(sorted(set.intersection(*(set(reply.accepts) for reply in replies)))),
            artifacts=tuple(sorted(set.intersection(*(set(reply.artifacts) for reply in replies)))),
            unhealthy=unhealthy or None,
            intact=all(reply.serving for reply in replies) and not self._gate.fenced,
            leased=self.is_leased,
        )

    def _described(self) -> list[EngineReply]:
        return self._workers.ask(lambda worker: worker.describe(), _DESCRIBE_TIMEOUT_S)

    def _writes_before_commit(self) -> bool:
        """Whether chunks of the open session go into live weights."""
        return self._is_writing_live() and not self._patching

    def _is_writing_live(self) -> bool:
        if self._writes_live is None:
            self._writes_live = any(reply.writes_live for reply in self._described())
        return self._writes_live

    def _reply(self, *, drain: bool = True) -> EngineReply:
        phases: list[PhaseRecord] = []
        if drain:
            phases = list(self._recorder.drain())
            with contextlib.suppress(WeightSyncError):  # a worker that hangs must not hold up an answer for its timings
                for drained in self._workers.ask(lambda worker: worker.drain_phases(), _DRAIN_TIMEOUT_S):
                    phases.extend(drained)
        return EngineReply(
            engine_id=self._engine_id,
            world_size=len(self._workers),
            serving=self._gate.serving,
            version=self._gate.version,
            writes_live=self._is_writing_live(),
            phases=tuple(phases),
        )
