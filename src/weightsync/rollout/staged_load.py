"""EngineLoader: brings one engine from a staging to serving a version. The last steps of a pull, for one engine alone.

    describe -> init (once a run) -> begin -> [pause] -> chunks by handle -> stage -> [pause] -> commit -> resume
                                         any failure -> abort: it serves its old version, or nothing

In a fleet it waits for the permit to commit before it pauses.

The chunks are the `packed_cuda_ipc` strategy's requests for CPU tensors: the staging is the bucket, which the engine
maps. So an engine needs nothing for the pull path that it has not for the push path, and proves its bytes in the same
way.

An engine that takes patches and serves exactly the version before is given the change alone (`load_patch` has the
requests). Where that can't be, or fails, it is loaded in full by the same call: the staging holds all of the version.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import uuid
from collections.abc import Iterable, Mapping

import msgspec

from weightsync.errors import (
    DigestMismatchError,
    EngineError,
    InvalidRequestError,
    LoadError,
    ManifestMismatchError,
    SharedMemoryError,
    StateError,
    UnsupportedError,
    VersionError,
    WeightSyncError,
)
from weightsync.memory import host_nonce
from weightsync.observe import Recorder, paused_s
from weightsync.plan.buckets import split_specs
from weightsync.rollout.load_patch import patch_requests, patch_that_fits
from weightsync.rollout.permit import Hold
from weightsync.rollout.pulled import Pulled, PulledPatch
from weightsync.transfer.base import init_requests
from weightsync.transfer.ipc import PackedCudaIpcTransferStrategy
from weightsync.types import (
    AbortRequest,
    AnyUpdateRequest,
    BeginRequest,
    CommitRequest,
    Deadline,
    DescribeRequest,
    EngineHandle,
    EngineOp,
    EngineReply,
    EngineRequest,
    PackedCudaIpcWeightUpdateRequest,
    PatchBase,
    PauseRequest,
    PhaseRecord,
    ResumeRequest,
    SharedMemoryHandle,
    StageRequest,
    TensorTable,
    UpdateRequest,
    Version,
)
from weightsync.types.deadline import MAX_WAIT_S

CHUNK_BYTES = 256 << 20
_ALIGNED_BYTES = 64
_ABORT_S = 5.0
_COMMIT_LEASE_S = 10.0
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadReport:
    """How it went.

    Attributes:
        version: that the engine serves now.
        unprovable: why the engine could not prove its live bytes; None where it did.
        paused_s: how long no generation could start.
        num_chunks: how many requests its weights came in.
        patched: whether it was given the change alone.
    """

    version: Version
    unprovable: str | None
    paused_s: float
    num_chunks: int
    patched: bool


class EngineLoader:
    """Loads one engine, version after version. One load at a time.

    Args:
        engine: a handle of it.
        model_id: which model.
        pause_timeout_s: how long it may take to finish running generations.
        chunk_bytes: how much it is given at a time; nothing is copied for it.
        recorder: where its phases go.

    Attributes:
        takes_patches: whether it can be given changed elements alone, as it said last.
    """

    def __init__(
        self,
        engine: EngineHandle,
        model_id: str,
        *,
        pause_timeout_s: float = 10.0,
        chunk_bytes: int = CHUNK_BYTES,
        recorder: Recorder | None = None,
    ) -> None:
        self.engine_id = engine.engine_id
        self._engine = engine
        self._model_id = model_id
        self._pause_timeout_s = pause_timeout_s
        self._chunk_bytes = chunk_bytes
        self._recorder = recorder or Recorder(f"load/{engine.engine_id}")
        self._strategy = PackedCudaIpcTransferStrategy(keep_mapped=False)  # a trainer may die, and its memory is needed
        self._group: str | None = None
        self._kept_chunks: (
            tuple[TensorTable, Mapping[str, int], tuple[PackedCudaIpcWeightUpdateRequest, ...]] | None
        ) = None
        self._run_id: str | None = None
        self.takes_patches = False

    def describe(self, *, timeout_s: float) -> EngineReply:
        """What the engine says of itself.

        Raises:
            WeightSyncError: it does not answer.
        """
        return self._engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=timeout_s)

    def load(self, pulled: Pulled, *, deadline: Deadline, hold: Hold | None = None) -> LoadReport:
        """Makes the engine serve what was pulled; with `hold`, once that may be committed.

        Raises:
            WeightSyncError: typed; the engine serves its old version, or refuses to serve.
        """
        steps = _Steps(self._engine, deadline, self._recorder, hold)
        reply = self._ready(steps, pulled.version)
        patch = patch_that_fits(pulled, reply)
        if patch is not None:
            try:
                return self._load_patch(steps, pulled, patch)
            except _FALLS_BACK as error:
                _logger.warning("engine %s: loaded in full, not patched: %s", self.engine_id, error)
            self._ready(steps, pulled.version)
        return self._load_full(steps, pulled)

    def _load_patch(self, steps: _Steps, pulled: Pulled, patch: PulledPatch) -> LoadReport:
        session = _session_of(pulled.version)
        requests = tuple(patch_requests(patch, pulled.manifest, session, max_bytes=self._chunk_bytes))
        base = PatchBase(version=patch.base, model_digest=patch.base_digest)
        return self._load(steps, pulled, session, requests, base)

    def _load_full(self, steps: _Steps, pulled: Pulled) -> LoadReport:
        session = _session_of(pulled.version)
        requests = (_request(chunk, session, seq, pulled.segment) for seq, chunk in enumerate(self._chunks_of(pulled)))
        return self._load(steps, pulled, session, requests, None)

    def _chunks_of(self, pulled: Pulled) -> tuple[PackedCudaIpcWeightUpdateRequest, ...]:
        """What a version is given in; made anew where the tensors or their places are others than the last time."""
        table, offsets = pulled.manifest.table, pulled.offsets
        kept = self._kept_chunks
        if kept is None or kept[0] is not table or kept[1] is not offsets:
            kept = self._kept_chunks = table, offsets, _chunks(table, offsets, pulled.segment, self._chunk_bytes)
        return kept[2]

    def _load(
        self,
        steps: _Steps,
        pulled: Pulled,
        session: str,
        requests: Iterable[AnyUpdateRequest],
        base: PatchBase | None,
    ) -> LoadReport:
        version, deadline = pulled.version, steps.deadline
        num_chunks = 0
        try:
            begin = BeginRequest(
                session=session, manifest=pulled.manifest, deadline_s=deadline.check("time to begin"), base=base
            )
            early = steps.call(EngineOp.BEGIN, begin).writes_live and base is None
            if early:
                steps.wait_for_permit()
                self._pause(steps, session, lease_s=deadline.remaining_s)
            for update in requests:
                steps.call(EngineOp.UPDATE_WEIGHTS, UpdateRequest(update=update))
                num_chunks += 1
            staged = steps.call(EngineOp.STAGE, StageRequest(session=session, manifest=pulled.manifest))
            if staged.digests_equal is not True and not staged.unprovable:
                raise DigestMismatchError(
                    "it answered stage without a proof", peer=self.engine_id, version=str(version)
                )
            if not early:
                steps.wait_for_permit()
                self._pause(steps, session, lease_s=self._pause_timeout_s + _COMMIT_LEASE_S)
            committed = steps.call(EngineOp.COMMIT, CommitRequest(session=session))
            if committed.version != version:
                raise EngineError(
                    f"it answered commit well and serves {committed.version}", peer=self.engine_id, version=str(version)
                )
            steps.call(EngineOp.RESUME, ResumeRequest(session=session))
        except BaseException as error:
            self._group = None
            with contextlib.suppress(WeightSyncError):
                reason = str(error)[:500] or type(error).__name__
                self._engine.call(EngineOp.ABORT, AbortRequest(session=session, reason=reason), timeout_s=_ABORT_S)
            raise
        return LoadReport(
            version=version,
            unprovable=staged.unprovable,
            paused_s=paused_s(steps.phases),
            num_chunks=num_chunks,
            patched=base is not None,
        )

    def _ready(self, steps: _Steps, version: Version) -> EngineReply:
        """What the engine says of itself; after this it is in our group."""
        reply = steps.call(EngineOp.DESCRIBE, DescribeRequest(), at_most_s=_DESCRIBE_S)
        self.takes_patches = "patch" in reply.accepts
        if reply.group is None or reply.group != self._group or self._run_id != version.run_id:
            self._join(steps, reply, version.run_id)
        return reply

    def _join(self, steps: _Steps, reply: EngineReply, run_id: str) -> None:
        sizes = {self.engine_id: reply.world_size}
        info, _ = self._strategy.create_init_info(sizes)
        steps.call(EngineOp.INIT, init_requests(info, sizes, run_id=run_id, model_id=self._model_id)[self.engine_id])
        self._group, self._run_id = info.group_name, run_id

    def _pause(self, steps: _Steps, session: str, *, lease_s: float) -> None:
        left = steps.deadline.check("time to pause")
        steps.call(
            EngineOp.PAUSE,
            PauseRequest(session=session, timeout_s=min(self._pause_timeout_s, left), lease_s=min(lease_s, left)),
        )


class _Steps:
    """Calls to one engine within one deadline."""

    def __init__(self, engine: EngineHandle, deadline: Deadline, recorder: Recorder, hold: Hold | None = None) -> None:
        self._engine = engine
        self._recorder = recorder
        self._hold = hold
        self.deadline = deadline
        self.phases: list[PhaseRecord] = []

    def call(self, op: EngineOp, request: EngineRequest, *, at_most_s: float = MAX_WAIT_S) -> EngineReply:
        reply = self._engine.call(op, request, timeout_s=min(at_most_s, self.deadline.check(f"time to {op}")))
        self.phases += reply.phases
        self._recorder.extend(reply.phases)
        return reply

    def wait_for_permit(self) -> None:
        """Returns when what is staged may be committed; see `Hold.staged`."""
        hold, self._hold = self._hold, None  # a load in full behind a patch does not wait again
        if hold is not None:
            with self._recorder.phase("hold"):
                hold.staged(self.deadline)


def _session_of(version: Version) -> str:
    return f"{version}#{uuid.uuid4().hex[:8]}"


def _request(chunk: PackedCudaIpcWeightUpdateRequest, session: str, seq: int, segment: str) -> AnyUpdateRequest:
    """A chunk of this session. All that it says of tensors was checked when the chunk was made, once a layout."""
    made = copy.copy(chunk)
    handle = msgspec.structs.replace(chunk.handles[0], name=segment)
    for name, value in (("session", session), ("seq", seq), ("handles", (handle,))):
        msgspec.structs.force_setattr(made, name, value)
    return made


def _chunks(
    tensors: TensorTable, offsets: Mapping[str, int], segment: str, max_bytes: int
) -> tuple[PackedCudaIpcWeightUpdateRequest, ...]:
    """The chunks of a version of a layout, of no session yet: the staging is the bucket.

    Args:
        tensors: of the manifest.
        offsets: first byte of each in the staging.
        segment: name of one that they lie in.
        max_bytes: of a chunk, unless one tensor has more.
    """
    nonce = host_nonce()
    made: list[PackedCudaIpcWeightUpdateRequest] = []
    for specs in split_specs(tensors, max_bytes):
        sizes = tuple([spec.nbytes for spec in specs])
        places = [offsets[spec.name] for spec in specs]
        held = [index for index, size in enumerate(sizes) if size]
        start = min([places[index] for index in held], default=0) // _ALIGNED_BYTES * _ALIGNED_BYTES
        end = max([places[index] + sizes[index] for index in held], default=start)
        made.append(
            PackedCudaIpcWeightUpdateRequest(
                session="-",
                seq=0,
                names=tuple([spec.name for spec in specs]),
                dtypes=tuple([spec.dtype for spec in specs]),
                shapes=tuple([spec.shape for spec in specs]),
                sizes=sizes,
                offsets=tuple([place - start if size else 0 for place, size in zip(places, sizes, strict=True)]),
                handles=(
                    SharedMemoryHandle(host_nonce=nonce, name=segment, offset_bytes=start, size_bytes=end - start),
                ),
            )
        )
    return tuple(made)
