"""Calls of a Ray actor, by what its handle has (Ray's own are in tests/cluster), and of what is async."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest
import torch

from weightsync.adapters.compat.calls import answer_of, each_of, in_thread
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


def test_what_blocks_runs_in_a_thread_on_the_callers_cuda_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU; with one: tests/gpu/test_cuda_streams.py. Seen red: on the default stream, which waits for none of
    them: bytes of the step before were sent, and proved."""
    caller, seen = threading.get_ident(), list[tuple[str, int, bool]]()

    class Stream(NamedTuple):
        number: int
        device: int

    def current(index: int) -> Stream:
        assert threading.get_ident() == caller, "asked by the caller: a stream is a thread's own"
        return Stream(7 if index == 1 else 0, index)

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        seen.append(("stream", stream.device, threading.get_ident() == caller))
        yield
        seen.append(("left", stream.device, threading.get_ident() == caller))

    for name, fake in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 2,
        "current_stream": current,
        "default_stream": lambda index: Stream(0, index),
        "stream": on,
        "set_device": lambda device: seen.append(("device", device, threading.get_ident() == caller)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    asyncio.run(in_thread(lambda: seen.append(("step", 0, threading.get_ident() == caller))))
    assert seen == [("stream", 1, False), ("device", 0, False), ("step", 0, False), ("left", 1, False)]
