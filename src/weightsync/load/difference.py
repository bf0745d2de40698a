"""What differs between a whole tensor and the one before it, as a patch."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from weightsync.load.patching import kernels
from weightsync.tensors import byte_array
from weightsync.threads import map_all
from weightsync.types import Patch

_Words: TypeAlias = npt.NDArray[np.uint64]
_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Found: TypeAlias = tuple[npt.NDArray[np.integer[Any]], _Bytes]
"""Which elements differ, and what they are by now: a row of bytes each."""

_WORD_BYTES = 8
_PIECE_WORDS = 1 << 18
"""What a thread compares at a time: both pieces and the places found lie in a core's second cache or near it. Even: an
element may have two words."""
_PIECES = 16
"""So many at a time: where all differs, what is found in one takes up to 48 MiB until it is counted."""


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
    starts, found = range(0, len(words), _PIECE_WORDS), list[_Found]()
    for at in range(0, len(starts), _PIECES):
        found += map_all(lambda start: _within(words, others, start, size), starts[at : at + _PIECES])
    rest = np.flatnonzero((one[end:] != other[end:]).reshape(-1, size).any(axis=1)) + end // size
    found.append(_found(rest, other, size))
    places = np.concatenate([where for where, _ in found])
    values = np.concatenate([now for _, now in found]).reshape(-1)
    return Patch(
        name=name,
        positions=torch.from_numpy(places),
        values=torch.from_numpy(values).view(after.dtype) if len(values) else torch.empty(0, dtype=after.dtype),
    )


def _within(one: _Words, other: _Words, start: int, size: int) -> _Found:
    """What differs, in elements of `size` bytes, in the piece from word `start` on."""
    cut = slice(start, start + _PIECE_WORDS)
    where = np.empty(len(one[cut]), dtype=np.uint32)
    words = where[: kernels().differing(one[cut], other[cut], where)].astype(np.int64) + start
    if size >= _WORD_BYTES:
        places = np.unique(words // (size // _WORD_BYTES))
    else:
        kind, each = f"u{size}", _WORD_BYTES // size
        changed = np.flatnonzero(one.take(words).view(kind) != other.take(words).view(kind))
        places = words.take(changed // each) * each + changed % each
    return _found(places, other.view(np.uint8), size)


def _found(places: npt.NDArray[np.int64], other: _Bytes, size: int) -> _Found:
    elements = other.reshape(-1, size)
    kind = np.uint32 if len(elements) <= 1 << 32 else np.int64
    return places.astype(kind), elements.take(places, axis=0)
