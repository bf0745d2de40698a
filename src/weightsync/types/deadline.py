"""Deadline: one moment in time that all waits of an operation share."""

from __future__ import annotations

import time

from weightsync.errors import DeadlineExceededError, InvalidRequestError

MAX_WAIT_S = 7 * 86_400.0
"""No wait is longer than a week: what asks for more has the wrong unit, and timers overflow."""


def check_wait_s(name: str, seconds: float, *, may_be_0: bool = False) -> float:
    """`seconds`, if that is a time one can wait.

    Args:
        name: of the argument, for the error.
        seconds: what was given.
        may_be_0: whether 0 will do, which only looks.

    Raises:
        InvalidRequestError: it is not a number above 0, or more than a week.
    """
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not (0 < seconds <= MAX_WAIT_S or (may_be_0 and seconds == 0)):  # NaN fails all
        least = "from 0 to" if may_be_0 else "above 0 and at most"
        raise InvalidRequestError(f"{name} is a number of seconds {least} {MAX_WAIT_S:g}, not {seconds!r:.80}")
    return seconds


def in_seconds(seconds: float) -> str:
    """A time for a message, without the digits that nobody measured: what is left of a deadline has many."""
    return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"


class Deadline:
    """A moment after which an operation has failed.

    A sync has one; every wait inside it asks for what is left, so waits don't add up.

    Args:
        timeout_s: seconds from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())

    @property
    def said(self) -> str:
        """The time that it had, for a message."""
        return in_seconds(self.timeout_s)

    @property
    def expired(self) -> bool:
        """Whether nothing is left."""
        return self.remaining_s == 0.0

    def check(self, waiting_for: str, **facts: object) -> float:
        """Seconds left, above 0.

        Raises:
            DeadlineExceededError: nothing is left; says what was waited for.
        """
        left = self.remaining_s
        if left <= 0:
            raise DeadlineExceededError(f"no {waiting_for} within {self.said}", **facts)  # type: ignore[arg-type]
        return left
