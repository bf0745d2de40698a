"""EngineWorker: one worker of an engine (one TP or PP or DP rank): its receiver, its loader, its session.

Walk of a chunk: `update` waits for its turn to receive, receives into one of two buckets, waits for its turn to
load, decodes and loads, releases the bucket. So chunk k + 1 arrives while chunk k is loaded, and order holds.

Failure: whatever fails in a session (here, at the trainer, or by its deadline) ends it once: the loader aborts, the
group is dropped so that every other member's pending operation fails too, and later calls of it are told why. A session
on a base is a patch: nothing live is written before its commit, which can be rolled back until it is settled: by
`audit`, by the next begin, or by the end.
Sessions are in `session`, groups in `membership`, proofs in `proof`, how live weights are read again in `audited`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from weightsync.codec.base import Codec
from weightsync.codec.full import FullCodec
from weightsync.codec.model_digest import warm_up
from weightsync.codec.patch import PatchDecoder
from weightsync.engine.audit import Audits
from weightsync.engine.audited import AuditedWorker
from weightsync.engine.live_base import LiveBase, check_artifact
from weightsync.engine.membership import Membership
from weightsync.engine.proof import Served, check_base, check_immutable, check_undamaged, committed, prove, prove_patch
from weightsync.engine.session import Session
from weightsync.errors import (
    DeadlineExceededError,
    LoadError,
    StateError,
    SyncInProgressError,
    TransferAbortedError,
    UnsupportedError,
    VersionError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.handles.fanout import in_thread
from weightsync.load.base import WeightLoader
from weightsync.load.patching import kernels as patch_kernels
from weightsync.observe import LONG_RUN_BYTES, Recorder
from weightsync.transfer.base import WeightTransferStrategy
from weightsync.transfer.registry import strategy_named
from weightsync.types import (
    AnyUpdateRequest,
    BeginRequest,
    EngineReply,
    InitRequest,
    Manifest,
    PhaseRecord,
    StageRequest,
    Version,
)
from weightsync.types.deadline import MAX_WAIT_S

_NO_LIVE_BASE = (
    "its base was not proved from live weights; the change is proved, on the copy that layers are loaded from"
)
_STUCK_LOADER_S = 30.0
_OTHERS_END_S = 1.0

_logger = logging.getLogger(__name__)


class EngineWorker(AuditedWorker):
    """Receives, proves and loads versions for one worker. Thread-safe; knows nothing of serving.

    Args:
        loader: of this worker's model.
        index: which worker of its engine, from 0.
        track: name in recorded phases, e.g. "engine-0/worker-1".
        model_id: the one model that it serves; any where not given.
        codec: how what travels becomes updates.
        strategies: from the name in an init info to a strategy; the library's own where not given.
        base: how it is known whether an adapter belongs here; by its loader's base tensors where not given.
    """

    def __init__(
        self,
        loader: WeightLoader,
        *,
        index: int = 0,
        track: str = "engine",
        model_id: str | None = None,
        codec: Codec | None = None,
        strategies: Callable[[str], WeightTransferStrategy] = strategy_named,
        base: LiveBase | None = None,
    ) -> None:
        self.loader = loader
        self.index = index
        self.recorder = Recorder(track, max_bytes=LONG_RUN_BYTES)
        self._codec = codec or FullCodec()
        self._strategies = strategies
        self._lock = threading.RLock()
        self._member = Membership(model_id)
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._device = torch.cuda.current_device() if in_use else None
        self._session: Session | None = None
        self._ended: Session | None = None  # the latest, for whoever asks late why it ended
        self._served: Served | None = None
        self._undoable: tuple[Session, Served | None] | None = None  # a patch that was committed, and what was before
        self._takes_patches = True  # until its model has turned out to be none that can be patched
        self._base = base or LiveBase()
        self._audits = Audits()
        self._stuck: str | None = None

    @property
    def session(self) -> str | None:
        """Name of the open session; None where none is."""
        with self._lock:
            return None if self._session is None else self._session.name

    @property
    def coming(self) -> Manifest | None:
        """What is staged and not committed yet; None where nothing is."""
        session = self._session
        return None if session is None else session.staged

    @property
    def live_version(self) -> Version | None:
        """The version whose bytes are live; None before the first commit, while live weights are written, and where
        they are no version's.

        It takes no lock and waits for nothing, so it may be asked before each step of a generation: in the thread that
        commits, since another one may be told of a commit late.
        """
        served = self._served
        is_whole = self.loader.healthy and self._stuck is None and self._audits.failure is None
        return served.version if served is not None and is_whole else None

    def describe(self) -> EngineReply:
        """What this worker is and serves.

        Raises:
            StateError: its loader never returned: it has to be restarted; or what its loader's `lost` raises.
        """
        lost = self.loader.lost()
        with self._lock:
            self._check_stuck()
            unhealthy = self._audits.finding or lost
            served = None if unhealthy else self._served
            return EngineReply(
                engine_id=self.recorder.track,
                serving=self.loader.healthy and not unhealthy,
                version=served.version if served else None,
                model_digest=served.digest if served else None,
                digests_equal=False if self._audits.failure else True if served and served.proved else None,
                writes_live=self.loader.writes_live,
                group=self._member.group,
                run_id=self._member.run_id,
                artifacts=tuple(sorted(self.loader.artifacts)),
                accepts=tuple(sorted(self.loader.accepts if self._takes_patches else self.loader.accepts - {"patch"})),
                unhealthy=unhealthy,
            )

    def init(self, request: InitRequest) -> None:
        """Joins the transfer group; a session under way is aborted, an older init gives way.

        Raises:
            GroupJoinError: not everybody came. The worker has no group then.
            TransferAbortedError: a newer init came meanwhile.
            InvalidRequestError: it is for another model. Nothing was changed.
            VersionError: it is of a run that a newer one took over from. Nothing was changed.
        """
        with self._lock:
            self.check_may_join(request)
            attempt = self._member.begin_join()
            session = self._session
        if session is not None:
            self._end(session, TransferAbortedError(f"run {request.run_id} took over"))
        with self._lock:
            self._member.check_newest(attempt)
            self._member.leave()
        warm_up()
        if "patch" in self.loader.accepts:
            in_thread(patch_kernels, name="weightsync-patch-kernels")  # so that the first patch need not wait for them
        self._use_device()
        strategy = self._strategies(request.info.strategy)
        receiver = strategy.create_receiver(request.info, rank=request.rank_offset + self.index)
        with self._lock:
            self._member.join(request, receiver, attempt=attempt)

    def check_may_join(self, request: InitRequest) -> None:
        """Raises as `init` would before it changes anything."""
        with self._lock:
            self._member.check_may_join(request)
            self._check_stuck()

    def begin(self, request: BeginRequest) -> None:
        """Opens a session after every check that needs no bytes.

        Raises:
            SyncInProgressError: another session is open.
            StateError: no group: init first.
            TransferAbortedError: it was aborted before it came.
            VersionError: not the current run, or older than what is served; or a patch on another base than what is
                served, proved and whole here. Nothing was changed: load it in full.
            UnsupportedError: this model can't be patched. Nothing was changed.
            ManifestMismatchError: the tensors don't fit the model. Nothing was changed.
            WrongArtifactError, WrongBaseError: an adapter that this engine does not take. Nothing was changed.
        """
        version = request.manifest.version
        with self._lock:
            self._check_stuck()
            if (other := self._session) is not None:
                raise SyncInProgressError(f"session {other.name} is open", version=str(other.manifest.version))
            self._member.check_not_over(request.session)
            receiver = self._member.receiver_for(version, request.manifest.model_id)
            served = self._served.version if self._served else None
            if served and served.run_id == version.run_id and served.is_newer_than(version):
                raise VersionError(f"{served} is served already; versions rise within a run", version=str(version))
            check_artifact(request.manifest, self.loader)
            self._base.check(request.manifest, self.loader)
            if request.base is not None:
                check_base(request.base, self._served, self.loader, version=version, damage=self._audits.finding)
            decoder = self._codec.decoder() if request.base is None else PatchDecoder()
            session = Session(request, decoder, receiver)
            session.watchdog = threading.Timer(request.deadline_s, self._expire, (session,))
            session.watchdog.daemon = True
            if request.base is None:
                if self.loader.audits_copy:
                    self._audits.pause()
                if self._audits.finding is not None:
                    self.loader.distrust()
                self.loader.begin(request.manifest)
            else:
                try:
                    self.loader.begin_patch(request.manifest)
                except UnsupportedError:
                    self._takes_patches = False  # nobody need try it again and again
                    raise
            try:
                session.watchdog.start()
            except BaseException:
                self.loader.abort("no watchdog")
                raise
            self._session = session
            self._undoable = None
            if request.base is None and self.loader.writes_live:
                self._audits.pause()

    def update(self, request: AnyUpdateRequest) -> None:
        """Receives and loads one chunk; returns when the loader has let go of its bytes.

        Raises:
            WeightSyncError: the session has failed; the loader is aborted, the group dropped.
        """
        session = self._open_session(request.session)
        try:
            session.check_announced(request)
            chunk = f"chunk {request.seq}"
            with session.receiving.turn(request.seq, session), self.recorder.phase("transfer", detail=chunk):
                updates = session.receiver.receive_weights(request, deadline=session.deadline)
            try:
                with session.loading.turn(request.seq, session), self.recorder.phase("load", detail=chunk):
                    self.loader.load_weights(session.decoder.decode(updates))
            finally:
                session.receiver.release(request)
        except BaseException as error:
            raise self._fail(session, as_weightsync_error(error, LoadError, "loading a chunk failed")) from error

    def stage(self, request: StageRequest) -> EngineReply:
        """Proves what was received and what will be served; see `StageRequest`.

        Raises:
            DigestMismatchError: received or loaded bytes are not the published ones. The session has failed.
            ManifestMismatchError: tensors are missing.
        """
        session = self._open_session(request.session)
        try:
            with session.loading.idle(session), self.recorder.phase("verify"):
                session.check_same_tensors(request.manifest)
                if session.base is None:
                    self.loader.verify()
                    session.decoder.check(request.manifest)
                    digest, unprovable = prove(self.loader, request.manifest)
                else:
                    digest = prove_patch(self.loader, session.base, request.manifest, session.changes)
                    is_live = self._served is not None and self._served.proved
                    unprovable = None if is_live else _NO_LIVE_BASE
                check_immutable(self._served, request.manifest)
            session.staged, session.proved = request.manifest, unprovable is None
            with self._lock:
                self._audits.interrupt()  # in the pause to come nobody should wait for it
            session.receiver.end_session()  # everything was read; in the pause to come it would take time
        except BaseException as error:
            raise self._fail(session, as_weightsync_error(error, LoadError, "staging failed")) from error
        return EngineReply(
            engine_id=self.recorder.track,
            version=self._served.version if self._served else None,
            digests_equal=None if unprovable else True,
            model_digest=digest,
            unprovable=unprovable,
        )

    def commit(self, name: str) -> Version:
        """Makes the staged version the served one and closes the session.

        Raises:
            StateError: not staged, or no such session.
            VersionError: it is a patch, and an audit has found what is live to be other weights. As below:
            LoadError: the loader failed; the session has failed.
        """
        session = self._open_session(name)
        with self._lock:
            if session.ended:  # since we looked; whoever ended it aborts the loader at this moment
                raise session.error or TransferAbortedError(f"session {name} has ended")
            manifest = session.staged
            if manifest is None:
                raise StateError("commit comes after stage", version=str(session.manifest.version))
            try:
                self._audits.pause()
                if session.base is not None:  # an audit may have ended since it began
                    check_undamaged(manifest.version, self._audits.finding)
                self._base.check_commit(manifest, self.loader)
                with self.recorder.phase("commit"):
                    self.loader.commit(manifest.version)
            except BaseException as error:
                raise self._fail(session, as_weightsync_error(error, LoadError, "commit failed")) from error
            before = self._served
            self._served = committed(session, manifest, self.loader)
            if session.base is not None or self.loader.can_roll_back:
                self._undoable = (session, before)
            if session.base is None:
                self._audits = Audits()
            else:
                self._audits.follow(session.changes)
            self._close(session)
            return manifest.version

    def rollback(self, name: str, reason: str) -> None:
        """Undoes a session's commit of a patch, which failed on another worker; aborts one that has not committed.

        Raises:
            LoadError: it could not be undone: this worker refuses to serve until a full load.
        """
        with self._lock:
            undoable = self._undoable if self._undoable and self._undoable[0].name == name else None
        if undoable is None:
            self.abort(name, reason)
            return
        with self._lock:
            if self._undoable is not undoable:  # something else was begun, or it was audited
                return
            self._use_device()
            session, before = undoable
            self._undoable = None
            self._audits.pause()
            self._audits.forget()
            session.error = TransferAbortedError(f"rolled back: {reason}", version=str(session.manifest.version))
            self._member.leave(session.receiver)
            with self.recorder.phase("undo"):
                self.loader.rollback()
            self._served = before

    def abort(self, name: str | None, reason: str) -> None:
        """Ends a session badly (any, where `name` is None) and leaves the group; or see `AbortRequest`. Idempotent.

        Returns when another may begin, also where something else has ended it a moment before.
        """
        with self._lock:
            session = self._session
            if session is None and name is not None:
                self._member.end(name)
        if session is not None and name in (None, session.name):
            self._end(session, TransferAbortedError(f"aborted: {reason}", version=str(session.manifest.version)))

    def drain_phases(self) -> tuple[PhaseRecord, ...]:
        """The phases timed since the last call."""
        return tuple(self.recorder.drain())

    def close(self) -> None:
        """Gives everything back. Idempotent."""
        self.abort(None, "the engine is closing")
        with self._lock:
            self._audits.pause()
            self._undoable = None
            self.loader.settle()
            self._member.begin_join()  # one that is joining now gives up
            self._member.leave()

    def _use_device(self) -> None:
        """The current device is the thread's own, and this one may be a server's or a timer's."""
        of_model = self.loader.device_index
        if (device := self._device if of_model is None else of_model) is not None:
            torch.cuda.set_device(device)

    def _check_stuck(self) -> None:
        if self._stuck is not None:
            raise StateError(f"this worker is stuck and has to be restarted: {self._stuck}")

    def _open_session(self, name: str) -> Session:
        with self._lock:
            session = self._session
            if session is None or session.name != name:
                ended = self._ended if self._ended is not None and self._ended.name == name else None
                why = f"it ended with {ended.error}" if ended and ended.error else "it was aborted, or has ended"
                version = str(self._served.version) if self._served else None
                raise TransferAbortedError(f"session {name} is not open here: {why}", version=version)
            return session

    def _expire(self, session: Session) -> None:
        why = f"the session did not end within {session.deadline.said}: the trainer is gone or too slow"
        self._fail(session, DeadlineExceededError(why, version=str(session.manifest.version), state_left="aborted"))

    def _end(self, session: Session, error: WeightSyncError) -> None:
        """As `_fail`, and waits for whoever else ends it; not for a loader that never returns."""
        self._fail(session, error)
        session.closed.wait(_OTHERS_END_S)

    def _fail(self, session: Session, error: WeightSyncError) -> WeightSyncError:
        """Ends `session` for the first error alone; returns the error that ended it."""
        with self._lock:
            if session.ended:  # maybe by a commit, which is no failure
                return session.error or error
            error = session.note(error)
            session.ended = True
            self._member.leave(session.receiver)
        try:
            self._abort_load(session, error, _STUCK_LOADER_S)
        except DeadlineExceededError as stuck:
            self._stuck = stuck.message
            in_thread(lambda: self._abort_load(session, error, MAX_WAIT_S), name="weightsync-stuck-loader")
        return error

    def _abort_load(self, session: Session, error: WeightSyncError, patience_s: float) -> None:
        self._use_device()  # a watchdog's thread comes here as well
        with session.loading.idle(None, patience_s):  # never abort under a load that is running
            try:
                self.loader.abort(str(error))
            except Exception:  # e.g. its engine elsewhere is gone: the next begin says it, if it still is
                _logger.exception("%s: the loader could not abort session %s", self.recorder.track, session.name)
        with self._lock:
            self._close(session)
            self._stuck = None

    def _close(self, session: Session) -> None:
        session.ended = True
        self._ended = session
        if session.watchdog is not None:
            session.watchdog.cancel()
        if self._session is session:
            self._session = None
        session.receiver.end_session()
        session.closed.set()
