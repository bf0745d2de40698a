"""The folder that named shared memory lies in, and how its files are opened: no links, no other user's files."""

from __future__ import annotations

import os
import re
import stat

from weightsync.errors import SharedMemoryError, UnsupportedError
from weightsync.types.scarcity import is_passing

PREFIX = "weightsync-"
_NAME = re.compile(r"weightsync-[0-9A-Za-z][0-9A-Za-z-]{0,200}")

_path = "/dev/shm"
_MOUNTS = "/proc/mounts"


def folder() -> str:
    """The folder.

    Raises:
        UnsupportedError: this system has none.
    """
    if not os.path.isdir(_path):
        raise UnsupportedError(f"named shared memory needs {_path}, which this system has not: use strategy broadcast")
    return _path


def path_of(name: str) -> str:
    """Where the file of that name lies.

    Raises:
        SharedMemoryError: it is no name of ours. Nothing was opened.
    """
    if not _NAME.fullmatch(name):
        raise SharedMemoryError(f"{name!r} is no name of a shared-memory file of weightsync: nothing was opened")
    return f"{folder()}/{name}"


def free_bytes() -> int:
    facts = os.statvfs(folder())
    return facts.f_bavail * facts.f_frsize


def huge_option() -> str:
    """How the folder's file system grants huge pages: "never", "always", or "advise", to a mapping that asks for them
    before it has a page and to no other; "never" where nothing is said.
    """
    try:
        with open(_MOUNTS, encoding="utf-8", errors="replace") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return "never"
    options = [fields[3].split(",") for fields in mounts if len(fields) > 3 and fields[1] == _path]
    of_last = options[-1] if options else []
    return next((each.removeprefix("huge=") for each in of_last if each.startswith("huge=")), "never")


def read_head(name: str, num_bytes: int, *, need_bytes: int) -> bytes:
    """The first bytes of an existing file of this user; nothing is mapped.

    Raises:
        SharedMemoryError: as for `open_own`, or it has less than `need_bytes`.
    """
    fd = open_own(name, os.O_RDONLY)
    try:
        if (size_bytes := os.fstat(fd).st_size) < need_bytes:
            raise SharedMemoryError(f"{path_of(name)} has {size_bytes} bytes, {need_bytes} were announced")
        return os.pread(fd, num_bytes, 0)
    finally:
        os.close(fd)


def open_own(name: str, flags: int) -> int:
    """Opens an existing file of this user; never follows a link, never waits on a pipe.

    Returns:
        A descriptor, closed on exec; the caller's.

    Raises:
        SharedMemoryError: it is not there, no regular file, or another user's.
    """
    path = path_of(name)
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "" if is_passing(error) else ": its owner has closed it or is gone, or it is another user's"
        raise SharedMemoryError(f"{path} can't be opened ({error.strerror}){why}") from error
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        os.close(fd)
        raise SharedMemoryError(f"{path} is not a regular file that this user (uid {os.geteuid()}) alone can open")
    return fd
