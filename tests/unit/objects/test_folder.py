"""A folder as an object store: the same contract as S3's, see `test_cloud`. Here what a folder alone can do wrong."""

from __future__ import annotations

import errno
import fcntl
import itertools
import multiprocessing
import os
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.objects.contract import check_contract
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    ObjectConflictError,
    ObjectMissingError,
    StoreAuthError,
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
    for number in itertools.count(1):
        store.put_large("x", bytes(1 << 20), deadline=Deadline(5))
        if number >= 20 and (sizes or not thread.is_alive()):  # it has had a turn
            break
    ended.set()
    thread.join(10)
    assert sizes == {1 << 20}


def test_a_lock_that_is_held_has_a_deadline(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("folder", "lock"),
    [(0o755, 0o600), (0o700, 0o600), (0o775, 0o660), (0o2775, 0o660), (0o777, 0o666), (0o757, 0o606)],
)
def test_who_may_write_the_folder_may_lock_it_and_nobody_else(tmp_path: Path, folder: int, lock: int) -> None:
    """Whatever the umask is; a lock file of an earlier release too. Seen red with one that all may read, and the group
    may not write."""
    store = FolderStore(f"file://{tmp_path}/run")
    etag = store.put("x", b"1", deadline=Deadline(5), replaces=None)
    (tmp_path / "run").chmod(folder)
    for before in (None, 0o644):
        if before is not None:
            (tmp_path / "run" / ".lock").chmod(before)
        etag = store.put("x", b"2", deadline=Deadline(5), replaces=etag)
        assert stat.S_IMODE((tmp_path / "run" / ".lock").stat().st_mode) == lock


def _as_nobody(group: int, call: Callable[[], object]) -> int:
    """Exit code of a process of another user, in one group: 0, or 3 where it raised PermissionError, or 4."""
    pid = os.fork()
    if pid == 0:
        code = 5
        try:
            os.setgroups([])
            os.setgid(group)
            os.setuid(65534)
            call()
            code = 0
        except PermissionError:
            code = 3
        except StoreAuthError:
            code = 4
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes two users")
@pytest.mark.parametrize("may_be_given", [True, False])
def test_a_reader_holds_no_lock_and_a_second_users_writer_takes_it(
    monkeypatch: pytest.MonkeyPatch, may_be_given: bool
) -> None:
    """The second one writes as a member of the folder's group, which is not the first one's. Seen red: a read lock of
    any reader stopped the writer, and the second one could not open the lock at all."""
    with tempfile.TemporaryDirectory() as outside:  # pytest's own folder is closed to others
        os.chmod(outside, 0o755)
        folder = Path(outside) / "run"
        folder.mkdir()
        os.chown(folder, 0, 65533)
        folder.chmod(0o775)
        store = FolderStore(f"file://{folder}")
        etag = store.put("x", b"1", deadline=Deadline(5), replaces=None)
        with monkeypatch.context() as patch:
            if not may_be_given:

                def refused(*_: int) -> None:
                    raise PermissionError(1, "not a member")

                patch.setattr(os, "fchown", refused)
            etag = store.put("x", b"2", deadline=Deadline(5), replaces=etag)

        def read_lock() -> None:
            fcntl.lockf(os.open(folder / ".lock", os.O_RDONLY), fcntl.LOCK_SH)

        def replace() -> None:
            FolderStore(f"file://{folder}").put("x", b"3", deadline=Deadline(5), replaces=etag)

        assert _as_nobody(65534, read_lock) == 3
        assert _as_nobody(0, read_lock) == 3
        assert _as_nobody(65533, replace) == (0 if may_be_given else 4)


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


def test_a_folder_that_is_mounted_for_reading_refuses_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it counted as away, and each reader's note was tried for as long as a pull was given."""
    store = FolderStore(f"file://{tmp_path}/run")
    real = os.open

    def mounted_to_read(path: str, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", mounted_to_read)
    with pytest.raises(StoreAuthError, match="Read-only"):
        store.put("x", b"1", deadline=Deadline(5), replaces=None)


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
