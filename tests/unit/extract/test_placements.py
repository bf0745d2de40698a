"""Boxes of shards, against torch.chunk."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard

from weightsync.extract.placements import shard_box
from weightsync.types import Box


@pytest.mark.parametrize(
    ("rows", "ranks", "boxes"),
    [
        (7, 2, [(0, 4), (4, 3)]),
        (1, 2, [(0, 1), (1, 0)]),
        (5, 4, [(0, 2), (2, 2), (4, 1), (5, 0)]),
        (0, 2, [(0, 0)] * 2),
    ],
)
def test_rows_that_do_not_divide(rows: int, ranks: int, boxes: list[tuple[int, int]]) -> None:
    found = [shard_box((rows, 3), [Shard(0)], (ranks,), (rank,)) for rank in range(ranks)]
    assert found == [Box(offset=(start, 0), shape=(extent, 3)) for start, extent in boxes]


_placement = st.sampled_from([Shard(0), Shard(1), Replicate()])


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    placements=st.lists(_placement, min_size=1, max_size=3),
    mesh_shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
)
def test_boxes_hold_what_chunking_step_by_step_gives(
    shape: tuple[int, int], placements: list[Placement], mesh_shape: tuple[int, ...]
) -> None:
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    for coordinate in itertools.product(*(range(parts) for parts in mesh_shape[: len(placements)])):
        expected = whole
        for placement, parts, place in zip(placements, mesh_shape, coordinate, strict=False):
            if isinstance(placement, Shard):
                chunks = expected.chunk(parts, placement.dim)
                empty = expected.narrow(placement.dim, 0, 0)
                expected = chunks[place] if place < len(chunks) else empty
        box = shard_box(shape, placements, mesh_shape, coordinate)
        assert box.fits(shape)
        assert box.shape == tuple(expected.shape)
        found = whole[tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))]
        assert torch.equal(found, expected)
