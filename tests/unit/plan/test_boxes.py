"""Boxes against numpy's own indexing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import InvalidRequestError, ManifestMismatchError
from weightsync.plan.boxes import box_runs, check_partition, one_run, overlap, split_box, whole_box
from weightsync.types import Box

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    cuts = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return Box(offset=tuple(a for a, _ in cuts), shape=tuple(b - a for a, b in cuts))


@st.composite
def shape_and_boxes(draw: st.DrawFn, number: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    return shape, [draw(boxes_in(shape)) for _ in range(number)]


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """Flat indices of a box's elements, by numpy."""
    flat = np.arange(math.prod(shape)).reshape(shape)
    index = tuple(slice(start, start + extent) for start, extent in zip(box.offset, box.shape, strict=True))
    return [int(value) for value in flat[index].reshape(-1)]


@given(shape_and_boxes(1))
def test_runs_are_numpys_elements_in_order(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, [box] = case
    run, offsets = box_runs(shape, box)
    assert offsets.dtype == np.int64
    assert [int(start) + step for start in offsets for step in range(run)] == elements(shape, box)


@given(shape_and_boxes(1))
def test_a_box_of_one_run_is_known(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, [box] = case
    found, wanted = one_run(shape, box), elements(shape, box)
    follow = not wanted or wanted == list(range(wanted[0], wanted[0] + len(wanted)))
    assert (found is not None) == follow
    if found is not None:
        assert list(range(found[0], found[0] + found[1])) == wanted


def test_a_box_outside_is_no_run() -> None:
    assert one_run((4, 5), Box(offset=(0, 3), shape=(1, 4))) is None


@pytest.mark.parametrize(
    ("shape", "offset", "part", "run", "starts"),
    [
        ((7, 5), (4, 0), (3, 5), 15, [20]),
        ((7, 5), (0, 1), (7, 2), 2, [1, 6, 11, 16, 21, 26, 31]),
        ((3, 4, 5), (1, 1, 0), (2, 2, 5), 10, [25, 45]),
        ((3, 1, 5), (1, 0, 0), (2, 1, 5), 10, [5]),
        ((), (), (), 1, [0]),
        ((3, 4), (1, 4), (2, 0), 0, []),
        ((0,), (0,), (0,), 0, []),
    ],
)
def test_runs_are_merged(
    shape: tuple[int, ...], offset: tuple[int, ...], part: tuple[int, ...], run: int, starts: list[int]
) -> None:
    found = box_runs(shape, Box(offset=offset, shape=part))
    assert (found[0], found[1].tolist()) == (run, starts)


def test_a_box_outside_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="outside"):
        box_runs((2, 3), Box(offset=(1, 0), shape=(2, 3)))
    with pytest.raises(InvalidRequestError, match="dimensions"):
        overlap(whole_box((2,)), whole_box((2, 1)))


@given(shape_and_boxes(2))
def test_overlap_is_the_common_elements(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, [first, second] = case
    both = set(elements(shape, first)) & set(elements(shape, second))
    shared = overlap(first, second)
    assert shared == overlap(second, first)
    assert (set(elements(shape, shared)) if shared else set()) == both


@given(shape_and_boxes(1), st.integers(1, 30))
def test_blocks_follow_one_another(case: tuple[tuple[int, ...], list[Box]], limit: int) -> None:
    shape, [box] = case
    blocks = list(split_box(box, limit))
    assert all(0 < block.numel <= limit for block in blocks)
    assert [index for block in blocks for index in elements(shape, block)] == elements(shape, box)


@given(shape_and_boxes(3))
def test_partition_is_counted_by_numpy(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    times = np.zeros(math.prod(shape), dtype=int)
    for box in boxes:
        times[elements(shape, box)] += 1
    if (times == 1).all():
        check_partition(shape, boxes)
    else:
        with pytest.raises(ManifestMismatchError):
            check_partition(shape, boxes)


@given(st.data())
def test_any_split_is_a_partition_and_one_part_less_is_not(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    parts = data.draw(st.permutations(list(split_box(whole_box(shape), data.draw(st.integers(1, 30))))))
    check_partition(shape, parts)
    with pytest.raises(ManifestMismatchError, match="hold"):
        check_partition(shape, parts[1:], parameter="w")
    with pytest.raises(ManifestMismatchError, match="overlap"):
        check_partition(shape, [*parts, parts[0]], parameter="w")


def test_a_part_of_another_shape_is_no_part() -> None:
    with pytest.raises(ManifestMismatchError, match="outside"):
        check_partition((4,), [Box(offset=(0,), shape=(2,)), Box(offset=(2,), shape=(3,))])
