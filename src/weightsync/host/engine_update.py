"""EngineUpdate: brings one engine from a staging to serving a version, by the steps of `update.session`.

Its chunks are the `packed_cuda_ipc` strategy's requests for CPU tensors: the staging is the bucket, which the engine
maps. An engine that takes patches and serves exactly the version before is given the change alone. Where that can't
be, or fails, it is loaded in full by the same call: the staging holds all of the version.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping

from weightsync.errors import (
    DigestMismatchError,
    EngineUnreachableError,
    InvalidRequestError,
    LoadError,
    ManifestMismatchError,
    SharedMemoryError,
    StateError,
    UnsupportedError,
    VersionError,
    WeightSyncError,
)
from weightsync.handles.fanout import DirectEngine, own_words
from weightsync.host.commit_gate import PendingCommit
from weightsync.host.staged_requests import full_chunks, full_request, patch_requests, patch_that_fits
from weightsync.host.staged_version import StagedVersion
from weightsync.memory import host_nonce
from weightsync.observe import Recorder, now_s
from weightsync.transfer.ipc import PackedCudaIpcTransferStrategy
from weightsync.types import (
    AnyUpdateRequest,
    Deadline,
    DescribeRequest,
    EngineHandle,
    EngineOp,
    EngineReply,
    PackedCudaIpcWeightUpdateRequest,
    PatchBase,
    PhaseRecord,
    TensorTable,
    Version,
)
from weightsync.types.canary import CanaryReading
from weightsync.types.deadline import MAX_WAIT_S
from weightsync.types.fleet import LEASE_MIDDLEWARE
from weightsync.update.artifacts import check_takes
from weightsync.update.group import TransferGroup
from weightsync.update.session import UpdateSession

CHUNK_BYTES = 256 << 20
_DETAIL = 200
_DESCRIBE_S = 10.0
"""An engine that stands still keeps the others waiting no longer than this."""

_FALLS_BACK = (
    VersionError,
    UnsupportedError,
    DigestMismatchError,
    LoadError,
    InvalidRequestError,
    ManifestMismatchError,
    SharedMemoryError,
    StateError,
)
"""What a patch may fail with while the whole version can be loaded yet: not a deadline, nor an engine that is gone."""

_logger = logging.getLogger(__name__)
_UNLEASED = (
    "looks at no lease: it answers whatever becomes of this service, and with what it was started with when it starts "
    f"again. vLLM is started with WEIGHTSYNC_LEASE_FILE and --middleware {LEASE_MIDDLEWARE}; an engine of a module is "
    "EmbeddedEngine.of(loader, lease=LeaseReader(FILE)); SGLang knows no lease"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadReport:
    """How it went.

    Attributes:
        version: that the engine serves now.
        unprovable: why the engine could not prove its live bytes; None where it did.
        paused_s: how long no generation could start.
        num_chunks: how many requests its weights came in.
        patched: whether it was given the change alone.
        checksum: the engine's own, of its live weights; None where it has none.
        full_because: why it was given all of it, though deltas brought it; None where it was not, or they did not.
        canary: what it answered to the trainer's canary; None where it was asked none.
        written: how many elements it has written in place; None where that was all of them, or is not known.
    """

    version: Version
    unprovable: str | None
    paused_s: float
    num_chunks: int
    patched: bool
    checksum: str | None = None
    full_because: str | None = None
    canary: CanaryReading | None = None
    written: int | None = None


class EngineUpdate:
    """Loads one engine, version after version. One load at a time.

    Args:
        engine: a handle of it.
        model_id: which model.
        pause_timeout_s: how long it may take to finish running generations.
        chunk_bytes: how much it is given at a time; nothing is copied for it.
        recorder: where its phases go.
        leased: whether it is to answer under a lease alone; it is warned of where it says that it does not.

    Attributes:
        takes_patches: whether it can be given changed elements alone, as it said last.
        has_answered: whether it has ever said anything of itself.
    """

    def __init__(
        self,
        engine: EngineHandle,
        model_id: str,
        *,
        pause_timeout_s: float = 10.0,
        chunk_bytes: int = CHUNK_BYTES,
        recorder: Recorder | None = None,
        leased: bool = False,
    ) -> None:
        self.engine_id = engine.engine_id
        self._engine = engine
        self._model_id = model_id
        self._client = DirectEngine(engine)
        self._pause_timeout_s = pause_timeout_s
        self._chunk_bytes = chunk_bytes
        self._recorder = recorder or Recorder(f"load/{engine.engine_id}")
        strategy = PackedCudaIpcTransferStrategy(keep_mapped=False)  # a trainer may die, and its memory is needed
        self._group = TransferGroup(strategy, model_id=model_id, join_timeout_s=MAX_WAIT_S, recorder=self._recorder)
        self._kept_chunks: (
            tuple[TensorTable, Mapping[str, int], str, tuple[PackedCudaIpcWeightUpdateRequest, ...]] | None
        ) = None
        self.takes_patches = self.has_answered = False
        self._leased, self._is_warned_of = leased, False

    def describe(self, *, timeout_s: float) -> EngineReply:
        """What the engine says of itself.

        Raises:
            WeightSyncError: it does not answer.
        """
        request = DescribeRequest(model_id=self._model_id)
        try:
            reply = self._engine.call(EngineOp.DESCRIBE, request, timeout_s=timeout_s)
        except EngineUnreachableError:
            raise
        except WeightSyncError:
            self.has_answered = True  # it is there, whatever it says
            raise
        self.has_answered = True
        if self._leased and reply.leased is False and not self._is_warned_of:
            _logger.warning("engine %s %s", self.engine_id, _UNLEASED)
        self._is_warned_of = self._is_warned_of if reply.leased is None else not reply.leased
        return reply

    def load(self, pulled: StagedVersion, *, deadline: Deadline, hold: PendingCommit | None = None) -> LoadReport:
        """Makes the engine serve what was pulled; with `hold`, once that may be committed.

        Raises:
            WeightSyncError: typed; the engine serves its old version, or refuses to serve.
        """
        reply = self._ready(pulled, deadline, of_fleet=hold is not None)
        patch = patch_that_fits(pulled, reply)
        may_pause = _once(self._recorder, deadline, hold)
        if not isinstance(patch, str):
            base = PatchBase(version=patch.base, model_digest=patch.base_digest)
            session = self._session(pulled.version, deadline, may_pause)
            requests = patch_requests(patch, pulled.manifest, session.name, max_bytes=self._chunk_bytes)
            written = sum(each.count for each in patch.tensors)
            try:
                with self._recorder.phase("patch", detail=f"{pulled.version}: {written} elements"):
                    report = self._update(session, pulled, requests, base)
                return dataclasses.replace(report, written=written)
            except _FALLS_BACK as error:
                _logger.warning("engine %s: loaded in full, not patched: %s", self.engine_id, error)
                patch = str(error)
                at_s = now_s()
                self._recorder.add(
                    PhaseRecord(
                        name="fallback", start_s=at_s, end_s=at_s, track=self._recorder.track, detail=patch[:_DETAIL]
                    )
                )
            self._ready(pulled, deadline, of_fleet=hold is not None)
        session = self._session(pulled.version, deadline, may_pause)
        chunks = enumerate(self._chunks_of(pulled))
        report = self._update(
            session, pulled, (full_request(chunk, session.name, seq, pulled.segment) for seq, chunk in chunks)
        )
        return dataclasses.replace(report, full_because=patch if pulled.num_deltas else None)

    def _session(self, version: Version, deadline: Deadline, may_pause: Callable[[], None]) -> UpdateSession:
        return UpdateSession(
            self._client,
            version,
            deadline,
            pause_timeout_s=self._pause_timeout_s,
            recorder=self._recorder,
            may_pause=may_pause,
        )

    def _ready(self, pulled: StagedVersion, deadline: Deadline, *, of_fleet: bool) -> EngineReply:
        """What the engine says of itself; after this it is in our group. `of_fleet`: see `RunsOver`."""
        reply = self.describe(timeout_s=min(_DESCRIBE_S, deadline.check("time to ask the engine")))
        self._recorder.extend(reply.phases)
        self.takes_patches = "patch" in reply.accepts
        try:
            self._join(pulled, reply, deadline)
        except VersionError:  # the engine knows another run as the newer one
            is_served = reply.version is not None and reply.version.run_id == pulled.version.run_id
            if not (of_fleet and is_served):  # it may be another trainer's by now, that has committed
                raise
            self._join(pulled, reply, deadline, returns=True)
        return reply

    def _join(self, pulled: StagedVersion, reply: EngineReply, deadline: Deadline, *, returns: bool = False) -> None:
        with own_words():
            check_takes(pulled.manifest, {self.engine_id: reply})
            self._group.join(
                self._client,
                {self.engine_id: reply},
                run_id=pulled.version.run_id,
                deadline=deadline,
                artifact=pulled.manifest.artifact,
                returns=returns,
            )

    def _update(
        self,
        session: UpdateSession,
        pulled: StagedVersion,
        requests: Iterable[AnyUpdateRequest],
        base: PatchBase | None = None,
    ) -> LoadReport:
        num_chunks = 0
        with own_words():
            try:
                session.begin(pulled.manifest, base)
                session.pause_live_writers()
                for request in requests:
                    session.update(request)
                    num_chunks += 1
                unprovable = session.finish(pulled.manifest)
                self.takes_patches |= any("patch" in reply.accepts for reply in session.resumed.values())
            except BaseException as error:
                self._group.leave()
                session.abort(str(error) or type(error).__name__)
                raise
        return LoadReport(
            version=pulled.version,
            unprovable=unprovable.get(self.engine_id),
            paused_s=session.paused_s,
            num_chunks=num_chunks,
            patched=base is not None,
            checksum=session.checksums.get(self.engine_id),
            canary=None if (own_reply := session.resumed.get(self.engine_id)) is None else own_reply.canary,
            written=next((reply.written for reply in session.resumed.values()), None),
        )

    def _chunks_of(self, pulled: StagedVersion) -> tuple[PackedCudaIpcWeightUpdateRequest, ...]:
        """What a version is given in; made anew where the tensors, their places or this host's proof are others than
        the last time: somebody may clean /dev/shm."""
        table, offsets, nonce = pulled.manifest.table, pulled.offsets, host_nonce()
        kept = self._kept_chunks
        if kept is None or kept[0] is not table or kept[1] is not offsets or kept[2] != nonce:
            chunks = full_chunks(table, offsets, pulled.segment, self._chunk_bytes)
            kept = self._kept_chunks = table, offsets, nonce, chunks
        return kept[3]


def _once(recorder: Recorder, deadline: Deadline, hold: PendingCommit | None) -> Callable[[], None]:
    """Returns when what is staged may be committed, see `PendingCommit.staged`; the second time at once: a load in full
    behind a patch does not wait again."""
    waiting = [] if hold is None else [hold]

    def may_pause() -> None:
        if waiting:
            with recorder.phase("hold"):
                waiting.pop().staged(deadline)

    return may_pause
