"""Pulls: when a version's memory is given back."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.errors import StateError
from weightsync.host.pulls import Pulls
from weightsync.host.settings import RolloutConfig
from weightsync.observe import Recorder
from weightsync.types import Version


def test_memory_is_given_back_when_the_last_engine_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: where no thread could be had to wait for them, it was kept for ever."""
    start, here = threading.Thread.start, threading.current_thread()

    def fails(thread: threading.Thread) -> None:
        if threading.current_thread() is here:
            raise RuntimeError("can't start new thread")
        start(thread)

    holders: list[Future[Any]] = [Future(), Future(), Future()]
    told: list[str] = []
    pulls = Pulls(
        "m", RolloutConfig(), recorder=Recorder("t"), may_call=lambda _: False, holders=lambda: holders,
        patch_limit=lambda: 0.0,
    )  # fmt: skip
    monkeypatch.setattr(pulls._staging, "close", lambda: told.append("closed"))
    monkeypatch.setattr(threading.Thread, "start", fails)
    pulled: Any = SimpleNamespace(version="r/1", release=lambda: told.append("released"))
    holders[1].set_result(None)
    pulls._give_back(pulled)
    holders[0].set_exception(RuntimeError("its load failed"))
    assert told == []
    holders[2].set_result(None)
    assert told == ["released", "closed"]
    pulls.close()
    assert told == ["released", "closed"], "what is pulled next goes elsewhere"


def test_what_agents_have_granted_moves_until_it_fails_or_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has it granted may get all of it from other hosts, though its agent is gone by now."""
    pulls = Pulls(
        "m", RolloutConfig(), recorder=Recorder("t"), may_call=lambda _: False, holders=list, patch_limit=lambda: 0.0
    )
    version, seen = Version(run_id="r", number=1), []

    def pull(*, granted: Any, retrying: Any, **_: Any) -> Any:
        for step in (
            lambda: None,
            lambda: granted(version),
            lambda: retrying(StateError("as told")),
            lambda: granted(version),
        ):
            step()
            seen.append(pulls.moving)
        return SimpleNamespace(version=version, release=lambda: None)

    monkeypatch.setattr(pulls, "_puller_at", lambda _: SimpleNamespace(pull=pull))
    with pulls.pulled("http://agent", at_least=lambda: version, retrying=lambda _: None):
        seen.append(pulls.moving)
    assert [*seen, pulls.moving] == [False, True, False, True, True, False]


def test_what_is_wrong_is_forgotten_though_another_host_reads_it() -> None:
    """Seen red: that nobody could cut it stood in place of the engine's error."""

    def stuck() -> None:
        raise StateError("another host reads what is to be written")

    pulls = Pulls(
        "m", RolloutConfig(), recorder=Recorder("t"), may_call=lambda _: False, holders=list, patch_limit=lambda: 0.0
    )
    pulls._staging.before_write, pulls._staging._held = stuck, Version(run_id="r", number=1)
    pulls.forget()
    assert pulls._staging._held is None


def test_what_has_come_is_of_the_version_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: what had come of the version before stood for the next one, until its first bytes were there."""
    pulls = Pulls(
        "m", RolloutConfig(), recorder=Recorder("t"), may_call=lambda _: False, holders=list, patch_limit=lambda: 0.0
    )
    version = Version(run_id="r", number=1)
    seen: list[tuple[int, int] | None] = []

    def pull(*, granted: Any, retrying: Any, progress: Any, **_: Any) -> Any:
        for step in (
            lambda: granted(version),
            lambda: progress(40, 80),
            lambda: retrying(StateError("a newer one is there")),
            lambda: granted(version),
            lambda: progress(80, 80),
            lambda: granted(version),  # it was a chain's anchor
            lambda: progress(1, 2),
        ):
            step()
            seen.append(pulls.progress)
        return SimpleNamespace(version=version, release=lambda: None)

    monkeypatch.setattr(pulls, "_puller_at", lambda _: SimpleNamespace(pull=pull))
    with pulls.pulled("http://agent", at_least=lambda: version, retrying=lambda _: None):
        pass
    assert [*seen, pulls.progress] == [None, (40, 80), None, None, (80, 80), None, (1, 2), None]
