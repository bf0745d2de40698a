"""The step that rollout waits for: since when, and when it is given up; with a clock of its own."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.unit.control.test_state import Machine
from weightsync.control.events import BatchReady
from weightsync.control.step_watch import StepWatch

LONG_S = 30.0


class Watched:
    """A model in mode "sync", and its watch."""

    def __init__(self, timeout_s: float | None = 3600.0) -> None:
        self.now_s = 100.0
        self.machine = Machine()
        self.late: list[Any] = []
        self.is_late = threading.Event()
        self.watch = StepWatch(timeout_s, self._late, clock=lambda: self.now_s)

    def _late(self, awaited: Any) -> None:
        self.late.append(awaited)
        self.is_late.set()

    def look(self) -> None:
        self.watch.look(self.machine.state, self.machine.policy)

    def batch(self) -> None:
        self.machine(BatchReady())
        self.look()


def test_it_counts_from_the_batch_and_a_second_one_gives_no_more_time() -> None:
    watched = Watched()
    assert watched.watch.waited_s is None
    watched.batch()
    timer = watched.watch._alarm._timer
    watched.now_s += 5.0
    watched.batch()
    assert watched.watch.waited_s == 5.0
    assert watched.watch._alarm._timer is timer
    watched.machine.train(1)
    watched.look()
    assert watched.watch.waited_s is None
    watched.machine.synced()
    watched.look()
    assert watched.watch.waited_s == 0.0, "the second batch's step"
    watched.watch.close()


def test_a_step_that_is_late_is_told_of_once_and_is_the_one_that_is_awaited() -> None:
    watched = Watched(timeout_s=0.01)
    watched.batch()
    assert watched.is_late.wait(LONG_S)
    assert watched.late[0] is watched.watch.awaited
    assert watched.watch.lose() == "no version came within 0.01 s"
    assert watched.watch.lost is not None
    watched.look()
    assert len(watched.late) == 1


def test_nothing_is_late_where_no_limit_is_set() -> None:
    watched = Watched(timeout_s=None)
    watched.batch()
    watched.now_s += 1e6
    assert (watched.watch.waited_s, watched.watch._alarm._timer) == (1e6, None)


def test_without_a_thread_it_is_tried_again_and_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        watched.batch()
    assert watched.watch._alarm._timer is None
    watched.now_s += 5.0
    watched.batch()
    timer = watched.watch._alarm._timer
    assert timer is not None
    assert (watched.watch.waited_s, timer.interval) == (5.0, 3595.0)
    watched.watch.close()
