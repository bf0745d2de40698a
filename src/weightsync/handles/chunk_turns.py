"""The one session that an engine's handle has open, and the order in which its chunks go to the engine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from weightsync.errors import (
    EngineError,
    InvalidRequestError,
    SyncInProgressError,
    TransferAbortedError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.types import Deadline, Version


class ChunkTurns:
    """A session's chunks take turns in the order of their numbers: an engine's worker has one thread, and one that
    waits for chunk k + 1 would never be told of chunk k."""

    def __init__(self, name: str, version: Version) -> None:
        self.name = name
        self.version = version
        self._changed = threading.Condition()
        self._next = 0
        self._busy = False
        self._error: WeightSyncError | None = None

    @contextlib.contextmanager
    def turn(self, seq: int, deadline: Deadline) -> Iterator[None]:
        """Waits until all chunks before `seq` were answered.

        Raises:
            TransferAbortedError: the session has failed.
            DeadlineExceededError: its turn did not come in time.
        """
        with self._changed:
            while self._busy or seq != self._next:
                self._check()
                if seq < self._next or (self._busy and seq == self._next):
                    raise InvalidRequestError(f"chunk {seq} was announced twice")
                self._changed.wait(deadline.check(f"turn of chunk {seq}"))
            self._check()
            self._busy = True
        try:
            yield
        except BaseException as error:
            self.fail(as_weightsync_error(error, EngineError, f"chunk {seq} failed"))
            raise
        finally:
            with self._changed:
                self._busy = False
                self._next = seq + 1
                self._changed.notify_all()

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
