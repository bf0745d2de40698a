"""PrivateFolder: a folder of this user alone beside the shared memory, for files of a process. It goes with its owner.

A name in the abstract namespace, or in a folder that everybody may write, can be taken by any local user first. Into
this folder nobody else can look: it is new, its mode is 0700, and its parent is sticky. The owner holds a lock
(`flock`) on the folder itself, so whoever finds one without a lock knows that its owner is gone, and removes it. A
shared folder has a lock that several can hold: it is handed over to another process without a moment in which nobody
has it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import weakref

from weightsync.errors import SharedMemoryError
from weightsync.memory.folder import PREFIX, folder
from weightsync.types.closing import Closing
from weightsync.types.process import closed_in_children

_NAME = re.compile(PREFIX + r"ipc-[0-9]+-[0-9a-f]{16}")
_MOST_TRIES = 100
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder(Closing):
    """Made when it is constructed, removed with what lies in it by `close`, at this process's end, or after it.

    Args:
        shared: another process may take it over, see `taken_over`.

    Attributes:
        path: short enough for a socket's address.

    Raises:
        SharedMemoryError: it can't be made.
        UnsupportedError: the system has no named shared memory.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._own(*_made(fcntl.LOCK_SH if shared else fcntl.LOCK_EX))

    @classmethod
    def taken_over(cls, name: str) -> PrivateFolder:
        """Another process's shared folder: from here on it goes with this process, too. The other one lets go of it by
        `hand_over`, or ends.

        Raises:
            SharedMemoryError: it is no name of one, not there, not this user's alone, or not shared.
        """
        path = check_private(name)
        try:
            lock_fd = _locked(path, fcntl.LOCK_SH)
        except OSError as error:
            raise SharedMemoryError(f"{path} can't be taken over ({error.strerror})") from error
        taken = cls.__new__(cls)
        taken._own(path, lock_fd)
        return taken

    def _own(self, path: str, lock_fd: int) -> None:
        self.path, self._lock_fd = path, lock_fd
        self._let_go = weakref.finalize(self, os.close, lock_fd)  # the first one made runs last
        self._remove_at_exit = weakref.finalize(self, _remove, self.path, os.getpid())
        closed_in_children(self, PrivateFolder._forget)

    @property
    def name(self) -> str:
        """By which another process takes it over."""
        return os.path.basename(self.path)

    def hand_over(self) -> None:
        """Lets go of it without removing it: another process has taken it over."""
        self._remove_at_exit.detach()
        self._forget()

    def close(self) -> None:
        """Removes it. Idempotent; in a forked child it only forgets."""
        if self._lock_fd >= 0:
            self._remove_at_exit()
            self._forget()

    def _forget(self) -> None:
        """The lock must end with the owner, and not with a forked child."""
        self._lock_fd = -1
        self._let_go()


def check_private(name: str) -> str:
    """The path of another process's folder.

    Raises:
        SharedMemoryError: it is no name of ours, not there, or not this user's alone.
    """
    path = f"{folder()}/{name}"
    if not _NAME.fullmatch(name):
        raise SharedMemoryError(f"{name!r} is no name of a private folder of weightsync")
    try:
        fd = os.open(path, _OPEN)
    except OSError as error:
        raise SharedMemoryError(f"{path} can't be opened ({error.strerror})") from error
    try:
        if not _is_private(fd):
            raise SharedMemoryError(f"others may look into {path}")
    finally:
        os.close(fd)
    return path


def reclaim_folders() -> None:
    """Removes this user's folders whose owner is gone."""
    for name in os.listdir(folder()):
        if not _NAME.fullmatch(name):
            continue
        with contextlib.suppress(OSError):  # another user's, or somebody was faster
            fd = os.open(f"{folder()}/{name}", _OPEN)
            try:
                if _is_private(fd):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
                    _remove(f"{folder()}/{name}", os.getpid())
            finally:
                os.close(fd)


def _made(lock: int) -> tuple[str, int]:
    """A new folder that `reclaim_folders` leaves alone while its descriptor is open: its path and descriptor.

    Raises:
        SharedMemoryError: it can't be made, or opened. None is left.
    """
    for _ in range(_MOST_TRIES):
        path = f"{folder()}/{PREFIX}ipc-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            os.mkdir(path, 0o700)
            try:
                return path, _locked(path, lock)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.rmdir(path)
                raise
        except (FileNotFoundError, BlockingIOError):  # another process took it for a dead one's in between
            continue
        except OSError as error:
            raise SharedMemoryError(f"{path} can't be made: {error}", state_left="nothing was made") from error
    raise SharedMemoryError(f"somebody removes the folders that are made in {folder()}", state_left="nothing was made")


def _locked(path: str, lock: int) -> int:
    """Its descriptor, with the lock.

    Raises:
        FileNotFoundError, BlockingIOError: another process is removing it.
        OSError: it can't be opened.
    """
    fd = os.open(path, _OPEN)
    try:
        fcntl.flock(fd, lock | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.lstat(path)):
            raise FileNotFoundError(errno.ENOENT, "it was removed", path)
        if not _is_private(fd):
            raise PermissionError(errno.EPERM, "others may look into it", path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_private(fd: int) -> bool:
    facts = os.fstat(fd)
    return facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) & 0o077 == 0


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(OSError):  # an empty one needs no descriptor more
            os.rmdir(path)
            return
        shutil.rmtree(path, ignore_errors=True)
