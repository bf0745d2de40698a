"""Spans: who was waited for in a sync, as it goes."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator

from weightsync.types.control import SyncSpan
from weightsync.types.publication import ModelStatus

_MAX_SPANS = 10_000
_MAX_OF_A_NAME = 8


class Spans:
    """Of one sync, from when this was made. Thread-safe."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._done: list[SyncSpan] = []
        self._open: dict[int, tuple[str, str | None, float]] = {}
        self._count = 0

    @contextlib.contextmanager
    def of(self, name: str, *, who: str | None = None) -> Iterator[Callable[[str, float], None]]:
        """What the body does is one. It may call what it is given: its first so many seconds were of another name."""
        with self._lock:
            self._count += 1
            number = self._count
            self._open[number] = (name, who, time.monotonic())

        def first(other: str, seconds: float) -> None:
            with self._lock:
                _, _, started = self._open[number]
                seconds = min(seconds, time.monotonic() - started)
                if seconds > 0:
                    self._add(other, who, started, seconds)
                    self._open[number] = (name, who, started + seconds)

        try:
            yield first
        finally:
            with self._lock:
                _, _, started = self._open.pop(number)
                self._add(name, who, started, time.monotonic() - started)

    def of_status(self, who: str, status: ModelStatus) -> None:
        """What an instance says of the load that has just ended: its parts, one behind the other, up to now."""
        now = time.monotonic()
        with self._lock:
            if status.load_s:
                self._add("load", who, now - status.load_s, status.load_s)
            if status.paused_s:
                self._add("pause", who, now - status.paused_s, status.paused_s)

    def so_far(self) -> tuple[SyncSpan, ...]:
        """Those done and those that go on, until now; of each name the slowest few, the earliest first."""
        now = time.monotonic()
        with self._lock:
            running = [_span(name, who, since - self._began, now - since) for name, who, since in self._open.values()]
            found = [*self._done, *running]
        slowest = {
            name: heapq.nlargest(_MAX_OF_A_NAME, [span for span in found if span.name == name], key=_seconds)
            for name in {span.name for span in found}
        }
        return tuple(sorted(itertools.chain(*slowest.values()), key=lambda span: span.start_s))

    def _add(self, name: str, who: str | None, started: float, seconds: float) -> None:
        if len(self._done) < _MAX_SPANS:
            self._done.append(_span(name, who, started - self._began, seconds))


def _seconds(span: SyncSpan) -> float:
    return span.seconds


def _span(name: str, who: str | None, start_s: float, seconds: float) -> SyncSpan:
    return SyncSpan(name=name, who=who, start_s=start_s, seconds=max(0.0, seconds))
