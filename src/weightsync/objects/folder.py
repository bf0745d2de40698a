"""FolderStore: a folder, shared by whoever mounts it, as an object store with conditional puts.

    an object      a file; written aside, flushed to the disk, then given its name
    only if new    the name is given by link(2), which fails where there is one
    replace        under the lock file of its folder: its etag is looked at, then rename(2)

The etag is a hash of the bytes, so it is the same on each host that mounts the folder. A reader takes no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator

from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    ObjectConflictError,
    ObjectMissingError,
    StorageError,
    StoreAuthError,
    StoreDamagedError,
    StoreUnavailableError,
    WeightSyncError,
)
from weightsync.objects.base import MAX_SMALL_BYTES, Data, Found, Listed
from weightsync.objects.urls import folder_of
from weightsync.types import Deadline
from weightsync.types.store import check_key

_LOCK = ".lock"
_ASIDE = ".aside-"
_OURS = re.compile(r"\.(lock|aside-)")
_STALE_S = 24 * 3600.0
"""A file aside that is older was left by a writer that was killed."""
_LOOK_S = 0.01
_STEP_BYTES = 8 << 20
_threads: dict[str, threading.Lock] = {}


class FolderStore:
    """See `ObjectStore`.

    Args:
        url: file:///path. The folder is made when something is written.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._root = folder_of(url)

    def get(self, key: str, *, deadline: Deadline, unless: str | None = None) -> Found | None:
        with self._typed(key):
            data = self._whole(key)
        found = Found(data=data, etag=_etag(data))
        return None if found.etag == unless else found

    def get_range(self, key: str, start: int, into: memoryview, *, deadline: Deadline) -> None:
        with self._typed(key):
            fd = self._opened(key)
            try:
                done = 0
                while done < len(into):
                    deadline.check("end of a read", peer=self.url)
                    count = os.preadv(fd, [into[done : done + _STEP_BYTES]], start + done)
                    if count == 0:
                        raise StoreDamagedError(f"{self.url}/{key} ends at byte {start + done}: it is cut off")
                    done += count
            finally:
                os.close(fd)

    def put(self, key: str, data: Data, *, deadline: Deadline, replaces: str | None) -> str:
        path = self._path(key)
        with self._typed(key), self._aside(path, data, deadline) as aside:
            if replaces is None:
                try:
                    os.link(aside, path)
                except FileExistsError:
                    raise ObjectConflictError(f"{self.url}/{key} is there already") from None
            else:
                with self._locked(os.path.dirname(path), deadline):
                    try:
                        now = _etag(self._whole(key))
                    except FileNotFoundError:
                        now = ""
                    if now != replaces:
                        raise ObjectConflictError(f"{self.url}/{key} is another one than was to be replaced")
                    os.rename(aside, path)
            _flush(os.path.dirname(path))
        return _etag(data)

    def put_large(self, key: str, data: Data, *, deadline: Deadline) -> None:
        path = self._path(key)
        with self._typed(key), self._aside(path, data, deadline) as aside:
            os.rename(aside, path)
            _flush(os.path.dirname(path))

    def delete(self, keys: Iterable[str], *, deadline: Deadline) -> None:
        for key in keys:
            deadline.check("end of a deletion", peer=self.url)
            path = self._path(key)
            with self._typed(key), contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            with contextlib.suppress(OSError):  # its folder, where that was the last
                os.rmdir(os.path.dirname(path))

    def list_under(self, prefix: str, *, deadline: Deadline) -> Iterator[Listed]:
        """See `ObjectStore.list_under`. Sweeps away what killed writers have left."""
        with self._typed(prefix):
            for folder, _, files in os.walk(os.path.join(self._root, prefix) if prefix else self._root):
                deadline.check("end of a listing", peer=self.url)
                for name in files:
                    path = os.path.join(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        facts = os.lstat(path)
                        if name.startswith(_ASIDE) and time.time() - facts.st_mtime > _STALE_S:
                            with contextlib.suppress(OSError):  # who may only read lists all the same
                                os.unlink(path)
                        elif not _OURS.match(name):
                            yield Listed(key=os.path.relpath(path, self._root), nbytes=facts.st_size)

    # --- helpers ---

    def _path(self, key: str) -> str:
        check_key(key)
        return os.path.join(self._root, key)

    def _opened(self, key: str) -> int:
        """A descriptor; who waits at the other end of a pipe that somebody has put there would wait for ever."""
        fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StoreDamagedError(f"{self.url}/{key} is no file")
        return fd

    def _whole(self, key: str) -> bytes:
        with os.fdopen(self._opened(key), "rb") as file:
            data = file.read(MAX_SMALL_BYTES + 1)
        if len(data) > MAX_SMALL_BYTES:
            raise StoreDamagedError(f"{self.url}/{key} is too long to be what it should be")
        return data

    @contextlib.contextmanager
    def _aside(self, path: str, data: Data, deadline: Deadline) -> Iterator[str]:
        folder = os.path.dirname(path)
        os.makedirs(folder, exist_ok=True)
        aside = os.path.join(folder, f"{_ASIDE}{secrets.token_hex(8)}")
        try:
            fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                view = memoryview(data).cast("B")
                while view:
                    deadline.check("end of a write", peer=self.url)
                    view = view[os.write(fd, view[:_STEP_BYTES]) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            yield aside
        finally:
            with contextlib.suppress(OSError):
                os.unlink(aside)

    @contextlib.contextmanager
    def _locked(self, folder: str, deadline: Deadline) -> Iterator[None]:
        """The file's lock is of a process, and the first thread to close it gives it up for all: a second one is among
        threads."""
        mine = _threads.setdefault(folder, threading.Lock())
        if not mine.acquire(timeout=max(0.0, deadline.remaining_s)):
            raise DeadlineExceededError(f"another thread holds the lock of {folder}", peer=self.url)
        try:
            with self._locked_file(folder, deadline):
                yield
        finally:
            mine.release()

    @contextlib.contextmanager
    def _locked_file(self, folder: str, deadline: Deadline) -> Iterator[None]:
        fd = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _share(fd, folder)
            while True:
                try:
                    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # over NFS too
                    break
                except OSError as error:
                    if error.errno not in (errno.EACCES, errno.EAGAIN):
                        raise
                if deadline.expired:
                    raise DeadlineExceededError(f"another writer holds the lock of {folder}", peer=self.url)
                time.sleep(_LOOK_S)
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _typed(self, key: str) -> Iterator[None]:
        try:
            yield
        except WeightSyncError:
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectMissingError(f"there is no {self.url}/{key}", peer=self.url) from error
        except OSError as error:
            if isinstance(error, PermissionError) or error.errno == errno.EROFS:
                raise StoreAuthError(f"{self.url}/{key} may not be touched here: {error}", peer=self.url) from error
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageError(f"{self.url} is full: {error}", peer=self.url) from error
            raise StoreUnavailableError(f"{self.url}/{key}: {error}", peer=self.url) from error


def _etag(data: Data) -> str:
    return hashlib.sha256(data).hexdigest()


def _share(fd: int, folder: str) -> None:
    """Makes one's own lock file one of whoever may write its folder, and of nobody else: who may read it could hold its
    lock, and stop all writers."""
    lock, place = os.fstat(fd), os.stat(folder)
    if lock.st_uid != os.geteuid():
        return
    writers = place.st_mode & 0o022
    with contextlib.suppress(OSError):  # a file system without owners
        if lock.st_gid != place.st_gid:
            try:
                os.fchown(fd, -1, place.st_gid)
            except OSError:  # its group is another one than may write
                writers &= 0o002
        if stat.S_IMODE(lock.st_mode) != (mode := 0o600 | writers | writers << 1):
            os.fchmod(fd, mode)


def _flush(folder: str) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def check_folder(url: str) -> None:
    """Raises ConfigError where something that is no folder lies there."""
    folder = folder_of(url)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ConfigError(f"{folder} is no folder")
