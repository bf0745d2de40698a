"""CommitGate and PendingCommit: engines' threads wait with what is staged until it may be committed, or may not."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weightsync.errors import DeadlineExceededError, TransferAbortedError, WeightSyncError
from weightsync.handles.fanout import in_thread
from weightsync.host.commit_gate import CommitGate, PendingCommit
from weightsync.types import Deadline, Version

LONG_S = 10.0


def v(number: int, run_id: str = "r") -> Version:
    return Version(run_id=run_id, number=number)


class Owner:
    """What a follower gives: a lock, and somebody who is told."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.told = 0
        self.permit = CommitGate(self.changed, self.tell)

    def tell(self) -> None:
        with self.changed:
            self.told += 1
            self.changed.notify_all()

    def stages(self, hold: PendingCommit, timeout_s: float = LONG_S) -> Future[None]:
        missing = hold._num_missing
        thread = in_thread(lambda: hold.staged(Deadline(timeout_s)), name="engine")
        until(lambda: hold._num_missing < missing, "it has staged")
        return thread


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.002)


@pytest.fixture
def owner() -> Owner:
    return Owner()


def test_all_engines_wait_and_go_on_together(owner: Owner) -> None:
    hold = owner.permit.hold(v(1), 2)
    first = owner.stages(hold)
    assert owner.permit.staged is None, "one is missing"
    second = owner.stages(hold)
    assert owner.permit.staged == v(1)
    assert not first.done()
    assert not second.done()
    owner.permit.allow(v(1))
    assert first.result(LONG_S) is second.result(LONG_S) is None
    assert hold.held_s > 0
    assert owner.permit.allows(v(1))
    assert not owner.permit.allows(v(2))
    owner.permit.ended(hold)
    assert owner.permit.staged is None


def test_what_comes_staged_behind_a_newer_one_is_prepared_is_let_go(owner: Owner) -> None:
    """A trainer tells of a version a moment before its agent has it: the one before it comes once more. Seen red: it
    was held, and both waited for each other until a deadline.
    """
    first = owner.permit.hold(v(15), 1)
    staged = owner.stages(first)
    owner.permit.prepare(v(16))
    again = owner.permit.hold(v(15), 1)
    for engine in (staged, in_thread(lambda: again.staged(Deadline(LONG_S)), name="engine")):
        with pytest.raises(TransferAbortedError, match="r/16 is prepared instead"):
            engine.result(LONG_S)
    for version in (v(16), v(17), v(1, "another")):
        assert owner.permit.hold(version, 1).why is None
    owner.permit.allow(v(15))
    owner.permit.hold(v(15), 1).staged(Deadline(0.0))
    owner.permit.allow(v(14))
    owner.permit.prepare(v(15))
    assert owner.permit.hold(v(15), 1).why is None, "16 never came"


def test_what_is_of_a_run_that_was_taken_over_is_let_go(owner: Owner) -> None:
    """Also where its pull ends only then. Seen red: it was held until the deadline of its load."""
    staged = owner.stages(owner.permit.hold(v(5), 1))
    owner.permit.turn_to("next")
    late = owner.permit.hold(v(5), 1)
    for engine in (staged, in_thread(lambda: late.staged(Deadline(LONG_S)), name="engine")):
        with pytest.raises(TransferAbortedError, match="another run took over"):
            engine.result(LONG_S)
    assert owner.permit.hold(v(0, "next"), 1).why is None
    owner.permit.turn_to("next")
    owner.permit.allow(v(5))
    owner.permit.hold(v(5), 1).staged(Deadline(0.0))


def test_what_is_allowed_already_waits_for_nobody(owner: Owner) -> None:
    owner.permit.allow(v(3))
    for version in (v(3), v(2)):
        owner.permit.hold(version, 2).staged(Deadline(0.0))


@pytest.mark.parametrize("version", [v(4), v(1, "another")], ids=str)
def test_what_is_newer_or_of_another_run_is_not_allowed(owner: Owner, version: Version) -> None:
    owner.permit.allow(v(3))
    assert not owner.permit.allows(version)
    with pytest.raises(DeadlineExceededError, match="nobody said that it may be committed") as caught:
        owner.permit.hold(version, 1).staged(Deadline(0.02))
    assert caught.value.state_left == "serving as before"


def test_released_before_it_is_staged(owner: Owner) -> None:
    hold = owner.permit.hold(v(1), 2)
    owner.permit.release("too few")
    with pytest.raises(TransferAbortedError, match="it was not committed: too few"):
        hold.staged(Deadline(LONG_S))
    assert owner.permit.staged is None


def test_released_while_it_waits(owner: Owner) -> None:
    hold = owner.permit.hold(v(1), 2)
    engines = [owner.stages(hold) for _ in range(2)]
    assert owner.permit.staged == v(1)
    owner.permit.release("too few")
    owner.permit.release("and again")
    assert owner.permit.staged is None, "nobody is to commit it any more"
    for engine in engines:
        with pytest.raises(TransferAbortedError, match="too few"):
            engine.result(LONG_S)


def test_released_after_it_was_allowed_goes_on(owner: Owner) -> None:
    """There is no way back: one engine may have committed. Seen to fail: it was said to be not staged."""
    hold = owner.permit.hold(v(1), 2)
    engine = owner.stages(hold)
    owner.permit.allow(v(1))
    owner.permit.release("too late")
    engine.result(LONG_S)
    hold.staged(Deadline(0.0))
    assert hold.why is None
    assert owner.permit.staged == v(1)


def test_allowed_after_it_was_released_stays_released(owner: Owner) -> None:
    """One engine has gone back already. Seen to fail: the other went on."""
    hold = owner.permit.hold(v(1), 2)
    owner.permit.release("too few")
    owner.permit.allow(v(1))
    for _ in range(2):
        with pytest.raises(TransferAbortedError, match="too few"):
            hold.staged(Deadline(0.0))


def test_a_newer_prepare_lets_go_of_what_is_older(owner: Owner) -> None:
    hold = owner.permit.hold(v(2), 1)
    engine = owner.stages(hold)
    for kept in (v(1), v(2)):
        owner.permit.release("as told", older_than=kept)
        assert owner.permit.staged == v(2)
    owner.permit.release("3 is prepared instead", older_than=v(3))
    with pytest.raises(TransferAbortedError, match="3 is prepared instead"):
        engine.result(LONG_S)
    other = owner.permit.hold(v(9), 1)
    owner.permit.release("another run", older_than=v(1, "another"))
    with pytest.raises(TransferAbortedError, match="another run"):
        other.staged(Deadline(LONG_S))


def test_a_gate_that_is_closed_holds_nothing(owner: Owner) -> None:
    engine = owner.stages(owner.permit.hold(v(2), 1))
    owner.permit.close()
    for version in (v(2), v(3)):
        with pytest.raises(TransferAbortedError, match="the service ends"):
            engine.result(LONG_S)
        late = owner.permit.hold(version, 1)
        engine = in_thread(functools.partial(late.staged, Deadline(LONG_S)), name="late")
    owner.permit.allow(v(3))
    owner.permit.hold(v(3), 1).staged(Deadline(0.0))


def test_what_it_was_told_before_it_came_in_may_be_committed_no_more(owner: Owner) -> None:
    owner.permit.allow(v(1000))
    assert owner.permit.allow_no_more_than(v(7))
    hold = owner.permit.hold(v(8), 2)
    engine = owner.stages(hold)
    assert not engine.done()
    owner.permit.allow(v(8))
    engine.result(LONG_S)
    assert not owner.permit.allow_no_more_than(v(7)), "one engine commits it"
    hold.staged(Deadline(0.0))
    owner.permit.ended(hold)
    assert owner.permit.allow_no_more_than(v(8))
    assert owner.permit.allow_no_more_than(None)
    assert not owner.permit.allows(v(1))


def test_nothing_is_held_and_nothing_is_released(owner: Owner) -> None:
    owner.permit.release("as told")
    hold = owner.permit.hold(v(1), 1)
    owner.permit.ended(hold)
    owner.permit.release("as told")
    assert hold.why is None


def test_a_load_that_ends_late_takes_nothing_from_the_next(owner: Owner) -> None:
    old = owner.permit.hold(v(1), 1)
    new = owner.permit.hold(v(2), 1)
    owner.permit.ended(old)
    engine = owner.stages(new)
    assert owner.permit.staged == v(2)
    owner.permit.allow(v(2))
    engine.result(LONG_S)


def test_one_engine_fails_and_the_others_do_not_wait(owner: Owner) -> None:
    hold = owner.permit.hold(v(1), 2)
    engine = owner.stages(hold)
    hold.failed("engine e2: as told")
    with pytest.raises(TransferAbortedError, match="engine e2: as told"):
        engine.result(LONG_S)
    assert owner.permit.staged is None


def test_one_engine_fails_when_the_others_may_commit(owner: Owner) -> None:
    hold = owner.permit.hold(v(1), 2)
    owner.permit.allow(v(1))
    hold.failed("engine e2: as told")
    hold.staged(Deadline(0.0))
    assert hold.why is None


def test_whoever_listens_is_told(owner: Owner) -> None:
    hold = owner.permit.hold(v(1), 1)
    counts = [owner.told]
    changes: list[Callable[[], None]] = [
        lambda: owner.permit.allow(v(1)),
        lambda: hold.staged(Deadline(0.0)),
        lambda: hold.failed("so"),
        lambda: owner.permit.ended(hold),
    ]
    for change in changes:
        change()
        counts.append(owner.told)
    assert counts == sorted(set(counts))


class Holds(RuleBasedStateMachine):
    """A version into two engines, with threads that really wait. Either all go on with it, or none does."""

    @initialize()
    def begin(self) -> None:
        self.owner = Owner()
        self.engines: list[Future[None]] = []
        self.number = 0
        self.hold: PendingCommit | None = None
        self.loads: list[tuple[PendingCommit, list[Future[None]]]] = []

    @precondition(lambda self: self.hold is None)
    @rule()
    def is_loaded(self) -> None:
        self.number += 1
        self.hold, self.engines = self.owner.permit.hold(v(self.number), 2), []

    @precondition(lambda self: self.hold is not None and len(self.engines) < 2)
    @rule()
    def one_has_staged(self) -> None:
        assert self.hold is not None
        self.engines.append(self.owner.stages(self.hold))

    @precondition(lambda self: self.owner.permit.staged is not None)
    @rule()
    def may_be_committed(self) -> None:
        staged = self.owner.permit.staged
        assert staged is not None
        assert len(self.engines) == 2
        self.owner.permit.allow(staged)

    @rule(newer=st.booleans())
    def is_released(self, newer: bool) -> None:
        self.owner.permit.release("as told", older_than=v(self.number + newer))

    @precondition(lambda self: self.hold is not None and len(self.engines) < 2)
    @rule()
    def one_fails(self) -> None:
        assert self.hold is not None
        self.hold.failed("as told")

    @precondition(lambda self: self.hold is not None)
    @rule()
    def is_over(self) -> None:
        """Whatever is to come of it: who has not staged comes now, and finds out."""
        assert self.hold is not None
        while len(self.engines) < 2:
            self.engines.append(self.owner.stages(self.hold))
        self.owner.permit.release("the end")
        ends = {self.end(engine) for engine in self.engines}
        assert len(ends) == 1, f"some engines went on, and some did not: {ends}"
        assert (ends == {None}) == self.owner.permit.allows(self.hold.version)
        self.owner.permit.ended(self.hold)
        self.hold = None

    @staticmethod
    def end(engine: Future[None]) -> type[WeightSyncError] | None:
        try:
            return engine.result(LONG_S)
        except WeightSyncError as error:
            return type(error)

    @invariant()
    def nothing_is_staged_before_all_have(self) -> None:
        if self.owner.permit.staged is not None:
            assert len(self.engines) == 2

    def teardown(self) -> None:
        if getattr(self, "hold", None) is not None:
            self.is_over()


TestHolds = Holds.TestCase
TestHolds.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_what_was_prepared_is_not_waited_for_when_something_is_allowed() -> None:
    """Of a number that nobody has. Seen red: whatever was staged below it was let go, for good."""
    gate = CommitGate(threading.Condition(), lambda: None)
    gate.prepare(Version(run_id="r", number=51))
    assert gate.hold(Version(run_id="r", number=5), 1).why is not None
    gate.allow(Version(run_id="r", number=2))
    held = gate.hold(Version(run_id="r", number=5), 1)
    assert held.why is None
    assert gate.passing is None
    gate.allow(Version(run_id="r", number=5))
    held.staged(Deadline(LONG_S))
    assert gate.passing == Version(run_id="r", number=5)
