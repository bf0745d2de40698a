"""One call to come: the last one that was set, and no other."""

from __future__ import annotations

import threading

import pytest

from weightsync.control.alarm import Alarm

LONG_S = 30.0


def test_the_last_call_that_was_set_comes_once() -> None:
    """Seen red where what was replaced is left to run."""
    alarm, came, over = Alarm(), [], threading.Event()
    alarm.set(0.0, over.set)
    assert over.wait(LONG_S)
    over.clear()
    alarm.set(3600.0, lambda: came.append("first"))
    first = alarm._timer
    assert first is not None
    alarm.set(0.0, lambda: (came.append("second"), over.set())[1])  # type: ignore[func-returns-value]
    assert over.wait(LONG_S)
    first.join(LONG_S)
    assert (came, first.is_alive()) == (["second"], False)


def test_one_that_is_cancelled_leaves_no_thread_and_can_be_set_again() -> None:
    alarm, over = Alarm(), threading.Event()
    alarm.cancel()
    alarm.set(3600.0, over.set)
    timer = alarm._timer
    assert timer is not None
    alarm.cancel()
    alarm.cancel()
    timer.join(LONG_S)
    assert not timer.is_alive()
    assert not over.is_set()
    alarm.set(0.0, over.set)
    assert over.wait(LONG_S)


def test_a_call_that_was_replaced_as_it_woke_does_not_come() -> None:
    """Its time is over, and it has not looked yet."""
    alarm, came = Alarm(), []
    alarm.set(3600.0, lambda: came.append("replaced"))
    late = alarm._timer
    assert late is not None
    alarm.set(3600.0, lambda: came.append("kept"))
    late.function()  # what its thread does when the time is over
    assert came == []
    assert alarm._timer is not None
    alarm.cancel()


def test_without_a_thread_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    alarm = Alarm()

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            alarm.set(3600.0, lambda: None)
    assert alarm._timer is None
