"""Calls of a Ray actor, by what its handle has (Ray's own are in tests/cluster), and of what is async."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from weightsync.adapters.compat.calls import answer_of, each_of
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


def test_an_async_generator_runs_in_one_thread_from_end_to_end() -> None:
    """Where a loop runs in the caller's. Seen red: each step had a thread of its own, and no_grad ended with it."""

    async def source() -> AsyncIterator[bool]:
        with torch.no_grad():
            for _ in range(3):
                yield torch.is_grad_enabled()

    async def beside_a_loop() -> list[bool]:
        return list(each_of(source()))

    assert asyncio.run(beside_a_loop()) == list(each_of(source())) == [False] * 3
