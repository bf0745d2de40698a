"""What the window raises where several things failed: an engine's own words come before what follows from them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from weightsync.errors import LoadError, TransferError
from weightsync.transfer.window import settle
from weightsync.types import Deadline


def failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def test_of_two_that_follow_from_something_the_engines_words_are_raised() -> None:
    """Seen red by chance: one of a set was taken."""
    for _ in range(50):
        moved = [failed(TransferError("a member left the group")) for _ in range(5)]
        with pytest.raises(TransferError, match="took over"):
            settle({1: (failed(TransferError("another took over")), *moved)}, upto=1, deadline=Deadline(5))


def test_a_cause_comes_before_all_that_follows() -> None:
    with pytest.raises(LoadError):
        settle({1: (failed(TransferError("it left")), failed(LoadError("no place")))}, upto=1, deadline=Deadline(5))
