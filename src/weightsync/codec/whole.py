"""The sum of a model whose tensors lie here whole, as `codec.digest` defines it: all of them in a few compiled calls.

`shard_sum` costs some forty microseconds a tensor, however small it is. Here a tensor costs what it takes to ask for
its address, dtype and shape; its keys are kept with the table of the model's tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, eq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightsync.addresses import Int64s, pieces
from weightsync.codec.digest import PartSums, shard_sums
from weightsync.codec.model_digest import ShardSum, keys_of, lanes_of_whole, model_digest, sum_of_runs
from weightsync.copying import cast_runs
from weightsync.errors import ManifestMismatchError
from weightsync.many import addresses, are_plain, sizes_bytes, sorted_out
from weightsync.tensors import spec_of, torch_dtype
from weightsync.threads import map_all
from weightsync.types import HeldTensor, TensorTable, WeightChunk

_SMALL_BYTES = 256 << 10
_PIECE_BYTES = 2 << 20
"""What one thread converts, and sums, at a time."""

_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


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
        tensors: one for each, in its order, on any device, of any strides. None is written until this returns.
        convert: whether they may be of other dtypes than the table says; they count in its dtypes. A few megabytes are
            converted at a time, or one tensor that is larger.

    Raises:
        ManifestMismatchError: there are more or fewer, or one is of another shape or dtype.
    """
    dtypes, kept_keys = table.derive(_dtypes_of), table.derive(keys_of)
    if len(tensors) != len(table):
        raise ManifestMismatchError(f"{len(tensors)} tensors are held, the manifest has {len(table)}")
    if not all(map(eq, map(_shape, tensors), table.shapes)):
        wrong = next(index for index, tensor in enumerate(tensors) if tensor.shape != table.shapes[index])
        raise ManifestMismatchError(
            f"held as {tuple(tensors[wrong].shape)}, in the manifest {table[wrong].shape}", parameter=table[wrong].name
        )
    if not convert and (found := list(map(_dtype, tensors))) != dtypes:
        wrong = next(index for index, dtype in enumerate(found) if dtype is not dtypes[index])
        raise ManifestMismatchError(
            f"held as {found[wrong]}, in the manifest {table[wrong].dtype}", parameter=table[wrong].name
        )
    small, rest = sorted_out(tensors, _SMALL_BYTES)
    total = ShardSum.zero()
    for (source, wanted), indexes in _by_kind(tensors, dtypes, small):
        picked = tensors if len(indexes) == len(tensors) else [tensors[index] for index in indexes]
        keys = kept_keys if picked is tensors else np.ascontiguousarray(kept_keys[:, indexes])
        total += _sum_of_small(picked, keys, None if source is wanted else wanted)
    large = [index for index in rest if tensors[index].dtype is dtypes[index] and are_plain((tensors[index],))]
    if large:
        picked = [tensors[index] for index in large]
        keys_1, keys_2 = np.ascontiguousarray(kept_keys[:, large])
        total += sum_of_runs(addresses(picked), sizes_bytes(picked), np.zeros(len(large), np.int64), keys_1, keys_2)
    sums = PartSums()
    for index in sorted(set(rest).difference(large)):
        converted = tensors[index].detach().to(dtypes[index]).contiguous()
        sums.add(HeldTensor(spec=table[index], box=None, tensor=converted))
    return total + sums.total()


def _dtypes_of(table: TensorTable) -> list[torch.dtype]:
    return [torch_dtype(dtype) for dtype in table.dtypes]


def _by_kind(
    tensors: Sequence[torch.Tensor], wanted: Sequence[torch.dtype], small: Sequence[int]
) -> Iterator[tuple[tuple[torch.dtype, torch.dtype], list[int]]]:
    """Those of one dtype, and of one that they are wanted in, together."""
    kinds: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    dtypes = list(map(_dtype, tensors))
    if len(small) == len(tensors) and len(only := set(zip(dtypes, wanted, strict=True))) == 1:
        yield only.pop(), list(small)
        return
    for index in small:
        kinds.setdefault((dtypes[index], wanted[index]), []).append(index)
    yield from kinds.items()


def _sum_of_small(
    tensors: Sequence[torch.Tensor], keys: npt.NDArray[np.uint64], wanted: torch.dtype | None
) -> ShardSum:
    """Of small plain tensors of one dtype, as they are or as `wanted`."""
    places, sizes, (keys_1, keys_2) = addresses(tensors), sizes_bytes(tensors), keys

    def one(piece: slice) -> tuple[int, int]:
        if wanted is None:
            return lanes_of_whole(places[piece], sizes[piece], keys_1[piece], keys_2[piece])
        kept, at, num_bytes = _converted(tensors[piece], places[piece], sizes[piece], wanted)
        lanes = lanes_of_whole(at, num_bytes, keys_1[piece], keys_2[piece])
        del kept  # what the addresses are of
        return lanes

    found = map_all(one, pieces(sizes, _PIECE_BYTES))
    return sum((ShardSum(lane_a=a, lane_b=b) for a, b in found), ShardSum.zero())


def _converted(
    tensors: Sequence[torch.Tensor], places: Int64s, sizes: Int64s, wanted: torch.dtype
) -> tuple[Any, Int64s, Int64s]:
    """Tensors of one dtype in another: the memory, which the caller keeps, their addresses and sizes in it."""
    source = tensors[0].dtype
    together = cast_runs(source, places, sizes, wanted)
    if together is None:
        with torch.no_grad():  # the mode is the thread's own
            apart = [tensor.to(wanted) for tensor in tensors]
        return apart, addresses(apart), sizes_bytes(apart)
    now = sizes // source.itemsize * wanted.itemsize
    return together, together.data_ptr() + np.cumsum(now) - now, now


class SummedChunks:
    """Chunks on their way; what they add to the model's digest is summed as they pass.

    Args:
        counts: whether they are summed at all: a trainer whose ranks sum their shards need not.
    """

    def __init__(self, chunks: Iterable[WeightChunk], *, counts: bool = True) -> None:
        self._chunks = chunks
        self._counts = counts
        self.total = ShardSum.zero()

    def __iter__(self) -> Iterator[WeightChunk]:
        for chunk in self._chunks:
            if self._counts:
                held = (
                    HeldTensor(spec=spec_of(name, tensor), box=None, tensor=tensor)
                    for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
                )
                self.total += shard_sums(held, together=True)
            yield chunk
            del chunk
