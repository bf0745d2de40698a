"""The machine that decides when to sync: golden sequences written by hand, and all interleavings by hypothesis."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weightsync.control.events import (
    Action,
    BatchDropped,
    BatchReady,
    Event,
    EvictFailed,
    GiveUp,
    RetryAfter,
    RetryDue,
    StartSync,
    StartValidation,
    Synced,
    SyncFailed,
    SyncWanted,
    Trained,
    ValidationEnded,
)
from weightsync.control.state import ModelState, Policy, awaits_step, pool_locked, services_blocked, step
from weightsync.errors import ConfigError, VersionError
from weightsync.types.control import ValidationRun


class Machine:
    """One model's state, and what was to be done last."""

    def __init__(self, **policy: Any) -> None:
        self.policy = Policy(**policy)
        self.state = ModelState()
        self.actions: tuple[Action, ...] = ()

    def __call__(self, event: Event) -> tuple[Action, ...]:
        self.state, self.actions = step(self.state, event, self.policy)
        return self.actions

    @property
    def blocked(self) -> bool:
        return services_blocked(self.state, self.policy)

    @property
    def locked(self) -> bool:
        return pool_locked(self.state, self.policy)

    def train(self, version: int | None = None, worker: str = "w", run_id: str | None = "r") -> tuple[Action, ...]:
        return self(Trained(worker=worker, run_id=run_id, version=version))

    def synced(self, version: int | None = None) -> tuple[Action, ...]:
        assert self.state.syncing is not None
        return self(Synced(version=self.state.syncing.version if version is None else version))

    def steps(self, count: int) -> list[tuple[str, str, int]]:
        """Batch by batch: whether rollout is blocked while the step trains, whether it syncs, rollout's version."""
        found = []
        for number in range(1, count + 1):
            self(BatchReady())
            while_training = "block" if self.blocked else "go"
            did = self.train(number)
            if did:
                assert did == (StartSync(run_id="r", version=number),)
                assert self.blocked == (self.policy.bound is not None)
                self.synced()
            assert not self.blocked
            assert not self.locked
            found.append((while_training, "sync" if did else "-", self.state.rollout_version))
        return found


ALWAYS = [("block", "sync", number) for number in range(1, 13)]
GOLDEN = {
    ("sync", 2): ALWAYS,
    ("batch-async", 1): ALWAYS,
    ("batch-async", 2): [
        ("go", "-", 0), ("block", "sync", 2), ("go", "-", 2), ("block", "sync", 4), ("go", "-", 4),
        ("block", "sync", 6), ("go", "-", 6), ("block", "sync", 8), ("go", "-", 8), ("block", "sync", 10),
        ("go", "-", 10), ("block", "sync", 12),
    ],
    ("batch-async", 3): [
        ("go", "-", 0), ("go", "-", 0), ("block", "sync", 3), ("go", "-", 3), ("go", "-", 3), ("block", "sync", 6),
        ("go", "-", 6), ("go", "-", 6), ("block", "sync", 9), ("go", "-", 9), ("go", "-", 9), ("block", "sync", 12),
    ],
    ("fully-async", 2): [("go", "sync", number) for number in range(1, 13)],
}  # fmt: skip


@pytest.mark.parametrize(("mode", "threshold"), list(GOLDEN), ids=str)
def test_twelve_steps(mode: str, threshold: int) -> None:
    """Written by hand from document 5 and the design: threshold 2 serves 0 2 2 4 4 6 after each of six steps."""
    assert Machine(mode=mode, staleness_threshold=threshold).steps(12) == GOLDEN[mode, threshold]


def test_a_batch_that_is_ready_early_counts() -> None:
    """Two batches at once, threshold 2: the second one's step ends in a sync, and rollout waits from now on."""
    machine = Machine(mode="batch-async")
    machine(BatchReady())
    assert not machine.blocked
    machine(BatchReady())
    assert (machine.blocked, machine.locked) == (True, True)
    assert machine.train(1) == ()
    assert machine.blocked
    assert machine.train(2) == (StartSync(run_id="r", version=2),)
    machine.synced()
    assert not machine.blocked


def test_a_trainer_that_tells_of_no_batch_is_bounded_too() -> None:
    machine = Machine(mode="batch-async", staleness_threshold=3)
    assert [machine.train(version) for version in (1, 2)] == [(), ()]
    assert machine.train(3) == (StartSync(run_id="r", version=3),)
    assert machine.blocked


def test_fully_async_syncs_the_newest_and_blocks_nobody() -> None:
    machine = Machine(mode="fully-async")
    assert machine.train(1) == (StartSync(run_id="r", version=1),)
    for version in (2, 3, 4):
        machine(BatchReady())
        assert machine.train(version) == ()
        assert (machine.blocked, machine.locked) == (False, False)
    assert machine.synced(1) == (StartSync(run_id="r", version=4),)
    assert machine.synced(4) == ()


def test_several_workers_count_once() -> None:
    machine = Machine(mode="batch-async")
    for worker in ("a", "b", "c"):
        assert machine.train(1, worker) == ()
    assert machine.state.train_version == 1
    assert machine.train(2, "a") == (StartSync(run_id="r", version=2),)
    assert machine.train(1, "d") == (), "one that is late"
    assert machine.state.train_version == 2


def test_calls_without_a_version_are_counted_by_worker() -> None:
    machine = Machine(mode="batch-async", staleness_threshold=9)
    for worker in ("a", "b", "a", "b", "b"):
        machine.train(None, worker, run_id=None)
    assert machine.state.train_version == 3


def test_a_first_call_without_a_version_is_the_end_of_a_step() -> None:
    machine = Machine(mode="batch-async")
    machine(BatchReady())
    machine(BatchReady())
    assert machine.train(None) == ()
    assert (machine.state.num_pending, machine.blocked) == (1, True)


def test_a_worker_that_goes_back_within_a_run_is_refused() -> None:
    machine = Machine()
    machine.train(5)
    before = machine.state
    with pytest.raises(VersionError, match="new run_id"):
        machine.train(4)
    assert machine.state == before


@pytest.mark.parametrize("mode", ["sync", "batch-async", "fully-async"])
def test_a_new_run_at_a_lower_version_is_followed_at_once(mode: str) -> None:
    machine = Machine(mode=mode, staleness_threshold=5)
    machine.train(7)
    if machine.state.syncing:
        machine.synced()
    assert machine.train(3, run_id="again") == (StartSync(run_id="again", version=3),)
    machine.synced()
    assert (machine.state.run_id, machine.state.rollout_version, machine.blocked) == ("again", 3, False)


def test_a_trainer_that_died_in_its_first_step_says_so_by_its_version() -> None:
    """It had a batch; the next one begins at 0 and has none: nobody waits for that batch's step."""
    machine = Machine()
    machine(BatchReady())
    assert machine.locked
    assert machine.train(0) == ()
    assert not machine.locked


def test_nobody_waits_for_a_step_that_gives_no_version() -> None:
    """Seen red: a step that published nothing, or a trainer that died in one, kept rollout blocked for good."""
    machine = Machine()
    machine(BatchReady())
    assert awaits_step(machine.state, machine.policy)
    assert machine(BatchDropped(num=1)) == ()
    assert (machine.blocked, machine.locked, machine.state.num_pending) == (False, False, 0)
    assert machine.steps(3) == [("block", "sync", number) for number in (1, 2, 3)], "as if nothing had been"


def test_the_step_that_is_due_is_waited_for_while_batches_enough_are_left() -> None:
    machine = Machine(mode="batch-async")
    for _ in range(3):
        machine(BatchReady())
    machine(BatchDropped(num=1))
    assert machine.blocked, "version 2 is still to come"
    machine(BatchDropped(num=1))
    assert not machine.blocked
    machine(BatchReady())
    assert machine.blocked
    machine(BatchDropped())
    assert (machine.blocked, machine.state.num_pending) == (False, 0)
    machine(BatchDropped(num=5))
    assert machine.steps(2) == [("go", "-", 0), ("block", "sync", 2)]


def test_a_batch_that_is_dropped_ends_no_sync_and_no_retry() -> None:
    machine = Machine(retries_s=(1.0,))
    machine(BatchReady())
    machine.train(1)
    machine(BatchDropped())
    assert (machine.state.phase, machine.blocked, awaits_step(machine.state, machine.policy)) == (
        "syncing",
        True,
        False,
    )
    machine(SyncFailed())
    machine(BatchDropped())
    assert (machine.state.phase, machine.blocked) == ("need_sync", True)
    assert machine(RetryDue()) == (StartSync(run_id="r", version=1),)


@pytest.mark.parametrize("first", [1, 101], ids=["from the start", "from a checkpoint"])
def test_the_first_word_of_a_trainer_ends_one_step_of_the_batches_since_all_were_dropped(first: int) -> None:
    """Seen red: it forgot all of them, so that rollout was a whole threshold further ahead from then on."""
    machine = Machine(mode="batch-async", staleness_threshold=4)
    machine.train(99, run_id="dead")
    machine.synced()
    machine(BatchReady())
    machine(BatchDropped())
    for _ in range(4):
        assert not machine.blocked
        machine(BatchReady())
    assert machine.blocked
    assert machine.train(first) == (StartSync(run_id="r", version=first),)
    machine.synced()
    assert (machine.state.num_pending, machine.blocked) == (3, False)
    machine(BatchReady())
    assert machine.blocked, "four batches are ready"
    for version in range(first + 1, first + 4):
        assert machine.train(version) == ()
        assert machine.blocked
    assert machine.train(first + 4) == (StartSync(run_id="r", version=first + 4),)


def test_what_the_rollout_side_serves_ends_no_step() -> None:
    """A controller that was started anew hears of it behind the first batch. Seen red: that batch was forgotten."""
    machine = Machine(mode="batch-async")
    machine(BatchReady())
    machine(Trained(worker="learnt", run_id="r", version=72, learnt=True))
    assert machine.state.num_pending == 1
    machine.synced()
    machine.train(73)
    assert machine.state.num_pending == 0


def test_a_dropped_batch_drops_what_was_only_announced_too() -> None:
    """Two counts: what is known for certain comes back when an agent denies what was announced."""
    machine = Machine()
    machine(BatchReady())
    machine(Trained(worker="w", run_id="r", version=1, claimed=True))
    assert (machine.state.num_pending, machine.state.sure_pending) == (0, 1)
    machine(BatchDropped(num=1))
    assert (machine.state.num_pending, machine.state.sure_pending) == (0, 0)
    machine(SyncFailed(absent=True, newest=0))
    assert not machine.blocked


@pytest.mark.parametrize("ends", [Synced(version=7), SyncFailed()], ids=str)
def test_the_end_of_an_old_runs_sync_says_nothing_of_the_new_run(ends: Event) -> None:
    machine = Machine()
    machine.train(7)
    assert machine.train(3, run_id="again") == ()
    assert machine(ends) == (StartSync(run_id="again", version=3),)
    assert machine.state.rollout_version == -1
    assert machine.state.num_failed == 0


def test_a_sync_that_fails_is_tried_again_by_a_timer_while_all_wait() -> None:
    machine = Machine(retries_s=(1.0, 2.0))
    machine(BatchReady())
    machine.train(1)
    for seconds in (1.0, 2.0):
        assert machine(SyncFailed()) == (RetryAfter(seconds=seconds),)
        assert (machine.blocked, machine.locked) == (True, True)
        assert machine(RetryDue()) == (StartSync(run_id="r", version=1),)
    assert machine(SyncFailed()) == (GiveUp(run_id="r", version=1),)
    assert (machine.blocked, machine.locked, machine.state.overdue) == (False, False, True)


def test_after_giving_up_nobody_is_blocked_until_a_sync_succeeds() -> None:
    machine = Machine(retries_s=())
    machine.train(1)
    machine(SyncFailed())
    machine(BatchReady())
    assert not machine.blocked
    assert machine.train(2) == (StartSync(run_id="r", version=2),)
    assert not machine.blocked
    machine.synced()
    assert not machine.state.overdue
    machine(BatchReady())
    assert machine.blocked


def test_a_retry_takes_the_newest_version() -> None:
    machine = Machine(mode="fully-async", retries_s=(1.0,))
    machine.train(1)
    machine(SyncFailed())
    assert machine.train(2) == (), "its retry is scheduled"
    assert machine(RetryDue()) == (StartSync(run_id="r", version=2),)


def test_whoever_failed_is_evicted_and_the_rest_synced() -> None:
    machine = Machine(retries_s=(), after_failure="evict")
    machine.train(1)
    assert machine(SyncFailed()) == (EvictFailed(), StartSync(run_id="r", version=1))
    assert machine.blocked
    assert machine(SyncFailed()) == (GiveUp(run_id="r", version=1),)


def test_a_retry_that_comes_late_does_nothing() -> None:
    machine = Machine()
    assert machine(RetryDue()) == ()
    machine.train(1)
    assert machine(RetryDue()) == ()
    machine(SyncFailed())
    machine.train(1, run_id="again")
    machine.synced()
    assert machine(RetryDue()) == ()


def test_a_word_that_comes_during_the_last_try_is_one_more_try() -> None:
    """Seen red: it was forgotten while a sync ran, and a fleet that nobody was left in stayed so."""
    machine = Machine(retries_s=())
    machine.train(1)
    for _ in range(2):
        assert machine(SyncWanted(anyway=False, again=True)) == (), "however often"
    assert machine(SyncFailed()) == (GiveUp(run_id="r", version=1), StartSync(run_id="r", version=1))
    assert (machine.blocked, machine.state.overdue) == (False, True)
    assert machine(SyncFailed()) == (GiveUp(run_id="r", version=1),), "a word is one try"
    assert machine(SyncWanted(anyway=False, again=True)) == (StartSync(run_id="r", version=1),)


def test_an_eviction_of_its_own_is_no_word_that_starts_all_retries_again() -> None:
    """Seen red: whoever was evicted came in again with what is current, and was tried and evicted for ever."""
    machine = Machine(retries_s=(), after_failure="evict")
    machine.train(1)
    assert machine(SyncFailed()) == (EvictFailed(), StartSync(run_id="r", version=1))
    machine(SyncWanted(anyway=False, again=True))  # it left, and came back
    assert machine(SyncFailed()) == (GiveUp(run_id="r", version=1),)
    assert machine(SyncWanted(anyway=False, again=True)) == (StartSync(run_id="r", version=1),), "who comes later"


def test_a_word_before_a_retry_is_no_more_than_that_retry() -> None:
    machine = Machine(retries_s=(1.0,))
    machine.train(1)
    machine(SyncWanted(again=True))
    assert machine(SyncFailed()) == (RetryAfter(seconds=1.0),)
    assert machine(SyncWanted(again=True)) == (), "it is tried in a moment"
    assert machine(RetryDue()) == (StartSync(run_id="r", version=1),)
    assert machine(SyncFailed()) == (GiveUp(run_id="r", version=1),)


def test_what_is_not_due_is_synced_by_hand_alone_or_where_nobody_is_left() -> None:
    """Behind a validation, too. Seen red: a word that came while one ran was forgotten."""
    machine = Machine(mode="batch-async", validate_freq=2)
    machine.train(1)
    assert machine(SyncWanted(anyway=False, again=True)) == ()
    assert machine(SyncWanted()) == (StartSync(run_id="r", version=1),)
    machine.train(2)
    machine.synced()
    machine.train(3)
    assert machine.synced(3) == (StartValidation(validation=ValidationRun(run_id="r", version=3, stands_for=(2,))),)
    machine.train(4)
    assert machine(SyncWanted()) == (), "it measures one version"
    assert machine(ValidationEnded()) == (StartSync(run_id="r", version=4),)


def test_validation_locks_the_pool_and_leaves_the_services_free() -> None:
    machine = Machine(validate_freq=2)
    machine.steps(1)
    machine(BatchReady())
    machine.train(2)
    (start,) = machine.synced()
    assert start == StartValidation(validation=ValidationRun(run_id="r", version=2, stands_for=(2,)))
    assert (machine.blocked, machine.locked) == (False, True)
    assert machine.train(3) == (), "it measures one version"
    assert machine(ValidationEnded()) == (StartSync(run_id="r", version=3),)
    machine.synced()
    assert (machine.blocked, machine.locked) == (False, False)
    assert machine(ValidationEnded()) == ()


def test_one_validation_stands_for_all_multiples_that_were_crossed() -> None:
    machine = Machine(mode="batch-async", staleness_threshold=7, validate_freq=3)
    assert machine.train(7) == (StartSync(run_id="r", version=7),)
    # the first word of a run that resumed at 7: what lies before it was validated, or not, by the run before
    assert machine.synced() == ()
    machine.train(14)
    (start,) = machine.synced()
    assert start == StartValidation(validation=ValidationRun(run_id="r", version=14, stands_for=(9, 12)))


@pytest.mark.parametrize(
    "wrong",
    [*({"retries_s": (seconds,)} for seconds in (-1.0, math.inf, math.nan, 1e9)), {"after_failure": "shrug"}],
    ids=str,
)
def test_policies_that_cannot_be(wrong: dict[str, Any]) -> None:
    """Seen red of times that no timer can wait: its thread died, and the model waited for that retry for good."""
    with pytest.raises(ConfigError):
        Policy(**wrong)


class AllInterleavings(RuleBasedStateMachine):
    """Trainers, pool, syncs, timers and validations in any order; a world that answers as the real one might."""

    @initialize(
        mode=st.sampled_from(["sync", "batch-async", "fully-async"]), threshold=st.integers(1, 3),
        freq=st.integers(0, 4), retries=st.integers(0, 2), after=st.sampled_from(["keep", "evict"]),
    )  # fmt: skip
    def begin(self, mode: Any, threshold: int, freq: int, retries: int, after: Any) -> None:
        self.policy = Policy(
            mode=mode, staleness_threshold=threshold, validate_freq=freq, retries_s=(1.0,) * retries,
            after_failure=after,
        )  # fmt: skip
        self.state = ModelState()
        self.run = 0
        self.version = 0
        self.batches = 0
        self.dropped_all = False
        self.retry = False
        self.validating: ValidationRun | None = None
        self.committed: dict[str, list[int]] = {}
        self.stood_for: list[tuple[str | None, int]] = []
        self.left: list[str] = []

    def feed(self, event: Event) -> None:
        before = self.state
        self.state, actions = step(self.state, event, self.policy)
        self.dropped_all = self.dropped_all and (not isinstance(event, Trained) or event.learnt)
        for action in actions:
            match action:
                case StartSync():
                    assert self.state.syncing == action
                    assert before.syncing is None or isinstance(event, Synced | SyncFailed)
                case RetryAfter():
                    self.retry = True
                case StartValidation(validation=validation):
                    assert self.validating is None
                    self.validating = validation
                    self.stood_for += [(validation.run_id, number) for number in validation.stands_for]
                case EvictFailed():
                    assert isinstance(event, SyncFailed)
                    assert self.state.syncing
                case GiveUp(version=version):
                    assert isinstance(event, SyncFailed)
                    again = before.again and not before.evicting  # its own eviction is no reason for more
                    assert (self.state.syncing is not None) == (again or version < self.state.train_version)

    @precondition(lambda self: not pool_locked(self.state, self.policy))
    @rule()
    def a_batch_is_ready(self) -> None:
        self.batches += 1
        self.feed(BatchReady())

    @precondition(lambda self: self.batches > 0)
    @rule(workers=st.integers(1, 3))
    def a_step_ends(self, workers: int) -> None:
        self.batches -= 1
        self.version += 1
        for index in range(workers):
            self.feed(Trained(worker=f"w{index}", run_id=f"run-{self.run}", version=self.version))

    @rule(num=st.integers(1, 3), all_of_them=st.booleans())
    def steps_give_no_version(self, num: int, all_of_them: bool) -> None:
        self.batches = 0 if all_of_them else max(0, self.batches - num)
        self.dropped_all |= all_of_them
        self.feed(BatchDropped(num=None if all_of_them else num))

    def starts_again(self, version: int, *, ends_a_step: bool) -> None:
        if self.state.told:
            self.left.append(f"run-{self.run}")
        self.run += 1
        self.batches = self.batches - ends_a_step if self.dropped_all else 0
        self.version = version
        self.feed(Trained(worker="w0", run_id=f"run-{self.run}", version=version))

    @precondition(lambda self: self.dropped_all and self.batches > 0)
    @rule(checkpoint=st.sampled_from([0, 40]))
    def a_trainer_that_has_dropped_all_ends_its_first_step(self, checkpoint: int) -> None:
        self.starts_again(checkpoint + 1, ends_a_step=True)

    @rule(version=st.integers(0, 3))
    def the_trainer_starts_again(self, version: int) -> None:
        if not self.state.told or (self.dropped_all and self.batches):
            version = 0  # nobody has heard of the one before, or its batches are here already
        self.starts_again(version, ends_a_step=False)

    @precondition(lambda self: self.left)
    @rule(back=st.integers(0, 15), version=st.integers(0, 9))
    def a_worker_of_an_old_run_is_late(self, back: int, version: int) -> None:
        before, run_id = self.state, self.left[-1 - back % len(self.left[-16:])]
        if before.overdue and before.rollout_version < 0 and run_id in (before.replaced[-1], before.served_run):
            return  # that may come back: see test_controller_runs
        with pytest.raises(VersionError, match=f"taken over by {before.run_id}"):
            self.feed(Trained(worker="w0", run_id=run_id, version=version))
        assert self.state == before

    @precondition(lambda self: self.state.told and not self.state.rollout_version and self.state.served_run is None)
    @rule()
    def another_run_is_found_to_be_served(self) -> None:
        self.feed(Trained(worker="fleet", run_id="before", version=57, learnt=True))
        assert self.state.rollout_version == -1

    @precondition(lambda self: self.state.syncing is not None)
    @rule(ok=st.booleans())
    def a_sync_ends(self, ok: bool) -> None:
        assert self.state.syncing is not None
        goal = self.state.syncing
        if ok and goal.run_id == self.state.run_id:
            self.committed.setdefault(str(goal.run_id), []).append(goal.version)
        self.feed(Synced(version=goal.version) if ok else SyncFailed())

    @precondition(lambda self: self.retry)
    @rule()
    def a_timer_fires(self) -> None:
        self.retry = False
        self.feed(RetryDue())

    @rule(anyway=st.booleans(), again=st.booleans())
    def a_sync_is_wanted(self, anyway: bool, again: bool) -> None:
        """By hand, or since instances came or went."""
        running = self.state.syncing
        self.feed(SyncWanted(anyway=anyway, again=again))
        assert running is None or self.state.syncing is running, "it goes on to its end"
        assert not anyway or self.state.wanted or self.state.syncing or self.state.staleness <= 0

    @precondition(lambda self: self.validating is not None)
    @rule()
    def a_validation_ends(self) -> None:
        self.validating = None
        self.feed(ValidationEnded())

    @invariant()
    def nobody_goes_on_too_far_behind(self) -> None:
        state, policy = self.state, self.policy
        if policy.bound is not None and not services_blocked(state, policy) and state.rollout_version >= 0:
            assert state.staleness < policy.bound or state.validation is not None or state.overdue

    @invariant()
    def whoever_waits_is_woken(self) -> None:
        state, policy = self.state, self.policy
        if not services_blocked(state, policy) and not pool_locked(state, policy):
            return
        step_under_way = state.due is not None and state.train_version + self.batches >= state.due
        assert state.syncing or self.retry or self.validating or step_under_way, state
        if not (state.syncing or self.retry or self.validating):
            assert awaits_step(state, policy), "a timer runs"

    @invariant()
    def what_is_wanted_is_on_its_way(self) -> None:
        state = self.state
        if state.wanted:
            assert state.syncing or self.retry or self.validating, state
            assert state.staleness > 0, "what is served is wanted no more"
        assert state.syncing or not state.again, "it is of the sync that runs"

    @invariant()
    def a_validation_measures_one_version(self) -> None:
        """Seen red: a retry began a sync meanwhile."""
        assert self.state.validation is None or self.state.syncing is None, self.state

    @invariant()
    def versions_rise_within_a_run(self) -> None:
        for versions in self.committed.values():
            assert versions == sorted(versions)

    @invariant()
    def every_multiple_has_one_validation(self) -> None:
        assert len(self.stood_for) == len(set(self.stood_for))
        freq, run = self.policy.validate_freq, self.state.run_id
        if freq and run is not None and self.state.rollout_version >= 0 and self.committed.get(run):
            first = self.committed[run][0]
            reached = {number for name, number in self.stood_for if name == run}
            assert {n for n in range(freq, self.state.rollout_version + 1, freq) if n > first} <= reached

    @invariant()
    def the_machine_knows_the_batches(self) -> None:
        assert self.state.num_pending == self.batches


AllInterleavings.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestAllInterleavings = AllInterleavings.TestCase


def test_states_are_values() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelState().phase = "syncing"  # type: ignore[misc]


def test_a_version_far_too_high_takes_no_memory() -> None:
    """Seen red: each multiple up to it was written down, until there was no memory."""
    machine = Machine(mode="fully-async", validate_freq=5)
    machine.train(1)
    (started,) = machine.synced(10**12 + 3)
    assert isinstance(started, StartValidation)
    assert started.validation.stands_for == tuple(range(10**12 - 999 * 5, 10**12 + 1, 5))
    machine(ValidationEnded())
    machine.train(10**12 + 5)
    (started,) = machine.synced(10**12 + 5)
    assert isinstance(started, StartValidation)
    assert started.validation.stands_for == (10**12 + 5,)
