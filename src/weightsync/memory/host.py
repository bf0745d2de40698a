"""The proof that two processes see the same shared memory: both read the same random number out of it.

A host's name proves nothing (containers share names and not memory, or memory and not names).
"""

from __future__ import annotations

import contextlib
import os
import secrets

from weightsync.errors import SharedMemoryError
from weightsync.memory.folder import PREFIX, open_own, path_of
from weightsync.memory.segment import locked_file

_NONCE_BYTES = 16


def host_nonce() -> str:
    """The number of this user's shared memory on this host, 32 hexadecimal digits; made by whoever asks first.

    It lies in one file, readable by this user alone, which stays until the host forgets its shared memory.
    Read anew each time: a process may have moved into another mount namespace.

    Raises:
        SharedMemoryError: the file is another user's, a link, or not what this library writes.
        UnsupportedError: the system has no named shared memory.
    """
    name = f"{PREFIX}host-{os.geteuid()}"
    if not os.path.lexists(path_of(name)):
        _make(name)
    fd = open_own(name, os.O_RDONLY)
    try:
        text = os.read(fd, 64).decode("ascii", "replace")
    finally:
        os.close(fd)
    if len(text) != 2 * _NONCE_BYTES or set(text) - set("0123456789abcdef"):
        raise SharedMemoryError(f"{path_of(name)} does not hold a host's nonce: remove it")
    return text


def _make(name: str) -> None:
    """Writes the file aside and links it into place, so that nobody reads half of it; the first one wins."""
    aside, fd = locked_file()
    try:
        os.write(fd, secrets.token_hex(_NONCE_BYTES).encode())
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(path_of(aside), path_of(name))
    finally:
        os.unlink(path_of(aside))
        os.close(fd)
