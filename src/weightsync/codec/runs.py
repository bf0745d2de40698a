"""Digests and sums of many tensors that lie in one mapped memory: by place and size, without a tensor of its own each."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from weightsync.codec.digest import ShardSum, seeds_of, shard_sum
from weightsync.codec.threads import map_all
from weightsync.many import Int64s
from weightsync.tensors import tensor_from_bytes
from weightsync.types import HeldTensor, TensorSpec

_SMALL_BYTES = 256 << 10
"""Larger ones are summed on all cores, each for itself."""
_GROUP_BYTES = 8 << 20
_GROUP_RUNS = 4096
"""What one thread takes at a time."""
_NUM_GROUPS = 16
"""After so many it is asked whether to go on."""

_MASK = (1 << 64) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """Parts of tensors as they lie in a memory; depends on nothing but their specs.

    Attributes:
        parts: each in one piece.
        offsets, sizes: first byte and bytes of each.
        keys_1, keys_2: of those that are small and whole, in order.
        of_small: their places among the parts.
        large: places of all others that have any bytes.
        groups: consecutive parts that one thread takes at a time.
    """

    parts: Sequence[TensorSpec]
    offsets: Int64s
    sizes: Int64s
    of_small: Int64s
    keys_1: npt.NDArray[np.uint64]
    keys_2: npt.NDArray[np.uint64]
    large: tuple[int, ...]
    groups: tuple[slice, ...]


def runs_of(parts: Sequence[TensorSpec]) -> Runs:
    """The runs of parts that lie at their `offset`."""
    sizes = [part.nbytes for part in parts]
    small = [index for index, part in enumerate(parts) if part.box is None and 0 < sizes[index] <= _SMALL_BYTES]
    taken = set(small)
    keys = np.empty((len(small), 2), dtype=np.uint64)
    for place, index in enumerate(small):
        part = parts[index]
        seeds = seeds_of.__wrapped__(part.name, part.dtype, part.shape)  # kept here, so not there
        keys[place] = seeds.key_1, seeds.key_2
    return Runs(
        parts=parts,
        offsets=np.array([part.offset for part in parts], dtype=np.int64),
        sizes=np.array(sizes, dtype=np.int64),
        of_small=np.array(small, dtype=np.int64),
        keys_1=np.ascontiguousarray(keys[:, 0]),
        keys_2=np.ascontiguousarray(keys[:, 1]),
        large=tuple(index for index, size in enumerate(sizes) if size and index not in taken),
        groups=tuple(_groups(sizes)),
    )


def digests_and_sum(memory: memoryview, runs: Runs, *, go_on: Callable[[], None]) -> tuple[bytes, ShardSum]:
    """The 16 bytes of `tensor_digest` of each part, one behind the other, and what all of them add to the model's
    digest; on all cores.

    Args:
        memory: where they lie.
        runs: of its parts.
        go_on: called again and again; what it raises ends the work.
    """
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    found: list[bytes] = []
    total = ShardSum.zero()
    for first in range(0, len(runs.groups), _NUM_GROUPS):
        go_on()
        for digests, part_sum in map_all(
            functools.partial(_of_group, memory, flat.data_ptr(), runs), runs.groups[first : first + _NUM_GROUPS]
        ):
            found.append(digests)
            total += part_sum
    for index in runs.large:
        go_on()
        part = runs.parts[index]
        view = tensor_from_bytes(
            flat[part.offset : part.offset + part.nbytes],
            dtype=part.dtype,
            shape=part.shape if part.box is None else part.box.shape,
        )
        total += shard_sum(HeldTensor(spec=part, box=part.box, tensor=view))
    return b"".join(found), total


def packed_digests_at(memory: memoryview, offsets: Sequence[int], sizes: Sequence[int]) -> bytes:
    """The 16 bytes of `tensor_digest` of each run of bytes, one behind the other, on all cores."""

    def one(cut: slice) -> bytes:
        return _digests(memory, offsets[cut], sizes[cut])

    return b"".join(map_all(one, _groups(sizes)))


def _of_group(memory: memoryview, address: int, runs: Runs, group: slice) -> tuple[bytes, ShardSum]:
    digests = _digests(memory, runs.offsets[group].tolist(), runs.sizes[group].tolist())
    low, high = np.searchsorted(runs.of_small, (group.start, group.stop)).tolist()
    if low == high:
        return digests, ShardSum.zero()
    which = runs.of_small[low:high]
    lane_a, lane_b = _kernels().whole_sums(
        runs.offsets[which] + address, runs.sizes[which], runs.keys_1[low:high], runs.keys_2[low:high]
    )
    return digests, ShardSum(lane_a=int(lane_a) & _MASK, lane_b=int(lane_b) & _MASK)


def _digests(memory: memoryview, offsets: Sequence[int], sizes: Sequence[int]) -> bytes:
    digest = xxhash.xxh3_128_digest
    return b"".join([digest(memory[offset : offset + size]) for offset, size in zip(offsets, sizes, strict=True)])


def _groups(sizes: Sequence[int]) -> Iterator[slice]:
    """Consecutive ones of together about `_GROUP_BYTES`; larger ones alone."""
    start, filled_bytes = 0, 0
    for index, size in enumerate(sizes):
        if index > start and (filled_bytes + size > _GROUP_BYTES or index - start == _GROUP_RUNS):
            yield slice(start, index)
            start, filled_bytes = index, 0
        filled_bytes += size
    if sizes:
        yield slice(start, len(sizes))


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("weightsync.codec.many_kernels")
