"""PublicationBuffer: which segments there are, who may be in them, and how long the trainer waits for one."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightsync.errors import SharedMemoryError
from weightsync.memory import Lock, MappedSegment, Reader, Segment, SharedSegment, folder, is_read
from weightsync.trainer import spare
from weightsync.trainer.buffer import PublicationBuffer, WriteTurn


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this test alone; its thread looks at segments by itself only where the test says how often."""
    monkeypatch.setattr(folder, "_path", str(tmp_path))
    monkeypatch.setattr(spare, "_TEND_EVERY_S", 3600.0)
    yield tmp_path
    assert os.listdir(tmp_path) == []


def nothing() -> None:
    """Nobody can be reset."""


def written(buffer: PublicationBuffer) -> str:
    """Publishes once; the segment's name."""
    turn = third(buffer)
    assert turn is not None
    buffer.written(turn)
    return turn.segment.name


def third(buffer: PublicationBuffer) -> WriteTurn | None:
    """A turn where a reader makes a third segment needed: it is there for the second try, if not for the first."""
    turn = buffer.acquire(nothing)
    if turn is None:
        assert buffer._spare.settle(20)
        turn = buffer.acquire(nothing)
    return turn


def soon(holds: Callable[[], bool]) -> None:
    """Returns when it holds."""
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)  # between two looks


def locked(name: str) -> bool:
    """Whether a writer would be kept out."""
    try:
        Lock(name, None).close()
    except BlockingIOError:
        return True
    return False


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["publish", "give up", "map newest", "send newest", "map any", "let go"]), max_size=30))
def test_no_reader_is_written_over_and_memory_is_bounded(own_folder: Path, steps: list[str]) -> None:
    """Seen to fail: a third segment without a reader, the newest handed out."""
    buffer = PublicationBuffer(4096, guard_s=0.0)
    readers: list[Lock] = []
    newest: str | None = None
    try:
        for step in steps:
            names = [name for name in os.listdir(own_folder) if name.startswith("weightsync-")]
            if step == "let go":
                if readers:
                    readers.pop(0).close()
            elif step in ("map newest", "send newest") and newest is not None:
                readers.append(Lock(newest, Reader.MAPPED if step == "map newest" else Reader.SENT))
            elif step == "map any" and names:
                readers.append(Lock(sorted(names)[0], Reader.MAPPED))
            elif step in ("publish", "give up"):
                in_use = {name for name in names if locked(name)}
                held = any(is_read(name, kind) for name in names if name != newest for kind in Reader)
                turn = third(buffer)
                if turn is None:
                    assert set(names) - {newest} <= in_use
                    assert len(names) == (3 if held else len(names)) >= 2
                    continue
                assert turn.segment.name not in in_use | {newest}
                with pytest.raises(BlockingIOError):
                    Lock(turn.segment.name, Reader.SENT)
                if step == "give up":
                    buffer.given_up(turn)
                else:
                    buffer.written(turn)
                    newest = turn.segment.name
                assert not locked(turn.segment.name)
                assert buffer._spare.settle(20)
                there = os.listdir(own_folder)
                assert newest is None or newest in there
                assert len(buffer._segments) == len(there) <= (3 if held else max(2, len(names)))
    finally:
        for reader in readers:
            reader.close()
        buffer.close()
    assert os.listdir(own_folder) == []


def locked_bytes(name: str) -> int:
    """How much of this process's mappings of that segment can't be swapped out."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if not word.endswith(":"):
            inside = line.endswith(f"/{name}")
        elif inside and word == "Locked:":
            found += int(rest.split()[0]) << 10
    return found


def test_the_trainers_segments_are_locked_in_memory() -> None:
    """`mlock`: a page that was swapped out would stop a step. Seen red without `pin`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() != 0 and soft != resource.RLIM_INFINITY and soft < 4 << 20:
        pytest.skip(f"this user may lock {soft} bytes (RLIMIT_MEMLOCK)")
    buffer = PublicationBuffer(1 << 20, guard_s=0.0)
    for name in (written(buffer), written(buffer)):
        assert locked_bytes(name) == 1 << 20
    buffer.close()


def test_a_third_segment_stays_while_its_lease_does_and_its_pages_go_with_it(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though another rank still maps it. Seen to fail: locked pages (mlock) that MADV_REMOVE leaves where they are."""
    monkeypatch.setattr(spare, "_TEND_EVERY_S", 0.02)
    told: list[int] = []
    buffer = PublicationBuffer(1 << 20, guard_s=0.0, let_go=lambda memory: told.append(memory[0]))
    first = written(buffer)
    with Lock(first, Reader.MAPPED):
        second = written(buffer)
        third = written(buffer)
        assert len({first, second, third}) == 3
        for _ in range(3):
            assert {written(buffer), written(buffer)} == {second, third}, "it is not made anew each time"
        assert told == []
        mapped = {name: SharedSegment(name) for name in os.listdir(own_folder)}
        for index, each in enumerate(mapped.values()):
            each.memory[:] = bytes([index + 1]) * (1 << 20)
    soon(lambda: len(os.listdir(own_folder)) == 2)
    assert buffer._spare.settle(20)
    (gone,) = set(mapped) - set(os.listdir(own_folder))
    assert told == [list(mapped).index(gone) + 1]
    for name, each in mapped.items():
        assert any(each.memory) is (name != gone)
        each.close()
    buffer.close()


def test_a_third_segment_is_there_before_the_step_that_wants_it(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receiver is slower than a step, by a lease or over a network. Seen to fail: over a network each second step
    waited for most of the guard."""
    monkeypatch.setattr(spare, "_TEND_EVERY_S", 0.02)
    for kind in Reader:
        buffer = PublicationBuffer(4096, guard_s=20.0)
        with Lock(written(buffer), kind):
            assert len(os.listdir(own_folder)) == 1
            written(buffer)
            soon(lambda: len(os.listdir(own_folder)) == 3)
            begun_s = time.monotonic()
            turn = buffer.acquire(nothing)
            assert time.monotonic() - begun_s < 5
            assert turn is not None
            buffer.written(turn)
            assert len(buffer._segments) == 3
        soon(lambda: len(os.listdir(own_folder)) == 2)
        buffer.close()


def test_never_four_segments_though_the_thread_looks_while_one_is_taken(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: to a look between taking it and listing it there were two, and another was made."""
    monkeypatch.setattr(spare, "_TEND_EVERY_S", 0.005)
    buffer = PublicationBuffer(4096, guard_s=20.0)
    grown = buffer._grown

    def slowly(segment: Segment) -> WriteTurn:
        threading.Event().wait(0.05)
        return grown(segment)

    with Lock(written(buffer), Reader.SENT):
        written(buffer)
        soon(lambda: buffer._spare.made)
        monkeypatch.setattr(buffer, "_grown", slowly)
        buffer._has_asked = False  # as where it was `acquire` that asked
        buffer.written(buffer.acquire(nothing) or pytest.fail("no segment"))
        assert buffer._spare.settle(20)
        assert len(os.listdir(own_folder)) == len(buffer._segments) == 3
    buffer.close()


def test_a_third_segment_whose_reader_has_gone_meanwhile_is_kept_for_a_while(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: given back as soon as it was made, and made anew for each version."""
    buffer = PublicationBuffer(4096, guard_s=0.0)
    gate = Gate(monkeypatch, "_allocated")
    gate.open.set()
    with Lock(written(buffer), Reader.SENT):
        gate.open.clear()
        turn = buffer.acquire(nothing)
        assert turn is not None  # the trainer's thread makes the second
        buffer.written(turn)
        assert buffer.acquire(nothing) is None
        assert gate.come.wait(20)
    gate.open.set()
    assert buffer._spare.settle(20)
    assert buffer._spare.made
    buffer.close()


def test_a_kind_of_reader_may_be_kept_from_costing_a_third_segment() -> None:
    buffer = PublicationBuffer(4096, guard_s=0.0, beside=(Reader.MAPPED,))
    with Lock(written(buffer), Reader.SENT) as reader:
        written(buffer)
        assert third(buffer) is None
        with Lock(reader.name, Reader.MAPPED):
            assert third(buffer) is not None
    buffer.close()


def test_an_error_of_a_version_long_ago_costs_none_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: said, and taken for its own, by a version twenty later that had room."""
    buffer = PublicationBuffer(4096, guard_s=0.0)
    with Lock(written(buffer), Reader.SENT):
        written(buffer)
        with no_room():
            assert buffer.acquire(nothing) is None
            assert buffer._spare.settle(20)
    for _ in range(3):
        newest = written(buffer)
    with Lock(newest, Reader.SENT):
        written(buffer)
        assert third(buffer) is not None
        assert not buffer.why_not or "full" not in buffer.why_not
    buffer.close()


def test_where_there_is_no_room_a_third_segment_is_tried_once_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: tried at each look, half a second apart; a try may fill /dev/shm before it fails."""
    monkeypatch.setattr(spare, "_TEND_EVERY_S", 0.01)
    buffer = PublicationBuffer(4096, guard_s=0.0)
    looks, real, tries = [0], buffer._spare._look, []

    def counted() -> None:
        real()
        looks[0] += 1

    def no_segment(size_bytes: int) -> Segment:
        tries.append(size_bytes)
        raise SharedMemoryError("no room")

    monkeypatch.setattr(buffer._spare, "_look", counted)
    with Lock(written(buffer), Reader.SENT):
        turn = buffer.acquire(nothing)
        assert turn is not None
        monkeypatch.setattr(spare, "pinned_segment", no_segment)
        buffer.written(turn)
        soon(lambda: looks[0] >= 5)
        assert len(tries) == 1
    buffer.close()


def test_who_reads_a_superseded_version_is_reset_before_the_guard_ends() -> None:
    """Once, when most of the guard is over; and the segment that this gives back is taken."""
    buffer = PublicationBuffer(4096, guard_s=0.4)
    names = [written(buffer)]
    other = Lock(names[0], Reader.SENT)
    names += [written(buffer), written(buffer)]
    reader, other = other, Lock(names[1], Reader.SENT)
    begun = time.monotonic()
    resets: list[float] = []

    def reset() -> None:
        resets.append(time.monotonic() - begun)
        reader.close()

    turn = buffer.acquire(reset)
    assert turn is not None
    assert turn.segment.name == names[0]
    assert len(resets) == 1
    assert resets[0] >= 0.25
    buffer.given_up(turn)

    reader = Lock(names[0], Reader.SENT)
    begun, told = time.monotonic(), []
    assert buffer.acquire(lambda: told.append(1)) is None, "a reader that can't be reset"
    assert 0.35 < time.monotonic() - begun < 10
    assert told == [1]
    reader.close()
    other.close()
    buffer.close()


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """No file may grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_is_an_error_for_what_the_trainer_needs_and_none_for_what_a_receiver_costs() -> None:
    """Seen to fail: a lease on a full host ended the trainer's step with an error."""
    buffer = PublicationBuffer(4096, guard_s=0.05)
    with no_room(), pytest.raises(SharedMemoryError):
        buffer.acquire(nothing)
    first = written(buffer)
    with no_room(), pytest.raises(SharedMemoryError):
        buffer.acquire(nothing)
    with Lock(first, Reader.MAPPED):
        written(buffer)
        with no_room():
            assert third(buffer) is None
            assert "no third segment" in buffer.why_not
        assert len(buffer._segments) == 2
        written(buffer)
        assert len(buffer._segments) == 3
    buffer.close()


# The third segment takes as long as a copy, and so does giving it back: a thread's work.


class Gate:
    """Where the thread waits, in the named method of a segment that it works on."""

    def __init__(self, patched: pytest.MonkeyPatch, method: str) -> None:
        self.come, self.open = threading.Event(), threading.Event()
        original = getattr(Segment, method)

        def gated(segment: Segment, *args: Any) -> Any:
            if threading.current_thread().name == "weightsync-segments":
                self.come.set()
                assert self.open.wait(20)
            return original(segment, *args)

        patched.setattr(Segment, method, gated)


def test_the_trainer_waits_its_guard_for_a_segment_that_is_being_made_and_has_it_the_next_time(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: made by `acquire` itself, which the gate then held for good."""
    buffer = PublicationBuffer(4096, guard_s=0.2)
    names = [written(buffer), written(buffer)]
    gate = Gate(monkeypatch, "_allocated")
    with Lock(names[0], Reader.MAPPED):
        begun_s = time.monotonic()
        for _ in range(2):
            assert buffer.acquire(nothing) is None
            assert "is being made" in buffer.why_not
        assert 0.35 < time.monotonic() - begun_s < 10
        assert gate.come.wait(20)
        gate.open.set()
        assert buffer._spare.settle(20)
        turn = buffer.acquire(nothing)
        assert turn is not None, "it was ready"
        buffer.written(turn)
        assert turn.segment.name not in names
        assert len(os.listdir(own_folder)) == 3
    buffer.close()


def test_a_segment_that_comes_free_within_the_guard_is_taken_and_the_spare_goes_with_the_lease(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "_TEND_EVERY_S", 0.02)
    buffer = PublicationBuffer(4096, guard_s=20.0)
    names = [written(buffer), written(buffer)]
    gate = Gate(monkeypatch, "_allocated")
    lease = Lock(names[0], Reader.MAPPED)

    def let_go() -> None:
        assert gate.come.wait(20)
        lease.close()

    thread = threading.Thread(target=let_go)
    thread.start()
    turn = buffer.acquire(nothing)
    thread.join()
    assert turn is not None
    assert turn.segment.name == names[0]
    gate.open.set()
    assert buffer._spare.settle(20)
    buffer.written(turn)
    soon(lambda: sorted(os.listdir(own_folder)) == sorted(names))  # there is no lease any more
    assert sorted([written(buffer), written(buffer)]) == sorted(names)
    buffer.close()


def test_a_spare_segment_that_nobody_took_goes_when_the_lease_has_ended(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "_TEND_EVERY_S", 0.02)
    buffer = PublicationBuffer(4096, guard_s=0.0)
    names = [written(buffer), written(buffer)]
    with Lock(names[0], Reader.MAPPED):
        buffer._spare.ask()
        assert buffer._spare.settle(20)
        assert len(os.listdir(own_folder)) == 3
    assert written(buffer) == names[0]
    soon(lambda: sorted(os.listdir(own_folder)) == sorted(names))
    buffer.close()


def test_giving_back_holds_up_nobody_and_comes_before_a_new_one(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: `written` waited for the kernel to free the pages. Never four at a time."""
    monkeypatch.setattr(spare, "_TEND_EVERY_S", 0.02)
    buffer = PublicationBuffer(4096, guard_s=0.0)
    first = written(buffer)
    with Lock(first, Reader.MAPPED):
        written(buffer)
        written(buffer)
        frees, makes = Gate(monkeypatch, "give_back_pages"), Gate(monkeypatch, "_allocated")
    assert frees.come.wait(20)
    names = os.listdir(own_folder)
    assert len(names) == len(buffer._segments) == 2
    newest = written(buffer)
    with Lock(newest, Reader.MAPPED):
        written(buffer)
        assert buffer.acquire(nothing) is None
        assert not makes.come.is_set(), "the old one still holds its memory"
        frees.open.set()
        assert makes.come.wait(20)
        makes.open.set()
        assert third(buffer) is not None
    buffer.close()


def test_closing_waits_for_what_is_being_made_and_leaves_nothing(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the model's layout changes while a segment of the old one is allocated."""
    buffer = PublicationBuffer(4096, guard_s=0.0)
    names = [written(buffer), written(buffer)]
    gate = Gate(monkeypatch, "_allocated")
    with Lock(names[0], Reader.MAPPED):
        assert buffer.acquire(nothing) is None
        assert gate.come.wait(20)
        closes = threading.Thread(target=buffer.close)
        closes.start()
        closes.join(0.1)
        assert closes.is_alive()
        gate.open.set()
        closes.join(20)
    assert os.listdir(own_folder) == []
    buffer.close()


def test_a_thread_that_cannot_be_had_costs_a_version_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = PublicationBuffer(4096, guard_s=0.0)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _no_thread)
        first = written(buffer)
        written(buffer)
        lease = Lock(first, Reader.MAPPED)
        assert third(buffer) is None
        assert "no thread" in buffer.why_not
    with lease:
        assert third(buffer) is not None
    buffer.close()


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_closing_takes_the_names_away_and_leaves_only_a_lease_its_memory(own_folder: Path) -> None:
    """Seen to fail: whoever mapped a segment kept all of its pages, without a lease too."""
    told: list[int] = []
    buffer = PublicationBuffer(1 << 20, guard_s=0.0, let_go=lambda memory: told.append(memory[0]))
    names = []
    for fill in (1, 2):
        turn = buffer.acquire(nothing)
        assert turn is not None
        turn.segment.memory[:] = bytes([fill]) * (1 << 20)
        buffer.written(turn)
        names.append(turn.segment.name)
    mapped = [SharedSegment(name) for name in names]
    files = [os.open(folder.path_of(name), os.O_RDONLY) for name in names]
    with Lock(names[1], Reader.MAPPED):
        buffer.close()
        buffer.close()
        assert os.listdir(own_folder) == []
        assert told == [1], "who has pinned a segment's pages lets go of them"
        assert [os.fstat(fd).st_blocks > 0 for fd in files] == [False, True]
        assert (mapped[0].memory[0], mapped[1].memory[0]) == (0, 2)
    for each, fd in zip(mapped, files, strict=True):
        each.close()
        os.close(fd)


def test_the_third_segment_goes_some_time_after_its_lease_though_nothing_is_published(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: it stayed until the next offload, which may be minutes away."""
    monkeypatch.setattr(spare, "_TEND_EVERY_S", 0.02)
    buffer = PublicationBuffer(1 << 20, guard_s=0.0)
    first = written(buffer)
    with Lock(first, Reader.MAPPED):
        written(buffer)
        newest = written(buffer)
        looks, real = [0], buffer._spare._look

        def counted() -> None:
            real()
            looks[0] += 1

        monkeypatch.setattr(buffer._spare, "_look", counted)
        soon(lambda: looks[0] >= 3)
        assert len(os.listdir(own_folder)) == 3, "the lease needs it"
    soon(lambda: len(os.listdir(own_folder)) == 2)
    assert newest in os.listdir(own_folder)
    assert len(buffer._segments) == 2
    soon(lambda: buffer._spare._thread is None)  # there is nothing left to look at
    assert {written(buffer), written(buffer)} == set(os.listdir(own_folder))
    buffer.close()


def test_a_spare_that_nobody_took_goes_though_nothing_is_published(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "_TEND_EVERY_S", 0.02)
    buffer = PublicationBuffer(4096, guard_s=0.0)
    names = [written(buffer), written(buffer)]
    with Lock(names[0], Reader.MAPPED):
        buffer._spare.ask()  # as `acquire` does, whose time is over before it is there
        assert buffer._spare.settle(20)
        assert len(os.listdir(own_folder)) == 3
    end = time.monotonic() + 10
    while sorted(os.listdir(own_folder)) != sorted(names):
        assert time.monotonic() < end
        time.sleep(0.01)
    buffer.close()


@pytest.mark.parametrize("why", ["no descriptor is left", "its name is gone"])
def test_a_lease_keeps_its_memory_whatever_the_trainer_can_not_find_out(why: str, own_folder: Path) -> None:
    """Seen red: the segment was taken for one that nobody reads, and its reader saw zeros."""
    buffer = PublicationBuffer(1 << 16, guard_s=0.05)
    turn = buffer.acquire(nothing)
    assert turn is not None
    turn.segment.memory[:4] = b"held"
    buffer.written(turn)
    name = turn.segment.name
    with Lock(name, Reader.MAPPED), contextlib.closing(MappedSegment(name, need_bytes=1)) as mapped:
        written(buffer)
        if why == "its name is gone":
            (own_folder / name).unlink()
            written(buffer)
        else:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
            try:
                assert buffer.acquire(nothing) is None
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert buffer._spare.settle(20)
        assert bytes(mapped.memory[:4]) == b"held"
    buffer.close()
