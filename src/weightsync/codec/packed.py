"""Digests of tensors that lie in one buffer: for small ones a slice and a call each, without a tensor of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import xxhash

from weightsync.codec.digest import PIECE_BYTES, tensor_digest
from weightsync.codec.threads import map_all
from weightsync.tensors import byte_array
from weightsync.types.table import packed_digest

_RUN_BYTES = 4 << 20
"""What one thread takes at a time."""


def bucket_digests(bucket: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
    """`tensor_digest` of each, as 16 bytes, on all cores.

    Args:
        bucket: 1-D uint8, contiguous, on any device; what is not host memory is copied in pieces of `PIECE_BYTES`.
        offsets, sizes: bytes, one a tensor; the ranges lie in the bucket.
    """

    def run(cut: slice) -> list[bytes]:
        first, end = min(offsets[cut]), max(map(sum, zip(offsets[cut], sizes[cut], strict=True)))
        if end - first > PIECE_BYTES:
            return [
                packed_digest(tensor_digest(bucket[offset : offset + size]))
                for offset, size in zip(offsets[cut], sizes[cut], strict=True)
            ]
        data = byte_array(bucket[first:end]).data
        digest = xxhash.xxh3_128_digest
        return [
            digest(data[offset - first : offset - first + size])
            for offset, size in zip(offsets[cut], sizes[cut], strict=True)
        ]

    return list(itertools.chain.from_iterable(map_all(run, _runs(sizes))))


def _runs(sizes: Sequence[int]) -> Iterator[slice]:
    """Consecutive tensors of together about `_RUN_BYTES`; larger ones alone."""
    start, filled_bytes = 0, 0
    for index, size in enumerate(sizes):
        if index > start and filled_bytes + size > _RUN_BYTES:
            yield slice(start, index)
            start, filled_bytes = index, 0
        filled_bytes += size
    if sizes:
        yield slice(start, len(sizes))
