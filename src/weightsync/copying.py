"""Copies between many tensors and one buffer: small tensors of host memory in one compiled call, the rest by torch.

One `copy_` costs a microsecond, and the views that it needs cost three: half a second for 100,000 tensors, however
small they are. Large ones stay torch's, which copies them on all cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch

from weightsync.addresses import Int64s, copy_runs, pieces
from weightsync.many import addresses, are_plain, sizes_bytes, sorted_out
from weightsync.tensors import byte_view, tensor_from_bytes
from weightsync.types import dtype_name

SMALL_BYTES = 256 << 10
"""A tensor of at most so many bytes is copied by one core."""

_CAST_BYTES = 2 << 20
"""What is converted at a time, and so what it takes besides."""

_WORTH_A_CALL = 32
"""From so many small tensors on."""

_SUMMED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


def pack(tensors: Sequence[torch.Tensor], offsets: Sequence[int], bucket: torch.Tensor) -> None:
    """Copies each tensor's bytes to its offset.

    Args:
        tensors: of any dtype, on the bucket's device or the CPU.
        offsets: bytes, one a tensor; the ranges lie in the bucket and do not overlap.
        bucket: 1-D uint8, contiguous.
    """
    small, rest = _sorted_out(tensors, bucket)
    if small:
        _copy_small(tensors, offsets, bucket, small, into_bucket=True)
    for index in rest:
        tensor, offset = tensors[index], offsets[index]
        if tensor.numel():
            plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
            bucket[offset : offset + plain.nbytes].copy_(byte_view(plain))


@torch.no_grad()
def unpack(bucket: torch.Tensor, offsets: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
    """Copies each tensor's bytes from its offset; the inverse of `pack`.

    Args:
        bucket: 1-D uint8, contiguous.
        offsets: bytes, one a tensor, each a multiple of its element's size.
        tensors: written; of any strides, on any device.
    """
    small, rest = _sorted_out(tensors, bucket)
    if small:
        _copy_small(tensors, offsets, bucket, small, into_bucket=False)
    for index in rest:
        tensor, offset = tensors[index], offsets[index]
        if tensor.numel():
            part = bucket[offset : offset + tensor.numel() * tensor.element_size()]
            tensor.copy_(tensor_from_bytes(part, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape)))


@torch.no_grad()
def cast_together(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor] | None:
    """`tensor.to(dtype)` of each, bit for bit, small ones of one shape many at a time. None where that is no gain.

    Args:
        tensors: any.
        dtypes: as many. A tensor that has its dtype already comes as it is.

    Returns:
        Contiguous, detached tensors; those that were converted are views of memory that they share.
    """
    if len(tensors) < _WORTH_A_CALL or not are_plain(tensors):
        return None
    found: list[torch.Tensor] = list(tensors)
    kinds: dict[tuple[torch.dtype, torch.dtype, torch.Size], list[int]] = {}
    for index, source, dtype, shape in zip(
        range(len(tensors)), map(_dtype, tensors), dtypes, map(_shape, tensors), strict=True
    ):
        if source is dtype:
            found[index] = tensors[index].detach()
        else:
            kinds.setdefault((source, dtype, shape), []).append(index)
    for (_, dtype, shape), indexes in kinds.items():
        alike = [tensors[index] for index in indexes]
        if len(alike) < _WORTH_A_CALL or alike[0].nbytes > SMALL_BYTES or not alike[0].nbytes:
            cast = [tensor.to(dtype) for tensor in alike]
        else:
            cast = []
            places, sizes = addresses(alike), sizes_bytes(alike)
            for cut in pieces(sizes, _CAST_BYTES):
                together = cast_runs(alike[0].dtype, places[cut], sizes[cut], dtype)
                if together is None:
                    cast += [tensor.to(dtype) for tensor in alike[cut]]
                else:
                    cast += together.view(-1, *shape).unbind(0)
        for index, tensor in zip(indexes, cast, strict=True):
            found[index] = tensor
    return found


def cast_runs(source: torch.dtype, places: Int64s, sizes: Int64s, wanted: torch.dtype) -> torch.Tensor | None:
    """Runs of memory of one dtype, one behind the other in another one; None where there may be a NaN.

    What a NaN becomes may depend on where it stands: torch converts the last few elements in another loop. So each
    tensor has to be converted by itself then.

    Args:
        source: of the runs.
        places, sizes: address and bytes of each; the caller keeps the memory.
        wanted: of the result, 1-D.
    """
    gathered = torch.empty(int(sizes.sum()) // source.itemsize, dtype=source, device="cpu")
    copy_runs(gathered.data_ptr() + np.cumsum(sizes) - sizes, places, sizes)
    with torch.no_grad():  # the mode is the thread's own
        return None if _may_have_a_nan(gathered) else gathered.to(wanted)


def _may_have_a_nan(values: torch.Tensor) -> bool:
    """By the sum, where it can be had: a NaN makes it one, as infinities of both signs do. To look at each element
    takes twenty times as long, ten times what the conversion takes."""
    return bool((values.sum() if values.dtype in _SUMMED else values).isnan().any())


def _sorted_out(tensors: Sequence[torch.Tensor], bucket: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """Places of the tensors that are small and plain, and of all others."""
    everything = range(len(tensors))
    if len(tensors) < _WORTH_A_CALL or bucket.device.type != "cpu":
        return [], everything
    small, rest = sorted_out(tensors, SMALL_BYTES)
    return ([], everything) if len(small) < _WORTH_A_CALL else (small, rest)


def _copy_small(
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    bucket: torch.Tensor,
    small: Sequence[int],
    *,
    into_bucket: bool,
) -> None:
    """By addresses: the caller holds all of the tensors, and they are as `_sorted_out` found them."""
    if len(small) < len(tensors):
        tensors, offsets = [tensors[index] for index in small], [offsets[index] for index in small]
    apart, sizes = addresses(tensors), sizes_bytes(tensors)
    starts = np.array(offsets, dtype=np.int64)
    if starts.min() < 0 or (starts + sizes).max() > bucket.numel():
        raise ValueError("a tensor lies outside the bucket")
    packed = starts + bucket.data_ptr()
    if into_bucket:
        copy_runs(packed, apart, sizes)
    else:
        copy_runs(apart, packed, sizes)
