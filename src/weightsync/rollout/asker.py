"""Asker: turns at agents, each agent in a thread of its own, for as long as there is something to ask it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from weightsync.errors import StateError

_AFTER_A_FAULT_S = 1.0

_logger = logging.getLogger(__name__)


class Asker:
    """Takes turns at endpoints. One that stands still keeps no other waiting. Thread-safe.

    Args:
        turn: asks one endpoint; says after how many seconds it is to be asked again, None: not before `soon`.
        name: of the threads.
    """

    def __init__(self, turn: Callable[[str], float | None], *, name: str) -> None:
        self._turn = turn
        self._name = name
        self._changed = threading.Condition()
        self._due_s: dict[str, float] = {}
        self._running: set[str] = set()
        self._closed = False

    def soon(self, endpoint: str, in_s: float = 0.0) -> None:
        """A turn at this endpoint, that many seconds from now at the latest. Returns at once.

        Raises:
            StateError: no thread can be started for it; the next call tries again.
        """
        with self._changed:
            if self._closed:
                return
            self._schedule(endpoint, in_s)
            if endpoint in self._running:
                return
            try:
                threading.Thread(target=self._run, args=(endpoint,), name=self._name, daemon=True).start()
            except RuntimeError as error:
                raise StateError(f"{endpoint} can't be asked what it has: {error}") from error
            self._running.add(endpoint)

    def close(self) -> None:
        """Ends the threads soon."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _schedule(self, endpoint: str, in_s: float) -> None:
        at_s = time.monotonic() + in_s
        self._due_s[endpoint] = min(at_s, self._due_s.get(endpoint, at_s))
        self._changed.notify_all()

    def _run(self, endpoint: str) -> None:
        while True:
            with self._changed:
                while not self._closed and endpoint in self._due_s:
                    left_s = self._due_s[endpoint] - time.monotonic()
                    if left_s <= 0:
                        break
                    self._changed.wait(left_s)
                if self._closed or endpoint not in self._due_s:
                    self._running.discard(endpoint)
                    return
                del self._due_s[endpoint]
            try:
                again_s = self._turn(endpoint)
            except Exception:  # a bug: who waits for this endpoint must not wait for ever
                _logger.exception("a turn at %s failed", endpoint)
                again_s = _AFTER_A_FAULT_S
            if again_s is not None:
                with self._changed:
                    self._schedule(endpoint, again_s)
