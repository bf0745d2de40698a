"""OffloadSteps: agree, acquire, copy, publish: what one rank does in an offload, and what it keeps for the next one.

    agree      ranks mean the same version of the same tensors; where the model or its sharding has changed, segments
               are laid out anew
    acquire    the first rank of each host takes a free segment; all are told which
    copy       each rank copies its own parts to their places, converting on the way
    publish    the first rank of a host stamps its segment

Each step ends alike on every rank: what one finds to be wrong, all raise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch
import xxhash

from weightsync.errors import InvalidRequestError, StateError, WeightSyncError, as_weightsync_error
from weightsync.extract.base import WeightExtractor
from weightsync.memory import Reader
from weightsync.observe import Recorder, now_s
from weightsync.plan.boxes import whole_box
from weightsync.trainer.buffer import PublicationBuffer, WriteTurn
from weightsync.trainer.extraction import gather
from weightsync.trainer.offload_plan import HostPlan, plan_hosts
from weightsync.trainer.plan_cache import Named, OffloadPlanCache, Weights, extractor_of
from weightsync.trainer.ranks import TrainingRanks
from weightsync.trainer.segment_writer import SegmentWriter, write_header
from weightsync.types import Box, TensorSpec, TensorTable, Version, WeightChunk
from weightsync.types.adapter import Adapter
from weightsync.types.canary import Canary
from weightsync.types.publication import Publication

Boxes = tuple[tuple[int, Box], ...]


@dataclasses.dataclass(kw_only=True)
class Agreed:
    """What is copied.

    Attributes:
        weights: what extracts them; or, where they lie as they did, this rank's parts.
        error: what this rank has found since the ranks agreed; all raise it in `acquire`.
    """

    weights: WeightExtractor | list[torch.Tensor]
    error: WeightSyncError | None


@dataclasses.dataclass(kw_only=True)
class Acquired:
    """Where to.

    Attributes:
        segments: name of each host's segment, by host.
        turn: of this rank's segment; None where another rank of the host has it, and after it was written.
        waited_s: until all were there.
        why: in words, where a host has none free: nothing is published.
    """

    segments: dict[str, str]
    turn: WriteTurn | None
    waited_s: float
    why: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadReport:
    """What one `offload` did.

    Attributes:
        version: that was given.
        published: whether the agents were told of it. False: no segment came free within the guard.
        path: "shards" (each rank its own part, without communication) or "gather".
        seconds: of the whole call.
        waited_s: for a segment.
        copied_bytes: by this rank.
        why: in words, where it was not published.
    """

    version: Version
    published: bool
    path: str
    seconds: float
    waited_s: float
    copied_bytes: int
    why: str | None = None

    def __str__(self) -> str:
        """One line for a log: `v3: 33.0 MB copied in 0.14 s, published`."""
        how = "published" if self.published else f"not published: {self.why}"
        waited = f", of which it waited {1e3 * self.waited_s:.0f} ms for a segment" if self.waited_s >= 1e-3 else ""
        return f"v{self.version.number}: {self.copied_bytes / 1e6:.1f} MB copied in {self.seconds:.2f} s{waited}, {how}"


class OffloadSteps:
    """Every training rank has one, and takes the same steps. Not thread-safe.

    Args:
        hosts: host of each rank.
        model_id, dtype, guard_s, timeout_s: see `WeightManager`.
        leases: whether receivers over TCP may cost a third segment.

    Attributes:
        buffer: this host's segments; None before the first offload, and where another rank of the host has them.
        gathers: whether rank 0 writes everything.
    """

    def __init__(
        self,
        ranks: TrainingRanks,
        hosts: Sequence[str],
        *,
        model_id: str,
        dtype: str | None,
        guard_s: float,
        leases: bool,
        timeout_s: float,
        recorder: Recorder,
    ) -> None:
        self.buffer: PublicationBuffer | None = None
        self.gathers = False
        self._ranks = ranks
        self._hosts = list(hosts)
        self._model_id = model_id
        self._dtype = dtype
        self._guard_s = guard_s
        self._beside = tuple(Reader) if leases else (Reader.MAPPED,)
        self._timeout_s = timeout_s
        self._recorder = recorder
        self._plan: HostPlan | None = None
        self._plan_of: tuple[str, Boxes] = ("", ())
        self._specs: Sequence[TensorSpec] = ()
        self._adapter: Adapter | None = None
        self._canary: Canary | None = None
        self._kept = OffloadPlanCache()
        self._writer = SegmentWriter()

    @property
    def is_lost(self) -> bool:
        """See `PublicationBuffer`; False where another rank of this host has that."""
        return self.buffer is not None and self.buffer.is_lost

    def agree(self, weights: Weights, version: int, *, check: Callable[[], None]) -> Agreed:
        """All ranks mean the same.

        Args:
            check: raises where this rank's call makes no sense.

        Raises:
            WeightSyncError: on every rank, where one can't or means something else. Nothing was changed.
        """
        error: WeightSyncError | None = None
        extractor: WeightExtractor | None = None
        named: Named | None = None
        parts: list[torch.Tensor] | None = None
        key, boxes = "", Boxes()
        try:
            check()
            named = self._kept.listed(weights)
            parts = None if named is None else self._kept.tensors(named)
            if parts is None:
                extractor = self._extractor_of(weights if named is None else named)
                key, boxes = self._key(extractor), self._boxes(extractor)
            else:  # all that they depend on is as it was
                key, boxes = self._plan_of
        except Exception as caught:
            error = as_weightsync_error(caught, InvalidRequestError, "the weights can't be published")
        adapter = weights.adapter if isinstance(weights, WeightExtractor) else None
        of = "" if adapter is None else xxhash.xxh3_128_hexdigest(msgspec.json.encode(adapter))
        canary = weights.canary if isinstance(weights, WeightExtractor) else None
        canary_fields = None if canary is None else msgspec.to_builtins(canary)
        replies = self._ranks.settle(
            error, key=f"{version} {key} {of}", changed=(key, boxes) != self._plan_of, canary=canary_fields
        )
        if len({reply["key"] for reply in replies}) > 1:
            raise InvalidRequestError("training ranks differ in version, tensors or dtype", rank=self._ranks.rank)
        self._adapter = adapter
        self._canary = msgspec.convert(replies[0]["canary"], Canary | None)
        if any(reply["changed"] for reply in replies):
            parts = None
            extractor = extractor or self._extractor_of(weights if named is None else named)
            self._lay_out(extractor, key, boxes)
        if parts is None and extractor is not None and named is not None and not self.gathers:
            try:
                self._kept.remember(named, self._specs, boxes)
                parts = self._kept.tensors(named)
            except Exception as caught:
                error = as_weightsync_error(caught, StateError, "the weights can't be read")
        return Agreed(weights=parts if parts is not None else extractor or [], error=error)

    def _extractor_of(self, weights: Weights) -> WeightExtractor:
        made = extractor_of(weights)
        made.alone = self._ranks.alone
        return made

    def acquire(self, agreed: Agreed, reset: Callable[[], None]) -> Acquired:
        """A segment on each host. `give_back` comes after, whatever happens.

        Args:
            reset: ends transfers of superseded versions, where no segment is free.

        Raises:
            WeightSyncError: on every rank, where one failed; nothing is held.
        """
        error, turn, begun_s = agreed.error, None, now_s()
        try:
            if self.buffer is not None:
                try:
                    turn = self.buffer.acquire(reset)
                except Exception as caught:
                    error = as_weightsync_error(caught, StateError, "no segment")
            replies = self._ranks.settle(
                error,
                segment=None if turn is None else turn.segment.name,
                writes=self.buffer is not None,
                why=self.buffer.why_not if self.buffer is not None and turn is None else None,
            )
        except BaseException:
            if turn is not None and self.buffer is not None:
                self.buffer.given_up(turn)
            raise
        segments = {host: reply["segment"] for host, reply in zip(self._hosts, replies, strict=True) if reply["writes"]}
        why = next((reply["why"] for reply in replies if reply["why"]), None) if None in segments.values() else None
        return Acquired(segments=segments, turn=turn, waited_s=now_s() - begun_s, why=why)

    def copy(self, agreed: Agreed, acquired: Acquired) -> int:
        """This rank's parts into its host's segment; bytes. Ends when every rank has copied.

        Raises:
            WeightSyncError: on every rank, where one failed.
        """
        assert self._plan is not None
        error: WeightSyncError | None = None
        copied_bytes = 0
        try:
            host = self._hosts[self._ranks.rank]
            if host in acquired.segments and (not self.gathers or self._ranks.rank == 0):  # who writes
                layout = self._plan.layouts[self._plan.hosts.index(host)]
                self._writer.aim(acquired.segments[host], layout, acquired.turn, self._model_id)
            if isinstance(agreed.weights, list):
                copied_bytes = self._writer.write_places(self._kept.places, agreed.weights)
            elif self.gathers:
                copied_bytes = self._write_gathered(agreed.weights)
            else:
                for part in agreed.weights.local_parts(self._dtype):
                    copied_bytes += self._writer.write(part.spec.name, part.box, part.tensor)
            self._writer.finish()
        except Exception as caught:
            error = as_weightsync_error(caught, StateError, "copying into shared memory failed")
        self._ranks.settle(error)
        return copied_bytes

    def publish(
        self, version: Version, acquired: Acquired, *, endpoints: Sequence[str | None], block_bytes: int
    ) -> tuple[Publication, int] | None:
        """What this host's agent is given: the publication, and which of its sources is here. None: another rank's."""
        turn = acquired.turn
        if turn is None or self.buffer is None:
            return None
        assert self._plan is not None
        source = self._plan.leaders.index(self._ranks.rank)
        write_header(turn.segment.memory, self._plan.layouts[source], version, self._model_id)
        self.buffer.written(turn)
        acquired.turn = None
        return self._plan.publication(
            version, self._model_id, self._specs, endpoints=endpoints, segments=acquired.segments,
            block_bytes=block_bytes, adapter=self._adapter, canary=self._canary,
        ), source  # fmt: skip

    def give_back(self, acquired: Acquired) -> None:
        """What was not written is free again. Idempotent."""
        if acquired.turn is not None and self.buffer is not None:
            self.buffer.given_up(acquired.turn)
        acquired.turn = None

    def close(self) -> None:
        """Unlinks the segments. Idempotent."""
        if self.buffer is not None:
            self.buffer.close()
        self._writer.close()

    def _write_gathered(self, extractor: WeightExtractor) -> int:
        """Every rank gathers, rank 0 writes; bytes. See `gather`."""
        copied_bytes = 0

        def write(chunks: Iterator[WeightChunk]) -> None:
            nonlocal copied_bytes
            for chunk in chunks:
                for name, tensor in zip(chunk.names, chunk.tensors, strict=True):
                    copied_bytes += self._writer.write(name, None, tensor)
                self._writer.finish()
                del chunk

        gather(
            extractor, write, dtype=self._dtype, ranks=self._ranks, timeout_s=self._timeout_s, recorder=self._recorder,
            failed="writing into shared memory failed",
        )  # fmt: skip
        return copied_bytes

    def _key(self, extractor: WeightExtractor) -> str:
        facts = msgspec.json.encode((extractor.metadata(self._dtype), extractor.can_shard_locally()))
        return str(xxhash.xxh3_128_hexdigest(facts))

    def _boxes(self, extractor: WeightExtractor) -> Boxes:
        """What this rank would write, by the tensor's place in the metadata."""
        if extractor.can_shard_locally():
            return extractor.local_boxes()
        if self._ranks.rank:
            return ()
        return tuple((index, whole_box(spec.shape)) for index, spec in enumerate(extractor.metadata(self._dtype)))

    def _lay_out(self, extractor: WeightExtractor, key: str, boxes: Boxes) -> None:
        """At the first offload, and when the model or its sharding has changed."""
        specs = extractor.metadata(self._dtype)
        replies = self._ranks.exchange(
            {
                "host": self._hosts[self._ranks.rank],
                "boxes": [[index, list(box.offset), list(box.shape)] for index, box in boxes],
            }
        )
        plan = plan_hosts(specs, replies)  # the same on every rank, and so is what it raises
        self._plan, self._plan_of, self._specs = plan, (key, boxes), TensorTable.of(specs)
        self.gathers = not extractor.can_shard_locally()
        self._kept.forget()
        self._writer.close()
        if self.buffer is not None:
            self.buffer.close()
            self.buffer = None
        if self._ranks.rank in plan.leaders:
            layout = plan.layouts[plan.leaders.index(self._ranks.rank)]
            self.buffer = PublicationBuffer(
                max(1, layout.total_bytes), guard_s=self._guard_s, beside=self._beside, let_go=self._writer.let_go
            )
