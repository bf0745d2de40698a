"""How far a transfer is, in a line."""

from __future__ import annotations

import pytest

from weightsync.types.progress import TransferProgress


def test_a_transfer_says_how_far_it_is_how_fast_and_how_long_it_takes_yet() -> None:
    moved = TransferProgress(done_bytes=120_000_000, total_bytes=480_000_000, seconds=0.15)
    assert moved.rate_bytes_s == pytest.approx(800e6)
    assert moved.left_s == pytest.approx(0.45)
    assert str(moved) == "120 of 480 MB (25 %), 800 MB/s, 0.5 s to go"


def test_before_anything_came_nobody_knows_how_long_it_takes() -> None:
    moved = TransferProgress(done_bytes=0, total_bytes=480_000_000, seconds=3.0)
    assert moved.left_s is None
    assert str(moved) == "0 of 480 MB (0 %), 0 MB/s"


def test_nothing_to_move_is_all_of_it() -> None:
    small = TransferProgress(done_bytes=94_000, total_bytes=394_000, seconds=1.0)
    assert str(small).startswith("0.094 of 0.394 MB (24 %)")
    assert str(TransferProgress(done_bytes=0, total_bytes=0, seconds=0.0)) == "0 of 0 MB (100 %), 0 MB/s"
