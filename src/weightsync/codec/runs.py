"""Digests and sums of many tensors in one mapped memory, by place and size. No torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from weightsync.addresses import Int64s
from weightsync.codec.model_digest import ShardSum, box_sum, kernels, keys_of
from weightsync.plan.boxes import box_runs
from weightsync.threads import batches, map_all
from weightsync.types import TensorSpec

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
        of_small: those that are small, and one run of their whole tensor.
        places, keys_1, keys_2: of these, where in its tensor each lies, in bytes, and its tensor's keys.
        large: places of all others that have any bytes.
        groups: consecutive parts that one thread takes at a time.
    """

    parts: Sequence[TensorSpec]
    offsets: Int64s
    sizes: Int64s
    of_small: Int64s
    places: Int64s
    keys_1: npt.NDArray[np.uint64]
    keys_2: npt.NDArray[np.uint64]
    large: tuple[int, ...]
    groups: tuple[slice, ...]


def runs_of(parts: Sequence[TensorSpec]) -> Runs:
    """The runs of parts that lie at their `offset`."""
    sizes = [part.nbytes for part in parts]
    small: list[int] = []
    places: list[int] = []
    for index, part in enumerate(parts):
        place = _place(part) if 0 < sizes[index] <= _SMALL_BYTES else None
        if place is not None:
            small.append(index)
            places.append(place)
    taken = set(small)
    keys_1, keys_2 = keys_of([parts[index] for index in small])
    return Runs(
        parts=parts,
        offsets=np.array([part.offset for part in parts], dtype=np.int64),
        sizes=np.array(sizes, dtype=np.int64),
        of_small=np.array(small, dtype=np.int64),
        places=np.array(places, dtype=np.int64),
        keys_1=keys_1,
        keys_2=keys_2,
        large=tuple(index for index, size in enumerate(sizes) if size and index not in taken),
        groups=tuple(batches(sizes, _GROUP_BYTES, most_items=_GROUP_RUNS)),
    )


def digests_and_sum(memory: memoryview, runs: Runs, *, check_cancelled: Callable[[], None]) -> tuple[bytes, ShardSum]:
    """The 16 bytes of `tensor_digest` of each part, one behind the other, and what all of them add to the model's
    digest; on all cores.

    Args:
        check_cancelled: called again and again; what it raises ends the work.
    """
    flat = np.frombuffer(memory, dtype=np.uint8)
    found: list[bytes] = []
    total = ShardSum.zero()
    for first in range(0, len(runs.groups), _NUM_GROUPS):
        check_cancelled()
        for digests, part_sum in map_all(
            functools.partial(_of_group, memory, flat.ctypes.data, runs), runs.groups[first : first + _NUM_GROUPS]
        ):
            found.append(digests)
            total += part_sum
    for index in runs.large:
        check_cancelled()
        part = runs.parts[index]
        total += box_sum(flat[part.offset : part.offset + part.nbytes], part, part.box)
    return b"".join(found), total


def _of_group(memory: memoryview, address: int, runs: Runs, group: slice) -> tuple[bytes, ShardSum]:
    digests = _digests(memory, runs.offsets[group].tolist(), runs.sizes[group].tolist())
    low, high = np.searchsorted(runs.of_small, (group.start, group.stop)).tolist()
    if low == high:
        return digests, ShardSum.zero()
    which = runs.of_small[low:high]
    lane_a, lane_b = kernels().runs_of_many(
        runs.offsets[which] + address, runs.sizes[which], runs.places[low:high], runs.keys_1[low:high],
        runs.keys_2[low:high],
    )  # fmt: skip
    return digests, ShardSum(lane_a=int(lane_a) & _MASK, lane_b=int(lane_b) & _MASK)


def _place(part: TensorSpec) -> int | None:
    """Where in its whole tensor a part begins, in bytes; None where it is no single run of it."""
    if part.box is None:
        return 0
    run_elements, offsets = box_runs(part.shape, part.box)
    return int(offsets[0]) * (part.nbytes // run_elements) if len(offsets) == 1 else None


def _digests(memory: memoryview, offsets: Sequence[int], sizes: Sequence[int]) -> bytes:
    digest = xxhash.xxh3_128_digest
    return b"".join([digest(memory[offset : offset + size]) for offset, size in zip(offsets, sizes, strict=True)])
