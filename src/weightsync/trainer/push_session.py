"""PushSession: the steps of a single sync on one training rank; `PushSync` makes one for each version."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from weightsync.codec.base import Codec, Encoder
from weightsync.codec.model_digest import ShardSum, model_digest
from weightsync.codec.whole import SummedChunks
from weightsync.errors import SyncFailedError, WeightSyncError, as_weightsync_error
from weightsync.extract.base import WeightExtractor
from weightsync.observe import Recorder, phases_s
from weightsync.trainer.engines import JoinedEngines
from weightsync.trainer.extraction import LockstepExtraction
from weightsync.trainer.ranks import TrainingRanks
from weightsync.trainer.sharing import RankSharing
from weightsync.transfer.base import ChunkSharer
from weightsync.types import (
    Deadline,
    InferenceEngineClient,
    Manifest,
    PatchBase,
    PhaseRecord,
    SyncReport,
    Version,
    WeightChunk,
)
from weightsync.update.artifacts import check_takes
from weightsync.update.session import UpdateSession

_logger = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 1.5  # within the `GRACE_S` that a push promises


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


class PushSession:
    """One sync of one training rank, from the first call to an engine to the last. Used once.

    Args:
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
        self._session: UpdateSession | None = None
        self._recorder = parts.recorder
        self._records: list[PhaseRecord] = []
        self.extraction: LockstepExtraction | None = None
        self.proved: Manifest | None = None
        self.encoded = False
        self.sent_bytes = sent_bytes
        self._why_full = why_full

    def run(self) -> SyncReport | None:
        """Runs the sync; a report on rank 0."""
        if self._ranks.rank == 0:
            unsubscribe = self._recorder.subscribe(self._records.append)
            try:
                return self._steps()
            finally:
                unsubscribe()
        self._ranks.settle(None)
        extraction = self._start_extraction(keep=False)
        self._exchange_sums(extraction.finish())
        return None

    def check(self) -> None:
        """On rank 0: whether every engine would take the manifest. Opens a session and aborts it.

        Raises:
            SyncFailedError: one would not.
        """
        manifest = self._manifest()
        client, described, _ = self._parts.engines.ready(
            self._deadline, run_id=self.version.run_id, require_all=False, artifact=manifest.artifact
        )
        check_takes(manifest, described)
        session = self._session_on(client)
        try:
            session.begin(manifest)
        finally:
            session.abort("nothing but a check")

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
        if self._session is not None:
            with self._recorder.phase("abort", detail=type(error).__name__):
                self._session.abort(error.message)  # the ranks still have to learn of `error`
        if self._ranks.rank == 0:
            self._parts.engines.group.leave()
        if self.extraction is not None:
            with contextlib.suppress(WeightSyncError):
                self.extraction.finish()
            if self.extraction.hangs:  # it may still be inside `agree`: nobody else may use that group now
                self._ranks.give_up("the extraction hangs in a collective")

    def _steps(self) -> SyncReport:
        parts, deadline = self._parts, self._deadline
        error: WeightSyncError | None = None
        try:
            manifest = self._manifest()
            client, session, lost, base = self._begin(manifest)
            encoder = parts.codec.encoder(base)
            self.encoded = True
        except Exception as caught:
            error = as_weightsync_error(caught, SyncFailedError, "the sync did not start")
            parts.engines.leave_out_busy(error)
        self._ranks.settle(error)
        parts.engines.took_part(client.engine_ids)
        if self._why_full is not None:
            _logger.info("%s goes out in full: %s", self.version, self._why_full)
        num_chunks, digests, total = self._transfer(client, session, encoder)
        digest = model_digest(manifest.tensors, total)
        proved = manifest.with_digests(digests, digest) if base is None else replace(manifest, model_digest=digest)
        unprovable = session.finish(proved)
        if all("patch" in session.resumed[who].accepts for who in unprovable):  # those take a change all the same
            self.proved = proved
        return SyncReport(
            version=self.version,
            engine_ids=tuple(client.engine_ids),
            lost={who: str(cause) for who, cause in lost.items()},
            total_bytes=manifest.total_bytes,
            sent_bytes=self.sent_bytes,
            num_deltas=0 if base is None else 1,
            full_because=self._why_full,
            num_chunks=num_chunks,
            seconds=deadline.timeout_s - deadline.remaining_s,
            paused_s=session.paused_s,
            phases_s=phases_s(self._records),
            digests_equal=None if unprovable else True,
            unprovable=unprovable,
            checksums=dict(session.checksums),
            written=sum(reply.written or 0 for reply in session.resumed.values()),
        )

    def _begin(
        self, manifest: Manifest
    ) -> tuple[InferenceEngineClient, UpdateSession, dict[str, WeightSyncError], PatchBase | None]:
        """Opens a session on every engine that answers: on a base where the codec has one and all agree, else without.
        Those that load into live weights are paused: before the other ranks start to extract, so that they learn of a
        failure; and some engines can tell only then that they refuse a base.

        Returns:
            These engines, the session, why others are left out, and the base.
        """
        parts = self._parts
        for may_have_base in (True, False):
            client, described, lost = parts.engines.ready(
                self._deadline,
                run_id=self.version.run_id,
                require_all=parts.require_all_engines,
                artifact=manifest.artifact,
            )
            check_takes(manifest, described)
            session = self._session = self._session_on(client)
            base = None
            if may_have_base:
                base = parts.codec.base_for(described, manifest)
                self._why_full = self._why_full or parts.codec.why_full
            try:
                session.begin(manifest, base)
                session.pause_live_writers()
            except SyncFailedError as error:
                if base is None:
                    raise
                self._why_full = f"a change of {base.version} was refused: {error}"
                session.abort("a full comes instead")  # leaves the group, so `ready` builds another
            else:
                return client, session, lost, base
        raise AssertionError("a begin without a base returns or raises")

    def _manifest(self) -> Manifest:
        parts = self._parts
        adapter = parts.extractor.adapter
        return Manifest(
            version=self.version,
            model_id=parts.model_id,
            tensors=parts.extractor.metadata(parts.dtype),
            artifact="model" if adapter is None else "lora",
            adapter=adapter,
            canary=parts.extractor.canary,
        )

    def _session_on(self, client: InferenceEngineClient) -> UpdateSession:
        return UpdateSession(
            client,
            self.version,
            self._deadline,
            pause_timeout_s=self._parts.pause_timeout_s,
            recorder=self._recorder,
            abort_timeout_s=_ABORT_TIMEOUT_S,
        )

    def _transfer(
        self, client: InferenceEngineClient, session: UpdateSession, encoder: Encoder
    ) -> tuple[int, Mapping[str, str], ShardSum]:
        """Moves all chunks; gives their number, each tensor's digest, and the sum over all shards."""
        sender = self._parts.engines.group.sender
        assert sender is not None
        extraction = self._start_extraction(keep=True)
        summed = SummedChunks(extraction.chunks(), counts=not self._parts.extractor.can_shard_locally())
        sent = self._counted(encoder.encode(summed))
        num_chunks = sender.send_chunks(sent, client, session=session.name, deadline=self._deadline)
        mine = extraction.finish()
        total = self._exchange_sums(mine)
        return num_chunks, encoder.digests(), summed.total if total is None else total

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
        reports = self._ranks.settle(None, lanes=None if mine is None else [mine.lane_a, mine.lane_b])
        if any(report["lanes"] is None for report in reports):
            return None
        total = ShardSum.zero()
        for report in reports:
            total += ShardSum(lane_a=report["lanes"][0], lane_b=report["lanes"][1])
        return total
