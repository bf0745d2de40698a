"""HostSegments: one rank's way into its host's segments, its own or its leader's: maps them and writes its parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightsync.errors import DeadlineExceededError, StateError, as_weightsync_error
from weightsync.extract.base import WeightExtractor
from weightsync.memory import SharedSegment
from weightsync.observe import Recorder
from weightsync.plan.safetensors import Layout
from weightsync.publish.buffer import WriteTurn
from weightsync.publish.extraction import LockstepExtraction
from weightsync.publish.ranks import TrainingRanks
from weightsync.publish.segment_writer import Place, SegmentWriter
from weightsync.types import Deadline, Version

_MAX_MAPPED = 6  # a host has three segments at most; beyond that some have been replaced


class HostSegments:
    """Aimed at a segment, then told to write. One thread."""

    def __init__(self) -> None:
        self._mapped: dict[str, SharedSegment] = {}
        self._writer = SegmentWriter()

    def aim(self, segment: str, layout: Layout, turn: WriteTurn | None, model_id: str) -> None:
        """What is written next goes into that segment.

        Args:
            segment: its name.
            layout: of what is to be written.
            turn: its owner's right to write it, which first takes its stamp away; None on the other ranks.
            model_id: which model.

        Raises:
            SharedMemoryError: it is gone: its owner is.
        """
        if turn is not None:
            memory = turn.segment.memory
            write_header(memory, layout, None, model_id)
        else:
            if segment not in self._mapped:
                if len(self._mapped) >= _MAX_MAPPED:
                    self.close()
                self._mapped[segment] = SharedSegment(segment)
            memory = self._mapped[segment].memory
        self._writer.aim(memory, layout.parts)

    def write_shards(self, extractor: WeightExtractor, *, dtype: str | None) -> int:
        """This rank's own parts, without communication; bytes."""
        copied_bytes = 0
        for part in extractor.local_parts(dtype):
            copied_bytes += self._writer.write(part.spec.name, part.box, part.tensor)
        self._writer.finish()
        return copied_bytes

    def write_places(self, places: Sequence[Place], tensors: Sequence[torch.Tensor]) -> int:
        """This rank's own parts again, at the places that they had before; bytes."""
        copied_bytes = self._writer.write_places(places, tensors)
        self._writer.finish()
        return copied_bytes

    def write_gathered(
        self,
        extractor: WeightExtractor,
        *,
        dtype: str | None,
        ranks: TrainingRanks,
        deadline: Deadline,
        recorder: Recorder,
    ) -> int:
        """Every rank gathers, rank 0 writes; bytes. A rank that fails tells the others before their next collective.

        Raises:
            WeightSyncError: on every rank.
        """
        writes = ranks.rank == 0
        extraction = LockstepExtraction(
            extractor, dtype=dtype, ranks=ranks, deadline=deadline, recorder=recorder, keep=writes
        )
        copied_bytes = 0
        extraction.start()
        try:
            if writes:
                for chunk in extraction.chunks():
                    for name, tensor in zip(chunk.names, chunk.tensors, strict=True):
                        copied_bytes += self._writer.write(name, None, tensor)
                    self._writer.finish()
                    del chunk
        except Exception as error:
            extraction.stop(as_weightsync_error(error, StateError, "writing into shared memory failed"))
            raise
        finally:
            try:
                extraction.finish()
            except DeadlineExceededError:  # its thread is inside a collective, and nobody may pair with that
                ranks.give_up("the extraction hangs in a collective")
                raise
        return copied_bytes

    def let_go(self, memory: memoryview) -> None:
        """One segment's memory is about to be given back."""
        self._writer.let_go(memory)

    def close(self) -> None:
        """Lets go of all mappings; it works again afterwards. Idempotent."""
        self._writer.close()
        while self._mapped:
            self._mapped.popitem()[1].close()


def write_header(memory: memoryview, layout: Layout, stamp: Version | None, model_id: str) -> None:
    """Writes a segment's header: with the version that lies there, or, while it is written, with none."""
    header = layout.header(stamp, model_id)
    memory[: len(header)] = header
