"""AuditedWorker: how an engine's worker reads its live weights again, by itself after a patch and when it is asked."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable

import msgspec

from weightsync.engine.audit import Audits
from weightsync.engine.proof import Served, auditable
from weightsync.engine.session import Session
from weightsync.errors import DigestMismatchError, StateError, TransferAbortedError, UnsupportedError
from weightsync.load.base import WeightLoader
from weightsync.observe import Recorder
from weightsync.types import EngineReply


class AuditedWorker(abc.ABC):
    """What `EngineWorker` has besides its sessions."""

    loader: WeightLoader
    recorder: Recorder
    _lock: threading.RLock
    _session: Session | None
    _served: Served | None
    _undoable: tuple[Session, Served | None] | None
    _audits: Audits

    @abc.abstractmethod
    def describe(self) -> EngineReply: ...

    @abc.abstractmethod
    def _use_device(self) -> None: ...

    def audit(self, name: str) -> None:
        """The patch that session `name` committed stays; reads all live weights and compares them with its digest.

        It is done on one core at low priority, and ends by itself: as soon as everything was read. The next commit
        interrupts it, and the audit after that, of a patch, goes on where it was.
        Returns at once where something else is served or loaded by now, and before live weights are written.

        Raises:
            DigestMismatchError: they are not what was published: this worker refuses to serve until a full load.
        """
        with self._lock:
            served = self._served
            if self._session is not None or served is None or served.session != name or not served.proved:
                return
            if self._audits.asked.locked():  # `verify` reads all of it
                self._undoable = None
                self.loader.settle()
                return
            read = self._reading(served)
        with contextlib.suppress(TransferAbortedError):
            read()

    def verify(self) -> EngineReply:
        """Reads all live weights now, as `audit` does, and says what they are; see `AuditRequest`.

        Raises:
            StateError: a version is being loaded, or has come while it read. It was not found out.
        """
        with self._audits.asked:
            with self._lock:
                if self._session is not None:
                    raise StateError("a version is being loaded: ask again when it is served")
                self._audits.pause()
                self._audits.forget()  # all of it is read now
                try:
                    read = self._reading(auditable(self._served))
                except UnsupportedError as error:
                    return msgspec.structs.replace(self.describe(), digests_equal=None, unprovable=error.message)
            equal = True
            try:
                read()
            except DigestMismatchError:
                equal = False
            except TransferAbortedError as error:
                raise StateError("a version came while live weights were read: ask again") from error
        return msgspec.structs.replace(self.describe(), digests_equal=equal)

    def _reading(self, served: Served) -> Callable[[], None]:
        """Under the lock: what reads all that is live, outside of it. It raises as `Audits.judge`."""
        self._undoable = None
        self.loader.settle()
        read = self._audits.reading(self.loader, served.manifest, lock=self._lock, before=self._use_device)

        def timed() -> None:
            with self.recorder.phase("audit", detail=str(served.version)):
                read()

        return timed
