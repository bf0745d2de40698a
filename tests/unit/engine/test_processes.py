"""ProcessWorker: a worker in a child process, and what its engine sees when that child fails or dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.unit.host.fakes import begin, model
from weightsync.engine.processes import ProcessWorker
from weightsync.errors import EngineError, EngineUnreachableError, LoadError, StateError, WeightSyncError
from weightsync.handles.fanout import in_thread
from weightsync.load.module import ModuleWeightLoader


def factory(index: int) -> tuple[ModuleWeightLoader, dict[str, Callable[[Any], Any]]]:
    def fail(what: Any) -> None:
        raise LoadError("no room", parameter=what) if what else KeyError("x")

    return ModuleWeightLoader(model()), {
        "echo": lambda argument: [index, os.getpid(), argument],
        "fail": fail,
        "sleep": lambda seconds: threading.Event().wait(seconds),
        "tensor": lambda argument: torch.ones(2),
        "die": lambda argument: os.kill(os.getpid(), signal.SIGKILL),
    }


def no_factory(index: int) -> Any:
    raise RuntimeError("no model here")


@pytest.fixture
def worker() -> Iterator[ProcessWorker]:
    deaths: list[str] = []
    made = ProcessWorker(factory, index=3, track="e/worker-3", start_method="fork", on_death=deaths.append)
    made.deaths = deaths  # type: ignore[attr-defined]
    yield made
    made.close()


def test_calls_run_in_the_child_and_answers_come_back_to_their_callers(worker: ProcessWorker) -> None:
    assert worker.pid != os.getpid()
    assert worker.describe().engine_id == "e/worker-3"
    slow = in_thread(lambda: worker.ask("sleep", 60), name="slow")
    assert [worker.ask("echo", n) for n in range(20)] == [[3, worker.pid, n] for n in range(20)]
    assert not slow.done(), "a slow call holds up no other"
    assert worker.drain_phases() == ()


def test_errors_cross_the_pipe_typed(worker: ProcessWorker) -> None:
    with pytest.raises(LoadError) as caught:
        worker.ask("fail", "w")
    assert (caught.value.parameter, caught.value.peer) == ("w", "e/worker-3")
    with pytest.raises(EngineError, match="KeyError"):
        worker.ask("fail", None)
    with pytest.raises(StateError, match="init first"):
        worker.begin(begin())
    with pytest.raises(StateError, match="it can: "):
        worker.ask("nothing like it", None)
    worker.abort("nobody", "nothing to abort")


def test_an_answer_that_can_not_be_written_is_an_error_not_a_wait(worker: ProcessWorker) -> None:
    call = in_thread(lambda: worker.ask("tensor", None), name="call")
    assert isinstance(call.exception(5), WeightSyncError)


def test_its_engine_knows_of_a_death_before_anybody_is_told() -> None:
    """Seen red: those that waited, and those that asked just then, were told, and the engine went on generating."""
    answered: list[bool] = []

    def waiting(count: int) -> list[Any]:
        end = time.monotonic() + 10
        while len(made._waiting) < count:
            assert time.monotonic() < end
        return list(made._waiting.values())

    def refuse(_: str) -> None:
        calls.append(in_thread(lambda: made.ask("sleep", 60), name="late"))
        answered.extend(future.done() for future in waiting(4))

    made = ProcessWorker(factory, track="e/worker-0", start_method="fork", on_death=refuse)
    calls = [in_thread(lambda: made.ask("sleep", 60), name=str(number)) for number in range(3)]
    waiting(3)
    os.kill(made.pid, signal.SIGKILL)
    for call in calls[:3]:
        assert isinstance(call.exception(20), EngineUnreachableError)
    assert answered == [False] * 4
    assert isinstance(calls[3].exception(20), EngineUnreachableError)
    made.close()


def test_a_child_that_dies_ends_every_call_and_is_told_once(worker: ProcessWorker) -> None:
    waiting = [in_thread(lambda: worker.ask("sleep", 60), name=str(i)) for i in range(3)]
    dying = in_thread(lambda: worker.ask("die", None), name="die")
    for call in (*waiting, dying):
        error = call.exception(10)
        assert isinstance(error, EngineUnreachableError)
        assert "-9" in str(error)
        assert error.peer == "e/worker-3"
    with pytest.raises(EngineUnreachableError, match="died"):
        worker.describe()
    assert worker.drain_phases() == ()
    deaths: list[str] = worker.deaths  # type: ignore[attr-defined]
    end = time.monotonic() + 5
    while not deaths and time.monotonic() < end:
        pass
    assert len(deaths) == 1


def test_a_child_that_is_closed_is_gone_and_no_death(worker: ProcessWorker) -> None:
    pid = worker.pid
    worker.close()
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert worker.deaths == []  # type: ignore[attr-defined]
    with pytest.raises(EngineUnreachableError):
        worker.describe()


def test_a_factory_that_fails_says_why() -> None:
    with pytest.raises(EngineError, match="no model here"):
        ProcessWorker(no_factory, start_method="fork", start_timeout_s=20)


def test_without_a_thread_to_listen_no_child_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a bare RuntimeError, and a child with the model's memory until its parent ended."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(StateError, match="no thread can be started"):
            ProcessWorker(factory, index=0, track="t", start_method="fork")
    assert not [child for child in multiprocessing.active_children() if child.name == "t"]
