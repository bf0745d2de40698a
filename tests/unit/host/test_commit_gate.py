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
        self.gate = CommitGate(self.changed, self.tell)

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
    hold = owner.gate.hold(v(1), 2)
    first = owner.stages(hold)
    assert owner.gate.staged is None, "one is missing"
    second = owner.stages(hold)
    assert owner.gate.staged == v(1)
    assert not first.done()
    assert not second.done()
    owner.gate.allow(v(1))
    assert first.result(LONG_S) is second.result(LONG_S) is None
    assert hold.held_s > 0
    assert owner.gate.allows(v(1))
    assert not owner.gate.allows(v(2))
    owner.gate.ended(hold)
    assert owner.gate.staged is None


def test_what_comes_staged_behind_a_newer_one_is_prepared_is_let_go(owner: Owner) -> None:
    """A trainer tells of a version a moment before its agent has it: the one before it comes once more. Seen red: it
    was held, and both waited for each other until a deadline.
    """
    first = owner.gate.hold(v(15), 1)
    staged = owner.stages(first)
    owner.gate.prepare(v(16))
    again = owner.gate.hold(v(15), 1)
    for engine in (staged, in_thread(lambda: again.staged(Deadline(LONG_S)), name="engine")):
        with pytest.raises(TransferAbortedError, match="r/16 is prepared instead"):
            engine.result(LONG_S)
    for version in (v(16), v(17), v(1, "another")):
        assert owner.gate.hold(version, 1).why is None
    owner.gate.allow(v(15))
    owner.gate.hold(v(15), 1).staged(Deadline(0.0))
    owner.gate.allow(v(14))
    owner.gate.prepare(v(15))
    assert owner.gate.hold(v(15), 1).why is None, "16 never came"


def test_what_is_of_a_run_that_was_taken_over_is_let_go(owner: Owner) -> None:
    """Also where its pull ends only then. Seen red: it was held until the deadline of its load."""
    staged = owner.stages(owner.gate.hold(v(5), 1))
    owner.gate.turn_to("next")
    late = owner.gate.hold(v(5), 1)
    for engine in (staged, in_thread(lambda: late.staged(Deadline(LONG_S)), name="engine")):
        with pytest.raises(TransferAbortedError, match="another run took over"):
            engine.result(LONG_S)
    assert owner.gate.hold(v(0, "next"), 1).why is None
    owner.gate.turn_to("next")
    owner.gate.allow(v(5))
    owner.gate.hold(v(5), 1).staged(Deadline(0.0))


def test_what_is_allowed_already_waits_for_nobody(owner: Owner) -> None:
    owner.gate.allow(v(3))
    for version in (v(3), v(2)):
        owner.gate.hold(version, 2).staged(Deadline(0.0))


@pytest.mark.parametrize("version", [v(4), v(1, "another")], ids=str)
def test_what_is_newer_or_of_another_run_is_not_allowed(owner: Owner, version: Version) -> None:
    owner.gate.allow(v(3))
    assert not owner.gate.allows(version)
    with pytest.raises(DeadlineExceededError, match="nobody said that it may be committed") as caught:
        owner.gate.hold(version, 1).staged(Deadline(0.02))
    assert caught.value.state_left == "serving as before"


def test_released_before_it_is_staged(owner: Owner) -> None:
    hold = owner.gate.hold(v(1), 2)
    owner.gate.release("too few")
    with pytest.raises(TransferAbortedError, match="it was not committed: too few"):
        hold.staged(Deadline(LONG_S))
    assert owner.gate.staged is None


def test_released_while_it_waits(owner: Owner) -> None:
    hold = owner.gate.hold(v(1), 2)
    engines = [owner.stages(hold) for _ in range(2)]
    assert owner.gate.staged == v(1)
    owner.gate.release("too few")
    owner.gate.release("and again")
    assert owner.gate.staged is None, "nobody is to commit it any more"
    for engine in engines:
        with pytest.raises(TransferAbortedError, match="too few"):
            engine.result(LONG_S)


def test_released_after_it_was_allowed_goes_on(owner: Owner) -> None:
    """There is no way back: one engine may have committed. Seen to fail: it was said to be not staged."""
    hold = owner.gate.hold(v(1), 2)
    engine = owner.stages(hold)
    owner.gate.allow(v(1))
    owner.gate.release("too late")
    engine.result(LONG_S)
    hold.staged(Deadline(0.0))
    assert hold.why is None
    assert owner.gate.staged == v(1)


def test_allowed_after_it_was_released_stays_released(owner: Owner) -> None:
    """One engine has gone back already. Seen to fail: the other went on."""
    hold = owner.gate.hold(v(1), 2)
    owner.gate.release("too few")
    owner.gate.allow(v(1))
    for _ in range(2):
        with pytest.raises(TransferAbortedError, match="too few"):
            hold.staged(Deadline(0.0))


def test_a_newer_prepare_lets_go_of_what_is_older(owner: Owner) -> None:
    hold = owner.gate.hold(v(2), 1)
    engine = owner.stages(hold)
    for kept in (v(1), v(2)):
        owner.gate.release("as told", older_than=kept)
        assert owner.gate.staged == v(2)
    owner.gate.release("3 is prepared instead", older_than=v(3))
    with pytest.raises(TransferAbortedError, match="3 is prepared instead"):
        engine.result(LONG_S)
    other = owner.gate.hold(v(9), 1)
    owner.gate.release("another run", older_than=v(1, "another"))
    with pytest.raises(TransferAbortedError, match="another run"):
        other.staged(Deadline(LONG_S))


def test_a_gate_that_is_closed_holds_nothing(owner: Owner) -> None:
    engine = owner.stages(owner.gate.hold(v(2), 1))
    owner.gate.close()
    for version in (v(2), v(3)):
        with pytest.raises(TransferAbortedError, match="the service ends"):
            engine.result(LONG_S)
        late = owner.gate.hold(version, 1)
        engine = in_thread(functools.partial(late.staged, Deadline(LONG_S)), name="late")
    owner.gate.allow(v(3))
    owner.gate.hold(v(3), 1).staged(Deadline(0.0))


def test_what_it_was_told_before_it_came_in_may_be_committed_no_more(owner: Owner) -> None:
    owner.gate.allow(v(1000))
    assert owner.gate.allow_no_more_than(v(7))
    hold = owner.gate.hold(v(8), 2)
    engine = owner.stages(hold)
    assert not engine.done()
    owner.gate.allow(v(8))
    engine.result(LONG_S)
    assert not owner.gate.allow_no_more_than(v(7)), "one engine commits it"
    hold.staged(Deadline(0.0))
    owner.gate.ended(hold)
    assert owner.gate.allow_no_more_than(v(8))
    assert owner.gate.allow_no_more_than(None)
    assert not owner.gate.allows(v(1))


def test_nothing_is_held_and_nothing_is_released(owner: Owner) -> None:
    owner.gate.release("as told")
    hold = owner.gate.hold(v(1), 1)
    owner.gate.ended(hold)
    owner.gate.release("as told")
    assert hold.why is None


def test_a_load_that_ends_late_takes_nothing_from_the_next(owner: Owner) -> None:
    old = owner.gate.hold(v(1), 1)
    new = owner.gate.hold(v(2), 1)
    owner.gate.ended(old)
    engine = owner.stages(new)
    assert owner.gate.staged == v(2)
    owner.gate.allow(v(2))
    engine.result(LONG_S)


def test_one_engine_fails_and_the_others_do_not_wait(owner: Owner) -> None:
    hold = owner.gate.hold(v(1), 2)
    engine = owner.stages(hold)
    hold.failed("engine e2: as told")
    with pytest.raises(TransferAbortedError, match="engine e2: as told"):
        engine.result(LONG_S)
    assert owner.gate.staged is None


def test_one_engine_fails_when_the_others_may_commit(owner: Owner) -> None:
    hold = owner.gate.hold(v(1), 2)
    owner.gate.allow(v(1))
    hold.failed("engine e2: as told")
    hold.staged(Deadline(0.0))
    assert hold.why is None


def test_whoever_listens_is_told(owner: Owner) -> None:
    hold = owner.gate.hold(v(1), 1)
    counts = [owner.told]
    changes: list[Callable[[], None]] = [
        lambda: owner.gate.allow(v(1)),
        lambda: hold.staged(Deadline(0.0)),
        lambda: hold.failed("so"),
        lambda: owner.gate.ended(hold),
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
        self.hold, self.engines = self.owner.gate.hold(v(self.number), 2), []

    @precondition(lambda self: self.hold is not None and len(self.engines) < 2)
    @rule()
    def one_has_staged(self) -> None:
        assert self.hold is not None
        self.engines.append(self.owner.stages(self.hold))

    @precondition(lambda self: self.owner.gate.staged is not None)
    @rule()
    def may_be_committed(self) -> None:
        staged = self.owner.gate.staged
        assert staged is not None
        assert len(self.engines) == 2
        self.owner.gate.allow(staged)

    @rule(newer=st.booleans())
    def is_released(self, newer: bool) -> None:
        self.owner.gate.release("as told", older_than=v(self.number + newer))

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
        self.owner.gate.release("the end")
        ends = {self.end(engine) for engine in self.engines}
        assert len(ends) == 1, f"some engines went on, and some did not: {ends}"
        assert (ends == {None}) == self.owner.gate.allows(self.hold.version)
        self.owner.gate.ended(self.hold)
        self.hold = None

    @staticmethod
    def end(engine: Future[None]) -> type[WeightSyncError] | None:
        try:
            return engine.result(LONG_S)
        except WeightSyncError as error:
            return type(error)

    @invariant()
    def nothing_is_staged_before_all_have(self) -> None:
        if self.owner.gate.staged is not None:
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
