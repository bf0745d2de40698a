"""The shared pool: order, errors, forks, and imports that stay light."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.multiproc.pull_kit import wait_until
from weightsync import threads


@pytest.fixture(autouse=True)
def _two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "num_cores", lambda: 2)


def test_results_keep_the_order() -> None:
    assert threads.map_all(lambda item: item * item, range(100)) == [item * item for item in range(100)]
    assert threads.map_all(lambda item: item, []) == []


def test_items_run_side_by_side_and_one_alone_in_the_callers_thread() -> None:
    both = threading.Barrier(2, timeout=10)
    threads.map_all(lambda _: both.wait(), range(2))
    assert threads.map_all(lambda _: threading.current_thread(), [0]) == [threading.current_thread()]


def test_an_error_comes_out_after_all_running_calls_ended() -> None:
    """Seen red: raised while another call ran."""
    runs, fails, returned, ended = (threading.Event() for _ in range(4))

    def work(item: int) -> None:
        if item == 0:
            assert runs.wait(10)
            fails.set()
            raise ValueError("the first")
        runs.set()
        assert fails.wait(10)
        returned.wait(0.2)  # it does not come before this ends: nothing else tells
        ended.set()

    with pytest.raises(ValueError, match="the first"):
        threads.map_all(work, range(20))
    over = ended.is_set()
    returned.set()
    assert over
    assert threads.map_all(lambda item: item, range(3)) == [0, 1, 2]


def test_two_errors_hold_nothing_that_was_borrowed() -> None:
    """Seen red: the one that was not raised held itself, and with it every memory that the calls had."""

    class Memory:
        pass

    both, borrowed = threading.Barrier(2, timeout=10), Memory()
    seen = weakref.ref(borrowed)

    def work(item: int, memory: Memory) -> None:
        both.wait()
        raise ValueError(f"{item} of {memory}")

    gc.disable()
    try:
        with pytest.raises(ValueError, match=r"^0 of"):
            threads.map_all(functools.partial(work, memory=borrowed), range(2))
        del borrowed
        wait_until(lambda: seen() is None, "a thread that has told its end returns", 10.0)
    finally:
        gc.enable()


def test_a_worker_that_ends_in_any_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: where there was no memory for a result, the caller waited for ever."""

    class Full(list[Any]):
        def __setitem__(self, index: Any, result: Any) -> None:
            raise MemoryError("no room for it")

    real = threads._run
    monkeypatch.setattr(threads, "_run", lambda worker, work, left, _, failed: real(worker, work, left, Full(), failed))
    with pytest.raises(MemoryError):
        threads.map_all(lambda item: item, range(9))


def test_nothing_begins_after_an_error_and_the_first_by_order_is_raised() -> None:
    """Seen red: others began for as long as an earlier one ran; the error that came first was raised."""
    begun, over = list[int](), threading.Event()

    class Item:
        def __init__(self, number: int) -> None:
            self.number = number

        def __del__(self) -> None:
            if self.number == 19:
                over.set()

    def work(item: Item) -> None:
        begun.append(item.number)
        if item.number == 1:
            raise ValueError("the second")
        if item.number > 1:
            over.set()
        assert over.wait(10)
        raise ValueError("the first")

    with pytest.raises(ValueError, match="the first"):
        threads.map_all(work, (Item(number) for number in range(20)))
    assert sorted(begun) == [0, 1]


def test_many_items_are_two_tasks_of_the_pool_and_callers_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: each item was a task, with two futures and a wake-up."""
    tasks = list[int]()

    class Counting(ThreadPoolExecutor):
        def submit(self, *args: Any, **options: Any) -> Any:
            tasks.append(1)
            return super().submit(*args, **options)

    with Counting(2) as pool, ThreadPoolExecutor(8) as callers:
        monkeypatch.setattr(threads, "_pool", pool)
        calls = [callers.submit(threads.map_all, lambda item: item + 1, range(500)) for _ in range(40)]
        assert all(call.result(60) == list(range(1, 501)) for call in calls)
    assert len(tasks) == 2 * len(calls)


def test_no_caller_waits_for_a_worker_that_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: one that was queued behind another caller's work was waited for when all items had been done."""
    others = threading.Event()

    class Shared(ThreadPoolExecutor):
        num_calls = 0

        def submit(self, *args: Any, **options: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == 2:
                super().submit(others.wait, 10)
            return super().submit(*args, **options)

    with Shared(1) as pool:
        monkeypatch.setattr(threads, "_pool", pool)
        assert threads.map_all(lambda item: item + 1, range(20)) == list(range(1, 21))
        waited_for = others.is_set() or pool._work_queue.empty()
        others.set()
    assert not waited_for


def test_an_interrupted_caller_leaves_no_call_running() -> None:
    """Seen red: what a worker had begun went on behind the interrupt."""
    program = """
import signal, sys, threading
from weightsync import threads
threads.num_cores = lambda: 2
main, both, ended = threading.main_thread().ident, threading.Barrier(2), []
heard, over = threading.Event(), threading.Event()

def interrupt(*_):
    if not heard.is_set():
        heard.set()
        raise KeyboardInterrupt

class Item:
    def __init__(self, number):
        self.number = number
    def __del__(self):
        if self.number == 19:
            over.set()

def work(item):
    if both.wait(10) == 0:
        while not heard.wait(0.01):  # one that comes just before the caller waits does not end the wait
            signal.pthread_kill(main, signal.SIGINT)
    ended.append(over.wait(10))

signal.signal(signal.SIGINT, interrupt)
try:
    threads.map_all(work, (Item(number) for number in range(20)))
except KeyboardInterrupt:
    sys.exit(0 if ended == [True, True] else 3)
sys.exit(4)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_a_thread_that_can_not_be_started_leaves_no_call_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that was queued, as the executor does before it starts a thread."""
    refused, ran, calls = threading.Event(), list[int](), list[int]()

    class Full(ThreadPoolExecutor):
        def submit(self, *args: Any, **options: Any) -> Any:
            calls.append(1)
            submitted = super().submit(*args, **options)
            if len(calls) == 2:
                refused.set()
                raise RuntimeError("can't start new thread")
            return submitted

    def work(item: int) -> None:
        assert refused.wait(10)
        ran.append(item)

    with Full(1) as pool:
        monkeypatch.setattr(threads, "_pool", pool)
        with pytest.raises(RuntimeError, match="start new thread"):
            threads.map_all(work, range(3))
        at_the_end = list(ran)
    assert at_the_end == ran, "nothing runs behind it"


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    """Forked while another thread holds the lock: the child must neither wait for it nor for its parent's threads."""
    program = """
import os, signal, sys, threading
from weightsync import threads
threads.num_cores = lambda: 2
assert threads.map_all(lambda item: item + 1, range(4)) == [1, 2, 3, 4]
threads._lock.acquire()
child = os.fork()
if child == 0:
    signal.alarm(10)
    os._exit(0 if threads.map_all(lambda item: item + 1, range(4)) == [1, 2, 3, 4] else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", program], timeout=60, check=False).returncode == 0


def test_importing_the_digest_imports_no_numba() -> None:
    program = "import sys, weightsync.codec.digest, weightsync.codec.full; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_the_pool_is_as_large_as_the_cores_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert threads.num_cores() == len(os.sched_getaffinity(0))
