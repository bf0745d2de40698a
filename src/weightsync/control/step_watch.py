"""StepWatch: the training step that rollout waits for, since when, and when it is given up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from weightsync.control.alarm import Alarm
from weightsync.control.state import ModelState, Policy, awaits_step

Awaited: TypeAlias = tuple[str | None, int, int | None]
"""Run, newest version, and the version that is waited for. Another step is another object, though it is equal."""


class StepWatch:
    """Of one model. Not thread-safe: its model's lock.

    Args:
        timeout_s: how long a step may be waited for; None: for ever.
        late: called in a thread of its own, without the lock, when one has been waited for so long.
        clock: seconds; never goes back.

    Attributes:
        awaited: the step that is waited for; None: rollout waits for none.
        lost: in words, that one was given up, while nothing was told of since.
    """

    def __init__(
        self, timeout_s: float | None, late: Callable[[Awaited], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.awaited: Awaited | None = None
        self.lost: str | None = None
        self._timeout_s = timeout_s
        self._late = late
        self._clock = clock
        self._alarm = Alarm()
        self._is_timed = False
        self._since_s = 0.0

    def look(self, state: ModelState, policy: Policy) -> None:
        """The state has changed."""
        now_s = self._clock()
        awaited = (state.run_id, state.train_version, state.due) if awaits_step(state, policy) else None
        if awaited != self.awaited:
            self._alarm.cancel()
            self.awaited, self._is_timed, self._since_s = awaited, False, now_s
        step = self.awaited
        if step is None or self._is_timed or self._timeout_s is None:
            return
        try:
            self._alarm.set(max(0.0, self._timeout_s - (now_s - self._since_s)), lambda: self._late(step))
            self._is_timed = True
        except RuntimeError:  # there is no thread to wait in: it is tried again at the next change
            pass

    def lose(self) -> str:
        """The step is given up; why, in words."""
        self.lost = f"no version came within {self._timeout_s:g} s"
        return self.lost

    @property
    def waited_s(self) -> float | None:
        """For how long a step has been waited for; None: none is."""
        return None if self.awaited is None else self._clock() - self._since_s

    def close(self) -> None:
        """Nothing is called any more."""
        self._alarm.cancel()
