"""Recorder: the phases of a sync, as they happen. The one source of the report, the metrics and the timeline."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from weightsync.errors import InvalidRequestError
from weightsync.types import PhaseRecord

_logger = logging.getLogger(__name__)

# One offset a process: wall time that is stepped while we run can't make a phase end before it starts.
_EPOCH_OFFSET_S = time.time() - time.monotonic()

_RECORD_BYTES = 160
_TEXT_BYTES = 56

LONG_RUN_BYTES = 1 << 20
"""What a process that runs for weeks keeps of its past: some thousand records."""

_LATEST_S = 1e11  # some thousand years from now

Subscriber = Callable[[PhaseRecord], None]


def now_s() -> float:
    """Seconds since the epoch that never go backwards within a process."""
    return _EPOCH_OFFSET_S + time.monotonic()


def usable(records: Iterable[PhaseRecord]) -> tuple[PhaseRecord, ...]:
    """The records whose times may be true: an engine's nonsense must not spoil the sums and pictures of the others."""
    return tuple(each for each in records if 0 <= each.start_s <= _LATEST_S and 0 <= each.end_s <= _LATEST_S)


class Recorder:
    """Collects phase records of one process, and of the engines that report to it. Safe to use from any thread.

    Memory is bounded: beyond `max_bytes` the oldest records go, and `num_dropped` counts them.

    Args:
        track: who records, e.g. "trainer/rank-0". "a/b" is thread b of process a in a trace.
        max_bytes: how much memory the records may take until `drain` takes them, their texts included; the newest is
            always kept.

    Raises:
        InvalidRequestError: `track` is empty, or `max_bytes` is not positive.
    """

    def __init__(self, track: str, *, max_bytes: int = 8 << 20) -> None:
        if not track:
            raise InvalidRequestError("a recorder needs a track, e.g. trainer/rank-0")
        if max_bytes < 1:
            raise InvalidRequestError(f"max_bytes is at least 1, got {max_bytes}")
        self.track = track
        self._lock = threading.Lock()
        self._records: collections.deque[PhaseRecord] = collections.deque()
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._num_dropped = 0
        self._subscribers: dict[object, Subscriber] = {}
        self._reported: set[object] = set()

    @contextlib.contextmanager
    def phase(self, name: str, *, detail: str = "", track: str | None = None) -> Iterator[None]:
        """Times the body. A body that raises is recorded too; the detail then names the error's type.

        Args:
            name: e.g. "extract"; a wait is called "wait ..." and says for whom: "wait for engines".
            detail: e.g. "chunk 3".
            track: another track than the recorder's own, e.g. for a sending thread.
        """
        start = now_s()
        try:
            yield
        except BaseException as error:
            failed = f"failed: {type(error).__name__}"
            detail = f"{detail}, {failed}" if detail else failed
            raise
        finally:
            # A record is for the reader of a trace: it must not replace the error of the body, and add() never raises.
            self.add(PhaseRecord(name=name, start_s=start, end_s=now_s(), track=track or self.track, detail=detail))

    def add(self, record: PhaseRecord) -> None:
        """Takes a record made elsewhere: by a sender, or by an engine. Tells the subscribers."""
        self.extend((record,))

    def extend(self, records: Iterable[PhaseRecord]) -> None:
        """`add` for several records. Those with times that can't be are left out."""
        taken = usable(records)
        with self._lock:
            for record in taken:
                self._records.append(record)
                self._num_bytes += _size_bytes(record)
            while self._num_bytes > self._max_bytes and len(self._records) > 1:
                self._num_bytes -= _size_bytes(self._records.popleft())
                self._num_dropped += 1
            subscribers = tuple(self._subscribers.items())
        for key, callback in subscribers:
            self._tell(key, callback, taken)

    def records(self) -> tuple[PhaseRecord, ...]:
        """What is kept now, in the order it came in."""
        with self._lock:
            return tuple(self._records)

    def drain(self) -> tuple[PhaseRecord, ...]:
        """Hands out what is kept and forgets it: each record is drained once."""
        with self._lock:
            taken = tuple(self._records)
            self._records.clear()
            self._num_bytes = 0
            return taken

    @property
    def num_dropped(self) -> int:
        """How many records were forgotten because nobody drained them in time."""
        with self._lock:
            return self._num_dropped

    def subscribe(self, callback: Subscriber) -> Callable[[], None]:
        """Calls `callback` with every record from now on, in the thread that records.

        A callback that raises never breaks a sync: its first error is logged, the others are swallowed.

        Returns:
            A function that ends the subscription; calling it twice is harmless.
        """
        key = object()
        with self._lock:
            self._subscribers[key] = callback

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers.pop(key, None)

        return unsubscribe

    def _tell(self, key: object, callback: Subscriber, records: Iterable[PhaseRecord]) -> None:
        for record in records:
            try:
                callback(record)
            except Exception:
                with self._lock:
                    first = key not in self._reported
                    self._reported.add(key)
                if first:
                    _logger.warning(
                        "a subscriber of the recorder of %s failed; its further errors are not logged",
                        self.track,
                        exc_info=True,
                    )


def _size_bytes(record: PhaseRecord) -> int:
    """What a record takes, more or less: texts count as if no other record had them."""
    return _RECORD_BYTES + sum(_TEXT_BYTES + 4 * len(text) for text in (record.name, record.track, record.detail)) // 2


def phases_s(records: Iterable[PhaseRecord]) -> dict[str, float]:
    """Seconds by phase name, summed. Phases overlap, so the sum may exceed the time that passed."""
    sums: dict[str, float] = {}
    for record in records:
        sums[record.name] = sums.get(record.name, 0.0) + max(0.0, record.end_s - record.start_s)
    return sums


def pauses(records: Iterable[PhaseRecord]) -> Mapping[str, tuple[tuple[float, float], ...]]:
    """When each track was paused: from the start of a "pause" to the end of the next "resume".

    A second "pause" before a "resume" belongs to the pause that is open. A pause that was never resumed lasts
    to the end of the last record of its track. Failed attempts count like any other: time passed.

    Returns:
        For each track that has paused, (start, end) in seconds since the epoch, rising.
    """
    by_track: dict[str, list[PhaseRecord]] = {}
    for record in records:
        by_track.setdefault(record.track, []).append(record)
    found: dict[str, tuple[tuple[float, float], ...]] = {}
    for track, own in by_track.items():
        spans: list[tuple[float, float]] = []
        open_s: float | None = None
        for record in sorted(own, key=lambda record: (record.start_s, record.end_s)):
            if record.name == "pause" and open_s is None:
                open_s = record.start_s
            elif record.name == "resume" and open_s is not None:
                spans.append((open_s, max(open_s, record.end_s)))
                open_s = None
        if open_s is not None:
            spans.append((open_s, max(open_s, *(record.end_s for record in own))))
        if spans:
            found[track] = tuple(spans)
    return found


def paused_s(records: Iterable[PhaseRecord]) -> float:
    """The longest total pause of any one track, in seconds; see `pauses`."""
    totals = (sum(end - start for start, end in spans) for spans in pauses(records).values())
    return max(totals, default=0.0)
