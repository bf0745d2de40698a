"""Copies by address: of every run, within no other byte, and of nothing that lies nowhere."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.addresses import copy_runs, loops, pieces, view_of_runs
from weightsync.errors import MissingDependencyError, UnsupportedError


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(1, 500))
def test_pieces_are_all_in_order_and_none_is_too_large(sizes: list[int], piece_bytes: int) -> None:
    cuts = pieces(np.array(sizes, dtype=np.int64), piece_bytes)
    assert list(itertools.chain.from_iterable(range(len(sizes))[cut] for cut in cuts)) == list(range(len(sizes)))
    assert all(sum(sizes[cut]) <= piece_bytes + max(sizes) for cut in cuts)


def test_runs_are_copied_and_nothing_else_is_written() -> None:
    source, target = np.arange(256, dtype=np.uint8), np.zeros(256, dtype=np.uint8)
    starts, sizes = np.array([3, 100, 200]), np.array([5, 0, 56])
    copy_runs(target.ctypes.data + starts, source.ctypes.data + starts, sizes)
    expected = np.zeros(256, dtype=np.uint8)
    expected[3:8], expected[200:] = source[3:8], source[200:]
    assert (target == expected).all()


def test_one_view_shows_every_run_wherever_it_lies() -> None:
    """In any order, pages apart, with empty ones. Seen red: counted from the address 0 of an empty one."""
    held = [np.full(size, index, dtype=np.uint8) for index, size in enumerate((70_000, 3, 1 << 20, 5))]
    places = np.array([held[2].ctypes.data, 0, held[0].ctypes.data, held[3].ctypes.data, held[1].ctypes.data])
    sizes = np.array([1 << 20, 0, 70_000, 5, 3])
    memory, starts, ends = view_of_runs(places, sizes)
    assert memory.readonly
    found = [bytes(memory[start:end]) for start, end in zip(starts, ends, strict=True)]
    assert found == [bytes([2]) * (1 << 20), b"", bytes(70_000), bytes([3]) * 5, bytes([1]) * 3]
    assert view_of_runs(places[1:2], sizes[1:2])[1:] == ([0], [0])
    with pytest.raises(UnsupportedError, match="no memory"):
        view_of_runs(places, sizes + 1)


def test_what_lies_nowhere_is_refused_before_anything_is_written() -> None:
    there = np.zeros(8, dtype=np.uint8)
    here = np.ones(8, dtype=np.uint8)
    good, nowhere = np.array([there.ctypes.data, 0]), np.array([here.ctypes.data, here.ctypes.data])
    with pytest.raises(UnsupportedError, match="no memory"):
        copy_runs(good, nowhere, np.array([8, 8]))
    assert not there.any()


def test_loops_that_are_missing_are_named() -> None:
    with pytest.raises(MissingDependencyError, match=r"weightsync\[torch\]"):
        loops("weightsync.no_such_loops")
