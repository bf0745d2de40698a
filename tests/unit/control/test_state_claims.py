"""Announced versions that their agent has not: what was told, and what was due, goes back to what is there."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.control.test_state import Machine
from weightsync.control.events import (
    BatchDropped,
    BatchReady,
    GiveUp,
    RetryAfter,
    RetryDue,
    StartSync,
    Synced,
    SyncFailed,
    Trained,
)
from weightsync.errors import VersionError


def claim(machine: Machine, version: int, run_id: str = "r", worker: str = "w") -> tuple[object, ...]:
    return tuple(machine(Trained(worker=worker, run_id=run_id, version=version, claimed=True)))


def start(version: int, run_id: str = "r") -> StartSync:
    return StartSync(run_id=run_id, version=version)


def test_what_the_agent_has_takes_its_place() -> None:
    machine = Machine(mode="fully-async")
    assert claim(machine, 1) == (start(1),)
    machine(Synced(version=1))
    assert claim(machine, 1001) == (start(1001),)
    assert claim(machine, 2) == (), "a true one is no way back"
    assert machine(SyncFailed(absent=True, newest=2)) == (start(2),)
    machine(Synced(version=2))
    assert (machine.state.train_version, machine.state.num_failed) == (2, 0)
    assert claim(machine, 3) == (start(3),)


def test_what_was_told_of_since_is_not_lost() -> None:
    machine = Machine(mode="fully-async")
    claim(machine, 1001)
    claim(machine, 3)
    assert machine(SyncFailed(absent=True, newest=2)) == (start(3),)
    assert machine(SyncFailed(absent=True, newest=2)) == (start(2),)


def test_a_worker_that_goes_back_behind_what_was_fetched_is_refused() -> None:
    machine = Machine(mode="fully-async")
    claim(machine, 5)
    machine(Synced(version=5))
    claim(machine, 9)
    with pytest.raises(VersionError, match="new run_id"):
        claim(machine, 4)
    claim(machine, 5)


def test_a_run_that_its_agent_does_not_know_gives_way_to_the_one_before_and_nobody_is_evicted() -> None:
    machine = Machine(mode="sync", after_failure="evict", retries_s=(1.0,))
    claim(machine, 1, "first")
    machine(Synced(version=1))
    assert claim(machine, 7, "lie") == (start(7, "lie"),)
    assert machine(SyncFailed(absent=True)) == (RetryAfter(seconds=1.0),)
    assert (machine.state.overdue, machine.blocked) == (True, False)
    machine(RetryDue())
    assert machine(SyncFailed(absent=True)) == (GiveUp(run_id="lie", version=7),)
    assert claim(machine, 2, "first") == (start(2, "first"),)


def test_an_evaluation_and_multiples_of_what_is_not_there() -> None:
    machine = Machine(mode="fully-async", validate_freq=10)
    machine(Trained(worker="w", run_id="r", version=1000, claimed=True, evaluate=True))
    assert machine.state.validated_to == 990
    machine(SyncFailed(absent=True, newest=3))
    assert (machine.state.evaluate_at, machine.state.validated_to) == (None, 0)


@settings(max_examples=200, deadline=None)
@example(steps=["batch", "step", "drop", "batch", "lie"], mode="batch-async")
@given(
    st.lists(st.sampled_from(["batch", "step", "lie", "drop", "end"]), max_size=40),
    st.sampled_from(["sync", "batch-async"]),
)
def test_lies_leave_no_trace_in_what_is_due(steps: list[str], mode: str) -> None:
    """Beside a machine that hears no lies: as soon as each lie was denied both are the same.

    Seen red: a batch was dropped whose version was told of, and the denial of another took the next batch for its.
    """
    honest, lied_to = Machine(mode=mode, staleness_threshold=2), Machine(mode=mode, staleness_threshold=2)
    version = batches = 0
    for what in steps:
        if what == "batch":
            batches += 1
            for machine in (honest, lied_to):
                machine(BatchReady())
        elif what == "step" and batches:
            batches, version = batches - 1, version + 1
            for machine in (honest, lied_to):
                claim(machine, version)
        elif what == "drop":
            batches = max(0, batches - 1)
            for machine in (honest, lied_to):
                machine(BatchDropped(num=1))
        elif what == "lie" and version:
            claim(lied_to, 1000 + version, worker="liar")
        for machine in (honest, lied_to):
            while machine.state.syncing is not None:
                goal = machine.state.syncing.version
                machine(Synced(version=goal) if goal <= version else SyncFailed(absent=True, newest=version))
    for machine in (honest, lied_to):
        assert machine.state.rollout_version <= machine.state.sure_version <= version == machine.state.train_version
        assert machine.state.num_pending == batches
        assert not machine.blocked or machine.state.phase == "need_sync"


def test_what_is_told_of_during_the_last_retry_is_tried() -> None:
    """Seen red: nobody tried it before the trainer spoke again, and it had ended."""
    machine = Machine(mode="sync", retries_s=())
    claim(machine, 4)
    claim(machine, 5)
    assert machine(SyncFailed()) == (GiveUp(run_id="r", version=4), start(5))
    assert (machine.state.overdue, machine.blocked) == (True, False), "rollout waits no longer for that"
    assert machine(SyncFailed()) == (GiveUp(run_id="r", version=5),)
    machine(Trained(worker="w", run_id="r", version=6))
    machine(Synced(version=6))
    assert not machine.state.overdue


def test_nothing_is_overdue_where_nothing_is_there() -> None:
    """Seen red: a number that was given up, and that its agent denied later, stood there as one that is overdue."""
    machine = Machine(mode="fully-async", retries_s=())
    claim(machine, 1)
    machine(Synced(version=1))
    claim(machine, 51)
    machine(SyncFailed())
    assert machine.state.overdue
    claim(machine, 52)
    machine(SyncFailed(absent=True, newest=1))
    assert (machine.state.overdue, machine.state.train_version) == (False, 1)


def test_the_run_that_was_served_comes_back_behind_any_number_of_false_ones() -> None:
    """Seen red: behind two of them its trainer was refused for good."""
    machine = Machine(mode="fully-async", retries_s=())
    claim(machine, 1, "true")
    machine(Synced(version=1))
    claim(machine, 9, "lie")
    claim(machine, 9, "another lie")
    with pytest.raises(VersionError, match="taken over"):
        claim(machine, 2, "true")
    machine(SyncFailed(absent=True))
    machine(SyncFailed(absent=True))
    assert claim(machine, 2, "true") == (start(2, "true"),)
    with pytest.raises(VersionError, match="taken over"):
        claim(machine, 9, "lie")
