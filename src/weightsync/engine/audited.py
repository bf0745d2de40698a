"""AuditedWorker: how an engine's worker reads its live weights again, by itself after a patch and when it is asked."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Sequence

import msgspec

from weightsync.engine.audit import Audits
from weightsync.engine.proof import Served, auditable
from weightsync.engine.session import Session
from weightsync.errors import (
    DeadlineExceededError,
    DigestMismatchError,
    StateError,
    TransferAbortedError,
    UnsupportedError,
)
from weightsync.load.base import WeightLoader
from weightsync.observe import Recorder
from weightsync.types import EngineReply, Manifest, in_seconds
from weightsync.types.deadline import MAX_WAIT_S


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

    @property
    def served(self) -> Manifest | None:
        """What was committed last; None before the first commit."""
        served = self._served
        return None if served is None else served.manifest

    @property
    def is_patched(self) -> bool:
        """Whether the last commit wrote elements of what was live before, and nobody has settled that yet."""
        return self._undoable is not None

    def audit(self, name: str) -> bool:
        """The patch that session `name` committed stays; reads all live weights and compares them with its digest.
        Where a loader `takes_patch` without a proof, it reads what the next patch is made on.

        It is done on one core at low priority, and ends by itself: as soon as everything was read. The next commit
        interrupts it, and the audit after that, of a patch, goes on where it was.
        Returns at once where something else is served or loaded by now, and before live weights are written.

        Returns:
            Whether all of it was read, and right.

        Raises:
            DigestMismatchError: they are not what was published: this worker refuses to serve until a full load.
        """
        with self._lock:
            served = self._served
            if self._session is not None or served is None or served.session != name:
                return False
            if not served.proved and not self.loader.takes_patch:
                return False
            if self._audits.asked_for(served) is not None:  # `verify` reads all of it
                self._undoable = None
                self.loader.settle()
                return False
            read = self._reading(served)
        with contextlib.suppress(TransferAbortedError):
            read()
            return True
        return False

    def settle(self, name: str) -> None:
        """The patch that session `name` committed stays, and what would undo it is let go of; nothing is read. Does
        nothing where something else is served or loaded by now."""
        with self._lock:
            if self._session is None and self._served is not None and self._served.session == name:
                self._undoable = None
                self.loader.settle()

    def verify(self, timeout_s: float = MAX_WAIT_S) -> EngineReply:
        """Reads all live weights now, as `audit` does, and says what they are; see `AuditRequest`. Those who ask while
        it reads wait for the same reading. The version and the digest that it tells are those that it has read.

        Args:
            timeout_s: how long to wait for the reading, which goes on beyond that.

        Raises:
            DeadlineExceededError: it is not over by then. Others may ask, and wait for the same one.
            StateError: a version is being loaded, or has come while it read. It was not found out.
        """
        with self._lock:
            if (session := self._session) is not None:
                raise StateError(
                    f"{session.manifest.version} is being loaded: ask again when it is served, or given up, in "
                    f"{session.deadline.remaining_s:.0f} s at the latest"
                )
            try:
                served = auditable(self._served, self.loader)
                reading = self._audits.asked_for(served)
                if reading is None:
                    self._audits.pause()
                    self._audits.forget()  # all of it is read now
                    reading = self._audits.ask(served, self._reading(served))
            except UnsupportedError as error:
                return msgspec.structs.replace(self.describe(), digests_equal=None, unprovable=error.message)
        found: str | None = None
        try:
            reading.result(timeout_s)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"live weights were not read within {in_seconds(timeout_s)}",
                version=str(served.version),
                state_left="it goes on",
            ) from error
        except DigestMismatchError as error:
            found = f"{type(error).__name__}: {error}"
        except TransferAbortedError as error:
            raise StateError("a version came while live weights were read: ask again") from error
        return msgspec.structs.replace(
            self.describe(),
            version=served.version,
            model_digest=served.digest,
            digests_equal=found is None,
            unprovable=None,
            unhealthy=found,
        )

    def _reading(self, served: Served) -> Callable[[], None]:
        """Under the lock: what reads all that is live, outside of it. It raises as `Audits.judge`."""
        self._undoable = None
        self.loader.settle()
        read = self._audits.reading(self.loader, served.manifest, lock=self._lock, before=self._use_device)

        def timed() -> None:
            with self.recorder.phase("audit", detail=str(served.version)):
                read()

        return timed


def found_together(replies: Sequence[EngineReply], own_reply: EngineReply) -> EngineReply:
    """What the workers of one engine have found: wrong where one did, unknown where one could not tell.

    Args:
        replies: of `AuditedWorker.verify`, of each.
        own_reply: what the engine says of itself.
    """
    wrong = "; ".join(sorted({str(reply.unhealthy) for reply in replies if reply.digests_equal is False}))
    why = "; ".join(sorted({reply.unprovable for reply in replies if reply.unprovable}))
    if not wrong and not why and len({(reply.version, reply.model_digest) for reply in replies}) > 1:
        why = "a version came while live weights were read: ask again"
    return msgspec.structs.replace(
        own_reply,
        version=replies[0].version,
        model_digest=replies[0].model_digest,
        digests_equal=False if wrong else None if why else True,
        unprovable=why or None,
        unhealthy=wrong or None,
    )
