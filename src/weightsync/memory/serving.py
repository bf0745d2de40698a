"""ServingLease: until when the engines of a host may answer. One page of memory that all of them map.

A service that is part of a fleet writes it, engines read it before they answer. Nobody has to be told that a lease is
over: a service that was stopped, cut off or killed writes no more, and its engines see by the host's clock that they
may not answer. What two processes compare is `CLOCK_BOOTTIME`, which goes on while a machine sleeps.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
import tempfile
import threading
import time
from types import TracebackType

from weightsync.errors import SharedMemoryError

_MAGIC = b"wsyncls1"
_UNTIL, _HOLD, _SEEN = 1, 2, 3  # doubles behind the magic: end of the lease, end of a hold, see `renew`; 0: none
_BOOT = slice(32, 40)
_SIZE = 40


def boot_s() -> float:
    """Seconds of the clock that a lease is measured by; the same in every process of the host."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _boot_mark() -> bytes:
    """Names this boot of the host: the clock of another one says nothing."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return hashlib.sha256(file.read()).digest()[:8]
    except OSError:
        return bytes(8)


class ServingLease:
    """The writer's side. Thread-safe. The file stays when the writer dies: engines refuse then, when it has run out.

    Args:
        path: of the file; made, and lent to nobody, where it is not there. One that is there is taken over as it is.

    Raises:
        SharedMemoryError: it can't be made, or is something else.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            if not os.path.exists(path):
                _make(path)
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._file)
                raise SharedMemoryError(
                    f"another process writes the lease file {path}: each service has one of its own, and one that was "
                    "stopped has to end first"
                ) from None
            try:
                self._map = _mapped(path, write=True)
            except BaseException:
                os.close(self._file)
                raise
        except OSError as error:
            raise SharedMemoryError(f"the lease file {path} can't be made: {error}") from error
        self._words = memoryview(self._map).cast("d")
        if self._map[_BOOT] != (mark := _boot_mark()):
            for word in (_UNTIL, _HOLD, _SEEN):
                self._words[word] = 0.0
            self._map[_BOOT] = mark

    def renew(self, until_s: float, *, seen_s: float | None = None) -> None:
        """Engines may answer until then, by `boot_s`. A lease is never cut short by this, nor a hold ended.

        Args:
            until_s: until when.
            seen_s: when every engine was last seen to serve what this is lent for; now, where not given. An engine that
                has started since then refuses: it has what it was started with.
        """
        with self._lock:
            if not self._map.closed:
                self._words[_SEEN] = max(self._words[_SEEN], boot_s() if seen_s is None else seen_s)
                self._words[_UNTIL] = max(self._words[_UNTIL], until_s)

    def revoke(self) -> None:
        """Engines refuse from now on."""
        self._write(_UNTIL, 0.0)

    def hold(self, until_s: float) -> None:
        """Whoever wants to answer waits from now on, until `lift`; from `until_s` on it is refused."""
        self._write(_HOLD, until_s)

    def lift(self) -> None:
        """Ends a hold."""
        self._write(_HOLD, 0.0)

    @property
    def left_s(self) -> float:
        """Seconds that the lease has."""
        with self._lock:
            return 0.0 if self._map.closed else max(0.0, self._words[_UNTIL] - boot_s())

    @property
    def torn(self) -> bool:
        """Whether a hold was not lifted: whoever wrote it before ended in the middle of a set."""
        return self._words[_HOLD] != 0.0

    def close(self) -> None:
        """Revokes it. Idempotent."""
        self.revoke()
        self.release()

    def release(self) -> None:
        """Writes it no more; what is lent stays lent until it is over. Idempotent."""
        with self._lock:
            if not self._map.closed:
                self._words.release()
                self._map.close()
                os.close(self._file)

    def remove(self) -> None:
        """Closes it and deletes the file: engines that map it refuse for ever. Idempotent."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def _write(self, word: int, seconds: float) -> None:
        with self._lock:
            if not self._map.closed:  # its engines refuse already
                self._words[word] = seconds

    def __enter__(self) -> ServingLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class LeaseReader:
    """An engine's side. Thread-safe; one look costs a microsecond.

    Args:
        path: of the file; it has to be there.

    Raises:
        SharedMemoryError: it is not, or is something else.
    """

    def __init__(self, path: str) -> None:
        try:
            self._map = _mapped(path, write=False)
        except OSError as error:
            raise SharedMemoryError(f"the lease file {path} can't be read: {error}; start its service first") from error
        self._words = memoryview(self._map).cast("d")
        self._started_s = boot_s()
        self._mark = _boot_mark()

    def refusal(self) -> str | None:
        """Why nothing may be answered; None where it may, or a hold has to be waited for."""
        now = boot_s()
        until, hold = self._words[_UNTIL], self._words[_HOLD]
        if until <= now or self._map[_BOOT] != self._mark:
            return "it holds no lease of its fleet, and may be behind: it answers again when it has caught up"
        if self._words[_SEEN] < self._started_s:
            return "it has started anew, and was given no weights since: it answers when its service has seen to it"
        if hold and hold <= now:
            return "a set of models was not committed as a whole: it answers again when it has caught up"
        return None

    @property
    def held(self) -> bool:
        """Whether a set is being committed: whoever wants to answer waits."""
        return self._words[_HOLD] > boot_s()


def _make(path: str) -> None:
    folder, name = os.path.split(os.path.abspath(path))
    number, aside = tempfile.mkstemp(prefix=f".{name}-", dir=folder)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(_MAGIC + struct.pack("=ddd", 0.0, 0.0, 0.0) + _boot_mark())
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
        raise


def _mapped(path: str, *, write: bool) -> mmap.mmap:
    with open(path, "r+b" if write else "rb") as file:
        if os.fstat(file.fileno()).st_size != _SIZE or file.read(len(_MAGIC)) != _MAGIC:
            raise SharedMemoryError(f"{path} is not a lease file of this release")
        return mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)
