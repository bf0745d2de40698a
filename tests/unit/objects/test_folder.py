"""A folder as an object store: the same contract as S3's, see `test_cloud`. Here what a folder alone can do wrong."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from tests.unit.objects.contract import check_contract
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    ObjectConflictError,
    ObjectMissingError,
    StoreDamagedError,
)
from weightsync.objects.folder import FolderStore, check_folder
from weightsync.types import Deadline


def test_the_contract(tmp_path: Path) -> None:
    check_contract(FolderStore(f"file://{tmp_path}/run"))


def _count(url: str, turns: int) -> None:
    """Adds 1 so many times, each by a conditional put."""
    store = FolderStore(url)
    for _ in range(turns):
        while True:
            found = store.get("count", deadline=Deadline(20))
            assert found is not None
            try:
                store.put("count", str(int(found.data) + 1).encode(), deadline=Deadline(20), replaces=found.etag)
                break
            except ObjectConflictError:
                continue


def test_conditional_puts_of_several_processes_lose_nothing(tmp_path: Path) -> None:
    """One writer at a time replaces."""
    url = f"file://{tmp_path}/run"
    FolderStore(url).put("count", b"0", deadline=Deadline(5), replaces=None)
    spawn = multiprocessing.get_context("fork")
    workers = [spawn.Process(target=_count, args=(url, 40)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    found = FolderStore(url).get("count", deadline=Deadline(5))
    assert found is not None
    assert found.data == b"120"


def test_conditional_puts_of_several_threads_lose_nothing(tmp_path: Path) -> None:
    """Seen red with the file's lock alone, which is of a process."""
    url = f"file://{tmp_path}/run"
    FolderStore(url).put("count", b"0", deadline=Deadline(5), replaces=None)
    workers = [threading.Thread(target=_count, args=(url, 40), daemon=True) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    found = FolderStore(url).get("count", deadline=Deadline(5))
    assert found is not None
    assert found.data == b"160"


def test_one_of_many_creates(tmp_path: Path) -> None:
    store, made = FolderStore(f"file://{tmp_path}/run"), []

    def create(number: int) -> None:
        try:
            store.put("x", str(number).encode(), deadline=Deadline(10), replaces=None)
            made.append(number)
        except ObjectConflictError:
            pass

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    found = store.get("x", deadline=Deadline(5))
    assert found is not None
    assert [int(found.data)] == made


def test_a_reader_never_sees_half(tmp_path: Path) -> None:
    """It is written aside first."""
    store, ended = FolderStore(f"file://{tmp_path}/run"), threading.Event()
    sizes = set()

    def read() -> None:
        while not ended.is_set():
            try:
                found = store.get("x", deadline=Deadline(5))
                sizes.add(len(found.data) if found else 0)
            except ObjectMissingError:
                pass

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(20):
        store.put_large("x", bytes(1 << 20), deadline=Deadline(5))
    ended.set()
    thread.join(10)
    assert sizes == {1 << 20}


def test_a_lock_that_is_held_has_a_deadline(tmp_path: Path) -> None:
    import fcntl

    store = FolderStore(f"file://{tmp_path}/run")
    etag = store.put("x", b"1", deadline=Deadline(5), replaces=None)
    store.put("x", b"2", deadline=Deadline(5), replaces=etag)
    pid = os.fork()
    if pid == 0:
        fd = os.open(tmp_path / "run" / ".lock", os.O_RDWR)
        fcntl.lockf(fd, fcntl.LOCK_EX)
        (tmp_path / "held").touch()
        threading.Event().wait(20)
        os._exit(0)
    try:
        end = Deadline(10)
        while not (tmp_path / "held").exists():
            end.check("lock")
        found = store.get("x", deadline=Deadline(5))
        assert found is not None
        with pytest.raises(DeadlineExceededError):
            store.put("x", b"3", deadline=Deadline(0.2), replaces=found.etag)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("key", ["../x", "/x", "a/../../x", ".lock", "a//b", "a/.aside-1", "", "a\nb", "x/"])
def test_no_key_leads_out(tmp_path: Path, key: str) -> None:
    store = FolderStore(f"file://{tmp_path}/run")
    for call in (
        lambda: store.get(key, deadline=Deadline(5)),
        lambda: store.put(key, b"x", deadline=Deadline(5), replaces=None),
        lambda: store.delete([key], deadline=Deadline(5)),
    ):
        with pytest.raises(InvalidRequestError):
            call()


def test_what_is_no_folder_and_what_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError):
        check_folder(f"file://{tmp_path}/file")
    store = FolderStore(f"file://{tmp_path}/run")
    store.put_large("x", b"12345", deadline=Deadline(5))
    with pytest.raises(StoreDamagedError):
        store.get_range("x", 3, memoryview(bytearray(5)), deadline=Deadline(5))


def test_what_is_no_file_is_damage_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """A pipe, which never ends; a link to itself hides nothing else. Seen red with a plain open, which waits."""
    store = FolderStore(f"file://{tmp_path}/run")
    etag = store.put("x", b"1", deadline=Deadline(5), replaces=None)
    (tmp_path / "run" / "x").unlink()
    os.mkfifo(tmp_path / "run" / "x")
    (tmp_path / "run" / "loop").symlink_to(tmp_path / "run" / "loop")
    ended: list[str] = []

    def ask() -> None:
        for call in (
            lambda: store.get("x", deadline=Deadline(5)),
            lambda: store.get_range("x", 0, memoryview(bytearray(1)), deadline=Deadline(5)),
            lambda: store.put("x", b"2", deadline=Deadline(5), replaces=etag),
        ):
            with pytest.raises(StoreDamagedError):
                call()
            ended.append("x")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(20)
    assert len(ended) == 3
    assert {each.key for each in store.list_under("", deadline=Deadline(5))} >= {"x", "loop"}


def test_who_may_not_sweep_lists_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file aside of a writer that was killed long ago, in a folder that is mounted for reading."""
    store = FolderStore(f"file://{tmp_path}/run")
    store.put_large("x", b"1", deadline=Deadline(5))
    (tmp_path / "run" / ".aside-0").write_bytes(b"half")
    os.utime(tmp_path / "run" / ".aside-0", (0, 0))

    def refused(path: str) -> None:
        raise PermissionError(13, "read-only", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        assert [each.key for each in store.list_under("", deadline=Deadline(5))] == ["x"]
    assert [each.key for each in store.list_under("", deadline=Deadline(5))] == ["x"]
    assert not (tmp_path / "run" / ".aside-0").exists()
