"""ServingLease: one page of memory that two processes map. What the writer says holds, also when it is dead."""

from __future__ import annotations

import functools
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightsync.errors import SharedMemoryError
from weightsync.handles.fanout import in_thread
from weightsync.memory import LeaseReader, ServingLease, boot_s, serving

LONG_S = 20.0


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[ServingLease]:
    with ServingLease(str(tmp_path / "lease")) as made:
        yield made


def test_nothing_is_lent_at_first(lease: ServingLease) -> None:
    reader = LeaseReader(lease.path)
    assert "holds no lease" in str(reader.refusal())
    assert not reader.held
    assert lease.left_s == 0.0


def test_a_child_that_is_forked_while_a_lease_is_taken_has_no_part_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: the file stayed locked as long as the child lived, and its service could not start again."""
    path, read, children = str(tmp_path / "lease"), serving._read, []
    ready, far = os.pipe()

    def forks(file: int) -> object:
        monkeypatch.setattr(serving, "_read", read)
        if (child := os.fork()) == 0:
            try:
                os.write(far, b"x")
                signal.pause()
            finally:
                os._exit(0)
        children.append(child)
        assert os.read(ready, 1) == b"x"
        return read(file)

    monkeypatch.setattr(serving, "_read", forks)
    ServingLease(path).close()
    try:
        ServingLease(path).close()
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
        os.close(ready)
        os.close(far)


def test_a_lease_is_never_cut_short_by_another(lease: ServingLease) -> None:
    reader = LeaseReader(lease.path)
    lease.renew(boot_s() + 1000.0)
    lease.renew(boot_s() + 1.0)
    lease.renew(0.0)
    assert 900.0 < lease.left_s <= 1000.0
    assert reader.refusal() is None
    lease.revoke()
    assert "holds no lease" in str(reader.refusal())
    assert lease.left_s == 0.0


def test_a_lease_ends_by_itself(lease: ServingLease) -> None:
    reader = LeaseReader(lease.path)
    end_s = boot_s() + 0.05
    lease.renew(end_s)
    while reader.refusal() is None:
        assert boot_s() < end_s + LONG_S
    assert boot_s() >= end_s


def test_an_engine_that_has_started_since_it_was_seen_refuses(lease: ServingLease) -> None:
    before = LeaseReader(lease.path)
    seen_s = boot_s()
    again = LeaseReader(lease.path)
    lease.renew(boot_s() + 100.0, seen_s=seen_s)
    assert before.refusal() is None
    assert "it has started anew" in str(again.refusal())
    lease.renew(boot_s() + 200.0, seen_s=seen_s)
    assert again.refusal() is not None
    lease.renew(boot_s() + 300.0, seen_s=boot_s())
    assert again.refusal() is None
    lease.renew(boot_s() + 400.0, seen_s=seen_s)
    assert again.refusal() is None, "it is not forgotten"


def test_a_hold_is_waited_for_and_lifted(lease: ServingLease) -> None:
    reader = LeaseReader(lease.path)
    lease.renew(boot_s() + 100.0)
    lease.hold(boot_s() + 100.0)
    assert (reader.refusal(), reader.held) == (None, True)
    lease.renew(boot_s() + 200.0)
    assert reader.held, "a lease ends no hold"
    lease.lift()
    assert (reader.refusal(), reader.held) == (None, False)


def test_a_hold_that_is_over_refuses_until_it_is_lifted(lease: ServingLease) -> None:
    reader = LeaseReader(lease.path)
    lease.renew(boot_s() + 100.0)
    lease.hold(boot_s())
    assert not reader.held
    assert "not committed as a whole" in str(reader.refusal())
    lease.renew(boot_s() + 200.0)
    assert reader.refusal() is not None
    lease.lift()
    assert reader.refusal() is None


def test_a_hold_without_a_lease_is_refused(lease: ServingLease) -> None:
    lease.hold(boot_s() + 100.0)
    assert "holds no lease" in str(LeaseReader(lease.path).refusal())


def test_what_is_there_is_taken_over(lease: ServingLease) -> None:
    """A service that is started again goes on with its own lease, and with what it could not commit."""
    reader = LeaseReader(lease.path)
    lease.renew(boot_s() + 1000.0)
    lease.hold(boot_s())
    with pytest.raises(SharedMemoryError, match="another process writes"):
        ServingLease(lease.path)
    os.close(lease._file)  # as the kernel does for one that was killed
    lease._file = os.open(os.devnull, os.O_RDONLY)
    again = ServingLease(lease.path)
    assert again.torn
    assert again.left_s > 900.0
    assert "as a whole" in str(reader.refusal())
    again.lift()
    assert reader.refusal() is None


def test_another_boots_clock_says_nothing(lease: ServingLease) -> None:
    """The file may lie where a restart of the host leaves it."""
    reader = LeaseReader(lease.path)
    lease.renew(boot_s() + 1e6, seen_s=boot_s() + 1e6)
    assert reader.refusal() is None
    with open(lease.path, "r+b") as file:
        file.seek(32)
        file.write(b"elsewhen")
    assert "holds no lease" in str(reader.refusal())
    os.close(lease._file)
    lease._file = os.open(os.devnull, os.O_RDONLY)
    again = ServingLease(lease.path)
    assert (again.left_s, again.torn) == (0.0, False)
    late = LeaseReader(lease.path)
    again.renew(boot_s() + 100.0, seen_s=1.0)
    assert "started anew" in str(late.refusal())


@pytest.mark.parametrize(
    "content",
    [
        b"wsyncls2" + bytes(32), b"a file", b"w" + bytes(7) + b"precious bytes", bytes(20), b"wsyncls1" + bytes(100),
        bytes(4096), b"x" * 4096,
    ],
    ids=lambda content: f"{len(content)} bytes",
)  # fmt: skip
def test_another_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lease"
    path.write_bytes(content)
    for kind in (ServingLease, LeaseReader):
        with pytest.raises(SharedMemoryError, match="is not a lease file"):
            kind(str(path))
    assert path.read_bytes() == content


@pytest.mark.parametrize("size", [0, 5, 8, 25, 39])
@pytest.mark.parametrize("written_on", [False, True])
def test_one_that_was_cut_off_is_made_whole_by_the_next_service(tmp_path: Path, size: int, written_on: bool) -> None:
    """As the refusal of its engines says. Seen red: nobody could start before the file was removed."""
    path = tmp_path / "lease"
    first = ServingLease(str(path))
    first.renew(boot_s() + 100.0)
    assert not first.damaged
    os.truncate(path, size)
    if written_on:
        first.renew(boot_s() + 200.0)
    assert first.damaged
    with pytest.raises(SharedMemoryError, match="is not a lease file"):
        LeaseReader(str(path))
    first.close()
    again = ServingLease(str(path))
    assert (again.left_s, again.torn, again.damaged) == (0.0, True, False), "a set may have been half served"
    again.lift()
    reader = LeaseReader(str(path))
    again.renew(boot_s() + 100.0)
    assert reader.refusal() is None


def test_where_none_can_be(tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryError, match="can't be made"):
        ServingLease(str(tmp_path / "no" / "folder"))
    with pytest.raises(SharedMemoryError, match="can't be made"):
        ServingLease(str(tmp_path))
    with pytest.raises(SharedMemoryError, match="start its service first"):
        LeaseReader(str(tmp_path / "lease"))
    assert list(tmp_path.iterdir()) == []


def test_nobody_else_may_write_it(lease: ServingLease) -> None:
    assert stat.S_IMODE(os.stat(lease.path).st_mode) == 0o644, "engines of another user read what root's service says"
    assert [each.name for each in Path(lease.path).parent.iterdir()] == ["lease"], "nothing is left beside it"


def test_closed_is_revoked_and_removed_is_refused_for_ever(tmp_path: Path) -> None:
    lease = ServingLease(str(tmp_path / "lease"))
    reader = LeaseReader(lease.path)
    lease.renew(boot_s() + 100.0)
    lease.close()
    lease.close()
    assert reader.refusal() is not None
    assert os.path.exists(lease.path)
    lease.remove()
    lease.remove()
    assert not os.path.exists(lease.path)
    with ServingLease(lease.path) as other:
        theirs = LeaseReader(lease.path)
        other.renew(boot_s() + 100.0)
        assert reader.refusal() is not None, "that is another file"
        assert theirs.refusal() is None


def test_after_close_there_is_no_lease(tmp_path: Path) -> None:
    """A heartbeat's answer that comes late is no reason to fail. Seen to fail with ValueError."""
    lease = ServingLease(str(tmp_path / "lease"))
    reader = LeaseReader(lease.path)
    lease.close()
    lease.renew(boot_s() + 100.0)
    lease.hold(boot_s() + 100.0)
    lease.lift()
    lease.revoke()
    assert lease.left_s == 0.0
    assert reader.refusal() is not None


def test_many_threads(lease: ServingLease) -> None:
    """The longest wins, whoever comes last; a reader never sees half of a number."""
    reader, base_s = LeaseReader(lease.path), boot_s() + 1000.0
    stop = threading.Event()

    def reads() -> set[str | None]:
        seen = set()
        while not stop.is_set():
            seen.add(reader.refusal())
        return seen

    lease.renew(base_s)
    reading = in_thread(reads, name="reads")

    def renews(first: int) -> None:
        for number in range(3000):
            lease.renew(base_s + (first * 7919 + number * 31) % 1000)

    writers = [in_thread(functools.partial(renews, first), name="renews") for first in range(4)]
    for writer in writers:
        writer.result(LONG_S)
    stop.set()
    assert reading.result(LONG_S) == {None}
    before_s, left_s, after_s = boot_s(), lease.left_s, boot_s()
    assert before_s + left_s - 1e-6 <= base_s + 999.0 <= after_s + left_s + 1e-6


WRITER_LEASE_S = 5.0  # more than a busy machine keeps a process waiting
WRITER = f"""
import sys
from weightsync.memory import ServingLease, boot_s
lease = ServingLease(sys.argv[1])
print("there", flush=True)
while True:
    lease.renew(boot_s() + {WRITER_LEASE_S})
    lease.hold(boot_s() + {WRITER_LEASE_S})
    lease.lift()
"""


def test_a_writer_that_is_killed_is_refused_within_its_lease(tmp_path: Path) -> None:
    """In the middle of writing: no number is torn, and no hold lasts for longer than it said."""
    path = str(tmp_path / "lease")
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline()
            reader = LeaseReader(path)
            end = time.monotonic() + LONG_S
            while reader.refusal() is not None:
                assert time.monotonic() < end
            for _ in range(2000):
                assert reader.refusal() is None, "while it lives"
            writer.send_signal(signal.SIGKILL)
            writer.wait(LONG_S)
        dead_s = boot_s()
        while True:
            now_s = boot_s()
            if reader.refusal() is not None:
                break
            assert now_s <= dead_s + WRITER_LEASE_S
        assert not reader.held
