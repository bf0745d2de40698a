"""Another process's shared memory: to be read (MappedSegment), or to be written beside its owner (SharedSegment)."""

from __future__ import annotations

import contextlib
import mmap
import os

from weightsync.errors import SharedMemoryError
from weightsync.memory.advice import Advice, advise
from weightsync.memory.folder import folder, open_own
from weightsync.types.closing import Closing


class _Mapping(Closing):
    _map: mmap.mmap

    @property
    def memory(self) -> memoryview:
        """The bytes. Views of it keep the memory mapped after `close`."""
        return memoryview(self._map)

    def close(self) -> None:
        """Unmaps, or lets the last view do so. Idempotent."""
        with contextlib.suppress(BufferError):
            self._map.close()


class MappedSegment(_Mapping):
    """A mapping of a segment by name. What its owner writes is seen here; what is written here is seen by nobody.

    The mapping is private: a write, which readers have no business to do, makes a copy of the page here instead of
    killing this process, and the owner and the other readers don't see it. This reader then goes on to see the
    copied page's old content.

    The memory lives as long as this mapping, also after its owner unlinked it or died.

    Raises:
        SharedMemoryError: no such segment of this user, a shorter one, or no room to map it. Nothing was mapped.
    """

    def __init__(self, name: str, *, need_bytes: int) -> None:
        self.name = name
        self._fd = open_own(name, os.O_RDONLY)
        try:
            self.size_bytes = os.fstat(self._fd).st_size
            if not 0 < need_bytes <= self.size_bytes:
                raise SharedMemoryError(
                    f"{folder()}/{name} has {self.size_bytes} bytes, {need_bytes} were announced: nothing was mapped"
                )
            self._map = mmap.mmap(self._fd, self.size_bytes, access=mmap.ACCESS_COPY)
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, OSError | ValueError):
                raise SharedMemoryError(f"{folder()}/{name} can't be mapped: {error}") from error
            raise
        self._closed = False
        advise(self._map, Advice.POPULATE_READ)

    @property
    def unlinked(self) -> bool:
        """Whether the owner has given it up, or somebody reclaimed it: nothing new will come by it."""
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        os.close(self._fd)
        super().close()


class SharedSegment(_Mapping):
    """Another process's segment of this user, to be written too: ranks of one host write into their leader's.

    Args:
        exact_bytes: one of another size is not mapped.

    Raises:
        SharedMemoryError: no such segment of this user.
    """

    def __init__(self, name: str, *, exact_bytes: int | None = None) -> None:
        fd = open_own(name, os.O_RDWR)
        try:
            self.size_bytes = os.fstat(fd).st_size
            if exact_bytes not in (None, self.size_bytes):
                raise SharedMemoryError(f"{folder()}/{name} has {self.size_bytes} bytes, not {exact_bytes}")
            self._map = mmap.mmap(fd, self.size_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        except (OSError, ValueError) as error:
            raise SharedMemoryError(f"{folder()}/{name} can't be mapped: {error}") from error
        finally:
            os.close(fd)
