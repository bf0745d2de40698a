"""Deadline: one moment in time that all waits of an operation share."""

from __future__ import annotations

import time

from weightsync.errors import DeadlineExceededError


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
            raise DeadlineExceededError(f"no {waiting_for} within {self.timeout_s:g} s", **facts)  # type: ignore[arg-type]
        return left
