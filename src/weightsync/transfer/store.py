"""StoreSource: reads an object of a store in ranges, several at once, each proved by its SHA-256. Knows no codec.

No limit of ours ends a request of a store: a folder's read on a mount that hangs never comes back, a cloud's may take
minutes. So a stream reads into memory of its own, and copies a range to its place when it was right, as long as the
caller waits. A caller that waits no longer leaves its streams behind: what they still get goes nowhere.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import os
import threading
from collections.abc import Callable

import numpy as np

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

MAX_LEFT_BEHIND = 16
"""So many streams of a process may sit in requests of one store that nobody waits for; no read begins beyond that."""

_MAX_TRIES = 3
_LOOK_S = 0.05
_left_behind: dict[str, list[threading.Thread]] = {}
"""By the store's URL; some may have ended."""
_lock = threading.Lock()


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
        self._changed = threading.Condition()

    def read(self, blocks: list[int], into: Destination, arrived: Arrived, *, deadline: Deadline) -> None:
        """See `RangedSource.read`.

        Raises:
            StoreDamagedError: the object is gone, cut off, or not what was written there. It is named.
        """
        self._wait_for_room(deadline)
        run = _Run(blocks, into, arrived, self._changed)
        stream = functools.partial(self._stream, run, deadline)
        streams = start_threads(stream, min(self.num_streams, len(blocks)), name="weightsync-store")
        try:
            with self._changed:
                while run.num_ended < len(streams):
                    if self._closed:
                        run.fail(_closed())
                        break
                    if deadline.expired:
                        run.fail(DeadlineExceededError(f"{self.blob.key} did not come within {deadline.said}"))
                        break
                    self._changed.wait(deadline.remaining_s)
        finally:
            run.leave()
            if run.num_ended < len(streams):
                with _lock:
                    _left_behind.setdefault(self.store.url, []).extend(streams)
        run.check()

    def cancel(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        self.cancel()

    def _wait_for_room(self, deadline: Deadline) -> None:
        """Returns when few enough streams of earlier reads sit in requests of this store."""
        url = self.store.url
        while len(late := _late_streams(url)) >= MAX_LEFT_BEHIND:
            if self._closed:
                raise _closed()
            deadline.check(f"end of {len(late)} earlier requests, which hang", peer=url)
            late[0].join(_LOOK_S)

    def _stream(self, run: _Run, deadline: Deadline) -> None:
        try:
            own = np.empty(min(self.blob.block_bytes, self.blob.data_end - self.blob.data_start), np.uint8).data
            while (block := run.take()) is not None:
                start, length = self.source.block(block)
                data = own[:length]
                self._fetch(run, block, data, deadline)
                run.put(block, start, data)
        except WeightSyncError as error:
            run.fail(error)
        except BaseException as error:
            run.fail(TransferError(f"{self.blob.key} could not be read: {type(error).__name__}: {error}"))
        finally:
            run.ended()

    def _fetch(self, run: _Run, block: int, data: memoryview, deadline: Deadline) -> None:
        start, length = self.source.block(block)
        key, why = self.blob.key, ""
        for _ in range(_MAX_TRIES):
            self._check_wanted(run)
            deadline.check(f"end of {key}", peer=self.store.url)
            try:
                self.store.get_range(key, start, data, deadline=deadline)
            except ObjectMissingError:
                why = "is gone"
                break
            except StoreDamagedError as error:
                why = error.message
                continue
            if hashlib.sha256(data).digest() == self.blob.digest(block):
                return
            why = f"is damaged: bytes {start} to {start + length} are others than were written"
        self._check_wanted(run)  # what comes late may be of an object that was deleted meanwhile, as it should be
        self.damaged(key)
        raise StoreDamagedError(f"{self.store.url}/{key} {why}", peer=self.store.url, state_left="nothing is taken")

    def _check_wanted(self, run: _Run) -> None:
        if self._closed or not run.is_wanted:
            raise _closed()


class _Run:
    """One read: the blocks that are left, and the way to the caller's memory, for as long as the caller waits.

    Attributes:
        error: why it failed, first of all; None: it did not.
        num_ended: how many of its streams have ended.
    """

    def __init__(self, blocks: list[int], into: Destination, arrived: Arrived, changed: threading.Condition) -> None:
        self.error: WeightSyncError | None = None
        self.num_ended = 0
        self._todo = collections.deque(blocks)
        self._changed = changed
        self._caller: tuple[Destination, Arrived] | None = (into, arrived)
        self._num_putting = 0

    @property
    def is_wanted(self) -> bool:
        """Whether the caller waits."""
        return self._caller is not None

    def take(self) -> int | None:
        """The next block; None: there is none, or it has failed."""
        with self._changed:
            return self._todo.popleft() if self._todo and self.error is None else None

    def put(self, block: int, offset: int, data: memoryview) -> None:
        """A block was right: its bytes go where the caller wants them; nowhere, where nobody waits for them."""
        with self._changed:
            if self._caller is None:
                return
            into, arrived = self._caller
            self._num_putting += 1
        try:
            target = into(offset, len(data))
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))  # a view's own copy holds the GIL
            arrived(block, target)
        finally:
            with self._changed:
                self._num_putting -= 1
                self._changed.notify_all()

    def fail(self, error: WeightSyncError) -> None:
        with self._changed:
            self.error = self.error or error

    def ended(self) -> None:
        """One of its streams has."""
        with self._changed:
            self.num_ended += 1
            self._changed.notify_all()

    def leave(self) -> None:
        """The caller waits no longer: when this returns, nobody writes its memory, or calls it, any more."""
        with self._changed:
            self._caller = None
            while self._num_putting:
                self._changed.wait()

    def check(self) -> None:
        """Raises what it failed with, and forgets it: streams left behind hold this, and its frames hold the caller's
        memory."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error


def _closed() -> TransferAbortedError:
    return TransferAbortedError("this source was closed")


def _late_streams(url: str) -> list[threading.Thread]:
    with _lock:
        late = [each for each in _left_behind.pop(url, ()) if each.is_alive()]
        if late:
            _left_behind[url] = late
        return late[:]


def _forget() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _left_behind.clear()


os.register_at_fork(after_in_child=_forget)
