"""EngineGroup: what each engine has come to is known by itself, and a load that was given up notes nothing more."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from tests.unit.host.fakes import manifest
from tests.unit.host.service_kit import Engine, wait_until
from weightsync.errors import EngineUnreachableError
from weightsync.handles.fanout import in_thread
from weightsync.handles.http import HttpEngine
from weightsync.host import engine_group
from weightsync.host.commit_gate import CommitGate
from weightsync.host.engine_group import EngineGroup
from weightsync.host.staged_version import StagedVersion
from weightsync.observe import Metrics, Recorder
from weightsync.plan.safetensors import plan_layout
from weightsync.types import Deadline, EngineHandle, EngineOp
from weightsync.types.fleet import NOT_STARTED
from weightsync.types.transfer_messages import Transport

LONG_S = 10.0
WHOLE = manifest(1, seed=1)


def staged() -> StagedVersion:
    return StagedVersion(
        manifest=WHOLE, segment="weightsync-1-none", transport=Transport.TCP, num_attempts=1, release=lambda: None,
        offsets={part.name: part.offset for part in plan_layout(WHOLE.tensors).parts},
    )  # fmt: skip


def group_of(*engines: EngineHandle, metrics: Metrics | None = None, gate: CommitGate | None = None) -> EngineGroup:
    return EngineGroup(
        engines, "m", pause_timeout_s=1.0, recorder=Recorder("t"), metrics=metrics or Metrics(), changed=lambda: None,
        gate=gate,
    )  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_a_slow_engine_hides_no_other(fails: bool) -> None:
    """Seen red with loads that are looked at one after another."""
    slow, other = Engine("slow"), Engine("other")
    slow.holds[EngineOp.BEGIN] = threading.Event()
    other.dead = fails
    group = group_of(slow, other)
    load = in_thread(lambda: group.load(staged(), Deadline(LONG_S)), name="load")
    if fails:
        wait_until(lambda: "other" not in group.answering(), "it is known that it has failed")
    else:
        wait_until(lambda: group.served()["other"] == WHOLE.version, "it is known to serve it")
    assert not load.done()
    assert group.served()["slow"] is None
    slow.holds[EngineOp.BEGIN].set()
    report = load.result(LONG_S)
    assert (set(report.errors), set(report.engine_ids)) == ({"other"} if fails else set(), {"slow", "other"})
    assert group.served()["slow"] == WHOLE.version


def test_a_load_that_was_given_up_notes_nothing_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_group, "_LET_GO_S", 0.05)
    slow = Engine("slow")
    slow.holds[EngineOp.RESUME] = threading.Event()
    group = group_of(slow)
    report = group.load(staged(), Deadline(6.0))
    assert "has not let go" in report.errors["slow"]
    assert group.served() == {"slow": None}
    (holder,) = group.holders()
    again = group.load(staged(), Deadline(0.3))
    assert "is not given" in again.errors["slow"]
    slow.holds[EngineOp.RESUME].set()
    holder.result(LONG_S)
    assert group.served() == {"slow": None}, "until it is asked"
    group.look()
    assert group.served() == {"slow": WHOLE.version}


def test_a_version_that_its_fleet_passes_over_is_no_failure() -> None:
    """An alarm on failed syncs would ring whenever a fleet goes on to a newer version. Seen red when it was counted."""
    metrics, changed = Metrics(), threading.Condition()
    gate = CommitGate(changed, changed.notify_all)
    group = group_of(Engine("one"), metrics=metrics, gate=gate)
    load = in_thread(lambda: group.load(staged(), Deadline(LONG_S)), name="load")
    wait_until(lambda: gate.staged == WHOLE.version, "it is staged")
    gate.release("the fleet has gone on")
    assert "the fleet has gone on" in load.result(LONG_S).errors["one"]
    failed = 'weightsync_syncs_total{outcome="failed"}'
    assert f"{failed} 0.0" in metrics.render().decode()
    dead = Engine("dead")
    dead.dead = True
    assert group_of(dead, metrics=metrics).load(staged(), Deadline(LONG_S)).errors
    assert f"{failed} 1.0" in metrics.render().decode(), "what fails is counted"


def test_an_engine_that_can_have_no_thread_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the others waited for it until the deadline."""

    def thread(function: Callable[[], Any], *, name: str) -> Future[Any]:
        if name != "weightsync-load-two":
            return in_thread(function, name=name)
        failed: Future[Any] = Future()
        failed.set_exception(RuntimeError("can't start new thread"))
        return failed

    monkeypatch.setattr(engine_group, "in_thread", thread)
    changed = threading.Condition()
    group = group_of(Engine("one"), Engine("two"), gate=CommitGate(changed, changed.notify_all))
    errors = group.load(staged(), Deadline(LONG_S)).errors
    assert errors.keys() == {"one", "two"}
    assert "TransferAbortedError: it was not committed: engine two: can't start new thread" in errors["one"]


def test_what_was_given_to_one_engine_is_held_though_the_next_can_t_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the memory that it read counted as free."""

    def thread(function: Callable[[], Any], *, name: str) -> Future[Any]:
        if name == "weightsync-load-two":
            raise MemoryError("as told")
        return in_thread(function, name=name)

    monkeypatch.setattr(engine_group, "in_thread", thread)
    one = Engine("one")
    go = one.holds[EngineOp.UPDATE_WEIGHTS] = threading.Event()
    group = group_of(one, Engine("two"))
    with pytest.raises(MemoryError, match="as told"):
        group.load(staged(), Deadline(LONG_S))
    (holder,) = group.holders()
    go.set()
    holder.result(LONG_S)
    assert group.holders() == []


def test_a_dead_engine_is_told_by_what_it_said_last() -> None:
    dead = Engine("dead")
    dead.dead = True
    group = group_of(dead)
    assert group.all_dead(WHOLE.version) == {}, "it has not failed before"
    errors = group.load(staged(), Deadline(LONG_S)).errors
    assert errors.keys() == {"dead"}
    assert EngineUnreachableError.__name__ in errors["dead"]
    assert group.all_dead(WHOLE.version).keys() == {"dead"}


def test_an_error_that_was_logged_is_not_logged_in_full_again(caplog: pytest.LogCaptureFixture) -> None:
    """Seen red: all names of a wrong model at each version."""
    dead = Engine("dead")
    dead.dead = True
    group = group_of(dead)
    for _ in range(3):
        group.load(staged(), Deadline(LONG_S))
    said = [each for each in caplog.messages if each.startswith("engine dead: ") and "was not loaded" in each]
    assert [each.endswith("the same EngineUnreachableError as before") for each in said] == [False, True, True]
    dead.dead = False
    group.load(staged(), Deadline(LONG_S))
    assert group.served()["dead"] == WHOLE.version
    dead.dead, dead.version = True, None
    group._engines[0].served = None
    group.load(staged(), Deadline(LONG_S))
    assert "as before" not in [each for each in caplog.messages if each.startswith("engine dead: ")][-1]


def test_an_engine_with_another_checksum_is_loaded_again() -> None:
    """Most engines agree; the other one counts as loaded with nothing, until it agrees."""
    engines = [Engine(name) for name in ("a", "b", "c")]
    for engine, checksum in zip(engines, ("1:x", "1:y", "1:x"), strict=True):
        engine.checksum = checksum
    group = group_of(*engines)
    report = group.load(staged(), Deadline(LONG_S))
    assert report.bytes_are_wrong
    assert set(report.errors) == {"b"}
    assert group.served() == {"a": WHOLE.version, "b": None, "c": WHOLE.version}
    report = group.load(staged(), Deadline(LONG_S))
    assert (set(report.errors), report.engine_ids) == ({"b"}, ("b",)), "compared with those that were loaded before"
    engines[1].checksum = "1:x"
    report = group.load(staged(), Deadline(LONG_S))
    assert (report.errors, report.checksums) == ({}, dict.fromkeys(("a", "b", "c"), "1:x"))
    assert group.served()["b"] == WHOLE.version


@pytest.mark.parametrize("looks_first", [True, False])
def test_an_engine_that_has_not_started_is_waited_for_and_has_not_failed(
    looks_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it has answered, that nobody listens there is a failure. Seen red: a failed load in the log, and counted."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        metrics = Metrics()
        group = group_of(HttpEngine(url), metrics=metrics)
        if looks_first:
            group.look()
        errors = group.load(staged(), Deadline(LONG_S)).errors
        group.look()
        assert errors == group.gone() == {url: errors[url]}
        assert group.standing(errors) == errors
        assert errors[url].startswith(f"{NOT_STARTED}: EngineUnreachableError: can't connect to {url}")
        own = (threading.current_thread().name, f"weightsync-load-{url}")  # another test's threads may still write
        (said,) = [record.getMessage() for record in caplog.records if record.threadName in own]
        assert said.startswith(f"waits for engine {url} to start: can't connect")
        assert 'weightsync_syncs_total{outcome="failed"} 0.0' in metrics.render().decode()
        group._engines[0].update.has_answered = True
        group.look()
        assert group.gone()[url].startswith("EngineUnreachableError: can't connect")
