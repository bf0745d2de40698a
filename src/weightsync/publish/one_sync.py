"""OneSync: the steps of a single sync on one training rank; `PushSync` makes one for each version."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping

from msgspec.structs import replace

from weightsync.codec.base import Codec
from weightsync.codec.digest import ShardSum, model_digest, shard_sums
from weightsync.errors import DigestMismatchError, EngineError, SyncFailedError, WeightSyncError, as_weightsync_error
from weightsync.extract.base import WeightExtractor
from weightsync.observe import Recorder, paused_s, phases_s
from weightsync.publish.engines import JoinedEngines
from weightsync.publish.extraction import LockstepExtraction
from weightsync.publish.ranks import TrainingRanks
from weightsync.publish.sharing import RankSharing
from weightsync.tensors import spec_of
from weightsync.transfer.base import ChunkSharer
from weightsync.types import (
    AbortRequest,
    BeginRequest,
    CommitRequest,
    Deadline,
    EngineReply,
    HeldTensor,
    InferenceEngineClient,
    Manifest,
    PatchBase,
    PauseRequest,
    PhaseRecord,
    ResumeRequest,
    StageRequest,
    SyncReport,
    Version,
    WeightChunk,
)

_logger = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 1.5  # within the `GRACE_S` that a push promises
_COMMIT_LEASE_S = 10.0  # how long a commit may take before paused engines go on without it


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncParts:
    """What every sync of a `PushSync` is made with; see its arguments."""

    extractor: WeightExtractor
    engines: JoinedEngines
    codec: Codec
    dtype: str | None
    model_id: str
    pause_timeout_s: float
    require_all_engines: bool
    recorder: Recorder
    sharer: ChunkSharer | None


class OneSync:
    """One sync of one training rank, from the first call to an engine to the last. Used once.

    Args:
        parts: what it is made with.
        ranks: how training ranks agree.
        version: to be synced.
        deadline: of the whole.
        sent_bytes: what an earlier try of this version has sent.
        why_full: why this one sends whole tensors, where that is known.

    Attributes:
        sent_bytes: and with what this one has.
        extraction: that of this sync, once it has started.
        proved: what every engine has proved and serves; None before, and where one can't prove it.
        encoded: whether the codec was asked for this version.
    """

    def __init__(
        self,
        parts: SyncParts,
        ranks: TrainingRanks,
        version: Version,
        deadline: Deadline,
        *,
        sent_bytes: int = 0,
        why_full: str | None = None,
    ) -> None:
        self._parts = parts
        self._ranks = ranks
        self._deadline = deadline
        self.version = version
        self._session = _session_of(version)
        self._client: InferenceEngineClient | None = None
        self._recorder = parts.recorder
        self._records: list[PhaseRecord] = []
        self._of_engines: list[PhaseRecord] = []
        self.extraction: LockstepExtraction | None = None
        self.proved: Manifest | None = None
        self.encoded = False
        self.sent_bytes = sent_bytes
        self._why_full = why_full

    def run(self) -> SyncReport | None:
        """Runs the sync; a report on rank 0."""
        if self._ranks.rank == 0:
            return self._lead()
        self._ranks.settle(None)
        extraction = self._start_extraction(keep=False)
        self._exchange_sums(extraction.finish())
        return None

    def end(self, error: WeightSyncError | None) -> None:
        """Lets go of what was lent, and tells the codec how it ended; after a failure `fail` comes first."""
        if self._parts.sharer is not None:
            self._parts.sharer.end_sync(failed=error is not None)
        if self.encoded:
            self._parts.codec.ended(self.proved if error is None else None, error)

    def fail(self, error: WeightSyncError) -> None:
        """Leaves everything as it was before: engines abort, the group goes, the extraction stops."""
        if self.extraction is not None:
            self.extraction.stop(error)
        if self._client is not None:
            with self._recorder.phase("abort", detail=type(error).__name__):
                self._abort(self._client, error.message)  # the ranks still have to learn of `error`
        if self._ranks.rank == 0:
            self._parts.engines.drop_sender()
        if self.extraction is not None:
            with contextlib.suppress(WeightSyncError):
                self.extraction.finish()
            if self.extraction.hangs:  # it may still be inside `agree`: nobody else may use that group now
                self._ranks.give_up("the extraction hangs in a collective")

    def _lead(self) -> SyncReport:
        unsubscribe = self._recorder.subscribe(self._records.append)
        try:
            return self._steps()
        finally:
            unsubscribe()

    def _steps(self) -> SyncReport:
        parts, deadline = self._parts, self._deadline
        error: WeightSyncError | None = None
        lost: dict[str, WeightSyncError] = {}
        try:
            manifest = Manifest(
                version=self.version,
                model_id=parts.model_id,
                tensors=parts.extractor.metadata(parts.dtype),
            )
            client, lost, base, replies = self._begin(manifest)
            paused_early = base is None and any(reply.writes_live for reply in replies.values())
            if paused_early:  # before the other ranks start to extract: a failure is told by this settle
                self._pause(client, lease_s=deadline.remaining_s)
        except Exception as caught:
            error = as_weightsync_error(caught, SyncFailedError, "the sync did not start")
            parts.engines.leave_out_busy(error)
        self._ranks.settle(error)
        parts.engines.took_part(client.engine_ids)
        if self._why_full is not None:
            _logger.info("%s goes out in full: %s", self.version, self._why_full)
        num_chunks, digests, total = self._transfer(client, base)
        digest = model_digest(manifest.tensors, total)
        proved = manifest.with_digests(digests, digest) if base is None else replace(manifest, model_digest=digest)
        staged = self._call(
            "stage",
            lambda left: client.stage(StageRequest(session=self._session, manifest=proved), timeout_s=left),
        )
        _check_proofs(staged, proved)
        if not paused_early:
            self._pause(client, lease_s=parts.pause_timeout_s + _COMMIT_LEASE_S)
        committed = self._call(
            "commit", lambda left: client.commit(CommitRequest(session=self._session), timeout_s=left)
        )
        _check_versions(committed, self.version)
        self._call("resume", lambda left: client.resume(ResumeRequest(session=self._session), timeout_s=left))
        unprovable = {who: reply.unprovable for who, reply in staged.items() if reply.unprovable}
        self.proved = None if unprovable else proved
        return SyncReport(
            version=self.version,
            engine_ids=tuple(staged),
            lost={who: str(cause) for who, cause in lost.items()},
            total_bytes=manifest.total_bytes,
            sent_bytes=self.sent_bytes,
            num_deltas=0 if base is None else 1,
            full_because=self._why_full,
            num_chunks=num_chunks,
            seconds=deadline.timeout_s - deadline.remaining_s,
            paused_s=paused_s(self._of_engines),
            phases_s=phases_s(self._records),
            digests_equal=None if unprovable else True,
            unprovable=unprovable,
        )

    def _begin(
        self, manifest: Manifest
    ) -> tuple[InferenceEngineClient, dict[str, WeightSyncError], PatchBase | None, Mapping[str, EngineReply]]:
        """Opens a session on every engine that answers: on a base where the codec has one and all agree, else without.

        Returns:
            These engines, why others are left out, the base, and what they answered.
        """
        parts = self._parts
        for may_have_base in (True, False):
            client, described, lost = parts.engines.ready(
                self._deadline, run_id=self.version.run_id, require_all=parts.require_all_engines
            )
            self._client = client
            base = None
            if may_have_base:
                base = parts.codec.base_for(described, manifest)
                self._why_full = self._why_full or parts.codec.why_full
            request = BeginRequest(
                session=self._session, manifest=manifest, deadline_s=self._deadline.check("time to begin"), base=base
            )
            try:
                return client, lost, base, self._call("begin", functools.partial(_begin, client, request))
            except SyncFailedError as error:
                if base is None:
                    raise
                self._why_full = f"a change of {base.version} was refused: {error}"
                self._abort(client, "a full comes instead")  # leaves the group, so `ready` builds another
                self._session = _session_of(self.version)
        raise AssertionError("a begin without a base returns or raises")

    def _abort(self, client: InferenceEngineClient, reason: str) -> None:
        with contextlib.suppress(Exception):
            client.abort(AbortRequest(session=self._session, reason=reason[:500]), timeout_s=_ABORT_TIMEOUT_S)

    def _transfer(self, client: InferenceEngineClient, base: PatchBase | None) -> tuple[int, dict[str, str], ShardSum]:
        """Moves all chunks; gives their number, each tensor's digest, and the sum over all shards."""
        sender = self._parts.engines.sender
        assert sender is not None
        encoder = self._parts.codec.encoder(base)
        self.encoded = True
        extraction = self._start_extraction(keep=True)
        summed = _Summed(extraction.chunks(), self._parts.extractor)
        sent = self._counted(encoder.encode(summed))
        num_chunks = sender.send_chunks(sent, client, session=self._session, deadline=self._deadline)
        mine = extraction.finish()
        total = self._exchange_sums(mine)
        return num_chunks, dict(encoder.digests()), summed.total if total is None else total

    def _counted(self, chunks: Iterator[WeightChunk]) -> Iterator[WeightChunk]:
        """Chunks on their way from the encoder to the sender, and their bytes."""
        for chunk in chunks:
            self.sent_bytes += chunk.total_size_bytes
            yield chunk
            del chunk

    def _start_extraction(self, *, keep: bool) -> LockstepExtraction:
        sharer = self._parts.sharer
        extraction = LockstepExtraction(
            self._parts.extractor,
            dtype=self._parts.dtype,
            ranks=self._ranks,
            deadline=self._deadline,
            recorder=self._recorder,
            keep=keep,
            sharing=None if sharer is None else RankSharing(sharer, self._ranks),
        )
        self.extraction = extraction
        extraction.start()
        return extraction

    def _exchange_sums(self, mine: ShardSum | None) -> ShardSum | None:
        """The sum of every rank's shards; None where shards can't be summed without communication."""
        said = self._ranks.settle(None, lanes=None if mine is None else [mine.lane_a, mine.lane_b])
        if any(what["lanes"] is None for what in said):
            return None
        total = ShardSum.zero()
        for what in said:
            total = total + ShardSum(lane_a=what["lanes"][0], lane_b=what["lanes"][1])
        return total

    def _pause(self, client: InferenceEngineClient, *, lease_s: float) -> None:
        """Pauses every engine; should this trainer die, they go on by themselves after `lease_s`."""
        timeout_s = self._parts.pause_timeout_s
        self._call(
            "pause",
            lambda left: client.pause(
                PauseRequest(session=self._session, timeout_s=min(timeout_s, left), lease_s=min(lease_s, left)),
                timeout_s=left,
            ),
        )

    def _call(self, name: str, step: Callable[[float], Mapping[str, EngineReply]]) -> Mapping[str, EngineReply]:
        with self._recorder.phase(f"wait for {name}"):  # the phases of that name are the engines' own
            replies = step(self._deadline.check(f"time to {name}"))
        for reply in replies.values():
            self._of_engines.extend(reply.phases)
            self._recorder.extend(reply.phases)
        return replies


def _check_proofs(staged: Mapping[str, EngineReply], manifest: Manifest) -> None:
    """An engine that answered 'well' has proved it, or says why it can't; anything else is a failure."""
    for who, reply in staged.items():
        proved = reply.digests_equal is True and reply.model_digest == manifest.model_digest
        if not proved and not (reply.digests_equal is None and reply.unprovable):
            raise DigestMismatchError(
                f"it answered stage without a proof: digests_equal {reply.digests_equal}, model_digest "
                f"{reply.model_digest}; published was {manifest.model_digest}",
                peer=who,
                version=str(manifest.version),
            )


def _check_versions(committed: Mapping[str, EngineReply], version: Version) -> None:
    for who, reply in committed.items():
        if reply.version != version:
            raise EngineError(f"it answered commit well and serves {reply.version}", peer=who, version=str(version))


def _session_of(version: Version) -> str:
    return f"{version}#{uuid.uuid4().hex[:8]}"


def _begin(client: InferenceEngineClient, request: BeginRequest, left: float) -> Mapping[str, EngineReply]:
    return client.begin(request, timeout_s=left)


class _Summed:
    """Chunks on their way to the encoder; sums whole tensors where shards can't be summed without communication."""

    def __init__(self, chunks: Iterator[WeightChunk], extractor: WeightExtractor) -> None:
        self._chunks = chunks
        self._needed = not extractor.can_shard_locally()
        self.total = ShardSum.zero()

    def __iter__(self) -> Iterator[WeightChunk]:
        for chunk in self._chunks:
            if self._needed:
                self.total += shard_sums(
                    HeldTensor(spec=spec_of(name, tensor), box=None, tensor=tensor)
                    for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
                )
            yield chunk
            del chunk
