"""PublicationBuffer: the segments of one trainer host, of which the trainer always finds one to write."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable

from weightsync.errors import SharedMemoryError
from weightsync.memory import Lock, Reader, Segment, is_read
from weightsync.types import Deadline

_POLL_S = 0.002
_NUM_SEGMENTS = 2
_NUM_WITH_LEASE = 3
_RESET_AT = 0.75

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteTurn:
    """The right to write a segment; until `lock` is closed nobody may begin to read it."""

    segment: Segment
    lock: Lock


class PublicationBuffer:
    """Two segments, a third only while somebody holds a lease on one. One thread at a time.

    Memory is allocated when it is first needed, whole: a write never meets a full /dev/shm.

    Args:
        size_bytes: of each segment.
        guard_s: how long `acquire` waits for readers of superseded versions, at most.
        let_go: told of a segment's memory before it is given back: for whoever has pinned its pages.
    """

    def __init__(self, size_bytes: int, *, guard_s: float, let_go: Callable[[memoryview], None] | None = None) -> None:
        self.size_bytes = size_bytes
        self._guard_s = guard_s
        self._let_go = let_go
        self._segments: list[Segment] = []
        self._current: Segment | None = None

    @property
    def num_segments(self) -> int:
        """How many are allocated."""
        return len(self._segments)

    def acquire(self, reset_superseded: Callable[[], None]) -> WriteTurn | None:
        """A segment that nobody reads and that does not hold the newest version; None where there is none.

        Args:
            reset_superseded: called when most of `guard_s` is over: ends transfers of all but the newest version.

        Raises:
            SharedMemoryError: there is no room for the first two segments. Nothing was changed.
        """
        guard, patience = Deadline(self._guard_s), Deadline(_RESET_AT * self._guard_s)
        told, room = False, True
        while True:
            turn = self._free()
            if turn is None and room:
                try:
                    turn = self._grown()
                except SharedMemoryError as error:
                    if len(self._segments) < _NUM_SEGMENTS:
                        raise
                    room = False  # a receiver's lease is no reason to end the trainer's step with an error
                    _logger.warning("no third segment beside a lease: %s", error)
            if turn is not None:
                return turn
            if patience.expired and not told:
                reset_superseded()
                told = True
            elif guard.expired:
                return None
            threading.Event().wait(min(_POLL_S, guard.remaining_s))

    def written(self, turn: WriteTurn) -> None:
        """The segment holds the newest version now; from here on it may be read."""
        self._current = turn.segment
        turn.lock.close()
        self._shrink()

    def given_up(self, turn: WriteTurn) -> None:
        """Nothing was published from it."""
        turn.lock.close()

    def close(self) -> None:
        """Unlinks everything; who maps a segment keeps its memory until they let go. Idempotent."""
        while self._segments:
            self._segments.pop().close()
        self._current = None

    def _free(self) -> WriteTurn | None:
        for segment in list(self._segments):
            if segment is not self._current:
                try:
                    return WriteTurn(segment=segment, lock=Lock(segment.name, None))
                except BlockingIOError:
                    continue
                except SharedMemoryError as error:  # somebody took its name away: nobody can be given it any more
                    _logger.warning("a segment is lost, and replaced: %s", error)
                    self._segments.remove(segment)
                    if self._let_go is not None:
                        self._let_go(segment.memory)
                    segment.close()
        return None

    def _leased(self) -> bool:
        """Whether anybody maps a segment that does not hold the newest version."""
        for segment in self._segments:
            with contextlib.suppress(SharedMemoryError):
                if segment is not self._current and is_read(segment.name, Reader.MAPPED):
                    return True
        return False

    def _grown(self) -> WriteTurn | None:
        """A new segment, where one more is allowed."""
        if len(self._segments) >= (_NUM_WITH_LEASE if self._leased() else _NUM_SEGMENTS):
            return None
        segment = Segment(self.size_bytes)
        segment.pin()
        try:
            turn = WriteTurn(segment=segment, lock=Lock(segment.name, None))
        except BaseException:
            segment.close()
            raise
        self._segments.append(segment)
        return turn

    def _shrink(self) -> None:
        """Gives the third segment back when there is no lease any more. Under one it would be needed again at once."""
        if len(self._segments) <= _NUM_SEGMENTS or self._leased():
            return
        for segment in self._segments:
            if segment is not self._current:
                with contextlib.suppress(BlockingIOError, SharedMemoryError), Lock(segment.name, None):
                    if self._let_go is not None:
                        self._let_go(segment.memory)
                    segment.give_back_pages()
                    segment.close()
                    self._segments.remove(segment)
                    return
