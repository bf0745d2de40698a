"""What an agent computes over a published segment: digests of its parts, checksums of its blocks, the shard sum."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weightsync.codec.digest import ShardSum, shard_sum, tensor_digests, warm_up
from weightsync.codec.threads import map_all
from weightsync.memory import MappedSegment
from weightsync.tensors import tensor_from_bytes
from weightsync.transfer.blocks import checksum
from weightsync.types import HeldTensor
from weightsync.types.publication import Publication, SourceProof

__all__ = ["prove", "warm_up"]

_PIECE = 64


def prove(publication: Publication, source: int, *, go_on: Callable[[], None]) -> SourceProof:
    """Reads the segment's bytes, on all cores.

    Args:
        publication: as it was stamped.
        source: which of its sources lies on this host.
        go_on: called again and again; what it raises ends the work.

    Raises:
        SharedMemoryError: the segment is gone.
    """
    where = publication.sources[source]
    parts = publication.parts_of(source)
    with MappedSegment(where.segment, need_bytes=where.data_end) as mapped:
        flat = torch.frombuffer(mapped.memory, dtype=torch.uint8)
        views = [
            tensor_from_bytes(
                flat[part.offset : part.offset + part.nbytes],
                dtype=part.dtype,
                shape=part.shape if part.box is None else part.box.shape,
            )
            for part in parts
        ]
        digests: dict[str, str] = {}
        total = ShardSum.zero()
        for start in range(0, len(parts), _PIECE):
            go_on()
            digests |= tensor_digests({str(index): views[index] for index in range(len(parts))[start : start + _PIECE]})
        for part, view in zip(parts, views, strict=True):
            go_on()
            total += shard_sum(HeldTensor(spec=part, box=part.box, tensor=view))
        del views, flat

        def one(block: tuple[int, int]) -> str:
            return checksum(mapped.memory[block[0] : block[0] + block[1]])

        checksums: list[str] = []
        for start in range(0, where.num_blocks, _PIECE):
            go_on()
            blocks = [where.block(index) for index in range(where.num_blocks)[start : start + _PIECE]]
            checksums += map_all(one, blocks)
    return SourceProof(
        block_checksums="".join(checksums),
        part_digests=tuple(digests[str(index)] for index in range(len(parts))),
        lane_a=total.lane_a,
        lane_b=total.lane_b,
    )
