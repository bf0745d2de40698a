"""Several sources read at once, and how many bytes of a pull are there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION
from concurrent.futures import wait as wait_for

from weightsync.handles.fanout import in_thread

Progress = Callable[[int, int], None]
"""Told (bytes that are there, bytes in all), from several threads."""


class ByteProgress:
    """Bytes that are there, told as they come."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._total = total_bytes
        self._progress = progress
        self._lock = threading.Lock()
        self._done = 0
        self._skipped = 0

    @property
    def received(self) -> int:
        """Bytes that came, less what was there before."""
        with self._lock:
            return self._done - self._skipped

    def add(self, count: int, *, skipped: bool = False) -> None:
        with self._lock:
            before, self._done = self._done, min(self._total, self._done + count)
            done = self._done
            if skipped:
                self._skipped += done - before
        if self._progress is not None:
            self._progress(done, self._total)

    def skip(self, num_blocks: int, block_bytes: int) -> None:
        if num_blocks:
            self.add(num_blocks * block_bytes, skipped=True)


def all_at_once(reads: list[Callable[[], None]], *, cancel: Callable[[], None]) -> None:
    """Reads every source, none after another: a grant does not wait for its turn. The first failure ends all, by
    `cancel`."""
    if len(reads) <= 1:
        for read in reads:
            read()
        return
    calls = [in_thread(read, name=f"weightsync-pull-from-{number}") for number, read in enumerate(reads)]
    wait_for(calls, return_when=FIRST_EXCEPTION)
    failed = next((error for call in calls if call.done() and (error := call.exception()) is not None), None)
    if failed is not None:
        cancel()
        wait_for(calls)
        raise failed
