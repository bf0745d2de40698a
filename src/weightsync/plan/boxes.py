"""Arithmetic of boxes: what two parts share, where a part lies in the whole, whether parts make a whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from weightsync.errors import InvalidRequestError, ManifestMismatchError
from weightsync.types import Box


@functools.lru_cache(maxsize=4096)  # asked of each of 100,000 tensors, of which few differ in shape
def whole_box(shape: tuple[int, ...]) -> Box:
    return Box(offset=(0,) * len(shape), shape=shape)


def overlap(first: Box, second: Box) -> Box | None:
    """The part that both boxes cover, in the same global coordinates; None where they share no element.

    Raises:
        InvalidRequestError: the boxes differ in dimensions.
    """
    if len(first.shape) != len(second.shape):
        raise InvalidRequestError(f"boxes of {len(first.shape)} and {len(second.shape)} dimensions can't overlap")
    starts, extents = [], []
    for start_a, extent_a, start_b, extent_b in zip(
        first.offset, first.shape, second.offset, second.shape, strict=True
    ):
        start = max(start_a, start_b)
        extent = min(start_a + extent_a, start_b + extent_b) - start
        if extent <= 0:
            return None
        starts.append(start)
        extents.append(extent)
    return Box(offset=tuple(starts), shape=tuple(extents))


def box_runs(shape: tuple[int, ...], box: Box) -> tuple[int, npt.NDArray[np.int64]]:
    """Where the elements of a box lie in the flat, row-major, global tensor.

    Returns:
        `(run_elements, offsets)`: the box's elements in row-major order are `len(offsets)` runs of
        `run_elements` each, and run r starts at flat element `offsets[r]` (int64, rising) of the global
        tensor. Trailing dimensions that the box covers in full are merged, so rows are one run. An empty box
        has `(0, [])`, a 0-d one `(1, [0])`.

    Raises:
        InvalidRequestError: the box lies outside `shape`.
    """
    if not box.fits(shape):
        raise InvalidRequestError(f"{box} lies outside shape {shape}")
    if box.numel == 0:
        return 0, np.empty(0, dtype=np.int64)
    split, strides = _split(shape, box), strides_of(shape)
    run_elements = math.prod(box.shape[split:])
    offsets = np.full(1, _first(box, strides), dtype=np.int64)
    for extent, stride in zip(box.shape[:split], strides[:split], strict=True):
        steps = np.arange(extent, dtype=np.int64) * stride
        offsets = (offsets[:, None] + steps[None, :]).reshape(-1)
    return run_elements, offsets


def one_run(shape: tuple[int, ...], box: Box) -> tuple[int, int] | None:
    """`(first, elements)` of a box whose elements follow one another in the flat, row-major, global tensor; None where
    they don't, or where the box lies outside. As `box_runs`, at no cost."""
    if not box.fits(shape):
        return None
    if box.numel == 0:
        return 0, 0
    if math.prod(box.shape[: _split(shape, box)]) != 1:
        return None
    return _first(box, strides_of(shape)), box.numel


def split_box(box: Box, max_elements: int) -> Iterator[Box]:
    """Cuts a box into blocks of at most `max_elements` (at least 1) that follow one another in its row-major order.

    Each block is a contiguous part of the box's own memory. Empty boxes have no blocks.
    """
    limit = max(1, max_elements)
    if box.numel <= limit:
        if box.numel:
            yield box
        return
    axis = next(axis for axis, extent in enumerate(box.shape) if extent > 1)
    rows = max(1, limit // (box.numel // box.shape[axis]))
    for start in range(0, box.shape[axis], rows):
        block = Box(
            offset=_replaced(box.offset, axis, box.offset[axis] + start),
            shape=_replaced(box.shape, axis, min(rows, box.shape[axis] - start)),
        )
        yield from split_box(block, limit)


def check_partition(shape: tuple[int, ...], boxes: Sequence[Box], *, parameter: str | None = None) -> None:
    """Checks that boxes cover every element of a tensor exactly once. Empty boxes are ignored.

    Raises:
        ManifestMismatchError: a part lies outside, two parts overlap, or elements are covered by none.
    """
    for box in boxes:
        if not box.fits(shape):
            raise ManifestMismatchError(f"part {box} lies outside shape {shape}", parameter=parameter)
    parts = [box for box in boxes if box.numel]
    pair = _first_overlap(parts)
    if pair is not None:
        raise ManifestMismatchError(f"parts {pair[0]} and {pair[1]} overlap", parameter=parameter)
    held, wanted = sum(box.numel for box in parts), math.prod(shape)
    if held != wanted:
        raise ManifestMismatchError(f"the parts hold {held} of {wanted} elements of shape {shape}", parameter=parameter)


def _first_overlap(parts: list[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element. Sweeps along the dimension that tells most boxes apart."""
    if len(parts) < 2:
        return None
    dims = len(parts[0].shape)
    if dims == 0:
        return parts[0], parts[1]
    axis = max(range(dims), key=lambda dim: len({box.offset[dim] for box in parts}))
    ordered = sorted(parts, key=lambda box: box.offset[axis])
    for index, box in enumerate(ordered):
        end = box.offset[axis] + box.shape[axis]
        for other in ordered[index + 1 :]:
            if other.offset[axis] >= end:
                break
            if overlap(box, other) is not None:
                return box, other
    return None


def _split(shape: tuple[int, ...], box: Box) -> int:
    """The first dimension of a run of a box that is not empty."""
    split = len(shape)
    while split > 0 and box.shape[split - 1] == shape[split - 1]:
        split -= 1
    return max(0, split - 1)  # the first dimension from behind that is cut still belongs to the run


def _first(box: Box, strides: tuple[int, ...]) -> int:
    """Where a box begins in the flat tensor."""
    return sum(start * stride for start, stride in zip(box.offset, strides, strict=True))


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many elements of the flat tensor are between two neighbours in each dimension."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def _replaced(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
