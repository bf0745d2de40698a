"""Calls of a Ray actor, by what its handle has; Ray's own are in tests/cluster."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from weightsync.adapters.compat.calls import answer_of
from weightsync.errors import DeadlineExceededError


class Actor:
    """A handle whose method `sync_weights` gives this answer."""

    def __init__(self, answer: Future[Any]) -> None:
        self.sync_weights = self.remote = self
        self.future = lambda: answer

    def __call__(self) -> Actor:
        return self


def test_an_actor_that_does_not_answer_has_missed_its_deadline() -> None:
    """What it raises itself stays as it is. Seen red: a bare TimeoutError, without a word."""
    with pytest.raises(DeadlineExceededError, match=r"no answer to sync_weights within 0\.01 s"):
        answer_of(Actor(Future()), "sync_weights", timeout_s=0.01)
    own = Future[Any]()
    own.set_exception(TimeoutError("the data loader"))
    with pytest.raises(TimeoutError, match="the data loader"):
        answer_of(Actor(own), "sync_weights", timeout_s=0.01)
