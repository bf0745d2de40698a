"""The sum of a model whose tensors lie here whole, as `codec.digest` defines it: all of them in a few compiled calls.

`shard_sum` costs some forty microseconds a tensor, however small it is. Here a tensor costs what it takes to ask for
its address, dtype and shape; its keys are kept with the table of the model's tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightsync.codec.digest import ShardSum, keys_of, lanes_of_whole, model_digest, shard_sum
from weightsync.codec.threads import map_all
from weightsync.errors import ManifestMismatchError
from weightsync.many import Int64s, addresses, are_plain, copy_runs, sizes_bytes
from weightsync.tensors import torch_dtype
from weightsync.types import HeldTensor, TensorTable

_SMALL_BYTES = 256 << 10
_PIECE_BYTES = 2 << 20
"""What one thread converts, and sums, at a time."""

_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Known:
    """What follows from a table.

    Attributes:
        shapes, dtypes: of each tensor.
    """

    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]


def whole_digest(table: TensorTable, tensors: Sequence[torch.Tensor]) -> str:
    """The model's digest, of `whole_sum`.

    Raises:
        ManifestMismatchError: as for `whole_sum`.
    """
    return model_digest(table, whole_sum(table, tensors))


@torch.no_grad()
def whole_sum(table: TensorTable, tensors: Sequence[torch.Tensor], *, convert: bool = False) -> ShardSum:
    """What whole tensors add to the model's digest, on all cores.

    Args:
        table: the model's tensors.
        tensors: one for each, in its order, on any device, of any strides. None is written until this returns.
        convert: whether they may be of other dtypes than the table says; they count in its dtypes. A few megabytes are
            converted at a time, or one tensor that is larger.

    Raises:
        ManifestMismatchError: there are more or fewer, or one is of another shape or dtype.
    """
    known, kept_keys = table.derive(_known), table.derive(keys_of)
    if len(tensors) != len(table):
        raise ManifestMismatchError(f"{len(tensors)} tensors are held, the manifest has {len(table)}")
    if list(map(_shape, tensors)) != known.shapes:
        wrong = next(index for index, tensor in enumerate(tensors) if tensor.shape != known.shapes[index])
        raise ManifestMismatchError(
            f"held as {tuple(tensors[wrong].shape)}, in the manifest {table[wrong].shape}", parameter=table[wrong].name
        )
    if not convert and (dtypes := list(map(_dtype, tensors))) != known.dtypes:
        wrong = next(index for index, dtype in enumerate(dtypes) if dtype is not known.dtypes[index])
        raise ManifestMismatchError(
            f"held as {dtypes[wrong]}, in the manifest {table[wrong].dtype}", parameter=table[wrong].name
        )
    small, rest = _sorted_out(tensors)
    total = ShardSum.zero()
    for (source, wanted), indexes in _by_kind(tensors, known, small):
        picked = tensors if len(indexes) == len(tensors) else [tensors[index] for index in indexes]
        keys = kept_keys if picked is tensors else np.ascontiguousarray(kept_keys[:, indexes])
        total += _sum_of_small(picked, keys, None if source is wanted else wanted)
    for index in rest:
        converted = tensors[index].detach().to(known.dtypes[index]).contiguous()
        total += shard_sum(HeldTensor(spec=table[index], box=None, tensor=converted))
    return total


def _known(table: TensorTable) -> _Known:
    return _Known(
        shapes=[spec.shape for spec in table],
        dtypes=[torch_dtype(spec.dtype) for spec in table],
    )


def _sorted_out(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[int], Sequence[int]]:
    """Places of the small plain tensors, and of all others."""
    if are_plain(tensors) and int(sizes_bytes(tensors).max(initial=0)) <= _SMALL_BYTES:
        return range(len(tensors)), ()
    small = [index for index, tensor in enumerate(tensors) if tensor.nbytes <= _SMALL_BYTES and are_plain((tensor,))]
    return small, sorted(set(range(len(tensors))).difference(small))


def _by_kind(
    tensors: Sequence[torch.Tensor], known: _Known, small: Sequence[int]
) -> Iterator[tuple[tuple[torch.dtype, torch.dtype], list[int]]]:
    """Those of one dtype, and of one that they are wanted in, together."""
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    dtypes = list(map(_dtype, tensors))
    for index in small:
        kinds.setdefault((dtypes[index], known.dtypes[index]), []).append(index)
    yield from kinds.items()


def _sum_of_small(
    tensors: Sequence[torch.Tensor], keys: npt.NDArray[np.uint64], wanted: torch.dtype | None
) -> ShardSum:
    """Of small plain tensors of one dtype, as they are or as `wanted`."""
    places, sizes, (keys_1, keys_2) = addresses(tensors), sizes_bytes(tensors), keys
    ends = np.cumsum(sizes)
    cuts = np.unique(np.searchsorted(ends, np.arange(_PIECE_BYTES, int(ends[-1]), _PIECE_BYTES)))
    edges = [0, *cuts.tolist(), len(tensors)]

    def one(piece: slice) -> tuple[int, int]:
        if wanted is None:
            return lanes_of_whole(places[piece], sizes[piece], keys_1[piece], keys_2[piece])
        kept, at, num_bytes = _converted(tensors[piece], places[piece], sizes[piece], wanted)
        lanes = lanes_of_whole(at, num_bytes, keys_1[piece], keys_2[piece])
        del kept  # what the addresses are of
        return lanes

    pieces = [slice(start, end) for start, end in itertools.pairwise(edges) if start < end]
    return sum((ShardSum(lane_a=a, lane_b=b) for a, b in map_all(one, pieces)), ShardSum.zero())


def _converted(
    tensors: Sequence[torch.Tensor], places: Int64s, sizes: Int64s, wanted: torch.dtype
) -> tuple[Any, Int64s, Int64s]:
    """Tensors of one dtype in another: the memory, which the caller keeps, their addresses and sizes in it.

    They are converted side by side. What a NaN becomes may depend on where it stands: torch converts the last few
    elements in another loop. So where there is one, each tensor is converted by itself, as it is for a chunk.
    """
    source = tensors[0].dtype
    ends = np.cumsum(sizes)
    gathered = torch.empty(int(ends[-1]) // source.itemsize, dtype=source)
    copy_runs(gathered.data_ptr() + ends - sizes, places, sizes)
    with torch.no_grad():  # the mode is the thread's own
        if gathered.isnan().any():
            apart = [tensor.to(wanted) for tensor in tensors]
            return apart, addresses(apart), sizes_bytes(apart)
        together = gathered.to(wanted)
    now = sizes // source.itemsize * wanted.itemsize
    return together, together.data_ptr() + np.cumsum(now) - now, now
