"""Who reads and who writes a segment, said by the kernel: open-file-description locks on bytes of its file.

A lock ends with the process that holds it, however it ends, so nobody has to be asked, and nothing expires under a
reader. It says nothing about which version lies there: a reader compares the stamp after it has its lock.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import struct

from weightsync.errors import UnsupportedError
from weightsync.memory.folder import open_own
from weightsync.types.closing import Closing
from weightsync.types.process import closed_in_children

_SETLK = getattr(fcntl, "F_OFD_SETLK", None)
_GETLK = getattr(fcntl, "F_OFD_GETLK", None)
_FLOCK = "hhqqi4x"


class Reader(enum.IntEnum):
    """What a segment is read for; the number is the byte that the lock is on."""

    MAPPED = 0
    SENT = 1


class Lock(Closing):
    """A lock on a segment's file, held from construction to `close` or to the end of this process.

    Args:
        reader: what it is to be read for; None: it is to be written, so nobody may read it.

    Raises:
        BlockingIOError: somebody else holds a lock against it.
        SharedMemoryError: there is no such segment of this user.
        UnsupportedError: the system has no such locks.
    """

    def __init__(self, name: str, reader: Reader | None) -> None:
        if _SETLK is None:
            raise UnsupportedError("leases on shared memory need Linux's open-file-description locks")
        self.name = name
        self._fd = open_own(name, os.O_RDONLY if reader is not None else os.O_RDWR)
        self._closed = False
        closed_in_children(self, Lock._forget)  # before it is locked
        try:
            if reader is None:
                wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, len(Reader), 0)
            else:
                wanted = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, reader, 1, 0)
            try:
                fcntl.fcntl(self._fd, _SETLK, wanted)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    raise BlockingIOError(error.errno, f"{name} is in use") from error
                raise
        except BaseException:
            self._closed = True
            os.close(self._fd)
            raise

    def fileno(self) -> int:
        """The descriptor that it is held by, to be written where the lock is a writer's."""
        return self._fd

    def close(self) -> None:
        """Gives the lock back. Idempotent; in a forked child nothing is left to give."""
        if not self._closed:
            self._closed = True
            # said aloud: a child that is being forked right now has a copy of the descriptor, and would keep the lock
            fcntl.fcntl(self._fd, _SETLK, struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))  # type: ignore[arg-type]
            os.close(self._fd)

    def _forget(self) -> None:
        """In a forked child, which has a copy of the descriptor: the lock must end with the parent."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)


def is_read(name: str, reader: Reader) -> bool:
    """Whether anybody reads the segment for that purpose now.

    Raises:
        SharedMemoryError: there is no such segment of this user.
    """
    if _GETLK is None:
        return False
    fd = open_own(name, os.O_RDWR)
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, reader, 1, 0)
        found = struct.unpack(_FLOCK, fcntl.fcntl(fd, _GETLK, asked))
        return bool(found[0] == fcntl.F_RDLCK)
    finally:
        os.close(fd)
