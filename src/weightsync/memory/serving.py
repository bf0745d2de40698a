"""ServingLease: until when the engines of a host may answer. Forty bytes of a file that all of them read.

A service that is part of a fleet writes it, engines read it before they answer. Nobody has to be told that a lease is
over: a service that was stopped, cut off or killed writes no more, and its engines see by the host's clock that they
may not answer. What two processes compare is `CLOCK_BOOTTIME`, which goes on while a machine sleeps.

The file is read and written, not mapped: who cuts off a mapped file kills everybody who looks into it. Only a file of
the right owner is believed (`memory.owned`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import struct
import tempfile
import threading
import time
import weakref

from weightsync.errors import SharedMemoryError
from weightsync.memory.owned import open_believed
from weightsync.types.process import closed_in_children, of_one_process

_MAGIC = b"wsyncls1"
_FORM = struct.Struct("=8sddd8s")
"""Magic; end of the lease, end of a hold, when its engines were seen last (see `renew`), 0: none; the boot's mark."""
_UNTIL, _HOLD, _SEEN, _BOOT = 8, 16, 24, 32
"""First bytes of what follows the magic."""
_WORD = struct.Struct("=d")
_MODE = 0o644
"""Engines may run as another user than root's service; there is no secret in it."""

_logger = logging.getLogger(__name__)


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


@of_one_process
class ServingLease:
    """The writer's side. Thread-safe. The file stays when the writer dies: engines refuse then, when it has run out.

    Args:
        path: of the file; made, and lent to nobody, where it is not there or was cut off. One that is there is taken
            over as it is where it is this user's own. Engines of another user can read it only where its writer is
            root.

    Raises:
        SharedMemoryError: it can't be made, is another user's, may be written by others, is a link or something else.
            What lies there was left as it was.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._closed = False
        try:
            if not os.path.lexists(path):
                _make(path)
            self._file = open_believed(path, os.O_RDWR)
            self._facts = os.fstat(self._file)
            try:
                self._take_over()
            except BaseException:
                self._closed = True
                os.close(self._file)
                raise
        except OSError as error:
            folder = os.path.dirname(path) or "."
            why = str(error) if os.path.isdir(folder) else f"its folder {folder} does not exist"
            raise SharedMemoryError(f"the lease file {path} can't be made: {why}") from error

    def _take_over(self) -> None:
        closed_in_children(self, ServingLease._forget)  # before it is locked
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SharedMemoryError(
                f"another process writes the lease file {self.path}: each service has one of its own, and one that was "
                "stopped has to end first"
            ) from None
        found = _read(self._file)
        if found is None and _was_cut_off(self._file):  # it is this user's; what it said of a set is not known: torn
            _write(self._file, 0, _FORM.pack(_MAGIC, 0.0, boot_s(), 0.0, _boot_mark()))
            found = _read(self._file)
        if found is None:
            raise SharedMemoryError(f"{self.path} is not a lease file of this release: name another, or remove it")
        _, until, hold, seen, boot = found
        if boot != (mark := _boot_mark()):
            until = hold = seen = 0.0
            _write(self._file, 0, _FORM.pack(_MAGIC, until, hold, seen, mark))
        self._words = {_UNTIL: until, _HOLD: hold, _SEEN: seen}

    def renew(self, until_s: float, *, seen_s: float | None = None) -> None:
        """Engines may answer until then, by `boot_s`. A lease is never cut short by this, nor a hold ended.

        Args:
            seen_s: when every engine was last seen to serve what this is lent for; now, where not given. An engine that
                has started since then refuses: it has what it was started with.
        """
        with self._lock:
            if not self._closed:
                self._set(_SEEN, max(self._words[_SEEN], boot_s() if seen_s is None else seen_s))
                self._set(_UNTIL, max(self._words[_UNTIL], until_s))

    @property
    def damaged(self) -> bool:
        """Whether its file was cut off or overwritten: engines refuse, whatever is written there."""
        with self._lock:
            return not self._closed and _read(self._file) is None

    @property
    def damage(self) -> str:
        """What to say, and do, where it is `damaged`."""
        return (
            f"the lease file {self.path} was damaged, or cut off: its engines refuse to answer; start this service "
            "again, then the engines"
        )

    def revoke(self) -> None:
        """Engines refuse from now on."""
        self._write(_UNTIL, 0.0)

    def hold(self, until_s: float) -> None:
        """Whoever wants to answer waits from now on, until `lift`; from `until_s` on it is refused."""
        self._write(_HOLD, until_s)

    def lift(self) -> None:
        self._write(_HOLD, 0.0)

    @property
    def left_s(self) -> float:
        with self._lock:
            return 0.0 if self._closed else max(0.0, self._words[_UNTIL] - boot_s())

    @property
    def torn(self) -> bool:
        """Whether a hold was not lifted: whoever wrote it before ended in the middle of a set."""
        return self._words[_HOLD] != 0.0

    @property
    def overdue(self) -> bool:
        """Whether the time of a hold is over, and nobody lifted it: engines refuse."""
        return 0.0 < self._words[_HOLD] <= boot_s()

    def close(self) -> None:
        """Revokes it. Idempotent."""
        try:
            self.revoke()
        except SharedMemoryError as error:
            _logger.warning("the lease %s is not revoked, it runs out by itself: %s", self.path, error)
        self.release()

    def release(self) -> None:
        """Writes it no more; what is lent stays lent until it is over. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._file)

    def _forget(self) -> None:
        """In a forked child: the lock on the file must end with the parent."""
        if not self._closed:
            os.close(self._file)

    def remove(self) -> None:
        """Closes it and deletes the file: engines that have it open refuse for ever. Idempotent.

        A file that somebody else has put there meanwhile stays.
        """
        with contextlib.suppress(OSError):
            if os.path.samestat(self._facts, os.lstat(self.path)):
                os.unlink(self.path)
        self.close()

    def _write(self, word: int, seconds: float) -> None:
        with self._lock:
            if not self._closed:  # its engines refuse already
                self._set(word, seconds)

    def _set(self, word: int, seconds: float) -> None:
        """Under the lock.

        Raises:
            SharedMemoryError: it can't be written; engines go by what they read last.
        """
        try:
            _write(self._file, word, _WORD.pack(seconds))
        except OSError as error:
            raise SharedMemoryError(f"the lease file {self.path} can't be written: {error}") from error
        self._words[word] = seconds

    def __enter__(self) -> ServingLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class LeaseReader:
    """An engine's side. Thread-safe; one look costs a microsecond.

    Args:
        path: of the file; it has to be there, this user's or root's, and nobody else's to write.

    Raises:
        SharedMemoryError: it is not, or is something else.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = open_believed(path, os.O_RDONLY, also_root=True)
        except OSError as error:
            raise SharedMemoryError(
                f"the lease file {path} can't be read: {error}; start its service first, or make it: "
                "ServingLease(path).close()"
            ) from error
        weakref.finalize(self, os.close, self._file)
        if _read(self._file) is None:
            raise SharedMemoryError(f"{path} is not a lease file of this release")
        self._started_s = boot_s()
        self._mark = _boot_mark()

    def refusal(self) -> str | None:
        """Why nothing may be answered; None where it may, or a hold has to be waited for."""
        found = _read(self._file)
        if found is None:
            return "its lease file was damaged, or cut off: start its service again, then this engine"
        now = boot_s()
        _, until, hold, seen, boot = found
        if until <= now or boot != self._mark:
            return "it holds no lease of its rollout service, and may be behind: it answers again when it has caught up"
        if seen < self._started_s:
            return "it has started anew, and was given no weights since: it answers when its service has seen to it"
        if hold and hold <= now:
            return "a set of models was not committed as a whole: it answers again when it has caught up"
        return None

    @property
    def held(self) -> bool:
        """Whether a set is being committed: whoever wants to answer waits."""
        found = _read(self._file)
        return found is not None and found[2] > boot_s()


def _make(path: str) -> None:
    """Writes it aside and links it into place: nobody reads half of it, and what another has put there stays."""
    folder, name = os.path.split(os.path.abspath(path))
    number, aside = tempfile.mkstemp(prefix=f".{name}-", dir=folder)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(_FORM.pack(_MAGIC, 0.0, 0.0, 0.0, _boot_mark()))
            os.fchmod(number, _MODE)
        with contextlib.suppress(FileExistsError):  # whose it is, is looked at when it is opened
            os.link(aside, path)
    finally:
        os.unlink(aside)


def _read(file: int) -> tuple[bytes, float, float, float, bytes] | None:
    """What the file says; None where it is no lease file, or not any more."""
    try:
        data = os.pread(file, _FORM.size + 1, 0)
    except OSError:
        return None
    if len(data) != _FORM.size or not data.startswith(_MAGIC):
        return None
    return _FORM.unpack(data)


def _was_cut_off(file: int) -> bool:
    """Whether it is what a lease file becomes that was cut off, and then maybe written on: words behind a hole."""
    data = os.pread(file, _FORM.size + 1, 0)
    magic = data[: len(_MAGIC)].rstrip(b"\0")
    cut = len(data) < _FORM.size and data[: len(_MAGIC)] == _MAGIC[: len(data)]
    return cut or (len(data) in (_HOLD, _SEEN, _BOOT, _FORM.size) and magic != _MAGIC and _MAGIC.startswith(magic))


def _write(file: int, offset: int, data: bytes) -> None:
    if os.pwrite(file, data, offset) != len(data):
        raise OSError(errno.EIO, "it was written in part")
