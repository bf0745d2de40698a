"""The model's digest from bytes alone: what torch's tensors give, from the same bytes in whatever pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.codec import model_digest as module
from weightsync.codec.digest import shard_sum
from weightsync.codec.model_digest import ShardSum, box_sum
from weightsync.plan.boxes import whole_box
from weightsync.tensors import byte_array
from weightsync.types import Box, HeldTensor, TensorSpec

SHAPES = ((), (1,), (17,), (6, 10), (1, 5, 7), (3, 4, 5))


@st.composite
def parts(draw: st.DrawFn) -> tuple[TensorSpec, Box, torch.Tensor]:
    """A part of a tensor: its spec, where it lies, and its elements, contiguous."""
    dtype, shape = draw(st.sampled_from(("uint8", "bfloat16", "float32", "complex128"))), draw(st.sampled_from(SHAPES))
    cuts = [sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent)))) for extent in shape]
    box = Box(offset=tuple(start for start, _ in cuts), shape=tuple(end - start for start, end in cuts))
    spec = TensorSpec(name="w", dtype=dtype, shape=shape)
    tensor = torch.randint(0, 256, box.shape, dtype=torch.uint8).to(getattr(torch, dtype))
    return spec, box, tensor


@settings(deadline=None, max_examples=100)
@given(part=parts(), piece_bytes=st.sampled_from((1, 24, 100, 16 << 20)))
def test_a_part_is_what_its_tensor_is(part: tuple[TensorSpec, Box, torch.Tensor], piece_bytes: int) -> None:
    """Seen to fail: with blocks that begin where the one before begins; with the box's offset left out."""
    spec, box, tensor = part
    expected = shard_sum(HeldTensor(spec=spec, box=box, tensor=tensor))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", piece_bytes)
        assert box_sum(byte_array(tensor), spec, box) == expected
        if box == whole_box(spec.shape):
            assert box_sum(byte_array(tensor), spec, None) == expected


def test_a_sum_has_two_lanes_of_64_bits() -> None:
    top = (1 << 64) - 1
    assert ShardSum(lane_a=top, lane_b=1) + ShardSum(lane_a=2, lane_b=top) == ShardSum(lane_a=1, lane_b=0)
