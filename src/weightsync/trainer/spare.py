"""SpareSegment: makes a segment, and gives back those that nobody needs, in a thread: both take as long as a copy."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

from weightsync.errors import SharedMemoryError
from weightsync.memory import Segment
from weightsync.memory.folder import path_of

_TEND_EVERY_S = 0.5

_logger = logging.getLogger(__name__)


class SpareSegment:
    """At most one spare segment, made on request. What is to be given back goes before it, so both never add up.

    Args:
        still_needed: asked every half second, from the thread, from `ask` or `tend` on until it says no. It may
            `discard` and `give_back`.
        let_go: told of a segment's memory before it is given back, from the thread.

    Attributes:
        under_way: whether one is being made.
        made: the one that is there, and not taken yet.
    """

    def __init__(
        self, size_bytes: int, *, still_needed: Callable[[], bool], let_go: Callable[[memoryview], None] | None
    ) -> None:
        self._size_bytes = size_bytes
        self._still_needed = still_needed
        self._let_go = let_go
        self._changed = threading.Condition()
        self.under_way = False
        self.made: Segment | None = None
        self._error: SharedMemoryError | None = None
        self._old: list[Segment] = []
        self._busy = False
        self._tended = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Begins to make one, unless one is there or under way. Returns at once."""
        with self._changed:
            if self.made is None and not self.under_way and not self._closed:
                self.under_way = self._tended = True
                if not self._runs():
                    self.under_way, self._error = False, SharedMemoryError("no thread can be started to make a segment")

    def take(self) -> Segment | None:
        """The segment, the caller's from here on; None while there is none.

        Raises:
            SharedMemoryError: it could not be made. Said once: after that it may be asked for again.
        """
        with self._changed:
            error, self._error = self._error, None
            if error is not None:
                raise error
            made, self.made = self.made, None
            return made

    def tend(self) -> None:
        """Begins to ask whether what was taken is still needed. Returns at once."""
        with self._changed:
            self._error = None  # of a version before this one
            if not (self._tended or self._closed):  # a second call does not put the next look off
                self._tended = True
                self._tended = self._runs()

    def discard(self) -> None:
        """Gives back one that was made and not taken."""
        made = None
        with contextlib.suppress(SharedMemoryError):
            made = self.take()
        if made is not None:
            self.give_back(made)

    def give_back(self, segment: Segment) -> None:
        """Takes the segment's name away now, and frees its memory from the thread, though others still map it.

        The caller holds its write lock, or knows that nobody reads it.
        """
        with contextlib.suppress(OSError, SharedMemoryError):
            os.unlink(path_of(segment.name))
        with self._changed:
            self._old.append(segment)
            runs = self._runs()
            if not runs:
                self._old.remove(segment)
        if not runs:
            self.free(segment)

    def settle(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing is under way; whether that was within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self.under_way or self._old or self._busy), timeout_s)

    def drop(self, segment: Segment) -> None:
        """Closes a segment of which nobody knows who reads it: whoever maps it keeps its memory."""
        if self._let_go is not None:
            self._let_go(segment.memory)
        segment.close()

    def free(self, segment: Segment) -> None:
        """Frees a segment's memory, though others still map it, and closes it. Takes long; see `give_back`."""
        try:
            if self._let_go is not None:
                self._let_go(segment.memory)
            segment.give_back_pages()
        except Exception as error:
            _logger.warning("a segment's memory could not be given back: %r", error)
        segment.close()

    def close(self) -> None:
        """Waits for what is under way, and gives everything back. Idempotent."""
        with self._changed:
            self._closed, self._tended = True, False
            self._changed.notify_all()
        self.discard()
        self.settle()

    def _runs(self) -> bool:
        """Sees to it that the thread runs, and looks; whether it does. Under the lock."""
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weightsync-segments", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the process has too many
                self._thread = None
        return self._thread is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                self.under_way = self.under_way and not self._closed
                self._busy = bool(self._old or self.under_way)
                self._changed.notify_all()
                if not self._busy:
                    if not self._tended:
                        self._thread = None
                        return
                    looks = not self._changed.wait(_TEND_EVERY_S)
                else:
                    looks = None
                    old, self._old = self._old, []
            if looks is not None:
                if looks:
                    self._look()
                continue
            for segment in old:
                self.free(segment)
            if not old:
                self._make()

    def _look(self) -> None:
        """Whether there is anything left to be tended. Not under the lock, since more is done than asked."""
        with self._changed:
            self._tended = False  # who calls `tend` meanwhile has another look
        needed = True
        try:
            needed = self._still_needed()
        except Exception as error:  # it is asked again
            _logger.warning("nobody can tell whether a third segment is needed: %r", error)
        with self._changed:
            self._tended = (self._tended or needed) and not self._closed

    def _make(self) -> None:
        made: Segment | None = None
        error: SharedMemoryError | None = None
        try:
            made = pinned_segment(self._size_bytes)
        except Exception as caught:
            error = caught if isinstance(caught, SharedMemoryError) else SharedMemoryError(f"no segment: {caught!r}")
        with self._changed:
            self.under_way = False
            self._error = error
            if not self._closed:  # though its reader may have gone: `still_needed` gives it back, if it is not wanted
                self.made, made = made, None
        if made is not None:
            self.free(made)


def pinned_segment(size_bytes: int) -> Segment:
    """A new segment, of huge pages that are never swapped out where the system allows it."""
    segment = Segment(size_bytes)
    segment.pin()
    return segment
