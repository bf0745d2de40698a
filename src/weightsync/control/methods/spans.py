"""Spans: who was waited for in a sync, as it goes."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Iterator

from weightsync.types.control import SyncSpan
from weightsync.types.service import ModelStatus

_MAX_SPANS = 10_000
_MAX_OF_A_NAME = 8


class Spans:
    """Of one sync, from when this was made. Thread-safe."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._done: list[SyncSpan] = []
        self._open: set[OpenSpan] = set()

    @contextlib.contextmanager
    def of(self, name: str, *, who: str | None = None) -> Iterator[OpenSpan]:
        """What the body does is one, of which it may tell more by what it is given."""
        span = OpenSpan(self, name, who)
        with self._lock:
            self._open.add(span)
        try:
            yield span
        finally:
            with self._lock:
                self._open.discard(span)
                self._add(name, who, span.started, time.monotonic() - span.started, span.nbytes)

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
            running = [
                _span(each.name, each.who, each.started - self._began, now - each.started) for each in self._open
            ]
            found = [*self._done, *running]
        slowest = {
            name: heapq.nlargest(_MAX_OF_A_NAME, [span for span in found if span.name == name], key=_seconds)
            for name in {span.name for span in found}
        }
        return tuple(sorted(itertools.chain(*slowest.values()), key=lambda span: span.start_s))

    def split(self, span: OpenSpan, other: str, seconds: float) -> None:
        """See `OpenSpan.first`."""
        with self._lock:
            seconds = min(seconds, time.monotonic() - span.started)
            if seconds > 0:
                self._add(other, span.who, span.started, seconds)
                span.started += seconds

    def _add(self, name: str, who: str | None, started: float, seconds: float, nbytes: int = 0) -> None:
        if len(self._done) < _MAX_SPANS:
            self._done.append(_span(name, who, started - self._began, seconds, nbytes))


class OpenSpan:
    """A span that goes on."""

    def __init__(self, spans: Spans, name: str, who: str | None) -> None:
        self._spans = spans
        self.name = name
        self.who = who
        self.started = time.monotonic()
        self.nbytes = 0

    def first(self, other: str, seconds: float) -> None:
        """Its first so many seconds were of another name."""
        self._spans.split(self, other, seconds)

    def moved(self, nbytes: int) -> None:
        """So much came in it."""
        self.nbytes = nbytes


def _seconds(span: SyncSpan) -> float:
    return span.seconds


def _span(name: str, who: str | None, start_s: float, seconds: float, nbytes: int = 0) -> SyncSpan:
    return SyncSpan(name=name, who=who, start_s=start_s, seconds=max(0.0, seconds), nbytes=nbytes)
