"""Whose a file or a folder is, before it is believed or changed: a name proves nothing, another user may have made it.

What is opened is looked at by its descriptor, so that nobody can put something else there in between.
"""

from __future__ import annotations

import errno
import os
import stat

from weightsync.errors import SharedMemoryError

_ROOT = 0
_LINK_ERRORS = (errno.ELOOP, errno.ENOTDIR)
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_believed(path: str, flags: int, *, also_root: bool = False) -> int:
    """Opens an existing regular file that nobody but its owner can write; never follows a link, never waits on a pipe.

    Args:
        path: any path. Links in its folders are followed.
        also_root: whether root's file will do; else this user's alone.

    Returns:
        A descriptor, closed on exec; the caller's.

    Raises:
        SharedMemoryError: it is something else: says what, and whose.
        OSError: it is not there, or can't be opened.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        if os.path.islink(path):
            raise SharedMemoryError(f"{path} is a link, which is not followed: remove it, or name its target") from None
        raise
    facts = os.fstat(fd)
    owners = (os.geteuid(), _ROOT) if also_root else (os.geteuid(),)
    if why := _why_not(facts, owners):
        os.close(fd)
        raise SharedMemoryError(f"{path} is {why}: nothing in it is believed; remove it, or use another path")
    return fd


def open_folder(path: str) -> int:
    """Opens a folder. Where its name is a link, this user or root has made it.

    Returns:
        A descriptor, closed on exec; the caller's. It stays that folder's, whatever becomes of the name.

    Raises:
        SharedMemoryError: another user's link leads there.
        OSError: it is not there, or is no folder.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in _LINK_ERRORS or not os.path.islink(path):
            raise
    if (owner := os.lstat(path).st_uid) not in (os.geteuid(), _ROOT):
        raise SharedMemoryError(f"{path} is a link of uid {owner}, which is not followed")
    return os.open(path, flags)


def link_fault(path: str) -> str | None:
    """Why a name does not stand for itself; None where it is no link."""
    return f"{path} is a link" if os.path.islink(path) else None


def is_own(facts: os.stat_result) -> bool:
    """Whether it is a plain file of this user that has one name: removing it takes nothing from anybody else."""
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and facts.st_nlink == 1


def _why_not(facts: os.stat_result, owners: tuple[int, ...]) -> str | None:
    """What is wrong with a file; None where nothing is."""
    if not stat.S_ISREG(facts.st_mode):
        return "no regular file"
    if facts.st_uid not in owners:
        wanted = " or ".join(str(owner) for owner in dict.fromkeys(owners))
        return f"a file of uid {facts.st_uid}, not of uid {wanted}"
    if facts.st_mode & _OTHERS_WRITE:
        return f"a file that others may write (mode {stat.S_IMODE(facts.st_mode):04o})"
    return None


def folder_fault(path: str) -> str | None:
    """Why others could replace what this user puts into a folder; None where they can't.

    A folder is safe that this user or root owns, and that nobody else may write, or all may and it is sticky.
    """
    facts = os.stat(path)
    if facts.st_uid not in (os.geteuid(), _ROOT):
        return f"{path} is a folder of uid {facts.st_uid}"
    if facts.st_mode & _OTHERS_WRITE and not facts.st_mode & stat.S_ISVTX:
        return f"others may write into {path} (mode {stat.S_IMODE(facts.st_mode):04o}, not sticky)"
    return None
