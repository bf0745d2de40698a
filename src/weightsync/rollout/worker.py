"""EngineWorker: one worker of an engine (one TP or PP or DP rank): its receiver, its loader, its session.

Walk of a chunk: `update` waits for its turn to receive, receives into one of two buckets, waits for its turn to
load, decodes and loads, releases the bucket. So chunk k + 1 arrives while chunk k is loaded, and order holds.

Failure: whatever fails in a session (here, at the trainer, or by its deadline) ends it once: the loader aborts, the
group is dropped so that every other member's pending operation fails too, and later calls of that
session are told why.

A session on a base is a patch: nothing live is written before its commit, and its commit can be rolled back until it is
settled: by `audit`, by the next begin, or by the end.

Over 400 lines: one state machine under one lock. Sessions are in `session`, how live weights are read is in `audit`.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable

import torch

from weightsync.clients.fanout import in_thread
from weightsync.codec.base import Codec
from weightsync.codec.digest import ShardSum, digest_of, patch_sum, patched_digest, warm_up
from weightsync.codec.full import FullCodec
from weightsync.codec.patch import PatchDecoder
from weightsync.codec.whole import whole_digest
from weightsync.errors import (
    DeadlineExceededError,
    DigestMismatchError,
    InvalidRequestError,
    LoadError,
    StateError,
    SyncInProgressError,
    TransferAbortedError,
    UnsupportedError,
    VersionError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.load.base import WeightLoader
from weightsync.load.patching import kernels as patch_kernels
from weightsync.observe import LONG_RUN_BYTES, Recorder
from weightsync.rollout.audit import Audit
from weightsync.rollout.session import Session
from weightsync.transfer.base import WeightTransferReceiver, WeightTransferStrategy
from weightsync.transfer.registry import strategy_named
from weightsync.types import (
    AnyUpdateRequest,
    BeginRequest,
    EngineReply,
    InitRequest,
    Manifest,
    PatchBase,
    PhaseRecord,
    StageRequest,
    Version,
)
from weightsync.types.deadline import MAX_WAIT_S

_STUCK_LOADER_S = 30.0
_OTHERS_END_S = 1.0
_MAX_SUPERSEDED = 1000
_AUDIT_ENDS_S = 2.0

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Served:
    """What is live.

    Attributes:
        manifest: of the version that was committed.
        session: that committed it.
        proved: whether its digest was computed from the live weights; a patch needs that of its base.
    """

    manifest: Manifest
    session: str
    proved: bool

    @property
    def version(self) -> Version:
        return self.manifest.version

    @property
    def digest(self) -> str | None:
        return self.manifest.model_digest


class EngineWorker:
    """Receives, proves and loads versions for one worker. Thread-safe; knows nothing of serving.

    Args:
        loader: of this worker's model.
        index: which worker of its engine, from 0.
        track: name in recorded phases, e.g. "engine-0/worker-1".
        model_id: the one model that it serves; any where not given.
        codec: how what travels becomes updates.
        strategies: from the name in an init info to a strategy; the library's own where not given.
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
    ) -> None:
        self.loader = loader
        self.index = index
        self.recorder = Recorder(track, max_bytes=LONG_RUN_BYTES)
        self._codec = codec or FullCodec()
        self._strategies = strategies
        self._lock = threading.RLock()
        self._model_id = model_id
        self._run: tuple[str, str] | None = None  # run_id and model_id of the latest init
        self._superseded: dict[str, None] = {}  # runs that are over, oldest first
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._receiver: WeightTransferReceiver | None = None
        self._group: str | None = None
        self._num_inits = 0
        self._session: Session | None = None
        self._ended: Session | None = None  # the latest, for whoever asks late why it ended
        self._served: _Served | None = None
        self._undoable: tuple[Session, _Served | None] | None = None  # a patch that was committed, and what was before
        self._takes_patches = True  # until its model has turned out to be none that can be patched
        self._audit: Audit | None = None
        self._rotten: DigestMismatchError | None = None  # what an audit found; until the next full load
        self._stuck: str | None = None

    @property
    def session(self) -> str | None:
        """Name of the open session; None where none is."""
        with self._lock:
            return None if self._session is None else self._session.name

    def describe(self) -> EngineReply:
        """What this worker is and serves.

        Raises:
            StateError: its loader never returned: it has to be restarted.
        """
        with self._lock:
            self._check_stuck()
            return EngineReply(
                engine_id=self.recorder.track,
                serving=self.loader.healthy and self._rotten is None,
                version=self._served.version if self._served and self._rotten is None else None,
                model_digest=self._served.digest if self._served and self._rotten is None else None,
                writes_live=self.loader.writes_live,
                group=self._group,
                run_id=self._run[0] if self._run else None,
                accepts=tuple(sorted(self.loader.accepts if self._takes_patches else self.loader.accepts - {"patch"})),
                unhealthy=None if self._rotten is None else f"{type(self._rotten).__name__}: {self._rotten}",
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
            self._num_inits += 1
            mine = self._num_inits
            session = self._session
        if session is not None:
            self._end(session, TransferAbortedError(f"run {request.run_id} took over"))
        with self._lock:
            self._drop_receiver()
        warm_up()
        if "patch" in self.loader.accepts:
            in_thread(patch_kernels, name="weightsync-patch-kernels")  # so that the first patch need not wait for them
        self._use_device()
        strategy = self._strategies(request.info.strategy)
        receiver = strategy.create_receiver(request.info, rank=request.rank_offset + self.index)
        with self._lock:
            if mine != self._num_inits:
                receiver.close()
                raise TransferAbortedError("a newer init took over while this one joined")
            self._receiver = receiver
            if self._run is not None and self._run[0] != request.run_id:
                self._superseded[self._run[0]] = None
                while len(self._superseded) > _MAX_SUPERSEDED:
                    del self._superseded[next(iter(self._superseded))]
            self._run = (request.run_id, request.model_id)
            self._group = request.info.group_name

    def check_may_join(self, request: InitRequest) -> None:
        """Raises as `init` would before it changes anything."""
        if self._model_id not in (None, request.model_id):
            raise InvalidRequestError(f"this engine serves model {self._model_id!r}, not {request.model_id!r}")
        with self._lock:
            self._check_stuck()
            if request.run_id in self._superseded:
                raise VersionError(
                    f"run {request.run_id} was taken over by {self._run and self._run[0]}; start a new run"
                )

    def begin(self, request: BeginRequest) -> None:
        """Opens a session after every check that needs no bytes.

        Raises:
            SyncInProgressError: another session is open.
            StateError: no group: init first.
            VersionError: not the current run, or older than what is served; or a patch on another base than what is
                served, proved and whole here. Nothing was changed: load it in full.
            UnsupportedError: this model can't be patched. Nothing was changed.
            ManifestMismatchError: the tensors don't fit the model. Nothing was changed.
        """
        version = request.manifest.version
        with self._lock:
            self._check_stuck()
            if self._session is not None:
                raise SyncInProgressError(
                    f"session {self._session.name} is open", version=str(self._session.manifest.version)
                )
            if self._receiver is None or self._run is None:
                raise StateError("this worker is in no transfer group: init first", version=str(version))
            if (version.run_id, request.manifest.model_id) != self._run:
                raise VersionError(
                    f"the current run and model are {self._run}, not {(version.run_id, request.manifest.model_id)}",
                    version=str(version),
                )
            served = self._served.version if self._served else None
            if served and served.run_id == version.run_id and served.is_newer_than(version):
                raise VersionError(f"{served} is served already; versions rise within a run", version=str(version))
            if request.base is not None:
                self._check_base(request.base, version)
            decoder = self._codec.decoder() if request.base is None else PatchDecoder()
            session = Session(request, decoder, self._receiver)
            session.watchdog = threading.Timer(request.deadline_s, self._expire, (session,))
            session.watchdog.daemon = True
            if request.base is None:
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
                self._pause_audit()

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
                    digest, unprovable = self._prove(request.manifest)
                else:
                    digest, unprovable = self._prove_patch(session.base, request.manifest, session.changes), None
                self._check_immutable(request.manifest)
            session.staged, session.proved = request.manifest, unprovable is None
            with self._lock:
                if self._audit is not None:
                    self._audit.pause(wait_s=0.0)  # in the pause to come nobody should wait for it
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
                self._pause_audit()
                with self.recorder.phase("commit"):
                    self.loader.commit(manifest.version)
            except BaseException as error:
                raise self._fail(session, as_weightsync_error(error, LoadError, "commit failed")) from error
            before = self._served
            self._served = _Served(manifest=manifest, session=session.name, proved=session.proved)
            if session.base is None:
                self._rotten = self._audit = None
            else:
                self._undoable = (session, before)
                if self._audit is not None:
                    self._audit.follow(session.changes)
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
            self._pause_audit()
            self._audit = None
            session.error = TransferAbortedError(f"rolled back: {reason}", version=str(session.manifest.version))
            self._drop_receiver(of=session)
            with self.recorder.phase("undo"):
                self.loader.rollback()
            self._served = before

    def audit(self, name: str) -> None:
        """The patch that session `name` committed stays; reads all live weights and compares them with its digest.

        It is done on one core at low priority, and ends by itself: as soon as everything was read. The next commit
        interrupts it, and the audit after that, of a patch, goes on where it was.
        Returns at once where something else is served or loaded by now, and before live weights are written.

        Raises:
            DigestMismatchError: they are not what was published: this worker refuses to serve until a full load.
        """
        with self._lock:
            served = self._served
            if self._session is not None or served is None or served.session != name or not served.proved:
                return
            self._undoable = None
            self.loader.settle()
            self._pause_audit()
            held = list(self.loader.live_tensors())  # now: within a session it gives what will serve
            audit = self._audit = self._audit or Audit()
            audit.begin()
        manifest = served.manifest

        def read() -> str:
            self._use_device()
            return audit.run(held, manifest.tensors)

        try:
            with self.recorder.phase("audit", detail=str(served.version)):
                digest = in_thread(read, name="weightsync-audit").result()
        except TransferAbortedError:
            return
        with self._lock:
            if audit.paused:
                return
            self._audit = None  # the next one reads all of it again
            if digest == served.digest:
                return
            self._rotten = DigestMismatchError(
                f"an audit found that the live weights have digest {digest}, {served.digest} was committed",
                version=str(served.version),
                state_left="this engine refuses to serve until the next full load",
            )
            _logger.error("%s: %s", self.recorder.track, self._rotten)
            raise self._rotten

    def abort(self, name: str | None, reason: str) -> None:
        """Ends a session badly (any session, where `name` is None) and leaves the group. Idempotent.

        Returns when another may begin, also where something else has ended it a moment before.
        """
        with self._lock:
            session = self._session
        if session is not None and name in (None, session.name):
            self._end(session, TransferAbortedError(f"aborted: {reason}", version=str(session.manifest.version)))

    def drain_phases(self) -> tuple[PhaseRecord, ...]:
        """The phases timed since the last call."""
        return tuple(self.recorder.drain())

    def close(self) -> None:
        """Gives everything back. Idempotent."""
        self.abort(None, "the engine is closing")
        with self._lock:
            self._pause_audit()
            self._undoable = None
            self.loader.settle()
            self._num_inits += 1  # one that is joining now gives up
            self._drop_receiver()

    def _check_base(self, base: PatchBase, version: Version) -> None:
        """Refuses a patch on anything but what is live here, proved and whole."""
        served, reason = self._served, None
        if "patch" not in self.loader.accepts:
            reason = "this engine takes whole tensors alone"
        elif served is None or (served.version, served.digest) != (base.version, base.model_digest):
            said = f"{served.version} of digest {served.digest}" if served else "nothing that was synced"
            reason = f"the patch is one on {base.version} of digest {base.model_digest}, this engine serves {said}"
        elif not served.proved:
            reason = f"nobody has proved that the live weights are {served.version}"
        elif not self.loader.healthy:
            reason = "the live weights are half-loaded"
        elif self._rotten is not None:
            reason = self._rotten.message
        if reason is not None:
            raise VersionError(reason, version=str(version), state_left="nothing was changed: load it in full")

    def _prove_patch(self, base: PatchBase, manifest: Manifest, changes: dict[str, ShardSum]) -> str:
        """Base + change is the published digest, with the change taken from what is live now; fills in `changes`."""
        change = ShardSum.zero()
        for each in self.loader.prepare_patch():
            changes[each.spec.name] = patch_sum(each.spec, each.positions, each.old, each.new)
            change += changes[each.spec.name]
        digest = patched_digest(base.model_digest, change)
        if digest != manifest.model_digest:
            raise DigestMismatchError(
                f"with this patch the engine's weights would have digest {digest}, the trainer published "
                f"{manifest.model_digest}",
                version=str(manifest.version),
                state_left="nothing was changed",
            )
        return digest

    def _pause_audit(self) -> None:
        if self._audit is not None and not self._audit.pause(wait_s=_AUDIT_ENDS_S):
            self._audit = None

    def _use_device(self) -> None:
        """The current device is the thread's own, and this one may be a server's or a timer's."""
        if self._device is not None:
            torch.cuda.set_device(self._device)

    def _check_stuck(self) -> None:
        if self._stuck is not None:
            raise StateError(f"this worker is stuck and has to be restarted: {self._stuck}")

    def _open_session(self, name: str) -> Session:
        with self._lock:
            session = self._session
            if session is None or session.name != name:
                ended = self._ended if self._ended is not None and self._ended.name == name else None
                why = f"it ended with {ended.error}" if ended and ended.error else "it was aborted, or has ended"
                raise TransferAbortedError(
                    f"session {name} is not open here: {why}",
                    version=str(self._served.version) if self._served else None,
                )
            return session

    def _prove(self, manifest: Manifest) -> tuple[str | None, str | None]:
        """(digest of the memory that will serve, None) or (None, why it can't be had)."""
        try:
            digest = self._live_digest(manifest)
        except UnsupportedError as error:
            return None, error.message
        if manifest.model_digest is None:
            return None, "the trainer gave no digest of the model"
        if digest != manifest.model_digest:
            raise DigestMismatchError(
                f"the engine's weights have digest {digest}, the trainer published {manifest.model_digest}",
                version=str(manifest.version),
            )
        return digest, None

    def _live_digest(self, manifest: Manifest) -> str:
        """From the memory that will serve."""
        whole, table = self.loader.live_whole(), manifest.table
        if whole is None or whole.keys() != table.by_name.keys():  # what lacks or is too much is told in words
            return digest_of(self.loader.live_tensors(), table)
        return whole_digest(table, [whole[spec.name] for spec in table])

    def _check_immutable(self, manifest: Manifest) -> None:
        served = self._served
        if served and served.version == manifest.version and served.digest != manifest.model_digest:
            raise VersionError(
                "this version is served already with other bytes: a version is immutable",
                version=str(manifest.version),
            )

    def _expire(self, session: Session) -> None:
        self._fail(
            session,
            DeadlineExceededError(
                f"the session did not end within {session.deadline.timeout_s:g} s: the trainer is gone or too slow",
                version=str(session.manifest.version),
                state_left="aborted",
            ),
        )

    def _end(self, session: Session, error: WeightSyncError) -> None:
        """As `_fail`, and waits for whoever else ends it; not for a loader that never returns."""
        self._fail(session, error)
        session.closed.wait(_OTHERS_END_S)

    def _fail(self, session: Session, error: WeightSyncError) -> WeightSyncError:
        """Ends `session` for the first error alone; returns the error that ended it."""
        with self._lock:
            error = session.note(error)
            if session.ended:
                return error
            session.ended = True
            self._drop_receiver(of=session)
        try:
            self._abort_load(session, error, _STUCK_LOADER_S)
        except DeadlineExceededError as stuck:
            self._stuck = stuck.message
            in_thread(lambda: self._abort_load(session, error, MAX_WAIT_S), name="weightsync-stuck-loader")
        return error

    def _abort_load(self, session: Session, error: WeightSyncError, patience_s: float) -> None:
        self._use_device()  # a watchdog's thread comes here as well
        with session.loading.idle(None, patience_s):  # never abort under a load that is running
            self.loader.abort(str(error))
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

    def _drop_receiver(self, of: Session | None = None) -> None:
        receiver = self._receiver if of is None else of.receiver
        if receiver is not None:
            receiver.close()
        if receiver is self._receiver:
            self._receiver = None
            self._group = None
