"""The writer's process: what ends it, and what it tries again. The rest is in `tests/multiproc/test_store.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.multiproc.pull_kit import MODEL, run_of
from tests.standins.stored import AGENT, SEED, taken
from tests.standins.threads import logged_here
from weightsync.errors import BusyError, StateError, StoreAuthError
from weightsync.objects.opened import open_store
from weightsync.sink import main
from weightsync.sink.claim import ClaimKeeper
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
    return main._run(config, tell, ended, [0.0], []), told


def test_a_want_of_memory_or_threads_is_told_and_tried_again(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it ended the writer for the rest of the run."""
    code, told = run(monkeypatch, f"file://{tmp_path}/run", Short(*SCARCE))
    assert [type(each) for each in told] == [Begun, Claimed, Trouble, Trouble, Trouble, Stored]
    for error, each in zip(SCARCE, told[2:5], strict=True):
        assert isinstance(each, Trouble)
        assert (each.error["error"], each.is_last) == (BusyError.__name__, False)
        assert repr(error) in each.error["message"]
    assert code == 0


def test_a_store_that_refuses_for_weeks_is_one_line(
    tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: one each 15 s."""
    refused = [StoreAuthError(f"expired, request {number}") for number in range(5)]
    code, told = run(monkeypatch, f"file://{tmp_path}/run", Short(*refused))
    assert (code, sum(isinstance(each, Trouble) for each in told)) == (0, 5)
    warned = [record.getMessage() for record in logged_here(caplog) if record.levelname == "WARNING"]
    assert warned == ["expired, request 0"]


class Turns(threading.Event):
    """Never waits; it is set after so many turns."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def wait(self, timeout: float | None = None) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_claim_that_is_not_renewed_for_weeks_is_one_line_until_it_is(
    tmp_path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = ClaimKeeper(open_store(f"file://{tmp_path}/run", whose="the store's"), run_id="r", takeover_s=60.0)
    keeper.acquire(ended=threading.Event())
    keeper._ended.set()
    put, tries = keeper._put, iter([False, False, False, True, False, False])

    def refuses(*args: Any) -> str:
        if not next(tries):
            raise StoreAuthError("expired")
        return put(*args)

    monkeypatch.setattr(keeper, "_put", refuses)
    monkeypatch.setattr(keeper, "_ended", Turns(6))
    keeper._keep()
    warned = [record.getMessage() for record in logged_here(caplog) if record.levelname == "WARNING"]
    assert warned == [f"the claim of {keeper._store.url} is not renewed: expired"] * 2


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


@pytest.mark.parametrize("is_told", [False, True])
def test_the_place_of_a_trainer_that_is_gone_comes_free_while_a_version_is_written(
    tmp_path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """A trainer that ends in order waits for that version, and its claim stays. Seen red: the one that was started
    again found a writer "who is alive" until the upload's end."""
    url = f"file://{tmp_path}/run"
    store, ended, until = open_store(url, whose="the store's"), threading.Event(), [0.0]
    closing: list[Callable[[], None]] = []
    told: list[SinkEvent] = []
    released: list[bool] = []

    class Slow(Short):
        def take(self, bases: object, **_: object) -> object:
            main._listen(iter([b"end 0"] if is_told else []), ended, until, closing)
            found, _etag = ClaimKeeper(store, run_id="next", takeover_s=1.0)._found()
            released.append(found is not None and found.released)
            return taken(1)

    monkeypatch.setattr(main, "Intake", lambda *_, **__: Slow())
    config = SinkConfig(store=url, model_id=MODEL, run_id=run_of(SEED), agents=(AGENT,))
    assert main._run(config, told.append, ended, until, closing) == 0
    assert released == [not is_told]
    assert isinstance(told[-1], Stored)
    following = ClaimKeeper(store, run_id="next", takeover_s=60.0)
    following.acquire(ended=threading.Event())
    assert following.epoch == 2
    following.release()
