"""A version that its trainer wants validated: by hand, and in all interleavings."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.unit.control.test_state import AllInterleavings, Machine
from weightsync.control.events import (
    BatchReady,
    Event,
    GiveUp,
    RetryAfter,
    RetryDue,
    StartSync,
    StartValidation,
    Synced,
    SyncFailed,
    Trained,
    ValidationEnded,
)
from weightsync.errors import VersionError
from weightsync.types.control import ValidationRun


def evaluates(machine: Machine, version: int, worker: str = "w", run_id: str = "r") -> Any:
    return machine(Trained(worker=worker, run_id=run_id, version=version, evaluate=True))


def validates(version: int, *, stands_for: tuple[int, ...] = (), run_id: str = "r") -> tuple[StartValidation]:
    return (StartValidation(validation=ValidationRun(run_id=run_id, version=version, stands_for=stands_for)),)


@pytest.mark.parametrize("mode", ["sync", "batch-async", "fully-async"])
def test_it_is_synced_and_validated_whatever_the_mode(mode: str) -> None:
    machine = Machine(mode=mode, staleness_threshold=9)
    machine(BatchReady())
    assert evaluates(machine, 1) == (StartSync(run_id="r", version=1),)
    assert machine.synced() == validates(1)
    assert machine.locked
    assert machine(ValidationEnded()) == ()
    assert machine.state.evaluate_at is None
    assert not machine.locked
    assert not machine.blocked


def test_one_that_is_served_is_validated_at_once() -> None:
    machine = Machine(mode="fully-async")
    machine.train(1)
    machine.synced()
    assert evaluates(machine, 1) == validates(1)


def test_several_workers_ask_for_it_once() -> None:
    """Seen to fail: the second worker came when the first one's validation ran, and it was validated again."""
    machine = Machine()
    assert evaluates(machine, 1, "w0") == (StartSync(run_id="r", version=1),)
    assert evaluates(machine, 1, "w1") == ()
    assert machine.synced() == validates(1)
    assert evaluates(machine, 1, "w2") == ()
    assert machine(ValidationEnded()) == ()
    assert evaluates(machine, 1, "w3") == ()


def test_one_validation_does_for_the_multiple_and_for_the_trainer() -> None:
    machine = Machine(validate_freq=2)
    machine.train(1)
    machine.synced()
    evaluates(machine, 2)
    assert machine.synced() == validates(2, stands_for=(2,))
    assert machine(ValidationEnded()) == ()


def test_while_another_is_validated_it_waits() -> None:
    machine = Machine(mode="fully-async")
    evaluates(machine, 1)
    machine.synced()
    assert evaluates(machine, 2) == (), "it measures one version"
    assert machine(ValidationEnded()) == (StartSync(run_id="r", version=2),)
    assert machine.synced() == validates(2)


@pytest.mark.parametrize("mode", ["sync", "batch-async", "fully-async"])
def test_a_retry_that_is_due_while_a_validation_runs_begins_when_that_has_ended(mode: str) -> None:
    """Seen red: the retry changed the weights in the middle of the validation, which was recorded for the old ones."""
    machine = Machine(mode=mode, staleness_threshold=1)
    machine.train(1)
    machine.synced()
    machine.train(2)
    assert machine(SyncFailed()) == (RetryAfter(seconds=1.0),)
    assert evaluates(machine, 1, "eval") == validates(1)
    assert machine(RetryDue()) == ()
    assert machine.train(3) == evaluates(machine, 1, "late") == ()
    assert machine(ValidationEnded()) == (StartSync(run_id="r", version=3),)
    assert machine.synced() == ()


def test_a_retry_that_is_not_due_when_a_validation_ends_keeps_its_time() -> None:
    machine = Machine()
    machine.train(1)
    machine.synced()
    machine.train(2)
    machine(SyncFailed())
    assert evaluates(machine, 1, "eval") == validates(1)
    assert machine(ValidationEnded()) == ()
    assert machine(RetryDue()) == (StartSync(run_id="r", version=2),)
    assert machine(SyncFailed()) == (RetryAfter(seconds=2.0),)
    assert machine(BatchReady()) == (), "the next one waits for its own time"


def test_a_newer_version_does_for_an_older_one() -> None:
    machine = Machine(mode="fully-async")
    evaluates(machine, 1)
    machine.train(2)
    assert machine.synced(2) == validates(2)
    assert machine(ValidationEnded()) == ()


def test_it_is_tried_again_and_given_up() -> None:
    machine = Machine(mode="fully-async", retries_s=(1.0,))
    evaluates(machine, 1)
    assert machine(SyncFailed()) == (RetryAfter(seconds=1.0),)
    assert machine(RetryDue()) == (StartSync(run_id="r", version=1),)
    assert machine(SyncFailed()) == (GiveUp(run_id="r", version=1),)
    assert machine.state.overdue
    assert machine.train(2) == (StartSync(run_id="r", version=2),)
    assert machine.synced() == validates(2), "it is not forgotten"


def test_a_new_run_asks_anew() -> None:
    machine = Machine(mode="fully-async")
    evaluates(machine, 3)
    machine.train(1, run_id="again")
    assert machine.state.evaluate_at is None
    assert machine.synced(3) == (StartSync(run_id="again", version=1),)
    assert machine.synced() == ()
    assert evaluates(machine, 1, run_id="again") == validates(1, run_id="again")


def early(machine: Machine, version: int, worker: str = "w") -> Any:
    return machine(Trained(worker=worker, run_id="r", version=version, evaluate=True, claimed=True))


def test_one_that_is_told_of_too_early_is_validated_when_it_is_there() -> None:
    """Seen red: with the agent's first denial it was forgotten, and synced without a validation."""
    machine = Machine(mode="fully-async")
    early(machine, 5)
    assert machine(SyncFailed(absent=True, newest=4, again=True)) == (StartSync(run_id="r", version=4),)
    assert (machine.state.evaluate_at, machine.state.evaluate_later) == (None, (5,))
    machine.synced()
    told = Trained(worker="announced", run_id="r", version=5, claimed=True)
    assert machine(told) == (StartSync(run_id="r", version=5),)
    assert machine(SyncFailed(absent=True, newest=4, again=True)) == ()
    assert machine.state.evaluate_later == (5,)
    machine(told)
    assert machine.synced() == validates(5)
    assert (machine.state.evaluate_at, machine.state.evaluate_later) == (None, ())


def test_one_that_never_comes_is_given_up_and_others_are_not() -> None:
    machine = Machine(mode="fully-async")
    early(machine, 5)
    machine(SyncFailed(absent=True, newest=4, again=True))
    machine.synced()
    early(machine, 1000, "liar")
    machine(SyncFailed(absent=True, newest=4, again=True))
    assert machine.state.evaluate_later == (5, 1000)
    machine(Trained(worker="announced", run_id="r", version=1000, claimed=True))
    machine(SyncFailed(absent=True, newest=4))
    assert (machine.state.evaluate_at, machine.state.evaluate_later) == (None, (5,))
    machine(Trained(worker="announced", run_id="r", version=5, claimed=True))
    assert machine.state.evaluate_at == 5
    machine(SyncFailed(absent=True, newest=4))
    assert (machine.state.evaluate_at, machine.state.evaluate_later) == (None, ())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["early", "there", "told again", "told", "sync", "validation"]), max_size=60))
def test_whatever_was_asked_for_too_early_is_validated_in_the_end(steps: list[str]) -> None:
    """An agent that publishes at its own pace, and a trainer that may be a version ahead of it."""
    machine = Machine(mode="fully-async")
    has, asked, denied, validated = 0, [-1], set[int](), [-1]

    def does(what: str) -> None:
        nonlocal has
        if what == "early":
            asked.append(has + 1)
            early(machine, has + 1)
        elif what == "there":
            has += 1
        elif what == "told again" and denied:
            machine(Trained(worker="announced", run_id="r", version=denied.pop(), claimed=True))
        elif what == "told" and has:
            machine(Trained(worker="other", run_id="r", version=has, claimed=True))
        elif what == "sync" and machine.state.syncing is not None:
            goal = machine.state.syncing.version
            denied.update({goal} if goal > has else ())
            machine(Synced(version=goal) if goal <= has else SyncFailed(absent=True, newest=has, again=True))
        elif what == "validation" and machine.state.validation is not None:
            validated.append(machine.state.validation.version)
            machine(ValidationEnded())
        state = machine.state
        to_come = (*state.evaluate_later, state.evaluated_to, -1 if state.evaluate_at is None else state.evaluate_at)
        assert max(asked) <= max(to_come), "it is forgotten"

    for what in steps:
        with contextlib.suppress(VersionError):  # it has told of more, and that was served
            does(what)
    has = max(has, *asked)
    for _ in range(len(steps) + 5):
        for what in ("told again", "sync", "validation"):
            with contextlib.suppress(VersionError):
                does(what)
    assert validated[-1] >= max(asked)
    assert validated == sorted(set(validated)), "none twice"
    assert not machine.state.evaluate_later


class WithEvaluations(AllInterleavings):
    """As before, and now and then a trainer asks, by several workers that come at their own pace."""

    def feed(self, event: Event) -> None:
        running = self.validating
        super().feed(event)
        if self.validating is not None and self.validating is not running:
            self.validated.append((self.validating.run_id, self.validating.version))

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[tuple[str | None, int]] = []
        self.asked: dict[str, int] = {}

    def asks(self, worker: int) -> None:
        run = f"run-{self.run}"
        self.asked[run] = self.version
        self.feed(Trained(worker=f"w{worker}", run_id=run, version=self.version, evaluate=True))

    @precondition(lambda self: self.batches > 0)
    @rule(workers=st.integers(1, 3))
    def a_step_ends_and_is_evaluated(self, workers: int) -> None:
        self.batches -= 1
        self.version += 1
        for worker in range(workers):
            self.asks(worker)

    @precondition(lambda self: self.state.told)
    @rule(worker=st.integers(0, 4))
    def another_worker_asks(self, worker: int) -> None:
        self.asks(worker)

    @precondition(lambda self: self.state.told and self.state.rollout_version > self.state.evaluated_to)
    @rule()
    def one_that_evaluates_alone_asks_for_what_is_served(self) -> None:
        version = self.state.rollout_version
        self.feed(Trained(worker="eval", run_id=self.state.run_id, version=version, evaluate=True))

    @invariant()
    def what_was_asked_for_is_validated_or_to_come(self) -> None:
        run = str(self.state.run_id)
        if run in self.asked and self.state.evaluate_at is None:
            assert max([n for name, n in self.validated if name == run], default=-1) >= self.asked[run]

    @invariant()
    def no_version_is_validated_twice(self) -> None:
        for run in {name for name, _ in self.validated}:
            numbers = [number for name, number in self.validated if name == run]
            assert numbers == sorted(set(numbers)), numbers

    @invariant()
    def what_is_to_come_is_on_its_way(self) -> None:
        state = self.state
        if state.evaluate_at is not None:
            assert state.syncing or self.retry or self.validating or state.overdue, state
            assert state.evaluate_at <= state.train_version


WithEvaluations.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestWithEvaluations = WithEvaluations.TestCase


def test_a_late_end_of_nothing_changes_nothing() -> None:
    machine = Machine()
    assert machine(ValidationEnded()) == machine(SyncFailed()) == machine(Synced(version=3)) == ()
