"""What differs between two whole tensors is found to the bit, whatever their dtype, size and place in memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync import threads
from weightsync.load import difference as module
from weightsync.load.difference import difference
from weightsync.load.patching import kernels
from weightsync.tensors import byte_view
from weightsync.types.dtypes import ITEMSIZE_BYTES

DTYPES = [name for name in ITEMSIZE_BYTES if hasattr(torch, name)]


def raw(count: int, dtype: torch.dtype, random: np.random.Generator) -> torch.Tensor:
    """Any bits, in memory that begins anywhere."""
    size = torch.empty(0, dtype=dtype).element_size()
    found = torch.from_numpy(random.integers(0, 256, (count + 1) * size, dtype=np.uint8))
    return (found & 1 if dtype == torch.bool else found).view(dtype)[1:]


@given(
    seed=st.integers(0, 10**6), count=st.integers(0, 400), share=st.floats(0, 1), dtype=st.sampled_from(DTYPES),
    piece=st.sampled_from([1, 8, 64, 1 << 18]),
)  # fmt: skip
def test_just_what_differs_is_found(seed: int, count: int, share: float, dtype: str, piece: int) -> None:
    random = np.random.default_rng(seed)
    before = raw(count, getattr(torch, dtype), random)
    after = before.clone()
    size = before.element_size()
    where = np.flatnonzero(random.random(count) < share)
    byte_view(after).view(-1, size)[where, 0] ^= 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE_WORDS", piece)
        found = difference("t", before, after)
    assert (found.name, found.positions.tolist()) == ("t", where.tolist())
    assert found.values.dtype == after.dtype
    assert torch.equal(byte_view(found.values).view(-1, size), byte_view(after).view(-1, size)[where])


def test_bits_count_and_not_numbers() -> None:
    """A negative zero is another zero; a NaN is the same NaN."""
    before = torch.tensor([0.0, float("nan"), 1.0, 1.0, 1.0])
    after = torch.tensor([-0.0, float("nan"), 1.0, 1.0, 2.0])
    assert difference("t", before, after).positions.tolist() == [0, 4]


def test_a_tensor_of_any_strides_is_compared_element_by_element() -> None:
    before = torch.zeros(6, 5)
    after = torch.zeros(5, 6).t()
    after[4, 2] = 1.0
    found = difference("t", before, after)
    assert (found.positions.tolist(), found.values.tolist()) == ([4 * 5 + 2], [1.0])


def test_pieces_are_compared_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own room for what it finds, and in order. Seen red: one after the other, and with one room."""
    before, both = torch.zeros(1000, dtype=torch.int16), threading.Barrier(2, timeout=10)
    after = before.clone()
    after[torch.tensor([0, 3, 499, 520, 521, 900])] = torch.arange(1, 7, dtype=torch.int16)

    def differing(*arrays: Any) -> int:
        count = kernels().differing(*arrays)
        both.wait()
        return int(count)

    monkeypatch.setattr(threads, "num_cores", lambda: 2)
    monkeypatch.setattr(threads, "_pool", None)
    monkeypatch.setattr(module, "kernels", lambda: SimpleNamespace(differing=differing))
    monkeypatch.setattr(module, "_PIECE_WORDS", 125)
    found = difference("t", before, after)
    pool = threads._pool
    assert pool is not None
    pool.shutdown()
    assert found.positions.tolist() == [0, 3, 499, 520, 521, 900]
    assert found.values.tolist() == [1, 2, 3, 4, 5, 6]


@given(seed=st.integers(0, 10**6), count=st.integers(0, 100), share=st.floats(0, 1))
def test_the_loop_writes_no_further_than_its_room(seed: int, count: int, share: float) -> None:
    """It writes down a word before it knows that it differs. Seen red: with a word written behind the last."""
    random = np.random.default_rng(seed)
    one = random.integers(0, 1 << 63, count, dtype=np.uint64)
    other = one ^ (random.random(count) < share).astype(np.uint64)
    room = np.full(count + 1, 7777, dtype=np.uint32)
    found = kernels().differing(one, other, room[:count])
    assert room[:found].tolist() == np.flatnonzero(one != other).tolist()
    assert room[count] == 7777
