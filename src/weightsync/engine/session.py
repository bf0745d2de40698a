"""Session and SessionTurns: one sync as an engine worker sees it, and the order of its chunks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from weightsync.codec.base import Decoder
from weightsync.codec.model_digest import ShardSum
from weightsync.errors import (
    InvalidRequestError,
    LoadError,
    ManifestMismatchError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.handles.chunk_turns import Turns
from weightsync.transfer.base import WeightTransferReceiver
from weightsync.types import AnyUpdateRequest, BeginRequest, Deadline, Manifest, PatchWeightUpdateRequest

_MAX_AHEAD = 8  # chunks that may wait for their turn; each holds a thread of the server


class Session:
    """What one sync is, here."""

    def __init__(self, request: BeginRequest, decoder: Decoder, receiver: WeightTransferReceiver) -> None:
        self.name = request.session
        self.manifest = request.manifest
        self.base = request.base
        self.deadline = Deadline(request.deadline_s)
        self.decoder = decoder
        self.receiver = receiver
        self.receiving = SessionTurns()
        self.loading = SessionTurns()
        self.staged: Manifest | None = None
        self.changes: dict[str, ShardSum] = {}  # of a patch: what it adds to the sum of each tensor
        self.proved = False  # what was staged, from the memory that will serve
        self.error: WeightSyncError | None = None
        self.ended = False
        self.closed = threading.Event()  # and nothing of it is left to be done
        self.watchdog: threading.Timer | None = None
        self._lock = threading.Lock()

    def note(self, error: WeightSyncError) -> WeightSyncError:
        """Keeps the first error, which is the cause of all others, and makes waiters look; returns it."""
        with self._lock:
            if self.error is None:
                self.error = error
            first = self.error
        self.receiving.wake()
        self.loading.wake()
        return first

    def check(self) -> None:
        """Raises what ended the session."""
        if self.error is not None:
            raise self.error
        self.deadline.check("turn in the session", version=str(self.manifest.version))

    def check_announced(self, request: AnyUpdateRequest) -> None:
        """Refuses a chunk that the manifest does not have, before anything is allocated or received."""
        if isinstance(request, PatchWeightUpdateRequest) and self.base is None:
            raise InvalidRequestError("a session without a base takes whole tensors alone")
        self.decoder.check_announced(request, self.manifest.table)

    def check_same_tensors(self, manifest: Manifest) -> None:
        """Refuses to stage another manifest than the session began with."""
        before = self.manifest
        alike = manifest.tensors == before.tensors or _tensors_of(manifest) == _tensors_of(before)
        same = manifest.version == before.version and alike
        if not same:
            raise ManifestMismatchError("stage names another manifest than begin", version=str(manifest.version))


def _tensors_of(manifest: Manifest) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {spec.name: (spec.dtype, spec.shape) for spec in manifest.tensors}


class SessionTurns(Turns):
    """Those of an engine worker's session."""

    def __init__(self) -> None:
        super().__init__(most_ahead=_MAX_AHEAD)

    @contextlib.contextmanager
    def turn(self, seq: int, session: Session) -> Iterator[None]:
        """The turn of chunk `seq`. A failure in it ends the session."""

        def failed(error: BaseException) -> BaseException:
            failure = as_weightsync_error(error, LoadError, f"chunk {seq} failed")
            session.note(failure)
            return failure

        with self.taken(seq, session.deadline, check=session.check, failed=failed):
            yield

    @contextlib.contextmanager
    def idle(self, session: Session | None, patience_s: float = 0.0) -> Iterator[None]:
        """Holds off all turns; waits for the one that is under way.

        Without a session, which would end it, the wait ends after `patience_s` in DeadlineExceededError: a loader
        that never returns must not hang its worker.
        """
        deadline = Deadline(patience_s) if session is None else session.deadline
        with self._changed:
            while self._busy:
                if session is not None:
                    session.check()
                self._changed.wait(deadline.check("return of the engine's loader"))
            self._busy = True
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
