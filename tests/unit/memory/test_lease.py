"""Locks on segments: the kernel tells writer and readers apart, and gives a lock back when its holder ends."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.standins.descriptors import num_open
from tests.standins.processes import Child, children
from weightsync.errors import SharedMemoryError
from weightsync.memory import Lock, Reader, Segment, folder, is_read


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this test alone."""
    monkeypatch.setattr(folder, "_path", str(tmp_path))
    yield tmp_path
    assert os.listdir(tmp_path) == []


def can(name: str, reader: Reader | None) -> bool:
    """Whether a lock is to be had; it is given back."""
    with contextlib.suppress(BlockingIOError), Lock(name, reader):
        return True
    return False


def _hold(path: str, name: str, reader: Reader | None, fork: bool, conn: Any) -> None:
    """Holds a lock, perhaps with a child that lives on, until it is told to give it back."""
    folder._path = path
    lock = Lock(name, reader)
    child = os.fork() if fork else -1
    if child == 0:
        lock.close()  # of a fork: takes nothing away from the parent
        conn.send("closed")
        signal.pause()
    conn.send(child)
    conn.recv()
    lock.close()
    lock.close()
    conn.send("given back")
    signal.pause()


def holder(start: Any, path: Path, name: str, reader: Reader | None, *, fork: bool = False) -> tuple[Child, int]:
    child: Child = start(_hold, str(path), name, reader, fork, talk=True)
    said = [child.recv(20) for _ in range(1 + fork)]
    return child, next(number for number in said if number != "closed")


@pytest.mark.parametrize("reader", list(Reader))
def test_a_reader_in_another_process_keeps_the_writer_out_and_no_reader(own_folder: Path, reader: Reader) -> None:
    other = Reader(1 - reader)
    with children() as start, Segment(4096) as segment:
        assert not is_read(segment.name, reader)
        child, _ = holder(start, own_folder, segment.name, reader)
        assert not can(segment.name, None)
        assert can(segment.name, reader)
        assert can(segment.name, other)
        assert is_read(segment.name, reader)
        assert not is_read(segment.name, other)
        child.conn.send("go on")
        assert child.recv(10) == "given back"
        assert can(segment.name, None)
        assert not is_read(segment.name, reader)


def test_a_writer_in_another_process_keeps_everybody_out_and_reads_nothing(own_folder: Path) -> None:
    with children() as start, Segment(4096) as segment:
        child, _ = holder(start, own_folder, segment.name, None)
        assert not any(can(segment.name, reader) for reader in (None, *Reader))
        assert not any(is_read(segment.name, reader) for reader in Reader), "a writer is no reader"
        child.conn.send("go on")
        assert child.recv(10) == "given back"
        assert all(can(segment.name, reader) for reader in (None, *Reader))


@pytest.mark.parametrize("reader", [None, *Reader])
def test_a_holders_fork_keeps_nothing_and_kill_9_gives_the_lock_back(own_folder: Path, reader: Reader | None) -> None:
    """Seen to fail: without the hook that closes the lock's descriptor in a forked child, which shares the lock."""
    with children() as start, Segment(4096) as segment:
        child, fork = holder(start, own_folder, segment.name, reader, fork=True)
        try:
            assert not can(segment.name, None), "what the fork closes does not unlock the parent's"
            child.kill()
            assert can(segment.name, None), "the fork lives, and holds nothing"
        finally:
            os.kill(fork, signal.SIGKILL)


def test_a_process_keeps_itself_out_too() -> None:
    """An agent's transfers, or a trainer and an embedded receiver: a lock is its holder's, not the process's."""
    with Segment(4096) as segment:
        with Lock(segment.name, Reader.MAPPED) as first, Lock(segment.name, Reader.MAPPED):
            first.close()
            assert not can(segment.name, None)
        with Lock(segment.name, None):
            assert not can(segment.name, Reader.SENT)
        assert can(segment.name, None)


def test_a_lock_outlives_the_name_and_a_new_one_needs_it() -> None:
    segment = Segment(4096)
    with Lock(segment.name, Reader.MAPPED):
        segment.close()
    for call in (lambda: Lock(segment.name, None), lambda: is_read(segment.name, Reader.SENT)):
        with pytest.raises(SharedMemoryError):
            call()


def test_a_refused_lock_leaves_no_descriptor() -> None:
    with Segment(4096) as segment, Lock(segment.name, Reader.SENT):
        before = num_open(segment.name)
        assert before
        for _ in range(20):
            assert not can(segment.name, None)
            is_read(segment.name, Reader.MAPPED)
        assert num_open(segment.name) == before
