"""Patience with an agent: a hung one is told from one that gets no CPU, by what the kernel says of its threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weightsync.trainer import watchdog
from weightsync.trainer.watchdog import Patience, ThreadTimes, starved_s, thread_times


class Fake:
    """A process as /proc shows it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.threads: dict[str, tuple[float, float, str]] = {"7": (1.0, 0.0, "S")}

    def show(self) -> ThreadTimes | None:
        for name, (cpu_s, waited_s, state) in self.threads.items():
            folder = self.root / "7" / "task" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "schedstat").write_text(f"{int(cpu_s * 1e9)} {int(waited_s * 1e9)} 12\n")
            (folder / "stat").write_text(f"{name} (py) thon)) {state} 1 7 7\n")
        return thread_times(7, proc=str(self.root))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake(tmp_path)
    monkeypatch.setattr(watchdog, "thread_times", lambda _pid: made.show())
    return made


def patience(fake: Fake, changes: Callable[[int], None], num_looks: int = 20) -> Patience:
    """After so many looks of 0.1 s, with a limit of 1 s."""
    made = Patience(1.0)
    made.begin(7)
    for look in range(num_looks):
        changes(look)
        made.look(0.1, 0.1)
    return made


def test_one_that_sleeps_is_hung(fake: Fake) -> None:
    assert patience(fake, lambda _: None, 10).is_over() is False
    assert patience(fake, lambda _: None, 11).is_over()


def test_one_that_computes_and_answers_nothing_is_hung(fake: Fake) -> None:
    assert patience(fake, lambda look: fake.threads.update({"7": (1.0 + 0.1 * look, 0.0, "R")})).is_over()


def test_one_that_is_stopped_is_hung(fake: Fake) -> None:
    fake.threads["7"] = (1.0, 0.0, "T")
    assert patience(fake, lambda _: None).is_over()


@pytest.mark.parametrize("state", ["R", "D"])
def test_one_that_waits_for_a_cpu_or_a_disk_all_the_time_is_left_alone(fake: Fake, state: str) -> None:
    """In one stretch: the kernel adds such a wait up when it is over."""
    fake.threads["8"] = (0.0, 0.0, state)
    made = patience(fake, lambda _: None, 90)
    assert not made.is_over()
    assert made.elapsed_s > 8.9
    assert made.silent_s == 0


def test_one_that_waits_most_of_the_time_is_left_alone(fake: Fake) -> None:
    made = patience(fake, lambda look: fake.threads.update({"7": (1.0 + 0.02 * look, 0.08 * look, "S")}), 40)
    assert made.silent_s < 1.0
    assert not made.is_over()


def test_no_silence_is_excused_for_ever(fake: Fake) -> None:
    fake.threads["7"] = (1.0, 0.0, "R")
    assert patience(fake, lambda _: None, 101).is_over()


def test_where_this_process_itself_got_no_cpu_its_looks_count_once(fake: Fake) -> None:
    made = Patience(1.0)
    made.begin(7)
    for _ in range(9):
        made.look(30.0, 0.1)
    assert not made.is_over()


def test_the_next_one_has_longer_until_one_has_lived_for_long(fake: Fake) -> None:
    made = patience(fake, lambda _: None)
    assert made.is_over()
    made.killed()
    made.begin(7)
    for _ in range(15):
        made.look(0.1, 0.1)
    assert not made.is_over()
    made.heard()
    for _ in range(60):
        made.look(0.5, 0.1)
        made.heard()
    for _ in range(12):
        made.look(0.1, 0.1)
    assert made.is_over()


def test_where_the_kernel_says_nothing_all_silence_counts(tmp_path: Path) -> None:
    assert thread_times(7, proc=str(tmp_path)) is None
    assert starved_s(None, None, 1.0) == 0.0
    (tmp_path / "7" / "task" / "7").mkdir(parents=True)
    assert thread_times(7, proc=str(tmp_path)) is None


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="a kernel without scheduler statistics")
def test_what_the_kernel_says_of_real_ones() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            first = thread_times(busy.pid)
            second = first
            for _ in range(10_000_000):
                second = thread_times(busy.pid)
                assert first is not None
                assert second is not None
                if second.cpu_s > first.cpu_s and second.ready:
                    break
            else:
                raise AssertionError("it did nothing")
        finally:
            busy.kill()
