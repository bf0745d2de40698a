"""A source that reads an object: right ranges, wrong ones, a deadline, and its end from elsewhere."""

from __future__ import annotations

import hashlib
import time

import pytest

from tests.standins.stores import FaultyStore
from weightsync.errors import DeadlineExceededError, StoreDamagedError, TransferAbortedError, TransferError
from weightsync.objects.folder import FolderStore
from weightsync.transfer.store import StoreSource
from weightsync.types import Deadline
from weightsync.types.publication import Source
from weightsync.types.store import StoredBlob

BLOCK, START, SIZE = 4096, 100, 100 + 5 * 4096 + 7


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


def read(reader, timeout_s=10.0):
    memory, there = memoryview(bytearray(SIZE)), set()
    reader.read(
        list(range(6)), lambda at, size: memory[at : at + size], lambda block, data: there.add(block),
        deadline=Deadline(timeout_s),
    )  # fmt: skip
    return memory, there


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
