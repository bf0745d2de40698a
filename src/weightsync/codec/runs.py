"""Digests and sums of many tensors in one mapped memory, by place and size. No torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from weightsync.addresses import Int64s
from weightsync.codec.model_digest import ShardSum, added, box_sum, kernels, keys_of, sum_of_runs
from weightsync.plan.boxes import one_run
from weightsync.threads import batches, map_all
from weightsync.types import TensorSpec, itemsize_bytes
from weightsync.types.process import num_cores

_GROUP_BYTES = 8 << 20
_GROUP_RUNS = 4096
"""What one thread takes at a time."""
_SMALL_BYTES = _GROUP_BYTES
"""Larger ones are summed on all cores."""
_NUM_GROUPS = 16
"""After so many, or four for each core, it is asked whether to go on."""

Keys = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """Parts of tensors as they lie in a memory; depends on nothing but their specs.

    Attributes:
        parts: each in one piece.
        offsets, sizes: first byte and bytes of each.
        of_runs: those that are one run of their whole tensor.
        places, keys_1, keys_2: of these, where in its tensor each lies, in bytes, and its tensor's keys.
        large: which of these are summed on all cores.
        of_several: those that are several runs.
        groups: consecutive parts that one thread takes at a time.
    """

    parts: Sequence[TensorSpec]
    offsets: Int64s
    sizes: Int64s
    of_runs: Int64s
    places: Int64s
    keys_1: Keys
    keys_2: Keys
    large: Int64s
    of_several: tuple[int, ...]
    groups: tuple[slice, ...]


def runs_of(parts: Sequence[TensorSpec]) -> Runs:
    """The runs of parts that lie at their `offset`."""
    sizes = [part.nbytes for part in parts]
    found = {index: _place(part) for index, part in enumerate(parts) if sizes[index]}
    places = {index: place for index, place in found.items() if place is not None}
    keys_1, keys_2 = keys_of([parts[index] for index in places])
    return Runs(
        parts=parts,
        offsets=np.array([part.offset for part in parts], dtype=np.int64),
        sizes=np.array(sizes, dtype=np.int64),
        of_runs=np.array(list(places), dtype=np.int64),
        places=np.array(list(places.values()), dtype=np.int64),
        keys_1=keys_1,
        keys_2=keys_2,
        large=np.flatnonzero([sizes[index] > _SMALL_BYTES for index in places]),
        of_several=tuple(index for index, place in found.items() if place is None),
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
    at_once = max(_NUM_GROUPS, 4 * num_cores())
    for first in range(0, len(runs.groups), at_once):
        check_cancelled()
        for digests, part_sum in map_all(
            functools.partial(_of_group, memory, flat.ctypes.data, runs), runs.groups[first : first + at_once]
        ):
            found.append(digests)
            total += part_sum
    for cut in batches(runs.sizes[runs.of_runs[runs.large]].tolist(), at_once * _GROUP_BYTES):
        check_cancelled()
        total += sum_of_runs(*_where(flat.ctypes.data, runs, runs.large[cut]))
    for index in runs.of_several:
        check_cancelled()
        part = runs.parts[index]
        total += box_sum(flat[part.offset : part.offset + part.nbytes], part, part.box)
    return b"".join(found), total


def _of_group(memory: memoryview, address: int, runs: Runs, group: slice) -> tuple[bytes, ShardSum]:
    digests = _digests(memory, runs.offsets[group].tolist(), runs.sizes[group].tolist())
    low, high = np.searchsorted(runs.of_runs, (group.start, group.stop)).tolist()
    small = low + np.flatnonzero(runs.sizes[runs.of_runs[low:high]] <= _SMALL_BYTES)
    if not len(small):
        return digests, ShardSum.zero()
    return digests, added([kernels().runs_of_many(*_where(address, runs, small))])


def _where(address: int, runs: Runs, which: Int64s) -> tuple[Int64s, Int64s, Int64s, Keys, Keys]:
    """Addresses and sizes of these runs, their places and keys."""
    parts = runs.of_runs[which]
    return runs.offsets[parts] + address, runs.sizes[parts], runs.places[which], runs.keys_1[which], runs.keys_2[which]


def _place(part: TensorSpec) -> int | None:
    """Where in its whole tensor a part begins, in bytes; None where it is no single run of it."""
    if part.box is None:
        return 0
    run = one_run(part.shape, part.box)
    return None if run is None else run[0] * itemsize_bytes(part.dtype)


def _digests(memory: memoryview, offsets: Sequence[int], sizes: Sequence[int]) -> bytes:
    digest = xxhash.xxh3_128_digest
    return b"".join([digest(memory[offset : offset + size]) for offset, size in zip(offsets, sizes, strict=True)])
