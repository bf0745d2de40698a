"""Copies between many tensors and one buffer: small tensors of host memory in one compiled call, the rest by torch.

One `copy_` costs a microsecond, and the views that it needs cost three: half a second for 100,000 tensors, however
small they are. Large ones stay torch's, which copies them on all cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weightsync.many import addresses, are_plain, copy_runs, sizes_bytes
from weightsync.tensors import byte_view, tensor_from_bytes
from weightsync.types import dtype_name

SMALL_BYTES = 256 << 10
"""A tensor of at most so many bytes is copied by one core."""

_WORTH_A_CALL = 32
"""From so many small tensors on."""


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


def _sorted_out(tensors: Sequence[torch.Tensor], bucket: torch.Tensor) -> tuple[list[int], Sequence[int]]:
    """Places of the tensors that are small and plain, and of all others."""
    everything = range(len(tensors))
    if len(tensors) < _WORTH_A_CALL or bucket.device.type != "cpu":
        return [], everything
    if are_plain(tensors) and max(sizes_bytes(tensors)) <= SMALL_BYTES:
        return list(everything), ()
    small = [index for index, tensor in enumerate(tensors) if tensor.nbytes <= SMALL_BYTES and are_plain((tensor,))]
    if len(small) < _WORTH_A_CALL:
        return [], everything
    return small, sorted(set(everything).difference(small))


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
