"""The digest's sum in torch's operations, as a GPU runs them, is the compiled loop's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.codec import device_digest
from weightsync.codec.device_digest import run_sum
from weightsync.codec.kernels import runs_sum

KEYS = st.integers(0, 2**64 - 1)


def compiled(data: torch.Tensor, place: int, key_1: int, key_2: int) -> tuple[int, int]:
    offsets = np.array([place], np.int64)
    return tuple(runs_sum(data.numpy(), len(data), offsets, np.uint64(key_1), np.uint64(key_2)))  # type: ignore[return-value]


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 9000), st.integers(0, 1 << 40), st.integers(0, 9), KEYS, KEYS, st.integers(0, 2**31))
def test_a_run_of_any_length_at_any_place(
    num_bytes: int, place: int, misaligned: int, key_1: int, key_2: int, seed: int
) -> None:
    """Red with a shift that is not logical."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (num_bytes + misaligned,), dtype=torch.uint8, generator=generator)[misaligned:]
    assert run_sum(data, place, key_1, key_2) == compiled(data, place, key_1, key_2)


def test_pieces_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randint(0, 256, (50_001,), dtype=torch.uint8)
    wanted = compiled(data, 777, 3, 2**64 - 5)
    monkeypatch.setattr(device_digest, "PIECE_BYTES", 8192)
    assert run_sum(data, 777, 3, 2**64 - 5) == wanted
