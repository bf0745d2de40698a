"""Chunks are taken in the order of their numbers, each once. Many threads: tests/unit/engine/test_worker.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from weightsync.errors import DeadlineExceededError, InvalidRequestError, TransferAbortedError
from weightsync.handles.chunk_turns import Turns
from weightsync.handles.fanout import in_thread
from weightsync.types import Deadline

LONG_S = 30.0


class Session:
    """What is taken, in which order."""

    def __init__(self, *, most_ahead: int | None = None) -> None:
        self.turns = Turns(most_ahead=most_ahead)
        self.ended: BaseException | None = None
        self.done: list[int] = []

    def check(self) -> None:
        if self.ended is not None:
            raise self.ended

    def failed(self, error: BaseException) -> BaseException:
        self.ended = TransferAbortedError(str(error))
        return self.ended

    @contextlib.contextmanager
    def turn(self, seq: int, *, timeout_s: float = LONG_S) -> Iterator[None]:
        with self.turns.taken(seq, Deadline(timeout_s), check=self.check, failed=self.failed):
            yield
            self.done.append(seq)

    def take(self, seq: int) -> None:
        with self.turn(seq):
            pass


def test_whoever_calls_first_the_order_is_that_of_the_numbers() -> None:
    session = Session()
    calls = [in_thread(lambda seq=seq: session.take(seq), name=f"chunk-{seq}") for seq in (3, 1, 2, 0)]  # type: ignore[misc]
    for call in calls:
        call.result(LONG_S)
    assert session.done == [0, 1, 2, 3]


def test_a_chunk_has_one_turn() -> None:
    session = Session()
    with session.turn(0), pytest.raises(InvalidRequestError, match="chunk 0 was announced twice"):
        session.take(0)
    with pytest.raises(InvalidRequestError, match="chunk 0 was announced twice"):
        session.take(0)
    session.take(1)


def test_one_that_is_too_far_ahead_waits_for_no_turn() -> None:
    with pytest.raises(InvalidRequestError, match="chunk 4 was announced while 0 is under way"):
        Session(most_ahead=3).take(4)
    with (
        pytest.raises(DeadlineExceededError, match="no turn of chunk 3"),
        Session(most_ahead=3).turn(3, timeout_s=0.01),
    ):
        pass


def test_a_failure_is_what_the_next_one_finds() -> None:
    session = Session()
    with pytest.raises(TransferAbortedError, match="it broke"), session.turn(0):
        raise ValueError("it broke")
    with pytest.raises(TransferAbortedError, match="it broke"):
        session.take(1)
    assert session.done == []


def test_who_waits_hears_of_the_end() -> None:
    session = Session()
    waiting = in_thread(lambda: session.take(1), name="chunk-1")
    session.ended = TransferAbortedError("aborted")
    session.turns.wake()
    with pytest.raises(TransferAbortedError, match="aborted"):
        waiting.result(LONG_S)
