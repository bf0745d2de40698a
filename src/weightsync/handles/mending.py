"""Mending: what an abort could not end, for want of an answer, is ended later, in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from weightsync.errors import DeadlineExceededError, WeightSyncError
from weightsync.handles.fanout import in_thread
from weightsync.types import AbortRequest, Deadline

_FIRST_S = 0.5
_ATTEMPT_S = 20.0
_LAST_S = 10.0

_logger = logging.getLogger(__name__)

End = Callable[[AbortRequest, Deadline, threading.Event | None], None]
"""Ends a session's pause; where the event is set meanwhile, it leaves the pause to whoever has set it."""


class Mending:
    """Of one handle. Thread-safe.

    Args:
        engine_id: for messages.
        end: makes one attempt.
    """

    def __init__(self, engine_id: str, end: End) -> None:
        self._engine_id = engine_id
        self._end = end
        self._stop = threading.Event()
        self._ending = threading.Lock()  # held while an earlier session's pause is ended
        self._closed = False

    def stop(self) -> None:
        """No further attempt begins, and one that is under way ends no pause."""
        self._stop.set()

    def begin(self, request: AbortRequest, until: Deadline) -> None:
        """Tries again and again, until it is done, or stopped. Behind `close` it does nothing."""
        if self._closed:
            return
        self._stop = stop = threading.Event()
        in_thread(lambda: self._mend(request, stop, until), name=f"weightsync-mend-{self._engine_id}")

    def close(self, request: AbortRequest | None) -> None:
        """A last attempt, in this thread, where there is a pause to be ended."""
        self._closed = True
        self.stop()
        if request is None:
            return
        deadline = Deadline(_LAST_S)
        try:
            with self.none(_LAST_S):
                self._end(request, deadline, None)
        except WeightSyncError as error:
            _logger.warning("engine %s may stand still: a pause of ours was not ended: %s", self._engine_id, error)

    @contextlib.contextmanager
    def none(self, wait_s: float) -> Iterator[None]:
        """While the body runs, nothing of an earlier session is ended; waits for that so long."""
        if not self._ending.acquire(timeout=wait_s):
            raise DeadlineExceededError(f"an earlier session was not ended in {wait_s:g} s", state_left="as it was")
        try:
            yield
        finally:
            self._ending.release()

    def _mend(self, request: AbortRequest, stop: threading.Event, until: Deadline) -> None:
        wait_s = _FIRST_S
        while not until.expired and not stop.wait(wait_s):
            try:
                with self._ending:
                    self._end(request, Deadline(_ATTEMPT_S), stop)
            except WeightSyncError as error:
                _logger.warning("engine %s: a pause of ours could not be ended yet: %s", self._engine_id, error)
            else:
                return
            wait_s = min(2 * wait_s, _ATTEMPT_S)
