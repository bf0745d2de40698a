"""PublicationBuffer: the segments of one trainer host, of which the trainer finds one to write whoever reads."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Collection

from weightsync.errors import SharedMemoryError
from weightsync.memory import Lock, Reader, Segment, is_read
from weightsync.trainer.spare import SpareSegment, pinned_segment
from weightsync.types import Deadline
from weightsync.types.scarcity import is_passing

_POLL_S = 0.002
_NUM_SEGMENTS = 2
_NUM_BESIDE_READERS = 3
_RESET_AT = 0.75
_LOOKS_UNTIL_SHRINK = 4
"""Two seconds: a receiver that is slower than a step would need the third segment again at once."""

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteTurn:
    """The right to write a segment; until `lock` is closed nobody may begin to read it."""

    segment: Segment
    lock: Lock


class PublicationBuffer:
    """Two segments, a third only while somebody still reads a version that is not the newest. One thread at a time.

    Memory is allocated when it is first needed, whole: a write never meets a full /dev/shm. The first two are made by
    `acquire` itself, since nothing can be published without them; the third, and whatever is given back, is a
    background thread's work (`SpareSegment`). The thread looks within half a second after each version whether a
    superseded one is still read, by a lease or by a transfer: the third segment is there, then, before the next step
    wants it.

    Args:
        size_bytes: of each segment.
        beside: the kinds of readers beside which there may be a third segment.
        guard_s: how long `acquire` waits for readers of superseded versions, or for the third segment, at most.
        let_go: told of a segment's memory before it is given back, for whoever has pinned its pages; from a thread.

    Attributes:
        why_not: in words, why the last `acquire` that gave nothing did so.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        guard_s: float,
        beside: Collection[Reader] = tuple(Reader),
        let_go: Callable[[memoryview], None] | None = None,
    ) -> None:
        self.size_bytes = size_bytes
        self._beside = beside
        self._guard_s = guard_s
        self._segments: list[Segment] = []
        self._current: Segment | None = None
        self._lock = threading.RLock()  # of the list of segments, between the trainer's thread and the spare's
        self._spare = SpareSegment(size_bytes, still_needed=self._tend, let_go=let_go)
        self.why_not = ""
        self._num_idle_looks = 0
        self._has_asked = False

    @property
    def is_lost(self) -> bool:
        """Whether somebody took the newest version's segment away: nobody can be given it any more."""
        return self._current is not None and self._current.is_lost

    def acquire(self, reset_superseded: Callable[[], None]) -> WriteTurn | None:
        """A segment that nobody reads and that does not hold the newest version; None where there is none.

        Args:
            reset_superseded: called when most of `guard_s` is over: ends transfers of all but the newest version.

        Raises:
            SharedMemoryError: there is no room for the first two segments. Nothing was changed.
        """
        guard, patience = Deadline(self._guard_s), Deadline(_RESET_AT * self._guard_s)
        has_reset = False
        failure: SharedMemoryError | None = None
        while True:
            turn = self._free()
            if turn is None and len(self._segments) < _NUM_SEGMENTS:
                turn = self._grown(pinned_segment(self.size_bytes))
            if turn is None and failure is None:
                try:
                    turn = self._third()
                except SharedMemoryError as error:  # a receiver is no reason to end the trainer's step
                    failure = error
                    _logger.warning("no third segment beside a reader: %s", error)
            if turn is not None:
                return turn
            if patience.expired and not has_reset:
                reset_superseded()
                has_reset = True
            elif guard.expired:
                self.why_not = self._said_of(failure)
                return None
            threading.Event().wait(min(_POLL_S, guard.remaining_s))

    def written(self, turn: WriteTurn) -> None:
        """The segment holds the newest version now; from here on it may be read."""
        with self._lock:
            self._current = turn.segment
            self._has_asked = False
            turn.lock.close()
        self._spare.tend()

    def given_up(self, turn: WriteTurn) -> None:
        """Nothing was published from it."""
        turn.lock.close()

    def close(self) -> None:
        """Unlinks everything, when a segment that is being made is ready. Who has a lease keeps its memory, who only
        maps it does not. Idempotent.
        """
        self._spare.close()
        with self._lock:
            segments, self._segments, self._current = self._segments, [], None
        for segment in segments:
            try:
                lock = Lock(segment.name, None)
            except (BlockingIOError, SharedMemoryError):
                segment.close()
            else:
                with lock:
                    self._spare.free(segment)

    def _said_of(self, failure: SharedMemoryError | None) -> str:
        """Why there was no segment."""
        third = ""
        if failure is not None:
            third = f"; no third segment: {failure}"
        elif self._spare.under_way:
            third = "; a third one is being made, and will be there for a later version"
        return (
            f"every segment was still read {self._guard_s:g} s after it was wanted: leases or transfers of receivers "
            f"that stand still ({', '.join(self._readers())}){third}"
        )

    def _readers(self) -> list[str]:
        """What each segment but the newest is read for."""
        found = []
        for segment in self._segments:
            if segment is not self._current:
                with contextlib.suppress(SharedMemoryError):
                    kinds = [kind.name.lower() for kind in Reader if is_read(segment.name, kind)]
                    found.append(f"{segment.name}: {' and '.join(kinds) or 'nobody'}")
        return found

    def _free(self) -> WriteTurn | None:
        with self._lock:
            for segment in [each for each in self._segments if each is not self._current]:
                try:
                    return WriteTurn(segment=segment, lock=Lock(segment.name, None))
                except BlockingIOError:
                    continue
                except SharedMemoryError as error:
                    if is_passing(error):  # nobody knows its readers just now
                        continue
                    # somebody took its name away: nobody can be given it any more, and who has it may read on
                    _logger.warning("a segment is lost, and replaced: %s", error)
                    self._segments.remove(segment)
                    self._spare.drop(segment)
        return None

    def _held(self) -> bool:
        """Whether one that does not hold the newest version is read, so that there may be a third. From any thread."""
        for segment in list(self._segments):
            with contextlib.suppress(SharedMemoryError):
                if segment is not self._current and any(is_read(segment.name, kind) for kind in self._beside):
                    return True
        return False

    def _third(self) -> WriteTurn | None:
        """The third segment, where one is allowed and ready; begins to make it where there is none.

        Raises:
            SharedMemoryError: it could not be made.
        """
        with self._lock:  # all of it: to the spare's thread one is taken and listed at once
            if len(self._segments) >= _NUM_BESIDE_READERS or not self._held():
                return None
            spare = self._spare.take()
            if spare is None:
                self._spare.ask()
                return None
            return self._grown(spare)

    def _grown(self, segment: Segment) -> WriteTurn:
        try:
            turn = WriteTurn(segment=segment, lock=Lock(segment.name, None))
        except BaseException:
            segment.close()
            raise
        with self._lock:
            self._segments.append(segment)
        return turn

    def _tend(self) -> bool:
        """Begins to make the third segment where the next version will want it, and gives it back when no reader needs
        it any more; whether it is to be looked again. From the spare's thread.
        """
        with self._lock:
            held, few = self._held(), len(self._segments) < _NUM_BESIDE_READERS
            self._num_idle_looks = 0 if held else self._num_idle_looks + 1
            if held and few and not self._has_asked:  # once a version: where there is no room, trying takes as long
                self._has_asked = True
                self._spare.ask()
            if self._num_idle_looks >= _LOOKS_UNTIL_SHRINK:
                self._num_idle_looks = 0
                self._shrink()
            return held or not few or self._spare.made is not None

    def _shrink(self) -> None:
        """Gives the third segment back when nobody needs it. Beside a reader it would be wanted again at once."""
        if self._held():
            return
        self._spare.discard()
        for segment in self._segments if len(self._segments) > _NUM_SEGMENTS else ():
            if segment is not self._current:
                with contextlib.suppress(BlockingIOError, SharedMemoryError), Lock(segment.name, None):
                    self._segments.remove(segment)
                    self._spare.give_back(segment)
                    return
