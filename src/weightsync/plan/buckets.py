"""Bucket layout: where each tensor of a chunk lies in the buffer that travels."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

_T = TypeVar("_T")
ALIGNMENT_BYTES = 256
"""Every tensor starts at a multiple of this, so views of any dtype are aligned, on a GPU too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """A packed chunk.

    Attributes:
        offsets: first byte of each tensor, in order.
        total_bytes: size of the bucket, padding included.
    """

    offsets: tuple[int, ...]
    total_bytes: int


def plan_bucket(sizes_bytes: Sequence[int]) -> BucketLayout:
    """Lays tensors one behind the other, each aligned to `ALIGNMENT_BYTES`.

    Empty tensors take no room. The bucket is never empty: a broadcast of nothing would be no message.
    """
    padded = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes_bytes]
    ends = tuple(itertools.accumulate(padded, initial=0))
    return BucketLayout(offsets=ends[:-1], total_bytes=max(ends[-1], ALIGNMENT_BYTES))


def plan_dense_bucket(sizes_bytes: Sequence[int]) -> BucketLayout:
    """Lays tensors one behind the other without padding, as SGLang's flattened buckets are. Views are aligned where
    tensors come in falling order of their itemsize.
    """
    ends = tuple(itertools.accumulate(sizes_bytes, initial=0))
    return BucketLayout(offsets=ends[:-1], total_bytes=ends[-1])


def split_by_bytes(items: Iterable[_T], bytes_of: Callable[[_T], int], most_bytes: float) -> Iterator[list[_T]]:
    """Consecutive items of at most `most_bytes` together; a larger one alone."""
    batch: list[_T] = []
    filled = 0
    for item in items:
        size = bytes_of(item)
        if batch and filled + size > most_bytes:
            yield batch
            batch, filled = [], 0
        batch.append(item)
        filled += size
    if batch:
        yield batch
