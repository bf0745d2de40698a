"""Bucket layouts: in order, aligned, without overlap, never empty, and what a request accepts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.plan.buckets import ALIGNMENT_BYTES, plan_bucket
from weightsync.types import BroadcastWeightUpdateRequest


@settings(deadline=None)
@given(st.lists(st.integers(0, 5000), max_size=30))
def test_tensors_lie_one_behind_the_other(sizes: list[int]) -> None:
    layout = plan_bucket(sizes)
    assert len(layout.offsets) == len(sizes)
    end = 0
    for offset, size in zip(layout.offsets, sizes, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert end <= offset < end + ALIGNMENT_BYTES
        end = offset + size
    assert max(end, 1) <= layout.total_bytes < max(end, 1) + ALIGNMENT_BYTES


@settings(deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=30))
def test_every_layout_can_be_announced(sizes: list[int]) -> None:
    layout = plan_bucket(sizes)
    BroadcastWeightUpdateRequest(
        session="s",
        seq=0,
        names=tuple(str(i) for i in range(len(sizes))),
        dtypes=("uint8",) * len(sizes),
        shapes=tuple((size,) for size in sizes),
        offsets=layout.offsets,
        bucket_bytes=layout.total_bytes,
    )


def test_empty_tensors_take_no_room_and_a_bucket_is_never_empty() -> None:
    assert plan_bucket([]).total_bytes == ALIGNMENT_BYTES
    assert plan_bucket([0, 0]).total_bytes == ALIGNMENT_BYTES
    assert plan_bucket([1, 0, 1]).offsets == (0, 256, 256)
    assert plan_bucket([256, 1]).offsets == (0, 256)
    assert plan_bucket([257, 1]).total_bytes == 768
