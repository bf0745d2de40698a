"""A source that reads an object: right ranges, wrong ones, a deadline, and its end from elsewhere."""

from __future__ import annotations

import hashlib
import threading
import time
import weakref

import numpy as np
import pytest

from tests.multiproc.pull_kit import wait_until
from tests.standins.stores import FaultyStore
from weightsync.errors import DeadlineExceededError, StoreDamagedError, TransferAbortedError, TransferError
from weightsync.handles.fanout import in_thread
from weightsync.objects.folder import FolderStore
from weightsync.transfer import store as transfer_store
from weightsync.transfer.store import StoreSource
from weightsync.types import Deadline
from weightsync.types.publication import Source
from weightsync.types.store import StoredBlob

BLOCK, START, SIZE = 4096, 100, 100 + 5 * 4096 + 7
SOON_S = 5.0


@pytest.fixture
def store(tmp_path):
    made = FolderStore(f"file://{tmp_path}/run")
    made.put_large("x", bytes(range(256)) * (SIZE // 256 + 1), deadline=Deadline(5))
    return made


def source(store, rule=lambda *_: None, **options):
    data = (bytes(range(256)) * (SIZE // 256 + 1))[:SIZE]
    sums = b"".join(hashlib.sha256(data[at : at + BLOCK]).digest() for at in range(START, SIZE, BLOCK))
    blob = StoredBlob(key="x", data_start=START, data_end=SIZE, block_bytes=BLOCK, sha256=sums)
    where = Source(endpoint="file:///a/run", segment="x", data_start=START, data_end=SIZE, block_bytes=BLOCK)
    return StoreSource(where, blob, FaultyStore(store, rule), **options), data


def read(reader, timeout_s=10.0, memory=None):
    memory, there = memoryview(bytearray(SIZE)) if memory is None else memory, set()
    reader.read(
        list(range(6)), lambda at, size: memory[at : at + size], lambda block, data: there.add(block),
        deadline=Deadline(timeout_s),
    )  # fmt: skip
    return memory, there


@pytest.fixture
def hangs():
    """A rule by which every request hangs until `open` is set."""

    class Hangs:
        def __init__(self):
            self.open, self.begun = threading.Event(), threading.Event()

        def __call__(self, op, key, count):
            self.begun.set()
            self.open.wait(30.0)

    made = Hangs()
    yield made
    made.open.set()
    wait_until_back()


def wait_until_back() -> None:
    wait_until(lambda: not any(each.name.startswith("weightsync-store") for each in threading.enumerate()), "all end")


def test_all_ranges_come(store) -> None:
    reader, data = source(store)
    memory, there = read(reader)
    assert there == set(range(6))
    assert memory[START:] == data[START:]


def test_a_range_that_stays_wrong_is_named_and_told_once(store) -> None:
    bad: list[str] = []
    reader, _ = source(store, lambda op, key, count: "flip", num_streams=1, damaged=bad.append)
    with pytest.raises(StoreDamagedError, match="x is damaged: bytes 100 to"):
        read(reader)
    assert bad == ["x"]


def test_a_range_that_comes_right_is_taken(store) -> None:
    reader, data = source(store, lambda op, key, count: "flip" if count < 2 else None, num_streams=1)
    assert read(reader)[0][START:] == data[START:]


def test_an_object_that_is_gone(store) -> None:
    reader, _ = source(store)
    store.delete(["x"], deadline=Deadline(5))
    with pytest.raises(StoreDamagedError, match="gone"):
        read(reader)


def test_the_end_from_elsewhere_and_the_deadline(store) -> None:
    def cut(op: str, key: str, count: int) -> None:
        if count:
            reader.cancel()

    def slow(op: str, key: str, count: int) -> None:
        time.sleep(0.1)

    reader, _ = source(store, cut, num_streams=1)
    with pytest.raises(TransferAbortedError):
        read(reader)
    reader, _ = source(store, slow, num_streams=1)
    with pytest.raises(DeadlineExceededError):
        read(reader, timeout_s=0.2)


def test_other_ranges_than_the_publication_says_are_refused(store) -> None:
    reader, _ = source(store)
    where = Source(endpoint="file:///a/run", segment="x", data_start=0, data_end=SIZE, block_bytes=BLOCK)
    with pytest.raises(TransferError):
        StoreSource(where, reader.blob, store)


def test_a_request_that_hangs_ends_with_the_deadline_and_writes_nothing_afterwards(store, hangs) -> None:
    """Seen red: the read waited for its streams without a limit, and they wrote the caller's memory when they came."""
    reader, _ = source(store, hangs)
    memory = memoryview(bytearray(SIZE))
    call = in_thread(lambda: read(reader, 1.0, memory), name="read")
    with pytest.raises(DeadlineExceededError, match="did not come within"):
        call.result(timeout=SOON_S)
    hangs.open.set()
    wait_until_back()
    assert bytes(memory) == bytes(SIZE)


def test_a_request_that_hangs_ends_with_the_cancel(store, hangs) -> None:
    """Seen red: the end from elsewhere was looked at between requests alone."""
    reader, _ = source(store, hangs)
    memory = memoryview(bytearray(SIZE))
    call = in_thread(lambda: read(reader, 60.0, memory), name="read")
    assert hangs.begun.wait(SOON_S)
    reader.cancel()
    with pytest.raises(TransferAbortedError):
        call.result(timeout=SOON_S)
    hangs.open.set()
    wait_until_back()
    assert bytes(memory) == bytes(SIZE)


def test_what_is_left_behind_holds_nothing_of_the_caller_and_tells_nobody(store, hangs) -> None:
    """Seen red: with the failure kept in what the streams hold, its frames kept the memory; a late "gone" was told."""
    bad: list[str] = []
    reader, _ = source(store, hangs, damaged=bad.append)
    memory = np.zeros(SIZE, np.uint8)
    held = weakref.ref(memory)

    def until_the_deadline(memory):
        with pytest.raises(DeadlineExceededError):
            read(reader, 0.2, memory.data)

    until_the_deadline(memory)
    del memory
    assert held() is None
    store.delete(["x"], deadline=Deadline(5))
    hangs.open.set()
    wait_until_back()
    assert bad == []


def test_so_many_streams_may_be_left_behind_and_the_next_read_waits_for_them(store, hangs, monkeypatch) -> None:
    """Seen red: with no look at them, each read left its own behind."""
    monkeypatch.setattr(transfer_store, "MAX_LEFT_BEHIND", 4)
    for _ in range(2):
        with pytest.raises(DeadlineExceededError, match="did not come"):
            read(source(store, hangs, num_streams=2)[0], 1.0)
    reader, _ = source(store, num_streams=2)
    with pytest.raises(DeadlineExceededError, match="no end of 4 earlier requests"):
        read(reader, 0.2)
    call = in_thread(lambda: read(reader), name="read")
    hangs.open.set()
    assert call.result(timeout=SOON_S)[1] == set(range(6))


def test_a_read_ends_after_what_its_caller_is_told(store) -> None:
    """What was told of is there, and nobody is told anything after the end. Seen red: with no wait for who is told."""
    told, go_on = threading.Event(), threading.Event()

    def arrived(block, data):
        told.set()
        assert go_on.wait(SOON_S)

    reader, _ = source(store, num_streams=1)
    memory = memoryview(bytearray(SIZE))
    call = in_thread(
        lambda: reader.read([0], lambda at, size: memory[at : at + size], arrived, deadline=Deadline(30)), name="read"
    )
    assert told.wait(SOON_S)
    reader.cancel()
    with pytest.raises(TimeoutError):
        call.result(timeout=0.2)
    go_on.set()
    with pytest.raises(TransferAbortedError):
        call.result(timeout=SOON_S)
