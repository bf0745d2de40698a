"""Listeners: who hears of each change of a model, beside those that wait at its condition."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Listeners:
    """Thread-safe.

    Args:
        changed: the owner's lock, notified of each change.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._listeners: set[Callable[[], None]] = set()

    @contextlib.contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Calls `listener` after every change, from any thread, while the body runs. It has to be quick."""
        with self._changed:
            self._listeners.add(listener)
        try:
            yield
        finally:
            with self._changed:
                self._listeners.discard(listener)

    def tell(self) -> None:
        """There is a change."""
        with self._changed:
            self._changed.notify_all()
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()
