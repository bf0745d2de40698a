"""What an agent computes over a published segment: digests of parts, checksums of blocks, the shard sum. No torch."""

from __future__ import annotations

from collections.abc import Callable

from weightsync.codec.model_digest import warm_up
from weightsync.codec.runs import Runs, digests_and_sum, runs_of
from weightsync.memory import MappedSegment
from weightsync.threads import map_all
from weightsync.transfer.blocks import checksum
from weightsync.types.process import num_cores
from weightsync.types.publication import Publication, SourceProof
from weightsync.types.table import SpecTable

__all__ = ["prove", "warm_up"]

_PIECE = 64
"""Blocks: after so many, or four for each core, it is asked whether to go on."""


def prove(publication: Publication, source: int, *, check_cancelled: Callable[[], None]) -> SourceProof:
    """Reads the segment's bytes, on all cores.

    Args:
        source: which of its sources lies on this host.
        check_cancelled: called again and again; what it raises ends the work.

    Raises:
        SharedMemoryError: the segment is gone.
    """
    where = publication.sources[source]
    runs = publication.table.derive(_runs_of, source)
    with MappedSegment(where.segment, need_bytes=where.data_end) as mapped:
        digests, total = digests_and_sum(mapped.memory, runs, check_cancelled=check_cancelled)

        def one(block: tuple[int, int]) -> str:
            return checksum(mapped.memory[block[0] : block[0] + block[1]])

        checksums: list[str] = []
        at_once = max(_PIECE, 4 * num_cores())
        for start in range(0, where.num_blocks, at_once):
            check_cancelled()
            blocks = [where.block(index) for index in range(where.num_blocks)[start : start + at_once]]
            checksums += map_all(one, blocks)
    return SourceProof(
        block_checksums="".join(checksums), part_digests=digests, lane_a=total.lane_a, lane_b=total.lane_b
    )


def _runs_of(parts: SpecTable, source: int) -> Runs:
    return runs_of([part for part in parts if part.source == source])
