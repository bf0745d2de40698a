"""ChunkTurns: the order in which a session's chunks go to vLLM."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from weightsync.errors import (
    EngineError,
    InvalidRequestError,
    TransferAbortedError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.types import Deadline, Version


class ChunkTurns:
    """A session's chunks take turns in the order of their numbers: a vLLM worker has one thread, and one that waits
    for chunk k + 1 would never be told of chunk k."""

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
