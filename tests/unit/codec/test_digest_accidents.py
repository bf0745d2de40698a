"""Accidents that the model digest must notice, in both lanes."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weightsync.codec.digest import ShardSum, digest_of, shard_sum
from weightsync.types import HeldTensor, TensorSpec

FLOATS = ["bfloat16", "float16", "float32", "float64"]
SHAPE = (37, 53)


def weights(dtype: str, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(getattr(torch, dtype))


def held(tensor: torch.Tensor, name: str = "w") -> HeldTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return HeldTensor(spec=TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape)), box=None, tensor=tensor)


def lanes(tensor: torch.Tensor) -> ShardSum:
    return shard_sum(held(tensor))


def assert_both_lanes_differ(first: torch.Tensor, second: torch.Tensor) -> None:
    one, other = lanes(first), lanes(second)
    assert one.lane_a != other.lane_a
    assert one.lane_b != other.lane_b


@pytest.mark.parametrize("dtype", FLOATS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_one_bit_anywhere(dtype: str, data: st.DataObject) -> None:
    first = weights(dtype)
    second = first.clone()
    flat = second.view(-1).view(torch.uint8)
    flat[data.draw(st.integers(0, len(flat) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert_both_lanes_differ(first, second)


@pytest.mark.parametrize("dtype", FLOATS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_two_elements_swapped(dtype: str, data: st.DataObject) -> None:
    first = weights(dtype)
    places = st.integers(0, first.numel() - 1)
    here, there = data.draw(
        st.tuples(places, places).filter(lambda pair: first.view(-1)[pair[0]] != first.view(-1)[pair[1]])
    )
    second = first.clone()
    second.view(-1)[here], second.view(-1)[there] = first.view(-1)[there], first.view(-1)[here]
    assert_both_lanes_differ(first, second)


@pytest.mark.parametrize("dtype", FLOATS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_the_signs_of_a_pair_flipped(dtype: str, data: st.DataObject) -> None:
    first = weights(dtype)
    pair = data.draw(st.lists(st.integers(0, first.numel() - 1), min_size=2, max_size=2, unique=True))
    second = first.clone()
    second.view(-1)[pair] = -first.view(-1)[pair]
    assert_both_lanes_differ(first, second)


@pytest.mark.parametrize("dtype", FLOATS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_a_range_zeroed_or_shifted_by_one(dtype: str, data: st.DataObject) -> None:
    first = weights(dtype)
    start = data.draw(st.integers(0, first.numel() - 3))
    stop = data.draw(st.integers(start + 2, first.numel()))
    zeroed, shifted = first.clone(), first.clone()
    zeroed.view(-1)[start:stop] = 0
    shifted.view(-1)[start:stop] = first.view(-1)[start:stop].roll(1)
    assert_both_lanes_differ(first, zeroed)
    assume(not torch.equal(first, shifted))  # equal neighbours: nothing was shifted
    assert_both_lanes_differ(first, shifted)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_and_halves_exchanged_and_transposed(dtype: str) -> None:
    first = weights(dtype, shape=(64, 64))
    order = list(range(64))
    random.Random(0).shuffle(order)
    for second in (
        first[order],
        first.flip(0),
        first.flip(1),
        first.t().contiguous(),
        torch.cat([first[32:], first[:32]]),
    ):
        assert_both_lanes_differ(first, second.contiguous())


def test_tensors_of_one_shape_swapped() -> None:
    first, second = weights("bfloat16", 1), weights("bfloat16", 2)
    specs = [held(first, "a").spec, held(first, "b").spec]
    right = digest_of([held(first, "a"), held(second, "b")], specs)
    wrong = digest_of([held(second, "a"), held(first, "b")], specs)
    assert right[:21] != wrong[:21]
    assert right[21:] != wrong[21:]


def test_name_dtype_shape_and_empty_tensors_count() -> None:
    zeros = torch.zeros(2, 6)
    variants = [
        [held(zeros, "a")],
        [held(zeros, "b")],
        [held(zeros.view(torch.int32), "a")],
        [held(zeros.view(3, 4), "a")],
        [held(zeros.view(12), "a")],
        [held(zeros, "a"), held(torch.zeros(0), "b")],
        [held(zeros, "a"), held(torch.zeros(0, 3), "b")],
        [held(zeros, "a"), held(torch.zeros(()), "b")],
        [held(zeros, "a"), held(torch.zeros(1), "b")],
        [held(torch.zeros(0), "a")],
        [],
    ]
    digests = [digest_of(parts, [part.spec for part in parts]) for parts in variants]
    assert len(set(digests)) == len(variants)
    assert all(len({digest[part] for digest in digests}) == len(variants) for part in (slice(21), slice(21, None)))


def test_the_lanes_are_no_copies_of_each_other() -> None:
    """Ratios of the lanes' differences would be constant if one lane followed from the other."""
    first = weights("float32")
    ratios = set()
    for place in range(64):
        second = first.clone()
        second.view(-1).view(torch.uint8)[4 * place] ^= 1
        one, other = lanes(first), lanes(second)
        inverse = pow((other.lane_a - one.lane_a) | 1, -1, 1 << 64)
        ratios.add((other.lane_b - one.lane_b) * inverse % (1 << 64))
    assert len(ratios) == 64


def test_no_two_single_bit_changes_look_alike() -> None:
    """Each of 16384 one-bit changes of one tensor gives a different digest, in each lane."""
    first = torch.zeros(2048, dtype=torch.uint8)
    seen_a, seen_b = set(), set()
    for place in range(2048):
        for bit in range(8):
            first[place] = 1 << bit
            changed = lanes(first)
            seen_a.add(changed.lane_a)
            seen_b.add(changed.lane_b)
        first[place] = 0
    assert len(seen_a) == len(seen_b) == math.prod((2048, 8))
