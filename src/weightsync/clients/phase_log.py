"""PhaseLog: what a handle times for its engine, until the next reply carries it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from weightsync.observe import now_s
from weightsync.types import PhaseRecord


class PhaseLog:
    """Thread-safe.

    Args:
        track: the engine's name.
    """

    def __init__(self, track: str) -> None:
        self._track = track
        self._lock = threading.Lock()
        self._records: list[PhaseRecord] = []

    @contextlib.contextmanager
    def phase(self, name: str, detail: str = "") -> Iterator[None]:
        """Times the body, also where it raises."""
        start_s = now_s()
        try:
            yield
        finally:
            record = PhaseRecord(name=name, start_s=start_s, end_s=now_s(), track=self._track, detail=detail)
            with self._lock:
                self._records.append(record)

    def drain(self) -> tuple[PhaseRecord, ...]:
        """Everything since the last drain."""
        with self._lock:
            records, self._records = tuple(self._records), []
        return records
