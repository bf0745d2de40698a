"""The order in which a session's chunks are taken, and the one session that an engine's handle has open."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from weightsync.errors import (
    EngineError,
    InvalidRequestError,
    SyncInProgressError,
    TransferAbortedError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.types import Deadline, Version


class Turns:
    """Chunks take turns in the order of their numbers, whatever order their calls come in: who has one thread, and
    waits for chunk k + 1, would never be told of chunk k.

    Args:
        most_ahead: how many chunks may wait for their turn; each holds a thread.
    """

    def __init__(self, *, most_ahead: int | None = None) -> None:
        self._changed = threading.Condition()
        self._most_ahead = most_ahead
        self._next = 0
        self._busy = False
        self._now: int | None = None  # whose turn it is

    @contextlib.contextmanager
    def taken(
        self,
        seq: int,
        deadline: Deadline,
        *,
        check: Callable[[], None],
        failed: Callable[[BaseException], BaseException],
    ) -> Iterator[None]:
        """The turn of chunk `seq`.

        Args:
            deadline: for the wait.
            check: raises what has ended the session; called again behind each `wake`.
            failed: told of a failure before the next chunk has its turn; what is raised of it.

        Raises:
            InvalidRequestError: it had its turn before, or is too far ahead.
            DeadlineExceededError: its turn did not come in time.
        """
        with self._changed:
            while self._busy or seq != self._next:
                check()
                if seq < self._next or seq == self._now:
                    raise InvalidRequestError(f"chunk {seq} was announced twice")
                if self._most_ahead is not None and seq > self._next + self._most_ahead:
                    raise InvalidRequestError(f"chunk {seq} was announced while {self._next} is under way")
                self._changed.wait(deadline.check(f"turn of chunk {seq}"))
            check()
            self._busy, self._now = True, seq
        try:
            yield
        except BaseException as error:
            raised = failed(error)
            if raised is error:
                raise
            raise raised from error
        finally:
            with self._changed:
                self._busy, self._now = False, None
                self._next = seq + 1
                self._changed.notify_all()

    def wake(self) -> None:
        """Whoever waits looks again at what has ended the session."""
        with self._changed:
            self._changed.notify_all()


class ChunkTurns(Turns):
    """Those of a handle's session."""

    def __init__(self, name: str, version: Version) -> None:
        super().__init__()
        self.name = name
        self.version = version
        self._error: WeightSyncError | None = None

    @contextlib.contextmanager
    def turn(self, seq: int, deadline: Deadline) -> Iterator[None]:
        """Waits until all chunks before `seq` were answered.

        Raises:
            TransferAbortedError: the session has failed.
            InvalidRequestError, DeadlineExceededError: see `Turns.taken`.
        """

        def failed(error: BaseException) -> BaseException:
            self.fail(as_weightsync_error(error, EngineError, f"chunk {seq} failed"))
            return error

        with self.taken(seq, deadline, check=self._check, failed=failed):
            yield

    def fail(self, error: WeightSyncError) -> None:
        """Ends the wait of every chunk; the first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _check(self) -> None:
        if self._error is not None:
            raise TransferAbortedError(f"the session has failed: {self._error.message}") from self._error


class OpenSession:
    """The session that is open, if any. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: ChunkTurns | None = None

    def start(self, name: str, version: Version) -> None:
        """Opens it.

        Raises:
            SyncInProgressError: another one is open.
        """
        with self._lock:
            if self._turns is not None:
                raise SyncInProgressError(f"session {self._turns.name} is open", version=str(version))
            self._turns = ChunkTurns(name, version)

    def turns(self, name: str) -> ChunkTurns:
        """Those of the session of that name.

        Raises:
            TransferAbortedError: it is not open.
        """
        with self._lock:
            if self._turns is None or self._turns.name != name:
                raise TransferAbortedError(f"session {name} is not open here: it was aborted, or has ended")
            return self._turns

    def has(self, name: str) -> bool:
        """Whether the session of that name is open."""
        with self._lock:
            return self._turns is not None and self._turns.name == name

    def end(self, error: WeightSyncError | None = None, *, name: str | None = None) -> bool:
        """Whether there was one that it ended, of that name where one is given; its chunks wait no more."""
        with self._lock:
            if self._turns is None or name not in (None, self._turns.name):
                return False
            turns, self._turns = self._turns, None
        if error is not None:
            turns.fail(error)
        return True
