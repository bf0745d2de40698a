"""FolderPublisher: a version when files have changed and settled; what is being written, cut off or lies is refused."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import queue
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from weightsync.clients.agent import AgentClient
from weightsync.errors import ConfigError, SharedMemoryError, StateError
from weightsync.host.puller import Puller
from weightsync.trainer.folder import FolderPublisher, Look
from weightsync.trainer.publisher import OffloadReport, WeightManager
from weightsync.types import Deadline
from weightsync.types.transfer_messages import Transport

INDEX = "model.safetensors.index.json"


class DisturbedManager(WeightManager):
    """Lets something happen to the files when they have been opened and before they are read."""

    disturb: Callable[[], None] | None = None

    def offload(self, *args: Any) -> OffloadReport:
        if self.disturb is not None:
            self.disturb()
        return super().offload(*args)


@pytest.fixture(scope="module")
def manager() -> Iterator[DisturbedManager]:
    """One for all tests: its agent takes seconds to start. Versions go on rising from test to test."""
    with DisturbedManager("folder", run_id="run", guard_s=20.0) as wm:
        yield wm
    assert list(Path("/dev/shm").glob(f"weightsync-{os.getpid()}-*")) == []


@pytest.fixture
def idle() -> WeightManager:
    """Never started: what is refused is refused before it is needed."""
    return WeightManager("folder")


def tensors_of(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((40, 50), value), "n": torch.tensor(int(value)), "e": torch.empty(0, 3),
            "b": torch.full((7,), value, dtype=torch.bfloat16)}  # fmt: skip


def write(folder: Path, value: float, *, age_s: float = 10) -> None:
    """Two files, `age_s` old, each of which replaces an older one."""
    names = list(tensors_of(value).items())
    for number, part in enumerate((dict(names[:2]), dict(names[2:]))):
        path = folder / f"part{number}.safetensors"
        save_file(part, folder / "aside")
        when = os.stat(folder / "aside").st_mtime - age_s + value  # no two values have one time
        os.utime(folder / "aside", (when, when))
        os.replace(folder / "aside", path)


def replace(path: Path, content: bytes) -> None:
    aside = path.with_name("aside")
    aside.write_bytes(content)
    os.replace(aside, path)


def published(report: OffloadReport) -> dict[str, torch.Tensor]:
    """What lies in shared memory, as safetensors says."""
    for path in Path("/dev/shm").glob(f"weightsync-{os.getpid()}-*"):
        with contextlib.suppress(SafetensorError, FileNotFoundError):  # of one that is being given back
            with safe_open(path, framework="pt") as file:
                found = f'"run", {report.version.number},' in file.metadata()["weightsync"]
            if found:
                return load_file(path)
    raise AssertionError(f"{report.version} lies nowhere")


def equal(found: dict[str, torch.Tensor], value: float) -> bool:
    expected = tensors_of(value)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


class Watched(FolderPublisher):
    """Counts its looks, and lets a file change before each."""

    num_looks = 0
    looked: threading.Condition
    touch: Callable[[], None] | None = None

    def _look(self) -> Look:
        if self.touch is not None:
            self.touch()
        with self.looked:
            self.num_looks += 1
            self.looked.notify_all()
        return super()._look()

    def wait_looks(self, number: int) -> None:
        """Until it has looked so many times more."""
        with self.looked:
            wanted = self.num_looks + number
            assert self.looked.wait_for(lambda: self.num_looks >= wanted, 60)


def raises(error: Exception) -> Any:
    raise error


def publisher_of(folder: Path, manager: WeightManager) -> Watched:
    """Goes on where the last test's has stopped: a manager's versions rise."""
    Watched.looked = threading.Condition()
    publisher = Watched(folder, manager, every_s=0.02)
    publisher._version = max(0, manager._newest)
    return publisher


def test_a_change_is_published_once_it_has_settled(tmp_path: Path, manager: DisturbedManager) -> None:
    """And half a file, which settles too, is refused and published when it is whole."""
    write(tmp_path, 1)
    publisher = publisher_of(tmp_path, manager)
    report = publisher.publish()
    assert equal(published(report), 1)
    news: queue.Queue[OffloadReport | logging.LogRecord] = queue.Queue()
    handler = logging.Handler()
    handler.emit = news.put  # type: ignore[method-assign]
    logging.getLogger("weightsync.trainer.folder").addHandler(handler)
    stop = threading.Event()
    thread = threading.Thread(target=publisher.watch, args=(stop, news.put))
    thread.start()
    try:
        write(tmp_path, 2)
        report = news.get(timeout=60)
        while not equal(published(report), 2):  # the first of the two files may have settled before the second came
            report = news.get(timeout=60)
        whole = (tmp_path / "part0.safetensors").read_bytes()
        replace(tmp_path / "part0.safetensors", whole[:-1000])
        refused = news.get(timeout=60)
        assert isinstance(refused, logging.LogRecord)
        assert "cut off" in refused.getMessage()
        publisher.wait_looks(4)
        assert news.empty(), "it is not refused again and again"
        replace(tmp_path / "part0.safetensors", whole)
        last = news.get(timeout=60)
        assert last.version.number == report.version.number + 1
        assert equal(published(last), 2)

        ages = itertools.count(1)
        publisher.touch = lambda: os.utime(tmp_path / "part0.safetensors", (next(ages),) * 2)
        publisher.wait_looks(15)
        assert news.empty(), "what changes from look to look has not settled"
        publisher.touch = None
        assert news.get(timeout=60).version.number == last.version.number + 1
    finally:
        stop.set()
        thread.join(60)
        logging.getLogger("weightsync.trainer.folder").removeHandler(handler)
    assert news.empty(), "nothing is published twice, nor refused twice"


@contextlib.contextmanager
def watched(
    publisher: FolderPublisher, proves: Callable[[OffloadReport], None] = lambda _: None
) -> Iterator[queue.Queue[OffloadReport]]:
    """What it publishes, and is proved, while it watches its folder."""
    news: queue.Queue[OffloadReport] = queue.Queue()
    stop = threading.Event()

    def told(report: OffloadReport) -> None:
        proves(report)
        news.put(report)

    thread = threading.Thread(target=publisher.watch, args=(stop, told))
    thread.start()
    try:
        yield news
    finally:
        stop.set()
        thread.join(60)


@pytest.mark.parametrize(("num_looks", "grows"), [(30, True), (7, False)])
def test_some_files_of_several_are_not_published_while_the_next_one_comes(
    num_looks: int, grows: bool, tmp_path: Path, manager: DisturbedManager
) -> None:
    """Under any name, or somewhere else. Seen red: a version of one new file and one old one."""
    folder, new = tmp_path / "folder", tmp_path / "new"
    for each, value in ((folder, 1), (new, 2)):
        each.mkdir()
        write(each, value)
    publisher = publisher_of(folder, manager)
    publisher.publish()
    looks = itertools.count()

    def copy() -> None:
        look = next(looks)
        if look in (0, num_looks):
            name = "part1.safetensors" if look else "part0.safetensors"
            os.replace(new / name, folder / name)
        if grows and look < num_looks:
            with (folder / ".part1.safetensors.Xy12").open("ab") as file:
                file.write(b"more")

    publisher.touch = copy
    with watched(publisher) as news:
        assert equal(published(news.get(timeout=60)), 2), "the first that is published is whole"
    assert news.empty()


def test_new_files_beside_an_index_make_no_version_before_it_names_them(tmp_path: Path, idle: WeightManager) -> None:
    """As docs/checkpoint.md says how to swap them. Seen red: the old bytes were published once more, and once more when
    the old files went."""

    def index(*names: str) -> None:
        replace(tmp_path / INDEX, json.dumps({"weight_map": dict(zip("wneb", names * 4, strict=False))}).encode())

    def seen() -> Look:
        return publisher._of_checkpoint(publisher._look())

    write(tmp_path, 1)
    old = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    index(*old)
    publisher = publisher_of(tmp_path, idle)
    before = seen()
    assert set(before) == {INDEX, *old}
    new = [f"new-{name}" for name in old]
    (tmp_path / new[0]).write_bytes((tmp_path / old[0]).read_bytes())
    assert seen() == before
    index(*new)
    assert set(seen()) == {INDEX, new[0]}
    (tmp_path / new[1]).write_bytes((tmp_path / old[1]).read_bytes())
    assert set(after := seen()) == {INDEX, *new}, "one that the index has named and that comes later counts"
    for name in old:
        (tmp_path / name).unlink()
    assert seen() == after
    (tmp_path / "next.safetensors").write_bytes(b"more")
    with pytest.MonkeyPatch.context() as patched:  # seen red: it counted from then on, as without an index
        patched.setattr(Path, "read_text", lambda _: raises(OSError(errno.EMFILE, "too many open files")))
        assert seen() == after
    assert seen() == after
    (tmp_path / "next.safetensors").unlink()
    (tmp_path / INDEX).write_bytes(b"{")
    assert set(seen()) == {INDEX, *new}, "half of one names nothing"


def test_a_folder_that_may_not_be_listed_is_told_so(
    tmp_path: Path, idle: WeightManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    publisher = publisher_of(tmp_path, idle)

    def refused(path: Path) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ConfigError, match=r"can't be looked at: .*Permission denied"):
        publisher.publish()


def test_what_failed_for_now_is_tried_again_and_what_is_no_checkpoint_is_not(
    tmp_path: Path, manager: DisturbedManager
) -> None:
    """Seen to fail: no room, or no descriptor, at the one look that counted, and the change was never published."""
    write(tmp_path, 1)
    publisher = publisher_of(tmp_path, manager)
    publisher.publish()
    passing = [
        SharedMemoryError("no room"), OSError(errno.EMFILE, "too many open files"), StateError("for now"),
        OSError(errno.EMFILE, "again"),
    ]  # fmt: skip

    def fail() -> None:
        if passing:
            error = passing.pop(0)
            if isinstance(error, OSError):  # as it comes from a file that can't be opened
                raise ConfigError("a file can't be read") from error
            raise error

    manager.disturb = fail
    with watched(publisher) as news:
        write(tmp_path, 2)
        report = news.get(timeout=60)
        assert not passing
        assert equal(published(report), 2)
    manager.disturb = None


def test_a_version_whose_memory_was_taken_away_is_published_anew(tmp_path: Path, manager: DisturbedManager) -> None:
    """By logind's RemoveIPC, say, when its user logs out. Seen red: nobody could fetch it any more, and nothing said
    so."""
    write(tmp_path, 7)
    publisher = publisher_of(tmp_path, manager)
    before = publisher.publish()
    manager.wait_published(before.version.number, timeout_s=60.0)
    with watched(publisher) as news:
        assert manager._steps is not None
        assert manager._steps.buffer is not None
        for segment in manager._steps.buffer._segments:
            os.unlink(f"/dev/shm/{segment.name}")
        report = news.get(timeout=30)
        assert report.version.number == before.version.number + 1
        assert equal(published(report), 7)
        manager.wait_published(report.version.number, timeout_s=60.0)
        with (
            contextlib.closing(
                Puller(manager.endpoint, "folder", receiver_id="late", transport=Transport.TCP)
            ) as puller,
            puller.pull(deadline=Deadline(60.0)) as pulled,
        ):
            assert pulled.version == report.version
        publisher.wait_looks(15)
    assert news.empty(), "once is enough"


def test_what_was_copied_and_not_proved_leaves_the_version_before_where_it_is(
    tmp_path: Path, manager: DisturbedManager
) -> None:
    """Its agent serves that one on. Seen red: the version was tried again, in that one's memory."""
    write(tmp_path, 1)
    publisher = publisher_of(tmp_path, manager)
    first = publisher.publish()
    assert manager._steps is not None
    buffer = manager._steps.buffer
    assert buffer is not None
    served = buffer._current
    tries: list[int] = []

    def proves(report: OffloadReport) -> None:
        tries.append(report.version.number)
        raise StateError("it was not published: the agent died 4 times")

    with watched(publisher, proves):
        write(tmp_path, 2)
        publisher.wait_looks(40)
    assert tries == [first.version.number + 1]
    assert served is not None
    assert served is not buffer._current


def test_what_is_published_anew_and_not_proved_is_tried_again(tmp_path: Path, manager: DisturbedManager) -> None:
    """Nobody has anything then. Seen red: the folder had to change first."""
    write(tmp_path, 1)
    publisher = publisher_of(tmp_path, manager)
    fail = [StateError("it was not published: the agent died 4 times")] * 2

    def proves(_: OffloadReport) -> None:
        if fail:
            raise fail.pop()

    manager.wait_published(publisher.publish().version.number, timeout_s=60)
    with watched(publisher, proves) as news:
        assert manager._steps is not None
        assert manager._steps.buffer is not None
        for segment in manager._steps.buffer._segments:
            os.unlink(f"/dev/shm/{segment.name}")
        report = news.get(timeout=60)
        assert not fail
        assert equal(published(report), 1)
        publisher.wait_looks(15)
    assert news.empty()


def test_some_tensors_may_have_a_dtype_of_their_own(tmp_path: Path) -> None:
    """As an engine has them, whatever the others are converted to. Seen red: no option said so."""
    write(tmp_path, 1.5)
    with WeightManager("m", dtype="bfloat16") as manager:
        FolderPublisher(tmp_path, manager, dtype_overrides={"b*": "float32"}).publish()
        manager.wait_published(1, timeout_s=60)
        with contextlib.closing(AgentClient(manager.endpoint)) as client:
            dtypes = {spec.name: spec.dtype for spec in client.manifest().publication.manifest.tensors}
    assert dtypes == {"w": "bfloat16", "n": "int64", "e": "bfloat16", "b": "float32"}


def test_a_reader_of_its_lines_that_has_gone_ends_it(tmp_path: Path, manager: DisturbedManager) -> None:
    """`weightsync agent ... | head -1`. Seen red: it was told as "was not published"."""
    write(tmp_path, 1)
    publisher = publisher_of(tmp_path, manager)
    stop = threading.Event()

    def gone(_: OffloadReport) -> None:
        stop.set()
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        publisher.watch(stop, gone)


def test_a_file_that_took_another_ones_place_counts_though_size_and_time_are_the_same(
    tmp_path: Path, manager: DisturbedManager
) -> None:
    """As `cp -p` and a rename leave it. Seen to fail: it was not noticed."""
    write(tmp_path, 1)
    publisher = publisher_of(tmp_path, manager)
    publisher.publish()
    before = publisher._look()
    path = tmp_path / "part1.safetensors"
    facts = path.stat()
    replace(path, path.read_bytes()[:-1] + b"\x55")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert publisher._look() != before


def rewritten(path: Path) -> Callable[[], None]:
    """Other bytes in place, of the same size."""

    def disturb() -> None:
        with path.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"\x55" * 100)

    return disturb


@pytest.mark.parametrize("how", ["rewritten", "cut off", "emptied"])
def test_a_file_that_is_written_while_it_is_read_is_not_published(
    tmp_path: Path, manager: DisturbedManager, how: str
) -> None:
    """Seen to fail: files that were mapped gave half of each, or killed the process when they were cut off."""
    write(tmp_path, 3)
    path = tmp_path / "part0.safetensors"
    publisher = publisher_of(tmp_path, manager)
    before = publisher.publish()
    sizes = {"cut off": 600, "emptied": 0}
    manager.disturb = rewritten(path) if how == "rewritten" else lambda: os.truncate(path, sizes[how])
    try:
        with pytest.raises(ConfigError, match=r"being written|cut off"):
            publisher.publish()
    finally:
        manager.disturb = None
    assert equal(published(before), 3), "the newest is as it was"
    write(tmp_path, 4)
    assert equal(published(publisher.publish()), 4)


def test_a_file_that_is_replaced_while_it_is_read_is_published_as_it_was(
    tmp_path: Path, manager: DisturbedManager
) -> None:
    """Never half of each."""
    write(tmp_path, 5)
    publisher = publisher_of(tmp_path, manager)
    manager.disturb = lambda: write(tmp_path, 6)
    try:
        report = publisher.publish()
    finally:
        manager.disturb = None
    assert equal(published(report), 5)
    assert equal(published(publisher.publish()), 6)


def framed(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        bytes(100),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 90_000_000) + b"{}",
        framed({"w": entry(0, 8, [2])}, bytes(7)),
        framed({"w": entry(0, 8, [2])}, bytes(9)),
        framed({"w": entry(0, 2**50, [2**48])}, bytes(8)),
        framed({"w": entry(0, 8, [3])}, bytes(8)),
        framed({"w": entry(4, 12, [2])}, bytes(12)),
        framed({"w": entry(0, 8, [2]), "v": entry(0, 8, [2])}, bytes(8)),
        framed({"w": entry(0, 8, [2], "Q7")}, bytes(8)),
        framed([1, 2, 3], bytes(8)),
        framed({"__metadata__": 7, "w": entry(0, 8, [2])}, bytes(8)),
    ],
)
def test_a_file_that_lies_is_refused_before_anything_is_taken(
    tmp_path: Path, idle: WeightManager, content: bytes
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        FolderPublisher(tmp_path, idle).publish()
    assert idle.agent_pid is None


def test_a_folder_without_files_is_told_so(tmp_path: Path, idle: WeightManager) -> None:
    for folder in (tmp_path, tmp_path / "not there"):
        with pytest.raises(ConfigError, match="safetensors"):
            FolderPublisher(folder, idle)


def test_a_name_in_two_files_is_refused(tmp_path: Path, idle: WeightManager) -> None:
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with contextlib.closing(idle), pytest.raises(ConfigError, match="both"):
        FolderPublisher(tmp_path, idle).publish()
