"""The proof that two processes see the same shared memory: both read the same random number out of it.

A host's name proves nothing (containers share names and not memory, or memory and not names). Nor does a name in the
folder: any local user may be there first. So the number counts only in a file that this user alone can have written,
and where the usual name is taken by somebody else, the file has a name that nobody can foresee.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import threading
from collections.abc import Iterator

from weightsync.errors import SharedMemoryError
from weightsync.memory.folder import PREFIX, folder, open_own, path_of
from weightsync.memory.segment import locked_file
from weightsync.types.deadline import Deadline

_NONCE_BYTES = 16
_TURN_S = 1.0
"""So long another process of this user may take to make the file; nobody who holds the lock longer is waited for."""


def host_nonce() -> str:
    """The number of this user's shared memory on this host, 32 hexadecimal digits; made by whoever asks first.

    It lies in one file, readable by this user alone, which stays until the host forgets its shared memory.
    Read anew each time: a process may have moved into another mount namespace. What else lies under such a name
    (another user's file, a link, a pipe, something damaged) is left alone, and not believed.

    Raises:
        SharedMemoryError: it can't be made.
        UnsupportedError: the system has no named shared memory.
    """
    try:
        return _host_nonce(f"{PREFIX}host-{os.geteuid()}")
    except OSError as error:
        raise SharedMemoryError(f"{folder()} can't be used: {error}", state_left="nothing was made") from error


def _host_nonce(usual: str) -> str:
    found = _read(usual) or _found(usual)
    if found is None:
        with _turn():
            found = _found(usual)
            if found is None:
                _make(usual)
                found = _read(usual)
            if found is None:  # somebody else's lies there
                _make(f"{usual}-{secrets.token_hex(8)}")
                found = _found(usual)
    if found is None:
        raise SharedMemoryError(f"{path_of(usual)} was removed just now: nobody may clean {folder()} of a running job")
    return found


def _found(usual: str) -> str | None:
    """The number that lies there already: under the usual name, else under the first of the others in order."""
    others = re.compile(re.escape(usual) + r"-[0-9a-f]{16}")
    for name in (usual, *sorted(name for name in os.listdir(folder()) if others.fullmatch(name))):
        if (nonce := _read(name)) is not None:
            return nonce
    return None


def _read(name: str) -> str | None:
    """The number in a file of this user alone; None where there is none."""
    try:
        fd = open_own(name, os.O_RDONLY)
    except SharedMemoryError:
        return None
    try:
        text = os.read(fd, 64).decode("ascii", "replace")
    finally:
        os.close(fd)
    return text if len(text) == 2 * _NONCE_BYTES and not set(text) - set("0123456789abcdef") else None


def _make(name: str) -> None:
    """Writes the file aside and links it into place, so that nobody reads half of it; the first one wins."""
    aside, fd = locked_file()
    try:
        os.write(fd, secrets.token_hex(_NONCE_BYTES).encode())
        with contextlib.suppress(FileExistsError):  # another process was faster, or it is somebody else's
            os.link(path_of(aside), path_of(name))
    except OSError as error:
        raise SharedMemoryError(f"{path_of(name)} can't be made: {error}", state_left="nothing was made") from error
    finally:
        os.unlink(path_of(aside))
        os.close(fd)


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """One process at a time, so that two that start at once agree. Another user may hold it for ever: the wait is
    short, and without the turn two of the same moment may take each other for strangers, which is safe.
    """
    fd = os.open(folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline, pause = Deadline(_TURN_S), threading.Event()
        while not deadline.expired:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pause.wait(min(0.01, deadline.remaining_s))
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(fd)
