"""Named shared memory: owners that die leave nothing, readers open nothing else, and a full folder is told in words."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.standins.descriptors import num_open
from tests.standins.processes import Child, children
from weightsync.errors import SharedMemoryError, UnsupportedError
from weightsync.memory import Lock, MappedSegment, Reader, Segment, folder, host_nonce, reclaim_dead
from weightsync.memory import advice as advice_module
from weightsync.memory import mapped as mapped_module
from weightsync.memory import segment as segment_module
from weightsync.memory.advice import Advice
from weightsync.memory.mapped import SharedSegment
from weightsync.memory.segment import unlink_own

quiet = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this test alone; in the end nothing lies in it but the host's nonce."""
    monkeypatch.setattr(folder, "_path", str(tmp_path))
    yield tmp_path
    assert [name for name in os.listdir(tmp_path) if not name.startswith("weightsync-host-")] == []


def there(name: str) -> bool:
    return os.path.lexists(folder.path_of(name))


# Owners.


def test_what_is_written_is_read_and_gone_when_closed(own_folder: Path) -> None:
    with Segment(5000) as segment:
        segment.memory[10:13] = b"abc"
        facts = os.stat(own_folder / segment.name)
        assert stat.S_IMODE(facts.st_mode) == 0o600
        assert facts.st_size == 5000
        assert facts.st_blocks * 512 >= 5000, "allocated up front"
        with MappedSegment(segment.name, need_bytes=5000) as reader:
            assert bytes(reader.memory[10:13]) == b"abc"
            segment.memory[10:13] = b"xyz"
            assert bytes(reader.memory[10:13]) == b"xyz"
            assert not reader.unlinked
            segment.close()
            assert reader.unlinked
            assert bytes(reader.memory[10:13]) == b"xyz", "the memory lives as long as somebody reads it"


def test_the_kernel_is_told_what_helps_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench/pages.py` measured SEQUENTIAL and WILLNEED, which steer read-ahead from a disk: nothing came of them. Seen
    red with either of them given, and without the pages at once."""
    told: list[Advice] = []

    def advise(mapped: mmap.mmap, advice: Advice, *, part: slice = slice(None)) -> None:
        told.append(advice)
        advice_module.advise(mapped, advice, part=part)

    for module in (segment_module, mapped_module):
        monkeypatch.setattr(module, "advise", advise)
    with Segment(1 << 20) as made:
        assert told == [Advice.HUGEPAGE, Advice.POPULATE_WRITE], "huge pages before there is any"
        MappedSegment(made.name, need_bytes=1).close()
        assert told[2:] == [Advice.POPULATE_READ]
        made.give_back_pages()
        assert told[3:] == [Advice.REMOVE]
        assert not any(made.memory)


def _resident_kib(path: Path) -> int:
    """Of the mappings of a file in this process."""
    entries = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    return sum(int(each.split("Rss:")[1].split()[0]) for each in entries)


def test_pages_are_mapped_behind_whoever_fills_it(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is allocated at once, so no write can fail; a thread maps it in pieces. Seen red without the thread."""
    monkeypatch.setattr(segment_module, "_MAPPED_AT_ONCE_BYTES", 1 << 20)
    with Segment((5 << 20) + 100, mapped=False) as made:
        assert os.stat(own_folder / made.name).st_blocks * 512 > 5 << 20
        made.memory[3 << 20] = 7
        assert made._mapping is not None
        made._mapping.join()
        assert _resident_kib(own_folder / made.name) == 5 * 1024 + 4
        assert made.memory[3 << 20] == 7, "what was written stays"
        assert not any(made.memory[: 3 << 20])


def test_nothing_is_mapped_that_was_given_back(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red without the wait: pages came back after they were freed, and stayed as long as anybody mapped them."""
    begun, goes_on, pieces = threading.Event(), threading.Event(), []

    def advise(mapped: mmap.mmap, advice: Advice, *, part: slice = slice(None)) -> None:
        if advice is Advice.POPULATE_WRITE:
            pieces.append(part)
            begun.set()
            goes_on.wait(20.0)
        advice_module.advise(mapped, advice, part=part)

    monkeypatch.setattr(segment_module, "advise", advise)
    monkeypatch.setattr(segment_module, "_MAPPED_AT_ONCE_BYTES", 1 << 20)
    with Segment(3 << 20, mapped=False) as made:
        assert begun.wait(20.0)
        thread = made._mapping
        assert thread is not None
        join = thread.join

        def goes_on_and_joins() -> None:
            goes_on.set()
            join()

        monkeypatch.setattr(thread, "join", goes_on_and_joins)
        made.give_back_pages()
        assert len(pieces) == 1
        assert not any(made.memory)


@pytest.mark.parametrize("huge", ["advise", "always", "never"])
def test_where_only_who_asks_has_huge_pages_all_is_mapped_first(huge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocated first, pages would stay small."""
    monkeypatch.setattr(segment_module, "huge_option", lambda: huge)
    with Segment(4096, mapped=False) as made:
        assert (made._mapping is None) == (huge == "advise")


def test_views_that_are_alive_survive_the_close() -> None:
    """Neither end crashes, and the bytes stay what they are."""
    segment = Segment(4096)
    segment.memory[:2] = b"ok"
    reader = MappedSegment(segment.name, need_bytes=1)
    written, read = segment.memory[:2], reader.memory[:2]
    for _ in range(2):
        segment.close()
        reader.close()
    assert bytes(written) == bytes(read) == b"ok"


def test_a_readers_write_is_its_own() -> None:
    """Seen to fail: with a shared mapping, the owner's bytes changed; with a read-only one the process dies."""
    with Segment(3 * mmap.PAGESIZE) as segment:
        reader, other = (MappedSegment(segment.name, need_bytes=1) for _ in range(2))
        reader.memory[0] = 7
        assert (segment.memory[0], other.memory[0]) == (0, 0)
        reader.close()
        other.close()


def _own(path: str, conn: Any) -> None:
    folder._path = path
    segment = Segment(4096)
    conn.send(segment.name)
    conn.recv()


def _own_and_fork(path: str, conn: Any) -> None:
    """Forks a child that lives on, then says the name."""
    folder._path = path
    segment = Segment(4096)
    child = os.fork()
    if child == 0:
        segment.close()  # of a fork: neither unlinks nor unlocks
        signal.pause()
    conn.send((segment.name, child))
    conn.recv()


def test_a_killed_owners_segment_is_reclaimed_and_a_living_ones_is_not(own_folder: Path) -> None:
    with children() as start, Segment(4096) as mine:
        owner: Child = start(_own, str(own_folder), talk=True)
        name = owner.recv(10)
        assert reclaim_dead() == ()
        owner.kill()
        assert there(name)
        with Segment(4096):
            assert not there(name), "whoever makes a segment clears away the dead"
        assert there(mine.name)


def _own_bytes(path: str, conn: Any) -> None:
    folder._path = path
    segments = [Segment((1 << 20) + 1) for _ in range(2)]  # the last page is not full
    for segment in segments:
        segment.memory[:] = b"x" * segment.size_bytes
        segment.pin()
    conn.send([segment.name for segment in segments])
    conn.recv()


def test_the_pages_of_a_killed_owner_are_freed_though_they_are_mapped_but_not_under_a_lease(own_folder: Path) -> None:
    """Seen to fail: only names went, and engines that idle kept two models of /dev/shm from the next trainer."""
    with children() as start:
        owner: Child = start(_own_bytes, str(own_folder), talk=True)
        free, leased = owner.recv(10)
        files = {name: os.open(folder.path_of(name), os.O_RDONLY) for name in (free, leased)}
        mapped = {name: MappedSegment(name, need_bytes=1) for name in files}
        with Lock(leased, Reader.MAPPED):
            owner.kill()
            assert set(reclaim_dead()) == {free, leased}
            assert os.fstat(files[free]).st_blocks == 0
            assert os.fstat(files[free]).st_size == (1 << 20) + 1, "whoever reads it reads zeros, and is not killed"
            assert not any(mapped[free].memory)
            assert os.fstat(files[leased]).st_blocks * 512 >= 1 << 20
            assert all(byte == ord("x") for byte in mapped[leased].memory[::4096])
        for name, fd in files.items():
            mapped[name].close()
            os.close(fd)


def test_a_fork_of_the_owner_keeps_nothing_alive(own_folder: Path) -> None:
    """Seen to fail: without the hook that closes the lock's descriptor in a forked child, and with a mapping made of
    the locked descriptor, which Python duplicates."""
    with children() as start:
        owner: Child = start(_own_and_fork, str(own_folder), talk=True)
        name, fork = owner.recv(10)
        try:
            assert there(name), "a fork that closes it does not unlink it"
            assert reclaim_dead() == (), "nor does it give up the lock"
            owner.kill()
            assert reclaim_dead() == (name,), "and once the owner is dead the fork does not hold the lock"
        finally:
            os.kill(fork, signal.SIGKILL)


def test_an_owner_that_ends_without_closing_leaves_nothing(own_folder: Path) -> None:
    code = f"from weightsync.memory import Segment, folder; folder._path = {str(own_folder)!r}; s = Segment(99)"
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert os.listdir(own_folder) == []


def test_a_process_that_is_about_to_be_ended_takes_its_names_away_while_it_still_writes() -> None:
    with Segment(4096) as segment, Segment(4096) as other:
        unlink_own()
        assert not there(segment.name)
        assert not there(other.name)
        segment.memory[0] = 1


def test_no_room_is_told_before_anything_is_taken(own_folder: Path) -> None:
    left = folder.free_bytes()
    with pytest.raises(SharedMemoryError, match=r"has \d+ left; raise the size of /dev/shm.* or lower chunk_bytes"):
        Segment(left + (1 << 40), instead="lower chunk_bytes")
    with pytest.raises(SharedMemoryError, match=r"has \d+ left; raise the size of /dev/shm") as plain:
        Segment(left + (1 << 40))
    assert "chunk_bytes" not in str(plain.value)  # a store's segment has no chunks
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(SharedMemoryError, match="left"):
            Segment(8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(SharedMemoryError):
        Segment(0)


def test_a_system_without_shared_memory_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(folder, "_path", "/nowhere/at/all")
        for call in (lambda: Segment(1), host_nonce, reclaim_dead):
            with pytest.raises(UnsupportedError, match="broadcast"):
                call()


# Readers.


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        ".",
        "/etc/passwd",
        "weightsync-../x",
        "weightsync-1/../../etc/passwd",
        "psm_abc",
        "weightsync-",
        "a\0b",
    ],
)
def test_a_name_that_is_not_ours_is_refused(name: str) -> None:
    with pytest.raises(SharedMemoryError):
        MappedSegment(name, need_bytes=1)


@quiet
@given(st.text(max_size=40))
def test_no_name_leads_out_of_the_folder(name: str) -> None:
    with contextlib.suppress(SharedMemoryError):
        assert os.path.dirname(os.path.realpath(folder.path_of(name))) == folder.folder()


@quiet
@given(size=st.integers(1, 70_000), need=st.integers(-5, 140_000))
def test_sizes_are_checked_before_anything_is_mapped(size: int, need: int) -> None:
    with Segment(size) as segment:
        if 0 < need <= size:
            with MappedSegment(segment.name, need_bytes=need) as reader:
                assert len(reader.memory) == size
        else:
            with pytest.raises(SharedMemoryError, match="announced"):
                MappedSegment(segment.name, need_bytes=need)


def test_only_a_users_own_regular_files_are_opened(own_folder: Path) -> None:
    secret = own_folder / "secret"
    secret.write_bytes(b"x" * 100)
    names = {kind: f"weightsync-1-{kind}" for kind in ("link", "pipe", "folder", "open")}
    os.symlink(secret, own_folder / names["link"])
    os.mkfifo(own_folder / names["pipe"], 0o600)
    os.mkdir(own_folder / names["folder"])
    (own_folder / names["open"]).write_bytes(b"x" * 100)
    os.chmod(own_folder / names["open"], 0o644)
    for name in (*names.values(), "weightsync-1-gone"):
        with pytest.raises(SharedMemoryError):
            MappedSegment(name, need_bytes=1)
    if os.geteuid() == 0:
        os.chmod(own_folder / names["open"], 0o600)
        os.chown(own_folder / names["open"], 12345, 12345)
        with pytest.raises(SharedMemoryError, match="uid"):
            MappedSegment(names["open"], need_bytes=1)
    assert reclaim_dead() == (), "what is not named like a segment is nobody's to unlink"
    for path in own_folder.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()


def test_what_the_kernel_does_not_map_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a bare OSError, of no name, which a pull neither types nor tries again."""

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with Segment(5000) as segment:
        before = num_open(segment.name)
        for mapping in (lambda: MappedSegment(segment.name, need_bytes=5000), lambda: SharedSegment(segment.name)):
            with monkeypatch.context() as patched:
                patched.setattr(mapped_module.mmap, "mmap", refused)
                with pytest.raises(SharedMemoryError, match=f"{segment.name} can't be mapped: .*annot allocate memory"):
                    mapping()
        assert num_open(segment.name) == before


# The host.


def _nonce(path: str) -> str:
    folder._path = path
    return host_nonce()


def test_every_process_that_sees_the_same_folder_reads_the_same_nonce(own_folder: Path, tmp_path: Path) -> None:
    """Eight at once, none of which finds it there."""
    with children() as start:
        said = [child.result(20) for child in [start(_nonce, str(own_folder)) for _ in range(8)]]
    assert set(said) == {host_nonce()}
    assert len(said[0]) == 32
    (kept,) = own_folder.iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder._path = str(elsewhere)
    assert host_nonce() != said[0]
    folder._path = str(own_folder)
    for path in elsewhere.iterdir():
        path.unlink()
    elsewhere.rmdir()


def _squat(path: Path, kind: str) -> None:
    if kind == "link":
        path.symlink_to("/etc/hostname")
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("0" * 31 + ("x" if kind == "damaged" else "0"))
        path.chmod(0o644 if kind == "open" else 0o600)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "damaged", "open"])
def test_what_lies_under_the_nonces_name_is_not_believed_and_does_not_stop_it(own_folder: Path, kind: str) -> None:
    """Seen to fail: every start of this user ended with SharedMemoryError, by one file of anybody."""
    path = own_folder / f"weightsync-host-{os.geteuid()}"
    _squat(path, kind)
    before = path.lstat()
    if kind == "link":
        with children() as start:
            said = {child.result(20) for child in [start(_nonce, str(own_folder)) for _ in range(6)]}
        assert said == {host_nonce()}, "all of this user agree"
    assert len(host_nonce()) == 32
    assert os.path.samestat(path.lstat(), before), "it is left alone"
    assert len(list(own_folder.iterdir())) == 2
    one = host_nonce()
    path.rmdir() if kind == "folder" else path.unlink()
    assert host_nonce() == one, "a name that gets free changes nothing"


def test_no_descriptor_left_is_a_typed_error() -> None:
    """Seen red: a bare OSError, of both."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for call in (lambda: Segment(1), host_nonce):
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
        try:
            with pytest.raises(SharedMemoryError, match="Too many open files"):
                call()  # type: ignore[operator]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
