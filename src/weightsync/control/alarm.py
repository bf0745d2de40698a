"""Alarm: one call to come, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Alarm:
    """The last call that was set. Thread-safe. A call that is about to run when it is replaced may run still: it looks
    whether it is wanted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def set(self, seconds: float, call: Callable[[], None]) -> None:
        """Calls it after so many seconds, in place of what was set before.

        Raises:
            RuntimeError: there is no thread to wait in. Nothing is set then.
        """
        timer = threading.Timer(seconds, lambda: self._ring(timer, call))
        timer.daemon = True
        self._replace(timer)
        try:
            timer.start()
        except RuntimeError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Nothing is called any more. Idempotent."""
        self._replace(None)

    def _replace(self, timer: threading.Timer | None) -> None:
        with self._lock:
            before, self._timer = self._timer, timer
        if before is not None:
            before.cancel()

    def _ring(self, timer: threading.Timer, call: Callable[[], None]) -> None:
        with self._lock:
            if self._timer is not timer:
                return
            self._timer = None
        call()
