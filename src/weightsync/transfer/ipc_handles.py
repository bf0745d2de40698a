"""What `ipc` lends and borrows memory through: one lender and one borrower for each kind of memory.

This file has the kind for CPU tensors, named shared memory; `ipc_cuda` has CUDA's. Neither knows chunks or requests.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence

import torch

from weightsync.errors import InvalidRequestError, TransferAbortedError, UnsupportedError, WeightSyncError
from weightsync.memory import MappedSegment, Segment, host_nonce, reclaim_dead
from weightsync.types import MemoryHandle, SharedMemoryHandle

BLOCK_BYTES = 1 << 21
"""Buckets are multiples of this: a huge page, and what a CUDA driver shares at least."""


class MemoryLender(abc.ABC):
    """The lending end of one training rank: rotating buckets that others can open. One thread at a time.

    Attributes:
        place: who can reach this memory.
        lends_in_place: whether `in_place` works; else every tensor goes through a bucket.
        outlives_failure: whether it is used on after a failed sync, in which somebody may still read its buckets. Else
            it is closed, and the next sync makes another: a late reader keeps the old bytes.
    """

    place: str
    lends_in_place: bool = False
    outlives_failure: bool = False

    @abc.abstractmethod
    def bucket(self, slot: int, nbytes: int) -> torch.Tensor:
        """The bucket of a slot, 1-D uint8, of `nbytes`. It keeps its memory from call to call and grows where it must.

        Raises:
            SharedMemoryError: no room.
        """

    @abc.abstractmethod
    def handle(self, slot: int, offset_bytes: int, size_bytes: int) -> MemoryHandle:
        """What opens a part of a slot's bucket. Its bytes are complete when this returns."""

    def in_place(self, tensor: torch.Tensor) -> MemoryHandle:
        """What opens a contiguous tensor's own memory. Its bytes are complete when this returns.

        Raises:
            UnsupportedError: this memory can't be lent; says why.
        """
        raise UnsupportedError(f"memory of {self.place} is lent through buckets alone")

    @abc.abstractmethod
    def close(self) -> None:
        """Gives the buckets back. Idempotent."""


class MemoryBorrower(abc.ABC):
    """The borrowing end of one engine worker. Thread-safe as its receiver is: chunks are opened one after the other."""

    place: str

    @abc.abstractmethod
    def can_open(self, handle: MemoryHandle) -> bool:
        """Whether the handle's memory can be reached from here."""

    @abc.abstractmethod
    def open(self, handle: MemoryHandle, *, keep: bool) -> torch.Tensor:
        """The bytes, 1-D uint8: a view, to be read alone.

        Args:
            keep: what it opens is a bucket and stays open for the next chunks. Else it may be memory that the trainer
                frees, and `let_go` follows, once for each call that returned.

        Raises:
            SharedMemoryError: it is gone, or smaller than the handle says.
            TransferError: the driver does not open it.
        """

    def finish_reading(self) -> None:  # noqa: B027  (CPU reads are over when they return)
        """Returns when what this thread has begun to read has been read."""

    def let_go(self, handles: Sequence[MemoryHandle]) -> None:  # noqa: B027  (buckets are kept)
        """Nobody reads these any more; they were opened with `keep` false."""

    def unmap(self) -> None:  # noqa: B027  (a device's buckets are few, and kept)
        """Lets go of the host's memory; what is opened next is mapped anew. Views that are alive stay readable."""

    @abc.abstractmethod
    def close(self) -> None:
        """Lets go of everything; views that are alive stay readable. Idempotent."""


class ShmLender(MemoryLender):
    """Buckets in named shared memory, one segment a slot.

    Raises:
        UnsupportedError: the system has no named shared memory.
    """

    def __init__(self, num_slots: int) -> None:
        self._nonce = host_nonce()
        self.place = f"host {self._nonce}"
        self._segments: list[Segment | None] = [None] * num_slots

    def bucket(self, slot: int, nbytes: int) -> torch.Tensor:
        segment = self._segments[slot]
        if segment is None or segment.size_bytes < nbytes:
            if segment is not None:
                self._segments[slot] = None
                segment.give_back_pages()  # idle engines map it still, and would keep its memory from the next one
                segment.close()  # first: both at once may have no room
            whole = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
            segment = self._segments[slot] = Segment(whole, instead="lower chunk_bytes")
        return torch.frombuffer(segment.memory, dtype=torch.uint8)[:nbytes]

    def handle(self, slot: int, offset_bytes: int, size_bytes: int) -> SharedMemoryHandle:
        segment = self._segments[slot]
        assert segment is not None
        return SharedMemoryHandle(
            host_nonce=self._nonce, name=segment.name, offset_bytes=offset_bytes, size_bytes=size_bytes
        )

    def close(self) -> None:
        segments, self._segments = self._segments, [None] * len(self._segments)
        for segment in segments:
            if segment is not None:
                segment.close()


class ShmBorrower(MemoryBorrower):
    """Maps segments of this host and user, each once until `unmap`."""

    def __init__(self) -> None:
        self._nonce = host_nonce()
        self.place = f"host {self._nonce}"
        self._mapped: dict[str, MappedSegment] = {}
        self._closed = False

    def can_open(self, handle: MemoryHandle) -> bool:
        return isinstance(handle, SharedMemoryHandle) and handle.host_nonce == self._nonce

    def open(self, handle: MemoryHandle, *, keep: bool) -> torch.Tensor:
        """See the base class. A segment is always a bucket, and kept."""
        assert isinstance(handle, SharedMemoryHandle)
        if self._closed:
            raise TransferAbortedError("this receiver was closed")
        if handle.size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        end = handle.offset_bytes + handle.size_bytes
        mapped = self._mapped.get(handle.name)
        if mapped is None:
            for name in [name for name, old in self._mapped.items() if old.unlinked]:
                self._mapped.pop(name).close()  # a bucket that the trainer has replaced
            mapped = self._mapped[handle.name] = MappedSegment(handle.name, need_bytes=end)
        if end > mapped.size_bytes:
            raise InvalidRequestError(
                f"a handle ends at byte {end} of segment {handle.name}, which has {mapped.size_bytes}"
            )
        return torch.frombuffer(mapped.memory, dtype=torch.uint8)[handle.offset_bytes : end]

    def unmap(self) -> None:
        while self._mapped:
            with contextlib.suppress(KeyError):  # from two threads
                self._mapped.popitem()[1].close()

    def close(self) -> None:
        """See the base class. Segments of owners that were killed, perhaps the trainer, lose their names."""
        self._closed = True
        self.unmap()
        with contextlib.suppress(OSError, WeightSyncError):
            reclaim_dead()
