"""Segment: a piece of named shared memory that its owner writes and others map.

The owner holds a lock (`flock`) on the file as long as it lives; the kernel drops it when the owner ends, however it
ends. So whoever finds a file without a lock knows that nobody will unlink it any more, and does so. A forked
child inherits the descriptor and with it the lock, so it closes its copy at once; it never unlinks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import threading
import weakref

from weightsync.errors import SharedMemoryError, WeightSyncError
from weightsync.memory.advice import Advice, advise
from weightsync.memory.folder import PREFIX, folder, free_bytes, huge_option, open_own, path_of
from weightsync.memory.lease import Lock
from weightsync.memory.private_folder import reclaim_folders
from weightsync.types.closing import Closing

_OWNED = re.compile(PREFIX + r"[0-9]+-[0-9a-f]{16}")
_ROOM = "raise the size of /dev/shm (a container's --shm-size)"

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_MAPPED_AT_ONCE_BYTES = 64 << 20

_live: weakref.WeakSet[Segment] = weakref.WeakSet()


class Segment(Closing):
    """Shared memory that this process owns. Allocated whole when it is made, gone from the folder when it is closed.

    Of huge pages where the folder's file system grants them to who asks (`huge=advise`): for who made it and for all
    who map it.

    Closing unlinks the name; the memory itself lives until the last process that mapped it lets go of it. Files of
    processes that died are unlinked whenever a segment is made.

    Args:
        size_bytes: above 0.
        mapped: whether its pages are mapped when it is made. False: a thread maps them while others write already,
            unless that cost it its huge pages.
        instead: what else to do where there is no room, for the error.

    Raises:
        SharedMemoryError: there is no room; says how much is left. Nothing was allocated.
        UnsupportedError: the system has no named shared memory.
    """

    def __init__(self, size_bytes: int, *, mapped: bool = True, instead: str = "") -> None:
        if size_bytes < 1:
            raise SharedMemoryError(f"a segment has at least one byte, not {size_bytes}")
        with contextlib.suppress(OSError):  # it costs nobody a segment that others' can't be cleaned up just now
            reclaim_dead()
        self.size_bytes = size_bytes
        self._advice = f"{_ROOM} or {instead}" if instead else _ROOM
        self.name, self._lock_fd = locked_file()
        self._pid = os.getpid()
        self._closed = False
        _live.add(self)
        self._unlink_at_exit = weakref.finalize(self, _unlink, self.name, self._pid)
        self._mapping: threading.Thread | None = None
        self._given_back = False
        try:
            self._map = self._allocated(mapped or huge_option() == "advise")
        except BaseException:
            self.close()
            raise

    def _allocated(self, all_mapped: bool) -> mmap.mmap:
        left = free_bytes()
        if self.size_bytes > left:
            raise SharedMemoryError(
                f"a shared-memory segment of {self.size_bytes} bytes has no room: {folder()} has {left} left; "
                f"{self._advice}",
                state_left="nothing was allocated",
            )
        try:
            mapped = self._mapped()
            advise(mapped, Advice.HUGEPAGE)  # before there is any page: those that are there stay as small as they are
            if all_mapped:
                advise(mapped, Advice.POPULATE_WRITE)  # not MAP_POPULATE: Python's mmap would hold its lock meanwhile
            os.posix_fallocate(self._lock_fd, 0, self.size_bytes)  # without it a write could end in SIGBUS
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock_fd, 0)
            full = error.errno in (errno.ENOSPC, errno.ENOMEM)
            raise SharedMemoryError(
                f"a shared-memory segment of {self.size_bytes} bytes could not be allocated ({error.strerror}): "
                f"{folder()} has {free_bytes()} left{f'; {self._advice}' if full else ''}",
                state_left="nothing was allocated",
            ) from error
        if not all_mapped:
            self._map_behind(mapped)
        return mapped

    def _map_behind(self, mapped: mmap.mmap) -> None:
        """Begins to map all pages, piece by piece: the process can't map anything else while one is under way."""

        def work() -> None:
            for start in range(0, self.size_bytes, _MAPPED_AT_ONCE_BYTES):
                if self._closed or self._given_back:
                    return
                advise(mapped, Advice.POPULATE_WRITE, part=slice(start, start + _MAPPED_AT_ONCE_BYTES))

        thread = threading.Thread(target=work, name="weightsync-pages", daemon=True)
        with contextlib.suppress(RuntimeError):  # the process has too many: each page is mapped when it is written
            thread.start()
            self._mapping = thread

    def _mapped(self) -> mmap.mmap:
        """All of it, without a page yet. A mapping keeps a copy of its descriptor: one of the locked descriptor would
        keep the lock in forked children.
        """
        fd = open_own(self.name, os.O_RDWR)
        try:
            os.ftruncate(fd, self.size_bytes)
            return mmap.mmap(fd, self.size_bytes, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)

    @property
    def memory(self) -> memoryview:
        """The bytes, to be written. Views of it keep the memory mapped after `close`."""
        return memoryview(self._map)

    @property
    def is_lost(self) -> bool:
        """Whether somebody took its name away, e.g. whoever cleans /dev/shm: nobody can open it any more."""
        return self._closed or os.fstat(self._lock_fd).st_nlink == 0

    def pin(self) -> None:
        """Asks for pages that are never swapped out. Where the system refuses (`RLIMIT_MEMLOCK`) everything works as
        before.
        """
        self._call("mlock")

    def give_back_pages(self) -> None:
        """Frees the memory though others map it: they read zeros. Only when nobody reads it any more."""
        self._given_back = True
        if self._mapping is not None:
            self._mapping.join()  # what it maps after the pages were given back would be there again
        self._call("munlock")  # locked pages can't be removed
        advise(self._map, Advice.REMOVE)

    def _call(self, name: str) -> None:
        """`mlock` or `munlock` of all of it, where the system has them and allows it."""
        with contextlib.suppress(OSError, AttributeError, ValueError):
            first = ctypes.c_char.from_buffer(self._map)  # held in the call: nobody unmaps it meanwhile
            getattr(ctypes.CDLL(None), name)(ctypes.byref(first), ctypes.c_size_t(self.size_bytes))

    def close(self) -> None:
        """Unlinks the name and gives up the lock. Idempotent; in a forked child it only forgets."""
        if self._closed:
            return
        self._closed = True
        self._unlink_at_exit()
        if os.getpid() == self._pid:
            os.close(self._lock_fd)
            if self._mapping is not None:
                self._mapping.join()  # it holds the memory for as long as it maps a piece
        if hasattr(self, "_map"):
            with contextlib.suppress(BufferError):  # views are alive: it is unmapped with the last of them
                self._map.close()


def unlink_own() -> None:
    """Takes the names of all of this process's segments away; it is about to be ended, perhaps while one is written."""
    while True:
        with contextlib.suppress(RuntimeError):  # another thread made a segment meanwhile
            segments = list(_live)
            break
    for segment in segments:
        segment._unlink_at_exit()


def reclaim_dead() -> tuple[str, ...]:
    """Unlinks this user's segments whose owner is gone, and frees the memory of those that nobody has a lock on: a
    process that maps one still, and reads zeros from then on, does not keep its pages from whoever comes next. Private
    folders of those that are gone are removed, too.

    Returns:
        Their names.
    """
    dead = []
    reclaim_folders()
    for name in os.listdir(folder()):
        if not _OWNED.fullmatch(name):
            continue
        with contextlib.suppress(SharedMemoryError, OSError):  # another user's, or somebody was faster
            fd = open_own(name, os.O_RDONLY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
                lock = _unread(name)
                try:
                    os.unlink(path_of(name))
                    dead.append(name)
                    if lock is not None:
                        _punch(lock, os.fstat(fd).st_size)
                finally:
                    if lock is not None:
                        lock.close()
            finally:
                os.close(fd)
    return tuple(dead)


def _unread(name: str) -> Lock | None:
    """The right to write it; None where somebody reads it, or the system has no such locks."""
    try:
        return Lock(name, None)
    except (OSError, WeightSyncError):
        return None


def _punch(lock: Lock, size_bytes: int) -> None:
    """Frees all pages of a locked file, though it is mapped elsewhere, and locked into memory there."""
    with contextlib.suppress(AttributeError, OSError):
        libc, whole = ctypes.CDLL(None), ctypes.c_long(-(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        libc.fallocate(ctypes.c_int(lock.fileno()), ctypes.c_int(_PUNCH_HOLE | _KEEP_SIZE), ctypes.c_long(0), whole)


def locked_file() -> tuple[str, int]:
    """A new, empty file that `reclaim_dead` leaves alone while its descriptor is open: its name and descriptor.

    Raises:
        SharedMemoryError: none can be made.
    """
    while True:
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            fd = os.open(path_of(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SharedMemoryError(f"{path_of(name)} can't be made: {error}", state_left="nothing was made") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return name, fd
        except BlockingIOError:
            pass
        except BaseException:
            os.close(fd)
            _unlink(name, os.getpid())
            raise
        os.close(fd)  # another process took it for a dead one's in between: it has unlinked it, or is about to


def _unlink(name: str, pid: int) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(OSError, SharedMemoryError):
            os.unlink(path_of(name))


def _after_fork() -> None:
    """The child has a copy of every locked descriptor; the lock must end with the parent."""
    for segment in list(_live):
        if not segment._closed:
            os.close(segment._lock_fd)
            segment._closed = True
            segment._unlink_at_exit.detach()


os.register_at_fork(after_in_child=_after_fork)
