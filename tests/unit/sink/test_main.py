"""The writer's process: what ends it, and what it tries again. The rest is in `tests/multiproc/test_store.py`."""

from __future__ import annotations

import threading

import pytest

from tests.multiproc.pull_kit import MODEL, run_of
from tests.standins.stored import AGENT, SEED, taken
from weightsync.errors import BusyError, StateError
from weightsync.sink import main
from weightsync.types import Version
from weightsync.types.sink import Begun, Claimed, SinkConfig, SinkEvent, Stored, Trouble

SCARCE = [MemoryError(), RuntimeError("can't start new thread"), OSError(24, "Too many open files")]


class Short:
    """An intake that fails in these ways first."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    def newest(self, **_: object) -> Version:
        return Version(run_id=run_of(SEED), number=1)

    def take(self, bases: object, **_: object) -> object:
        if self._errors:
            raise self._errors.pop(0)
        return taken(1)

    def close(self) -> None:
        pass


def run(monkeypatch: pytest.MonkeyPatch, url: str, intake: Short) -> tuple[int, list[SinkEvent]]:
    """A writer that ends when its version is stored: its exit code, and what it tells."""
    monkeypatch.setattr(main, "Intake", lambda *_, **__: intake)
    monkeypatch.setattr(main, "_FIRST_PAUSE_S", 0.001)
    told: list[SinkEvent] = []
    ended = threading.Event()

    def tell(event: SinkEvent) -> None:
        told.append(event)
        if isinstance(event, Stored):
            ended.set()

    config = SinkConfig(store=url, model_id=MODEL, run_id=run_of(SEED), agents=(AGENT,))
    return main._run(config, tell, ended, [0.0]), told


def test_a_want_of_memory_or_threads_is_told_and_tried_again(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it ended the writer for the rest of the run."""
    code, told = run(monkeypatch, f"file://{tmp_path}/run", Short(*SCARCE))
    assert [type(each) for each in told] == [Begun, Claimed, Trouble, Trouble, Trouble, Stored]
    for error, each in zip(SCARCE, told[2:5], strict=True):
        assert isinstance(each, Trouble)
        assert (each.error["error"], each.is_last) == (BusyError.__name__, False)
        assert repr(error) in each.error["message"]
    assert code == 0


def test_a_want_of_memory_outside_of_a_version_ends_no_more_than_this_process(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again. Seen red with `is_last`."""

    def none(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(main, "ChainWriter", none)
    code, told = run(monkeypatch, f"file://{tmp_path}/run", Short())
    assert isinstance(told[-1], Trouble)
    assert (code, told[-1].error["error"], told[-1].is_last) == (1, BusyError.__name__, False)


def test_what_nobody_knows_ends_it_for_good(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, told = run(monkeypatch, f"file://{tmp_path}/run", Short(KeyError("a slip")))
    assert isinstance(told[-1], Trouble)
    assert (code, told[-1].error["error"], told[-1].is_last) == (1, StateError.__name__, True)
