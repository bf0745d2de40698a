"""Repeating: a store whose passing troubles (no answer, 429, 5xx) are tried again, with growing pauses and jitter.

A refused credential is not: nobody storms a store that says no. Nor is a conflict, which is an answer.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from weightsync.errors import StoreUnavailableError
from weightsync.objects.base import Data, Found, Listed, ObjectStore
from weightsync.types import Deadline

_FIRST_S, _LONGEST_S = 0.1, 5.0

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class Repeating:
    """See `ObjectStore`.

    Args:
        first_s, longest_s: pauses between tries: each is twice the one before, and a random part of it.
    """

    def __init__(self, store: ObjectStore, *, first_s: float = _FIRST_S, longest_s: float = _LONGEST_S) -> None:
        self.url = store.url
        self._store = store
        self._first_s = first_s
        self._longest_s = longest_s
        self._closed = threading.Event()
        self.num_repeated = 0

    def get(self, key: str, *, deadline: Deadline, unless: str | None = None) -> Found | None:
        return self._until(deadline, lambda: self._store.get(key, deadline=deadline, unless=unless))

    def get_range(self, key: str, start: int, into: memoryview, *, deadline: Deadline) -> None:
        self._until(deadline, lambda: self._store.get_range(key, start, into, deadline=deadline))

    def put(self, key: str, data: Data, *, deadline: Deadline, replaces: str | None) -> str:
        """See `ObjectStore.put`. An answer that was lost may come back as a conflict with one's own object: who puts
        looks."""
        return self._until(deadline, lambda: self._store.put(key, data, deadline=deadline, replaces=replaces))

    def put_large(self, key: str, data: Data, *, deadline: Deadline) -> None:
        self._until(deadline, lambda: self._store.put_large(key, data, deadline=deadline))

    def delete(self, keys: Iterable[str], *, deadline: Deadline) -> None:
        wanted = tuple(keys)
        self._until(deadline, lambda: self._store.delete(wanted, deadline=deadline))

    def list_under(self, prefix: str, *, deadline: Deadline) -> Iterator[Listed]:
        yield from self._until(deadline, lambda: list(self._store.list_under(prefix, deadline=deadline)))

    def close(self) -> None:
        """Ends pauses between tries: what is under way fails. Idempotent."""
        self._closed.set()

    def _until(self, deadline: Deadline, call: Callable[[], _T]) -> _T:
        pause_s = self._first_s
        while True:
            try:
                return call()
            except StoreUnavailableError as error:
                wait_s = pause_s * (0.5 + random.random())
                if self._closed.is_set() or wait_s >= deadline.remaining_s:
                    raise
                self.num_repeated += 1
                _logger.debug("tried again in %.2f s: %s", wait_s, error)
                self._closed.wait(wait_s)
                pause_s = min(2 * pause_s, self._longest_s)
                if deadline.expired:  # the pause took longer than it was to
                    raise
