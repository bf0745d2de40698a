"""What of its storage a tensor touches, and who touches the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from weightsync.many import PLAIN_TYPES, addresses, sizes_bytes


def share_storage(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any two of them may overlap; False says that none do. Each is given once."""
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
    if PLAIN_TYPES.issuperset(map(type, strided)) and all(
        map(torch.Tensor.is_contiguous, strided)
    ):  # each is one run of memory: no two may have a byte in common
        starts, sizes = addresses(strided), sizes_bytes(strided)
        order = np.argsort(starts)
        starts, sizes = starts[order][sizes[order] > 0], sizes[order][sizes[order] > 0]
        return bool((starts[:-1] + sizes[:-1] > starts[1:]).any()) or bool((starts == 0).any())
    held = [tensor for tensor in strided if tensor.numel()]
    return len({tensor.untyped_storage().data_ptr() for tensor in held}) < len(held)


def storage_id(tensor: torch.Tensor) -> int:
    """Names its storage, as long as that lives."""
    return int(tensor.untyped_storage()._cdata)


def overlapping(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    """All pairs, (name, id) each, that are not one tensor and whose spans of one storage overlap."""
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        if tensor.numel() and tensor.layout == torch.strided:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for sharing in by_storage.values():
        if len(sharing) == 1:
            continue
        spans = sorted((_span(tensor), name, id(tensor)) for name, tensor in sharing)
        reach: dict[int, tuple[str, int]] = {}  # of those that end behind the start of the one looked at: name and end
        for (start, end), name, one in spans:
            reach = {other: (before, to) for other, (before, to) in reach.items() if to > start}
            yield from (((before, other), (name, one)) for other, (before, _) in reach.items() if other != one)
            reach.setdefault(one, (name, end))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory, as those of an expanded tensor do."""
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return tensor.numel() > 0
            reach += (size - 1) * stride
    return False


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of what a strided tensor touches of its storage."""
    first = int(tensor.storage_offset())
    reach = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (first + reach + 1) * tensor.element_size()
