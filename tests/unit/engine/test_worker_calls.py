"""WorkerCalls: a worker that stands still keeps one thread, however often it is asked."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from weightsync.engine.worker_calls import WorkerCalls
from weightsync.errors import DeadlineExceededError, StateError
from weightsync.types import Deadline


class Still:
    """Answers when it is let go."""

    def __init__(self) -> None:
        self.begun, self.go, self.asked = threading.Event(), threading.Event(), 0

    def describe(self) -> int:
        self.asked += 1
        self.begun.set()
        assert self.go.wait(60.0)
        return self.asked


def test_one_that_stands_still_is_asked_once() -> None:
    """Seen red: a thread for each look at it, for a week."""
    still: Any = Still()
    calls = WorkerCalls([still], "still-engine")
    for _ in range(5):
        with pytest.raises(DeadlineExceededError):
            calls.ask(lambda worker: worker.describe(), 0.02)
    assert still.begun.wait(60.0)
    assert sum(thread.name.startswith("still-engine") for thread in threading.enumerate()) == 1
    assert still.asked == 1
    still.go.set()
    assert calls.ask(lambda worker: worker.describe(), 60.0) == [2], "an answer of now, not the late one's"


def test_one_that_stands_still_beside_one_that_fails_is_asked_once() -> None:
    """Seen red: the other one's failure came first, and who stood still was forgotten."""

    class Dead:
        def describe(self) -> int:
            raise StateError("gone")

    still: Any = Still()
    dead: Any = Dead()
    calls = WorkerCalls([still, dead], "half-engine")
    with pytest.raises(StateError):
        calls.ask(lambda worker: worker.describe(), 60.0)
    assert still.begun.wait(60.0)
    for _ in range(2):
        with pytest.raises(StateError, match="gone"):
            calls.ask(lambda worker: worker.describe(), 60.0)
    assert still.asked == 1
    still.go.set()


def test_the_first_failure_of_a_step_is_raised_and_who_is_late_is_named() -> None:
    def step(worker: Any) -> str:
        if worker == "bad":
            raise StateError("it can't")
        if worker == "late":
            assert go.wait(60.0)
        return str(worker)

    go = threading.Event()
    good, bad, late = ("good", "bad", "late")
    assert WorkerCalls([good, good], "e").step(step, Deadline(60.0)) == ["good", "good"]  # type: ignore[list-item]
    with pytest.raises(StateError, match="it can't"):
        WorkerCalls([late, bad], "e").step(step, Deadline(60.0))  # type: ignore[list-item]
    with pytest.raises(DeadlineExceededError, match=r"workers \[1\]"):
        WorkerCalls([good, late], "e").step(step, Deadline(2.0))  # type: ignore[list-item]
    go.set()
