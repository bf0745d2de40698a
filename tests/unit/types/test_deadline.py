"""Waits that share a deadline do not add up."""

from __future__ import annotations

import threading

import pytest

from weightsync.errors import DeadlineExceededError
from weightsync.types import Deadline


def test_waits_that_share_a_deadline_do_not_add_up() -> None:
    assert 0 < Deadline(30).check("a start") <= 30
    deadline = Deadline(0.05)
    threading.Event().wait(deadline.remaining_s)
    while not deadline.expired:
        pass
    assert deadline.remaining_s == 0.0
    with pytest.raises(DeadlineExceededError, match=r"no answer within 0\.05 s") as caught:
        deadline.check("answer", rank=3, state_left="nothing was changed")
    assert (caught.value.rank, caught.value.state_left) == (3, "nothing was changed")


@pytest.mark.parametrize("timeout_s", [0.0, -5.0])
def test_a_deadline_that_has_passed(timeout_s: float) -> None:
    assert Deadline(timeout_s).expired
    with pytest.raises(DeadlineExceededError):
        Deadline(timeout_s).check("anything")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (29.9745, "30 s"), (9.97544, "10 s"), (9.94, "9.9 s"), (2.5, "2.5 s"), (0.9999, "1 s"), (0.1234, "0.12 s"),
        (300, "300 s"), (604800.0, "604800 s"),
    ],
)  # fmt: skip
def test_a_time_is_said_without_digits_that_nobody_measured(seconds: float, said: str) -> None:
    """Seen red: "did not answer within 29.9745 s"."""
    assert Deadline(seconds).said == said
