"""StoreSource: reads an object of a store in ranges, several at once, each proved by its SHA-256. Knows no codec."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Callable

from weightsync.errors import (
    DeadlineExceededError,
    ObjectMissingError,
    StoreDamagedError,
    TransferAbortedError,
    TransferError,
    WeightSyncError,
)
from weightsync.objects.base import ObjectStore
from weightsync.transfer.source import Arrived, Destination
from weightsync.transfer.threads import start_threads
from weightsync.types import Deadline
from weightsync.types.publication import Source
from weightsync.types.store import StoredBlob

_MAX_TRIES = 3


@dataclasses.dataclass(eq=False)
class StoreSource:
    """See `RangedSource`.

    Args:
        num_streams: ranges that are asked for at once.
        damaged: told of the object's key where it is gone, or wrong as often as it is asked for.
    """

    source: Source
    blob: StoredBlob
    store: ObjectStore
    _: dataclasses.KW_ONLY
    num_streams: int = 6
    damaged: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        blob, where = self.blob, self.source
        if (blob.data_start, blob.data_end, blob.block_bytes) != (where.data_start, where.data_end, where.block_bytes):
            raise TransferError(f"{blob.key} is cut into other ranges than its publication says")
        self._closed = False

    def read(self, blocks: list[int], into: Destination, arrived: Arrived, *, deadline: Deadline) -> None:
        """See `RangedSource.read`.

        Raises:
            StoreDamagedError: the object is gone, cut off, or not what was written there. It is named.
        """
        left = collections.deque(blocks)
        failed: list[WeightSyncError] = []

        def work() -> None:
            try:
                while not failed:
                    try:
                        block = left.popleft()
                    except IndexError:
                        return
                    target = into(*self.source.block(block))
                    self._fetch(block, target, deadline)
                    arrived(block, target)
            except WeightSyncError as error:
                failed.append(error)
            except Exception as error:
                failed.append(TransferError(f"{self.blob.key} could not be read: {type(error).__name__}: {error}"))

        streams = start_threads(work, min(self.num_streams, len(blocks)), name="weightsync-store")
        for stream in streams:
            stream.join(deadline.remaining_s + 1.0)
        if any(stream.is_alive() for stream in streams):
            failed.append(DeadlineExceededError(f"{self.blob.key} did not come within {deadline.said}"))
            for stream in streams:
                stream.join()  # its call has the store's own deadline, and it writes into the caller's memory
        if failed:
            raise failed[0]

    def cancel(self) -> None:
        self._closed = True

    def close(self) -> None:
        self._closed = True

    def _fetch(self, block: int, target: memoryview, deadline: Deadline) -> None:
        start, length = self.source.block(block)
        key, why = self.blob.key, ""
        for _ in range(_MAX_TRIES):
            if self._closed:
                raise TransferAbortedError("this source was closed")
            deadline.check(f"end of {key}", peer=self.store.url)
            try:
                self.store.get_range(key, start, target, deadline=deadline)
            except ObjectMissingError:
                why = "is gone"
                break
            except StoreDamagedError as error:
                why = error.message
                continue
            if hashlib.sha256(target).digest() == self.blob.digest(block):
                return
            why = f"is damaged: bytes {start} to {start + length} are others than were written"
        self.damaged(key)
        raise StoreDamagedError(f"{self.store.url}/{key} {why}", peer=self.store.url, state_left="nothing is taken")
