"""What differs between a whole tensor and the one before it, as a patch."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from weightsync.load.patching import kernels
from weightsync.tensors import byte_array
from weightsync.types import Patch

_Words: TypeAlias = npt.NDArray[np.uint64]

_WORD_BYTES = 8
_PIECE_WORDS = 1 << 18
"""What is compared at a time: both pieces and the places found lie in a core's second cache or near it."""


def difference(name: str, before: torch.Tensor, after: torch.Tensor) -> Patch:
    """The elements of `after` that are not those of `before`, to the bit.

    Args:
        name: of the tensor.
        before: in host memory, contiguous.
        after: of the same dtype and shape, anywhere; borrowed.

    Returns:
        A patch that owns its memory; without elements where nothing differs.
    """
    whole = after.detach().cpu().contiguous()
    one, other, size = byte_array(before), byte_array(whole), before.element_size()
    if one.ctypes.data % _WORD_BYTES:
        one = one.copy()
    if other.ctypes.data % _WORD_BYTES:
        other = other.copy()
    end = len(one) - len(one) % max(_WORD_BYTES, size)
    words, others = one[:end].view(np.uint64), other[:end].view(np.uint64)
    where = np.empty(min(len(words), _PIECE_WORDS), dtype=np.uint32)
    found = [_within(words, others, start, size, where) for start in range(0, len(words), _PIECE_WORDS)]
    rest = (one[end:] != other[end:]).reshape(-1, size).any(axis=1)
    found.append(np.flatnonzero(rest) + end // size)
    places = np.concatenate(found).astype(np.uint32 if len(one) // size <= 1 << 32 else np.int64)
    values = other.reshape(-1, size)[places].reshape(-1)
    return Patch(
        name=name,
        positions=torch.from_numpy(places),
        values=torch.from_numpy(values).view(after.dtype) if len(values) else torch.empty(0, dtype=after.dtype),
    )


def _within(one: _Words, other: _Words, start: int, size: int, where: npt.NDArray[np.uint32]) -> npt.NDArray[np.int64]:
    """Which elements of `size` bytes differ in the piece from word `start` on; `where` has room for its words."""
    cut = slice(start, start + _PIECE_WORDS)
    count = kernels().differing(one[cut], other[cut], where)
    chosen = where[:count].astype(np.int64) + start
    if size >= _WORD_BYTES:
        return np.unique(chosen // (size // _WORD_BYTES))
    each = _WORD_BYTES // size
    pairs = (array[chosen].view(np.uint8).reshape(-1, each, size) for array in (one, other))
    changed = (next(pairs) != next(pairs)).any(axis=2)
    elements: npt.NDArray[np.int64] = (chosen[:, None] * each + np.arange(each))[changed]
    return elements
