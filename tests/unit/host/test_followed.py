"""FollowedRun: what agents say, what is claimed of them, and what is made of it. No thread, no real clock."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.standins.threads import logged_here
from weightsync.errors import NotPublishedError, TransferAbortedError, VersionError
from weightsync.host.adoption import Adoption
from weightsync.host.agent_state import SHORTEST_S, WAIT_S, Claim, Target
from weightsync.host.followed import FollowedRun
from weightsync.types import Version
from weightsync.types.transfer_messages import AgentVersion

ONE, TWO, BAD = "http://one:1", "http://two:1", "http://bad:1"
PATIENCE_S, TIMEOUT_S = 10.0, 120.0


def v(number: int, run_id: str = "r") -> Version:
    return Version(run_id=run_id, number=number)


def says(
    number: int | None, run_id: str = "r", *, coming: int | None = None, life: str | None = "one", digest: str = "d"
) -> AgentVersion:
    return AgentVersion(
        model_id="m", run_id=None if number is None else run_id, version=number, incarnation=life, model_digest=digest,
        coming=coming, coming_run_id=None if coming is None else run_id,
    )  # fmt: skip


class Model:
    """A FollowedRun, one engine, and a clock."""

    def __init__(self, *endpoints: str, poll_s: float | None = None, of_fleet: bool = False) -> None:
        self.now_s = 1000.0
        self.served: dict[str, Version | None] = {"e": None}
        self.settled: list[str | None] = []
        self.num_takeovers = 0
        self.run = FollowedRun(
            "m", clock=lambda: self.now_s, settle=self.settled.append, taken_over=self._took_over,
            patience_s=PATIENCE_S, timeout_s=TIMEOUT_S, poll_s=poll_s, of_fleet=of_fleet,
        )  # fmt: skip
        for endpoint in endpoints:
            self.run.know(endpoint)

    def _took_over(self) -> None:
        self.num_takeovers += 1

    def hears(self, said: AgentVersion | None, endpoint: str = ONE, *, in_s: float = 0.0, takes_s: float = 0.0) -> None:
        """After so long this agent is asked, and says that; None: it can't be asked."""
        self.now_s += in_s
        ask, asked_s = self.run.next_ask(endpoint), self.now_s
        assert ask is not None, "there is no reason to ask it"
        self.now_s += takes_s
        if said is None:
            self.run.not_heard(endpoint, "nobody there", gone=True)
        else:
            self.run.heard(endpoint, said, asked=ask, asked_s=asked_s)

    def claims(self, number: int, run_id: str = "r", *, at: str = ONE, grace_s: float | None = PATIENCE_S) -> Claim:
        self.now_s += 0.001
        return self.run.claim(v(number, run_id), at, grace_s=grace_s)

    @property
    def target(self) -> tuple[str, int, str] | None:
        found = self.run.target(self.served, self.served)
        return None if found is None else (found.version.run_id, found.version.number, found.endpoint)

    def pulls(self, life: str | None = "one") -> None:
        """What is to be pulled is pulled, and served."""
        found = self.run.target(self.served, self.served)
        assert found is not None
        self.run.pulled(found.endpoint, found.version, life)
        self.served = dict.fromkeys(self.served, found.version)
        self.run.loaded(found.version)


def following(*endpoints: str, number: int = 3, poll_s: float | None = None, of_fleet: bool = False) -> Model:
    """It serves what the first agent has; the others have it too."""
    model = Model(*endpoints, poll_s=poll_s, of_fleet=of_fleet)
    for endpoint in endpoints:
        model.hears(says(number), endpoint)
    model.pulls()
    return model


# --- claims ---


@pytest.mark.parametrize(
    ("said", "newest"),
    [(says(3), 3), (says(3, coming=4), 4), (says(9, "other"), None), (says(9, "other", coming=10), None)],
)
def test_a_number_above_what_the_agent_has_is_denied_after_its_grace(said: AgentVersion, newest: int | None) -> None:
    model = Model(ONE)
    claim = model.claims(5)
    model.hears(said, in_s=PATIENCE_S - 0.1)
    model.run.check(claim)
    model.hears(said, in_s=0.2)
    with pytest.raises(NotPublishedError, match="did not have it") as caught:
        model.run.check(claim)
    assert (caught.value.newest, claim.denied is claim.error) == (newest, True)
    assert (model.run.next_ask(ONE) is None) == (newest is None), "it may come late where the run is there"


@pytest.mark.parametrize("said", [None, says(None), says(3, coming=5), says(3, coming=6)])
def test_who_says_nothing_or_is_about_to_have_it_denies_nothing(said: AgentVersion | None) -> None:
    model = following(ONE, number=2)
    claim = model.claims(5)
    for _ in range(20):
        model.hears(said, in_s=PATIENCE_S)
        assert claim.is_open
    model.hears(says(5), in_s=1.0)
    assert claim.there_s == model.now_s
    assert model.target == ("r", 5, ONE)


def test_a_denial_that_was_asked_for_too_early_is_asked_for_again_when_its_time_has_come() -> None:
    model = following(ONE)
    model.claims(5, grace_s=1.0)
    waits_s = []
    while (ask := model.run.next_ask(ONE)) is not None:
        waits_s.append(round(ask.wait_s, 2))
        model.hears(says(3), takes_s=ask.wait_s)
    first, late = waits_s[:3], waits_s[3:]
    assert first == [0.0, 1.0, 0.0], "at once, for as long as it may come, and at once when that is over"
    assert late == [WAIT_S] * 4, "and on for a while: it may come late"


def test_what_was_denied_is_served_when_it_comes_late() -> None:
    model = following(ONE)
    model.claims(5)
    model.hears(says(3), in_s=PATIENCE_S + 0.1)
    model.hears(says(5), in_s=WAIT_S)
    assert model.target == ("r", 5, ONE)
    assert model.run.next_ask(ONE) is None, "nobody waits any more"


def test_an_agent_that_names_another_run_than_it_had_has_ended_that_one_at_once() -> None:
    model = following(ONE)
    claim = model.claims(51)
    model.hears(says(None))
    model.run.check(claim)
    model.hears(says(0, "successor"), in_s=0.1)
    with pytest.raises(NotPublishedError, match="it has successor/0") as caught:
        model.run.check(claim)
    assert caught.value.newest is None
    assert (model.run.run_id, model.num_takeovers, model.target) == ("successor", 1, ("successor", 0, ONE))


def test_what_was_denied_once_is_denied_at_once_until_the_agent_comes_there() -> None:
    model = following(ONE)
    model.claims(100, grace_s=1.0)
    model.hears(says(3), in_s=1.1)
    for number, at_once in ((100, True), (101, True), (4, False)):
        claim = model.claims(number, grace_s=1.0)
        model.hears(says(3), in_s=0.1)
        assert (claim.denied is not None) == at_once
    model.hears(says(100), in_s=0.1)
    claim = model.claims(101, grace_s=1.0)
    model.hears(says(100), in_s=0.1)
    assert claim.is_open, "it may be a moment too early, as any other"


def test_a_false_number_delays_no_true_one_and_is_given_up() -> None:
    model = following(ONE)
    model.claims(10**9, grace_s=None)
    for number in (4, 5):
        model.claims(number)
        model.hears(says(number), in_s=0.1)
        assert model.target == ("r", number, ONE)
        model.pulls()
    assert model.run.wanted is not None
    assert model.run.wanted.version == v(10**9)
    model.hears(says(5), in_s=PATIENCE_S)
    assert "r/1000000000 was announced" in (model.run.doubts or "")
    assert model.run.next_ask(ONE) is not None, "it may come late"
    model.now_s += 3600.0
    assert (model.run.next_ask(ONE), model.run.doubts) == (None, None)


def test_what_was_announced_is_not_said_to_lack_before_a_denial_counts() -> None:
    """Seen red: "r/4 was announced, and one has it not: it has r/4", and a fleet that counted it as a failure, where
    versions come every 0.3 s."""
    model = following(ONE, poll_s=1.0)
    model.hears(says(4), in_s=0.1)
    model.claims(4)
    assert model.run.doubts is None, "what it said before it was announced says nothing"
    model.hears(None, in_s=0.1)
    assert model.run.doubts == f"r/4 was announced, and {ONE} has it not: {model.run.errors[ONE]}"
    model = Model(ONE)
    model.claims(4)
    nothing = f"r/4 was announced, and {ONE} has it not: it has nothing yet"
    for in_s, said in ((PATIENCE_S - 0.1, None), (0.2, nothing)):
        model.hears(says(None), in_s=in_s)
        assert model.run.doubts == said


def test_what_comes_late_is_pulled() -> None:
    model = following(ONE)
    model.claims(4, grace_s=None)
    model.hears(says(3), in_s=PATIENCE_S + 1)
    model.hears(says(4), in_s=60.0)
    assert model.target == ("r", 4, ONE)
    assert model.run.next_ask(ONE) is None


def test_a_run_that_its_agent_never_names_is_refused_when_its_time_is_over() -> None:
    model = following(ONE, BAD)
    claim = model.claims(1, "other", at=BAD)
    for _ in range(11):
        model.hears(None, BAD, in_s=PATIENCE_S)
    model.run.check(claim)
    model.hears(None, BAD, in_s=PATIENCE_S + 0.1)
    assert "other/1 was announced" in (model.run.doubts or ""), "it may come late, and operators are told"
    with pytest.raises(VersionError, match=r"not taken up: .* did not have it within 120 s: .* cut off: nobody there"):
        model.run.check(claim)
    for _ in range(11):
        model.hears(None, BAD, in_s=PATIENCE_S)
    model.now_s += 2 * PATIENCE_S
    assert (model.run.next_ask(BAD), model.run.doubts) == (None, None), "but not for ever"


def test_a_run_that_comes_when_its_time_is_over_is_taken_up() -> None:
    """Its agent was stopped for longer than a pull may take, and nobody told again (seen)."""
    model = following(ONE)
    model.claims(1, "other", grace_s=None)
    for _ in range(13):
        model.hears(None, in_s=PATIENCE_S)
    model.hears(says(1, "other"), in_s=1.0)
    assert (model.num_takeovers, model.target) == (1, ("other", 1, ONE))
    assert model.run.doubts is None


def test_a_run_that_its_agent_is_about_to_have_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    model = following(ONE)
    claim = model.claims(1, "other", grace_s=None)
    for _ in range(20):
        model.hears(says(None, "other", coming=1), in_s=PATIENCE_S)
        model.run.check(claim)
    model.hears(says(1, "other"), in_s=1.0)
    assert model.target == ("other", 1, ONE)
    dies = following(ONE)
    claim = dies.claims(1, "other", grace_s=None)
    dies.hears(says(None, "other", coming=1), in_s=120.0)
    dies.hears(None, in_s=1.0)
    assert claim.error is not None, "it is about to have it no more"


def test_many_runs_that_are_not_taken_up_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = following(ONE)
    for number in range(200):
        model.claims(1, f"false-{number}")
    model.hears(says(3), in_s=1.0)
    model.hears(says(3), in_s=TIMEOUT_S)
    assert len([line for line in logged_here(caplog) if "not taken up" in line.message]) <= 1


def test_claims_of_one_agent_are_bounded_and_another_one_s_stay() -> None:
    model = following(ONE, BAD)
    true = model.claims(4)
    for number in range(1000):
        model.claims(number, f"false-{number}", at=BAD, grace_s=None)
    assert len(model.run.agents[BAD].claims) == 256
    assert model.run.agents[ONE].claims == [true]


# --- runs ---


def test_the_first_run_that_an_agent_names_is_followed_whatever_is_claimed() -> None:
    model = Model(ONE)
    model.claims(5, "false")
    model.hears(says(1))
    assert model.target == ("r", 1, ONE)


@pytest.mark.parametrize(
    ("at", "claimed", "taken"), [(ONE, False, True), (TWO, True, True), (TWO, False, False), (BAD, False, False)]
)
def test_a_run_takes_over_where_it_was_claimed_or_comes_after_the_one_before(
    at: str, claimed: bool, taken: bool
) -> None:
    model = following(ONE, poll_s=5.0)
    model.run.know(TWO)
    model.run.know(BAD)
    model.hears(says(7, "elsewhere"), TWO)
    if claimed:
        model.claims(0, "next", at=at)
    model.hears(says(0, "next"), at, in_s=1.0)
    assert (model.run.run_id == "next") == taken
    assert model.num_takeovers == taken


def test_who_waits_for_the_run_before_hears_which_one_took_over() -> None:
    """Seen red: "run next was told of later, and is followed", which is said of runs that never were."""
    model = following(ONE, TWO)
    claim = model.claims(1001, "r", at=ONE)
    model.claims(0, "next", at=TWO)
    model.hears(says(0, "next"), TWO)
    with pytest.raises(TransferAbortedError, match="run r was taken over by next"):
        model.run.check(claim)


def test_an_old_run_never_takes_over_again() -> None:
    model = following(ONE, TWO, poll_s=5.0)
    model.claims(0, "next", at=TWO)
    model.hears(says(0, "next"), TWO)
    model.pulls()
    with pytest.raises(TransferAbortedError, match="taken over by next"):
        model.claims(4, "r")
    model.hears(says(4, "r"), ONE, in_s=1.0)
    model.hears(says(5, "r"), TWO, in_s=1.0)
    assert (model.run.run_id, model.target) == ("next", None)


def test_a_fleet_goes_back_to_the_run_before_one_of_which_nothing_was_ever_loaded() -> None:
    """Seen red: "run r was taken over by next" for good, where the trainer of `next` had died and r trained on."""
    model = following(ONE, TWO, of_fleet=True)
    stale = model.claims(4, "r")
    model.claims(1, "next", at=TWO)
    model.hears(says(1, "next"), TWO)
    with pytest.raises(TransferAbortedError, match="taken over by next"):
        model.run.check(stale)
    model.run.wake(ONE)
    model.hears(says(4), ONE, in_s=1.0)
    assert model.run.run_id == "next", "its agent's word alone brings no run back"
    claim = model.claims(5)
    model.run.check(claim)
    model.hears(says(5), ONE, in_s=1.0)
    model.run.check(claim)
    assert (model.target, model.num_takeovers) == (("r", 5, ONE), 2)
    model.run.wake(TWO)
    model.hears(None, TWO, in_s=1.0)
    assert not model.run.errors, "the other one is over now"
    model.pulls()
    model.claims(2, "next", at=TWO)
    model.hears(says(2, "next"), TWO, in_s=1.0)
    assert model.target == ("next", 2, TWO), "the controller has tried it again, and nothing of it was refused for good"


def test_a_fleet_goes_back_behind_any_number_of_runs_that_nobody_could_load() -> None:
    model = following(ONE, TWO, of_fleet=True)
    for name in ("a", "b"):
        model.claims(1, name, at=TWO)
        model.hears(says(1, name), TWO, in_s=1.0)
    back = model.claims(4)
    model.claims(1, "c", at=TWO)
    model.hears(says(1, "c"), TWO, in_s=1.0)
    with pytest.raises(TransferAbortedError, match="run r was taken over by a"):
        model.run.check(back)
    model.hears(says(4), ONE, in_s=1.0)
    assert model.run.run_id == "c", "that word was from before"
    model.claims(5)
    model.hears(says(5), ONE, in_s=1.0)
    assert model.target == ("r", 5, ONE)


@pytest.mark.parametrize("of_fleet", [False, True])
def test_a_run_that_was_served_is_never_left_for_an_old_one(of_fleet: bool) -> None:
    model = following(ONE, TWO, of_fleet=of_fleet)
    model.claims(1, "next", at=TWO)
    model.hears(says(1, "next"), TWO)
    if of_fleet:
        model.pulls()
    with pytest.raises(TransferAbortedError, match="taken over by next"):
        model.claims(4, "r")


def test_what_was_taken_over_from_engines_was_served() -> None:
    model = following(ONE, TWO, of_fleet=True)
    model.claims(1, "next", at=TWO)
    model.hears(says(1, "next"), TWO)
    model.run.adopted(Adoption(version=v(1, "next"), digest="d", sure=True), TWO)
    with pytest.raises(TransferAbortedError, match="taken over by next"):
        model.claims(4, "r")


def test_runs_that_are_over_are_bounded() -> None:
    model = following(ONE, poll_s=5.0)
    for number in range(1100):
        model.hears(says(0, f"run-{number}"), in_s=1.0)
    assert len(model.run._runs_over) == 1000


# --- several agents ---


def test_a_dead_agent_gives_way_to_one_that_has_the_run() -> None:
    model = following(ONE, TWO)
    model.claims(4)
    model.hears(None)
    model.hears(says(4), TWO)
    assert model.target == ("r", 4, TWO)
    model.pulls()
    assert model.run.wanted is not None
    assert model.run.wanted.endpoint == TWO


def test_an_agent_that_ended_long_ago_is_asked_once_where_another_one_fails() -> None:
    model = following(ONE, TWO)
    model.claims(4)
    model.hears(None, ONE)
    model.hears(None, TWO)
    assert model.run.next_ask(TWO) is None
    model.hears(says(4), ONE, in_s=1.0)
    model.pulls()
    assert [model.run.next_ask(endpoint) for endpoint in (ONE, TWO)] == [None, None]


def test_a_trainer_that_has_ended_in_order_is_no_failure_until_somebody_waits_for_its_word() -> None:
    model = following(ONE, TWO, poll_s=5.0)
    model.hears(msgspec.structs.replace(says(3), ending=True))
    model.hears(None, ONE, in_s=1.0)
    model.hears(None, TWO, in_s=1.0)
    assert (model.run.ended, set(model.run.errors)) == ((ONE,), {TWO})
    model.claims(4)
    model.hears(None, ONE)
    assert (model.run.ended, set(model.run.errors)) == ((), {ONE, TWO})
    model.hears(says(4), ONE, in_s=1.0)  # it was started again
    model.pulls()
    model.hears(None, ONE, in_s=6.0)
    assert (model.run.ended, set(model.run.errors)) == ((), {ONE, TWO})


@pytest.mark.parametrize("in_order", [True, False])
def test_what_nobody_has_any_more_is_known_when_its_trainer_has_ended(in_order: bool) -> None:
    """Seen red: who waited for it was told nothing before its time was over. Of one that is gone without a word nothing
    is known: it may be cut off, or started again."""
    model = following(ONE, TWO, poll_s=5.0)
    model.hears(msgspec.structs.replace(says(4), ending=in_order))
    model.now_s += 0.5
    wanted, since_s = Target(version=v(4), endpoint=ONE), model.now_s
    assert model.run.nobody_has(wanted, since_s=since_s) is None, "it was not looked for since then"
    model.hears(None, in_s=1.0)
    assert model.run.nobody_has(wanted, since_s=since_s) is None, "the other one was not asked since then"
    model.hears(says(3), TWO, in_s=5.0)
    why = model.run.nobody_has(wanted, since_s=since_s)
    assert (why is not None) == in_order
    if in_order:
        assert str(why).startswith(f"the trainer at {ONE} has ended, and nobody has r/4 any more: start a trainer")
    for other in (v(5), v(0, "next")):
        never = Target(version=other, endpoint=ONE)
        assert model.run.nobody_has(never, since_s=since_s) is None, "its successor may be there by now"
    model.hears(says(4), TWO, in_s=6.0)
    assert model.run.nobody_has(wanted, since_s=since_s) is None, "another agent has it"
    alone = following(ONE, poll_s=5.0)
    alone.hears(msgspec.structs.replace(says(4), ending=in_order))
    alone.hears(None, in_s=1.0)
    assert (alone.run.nobody_has(wanted, since_s=alone.now_s) is not None) == in_order
    assert alone.run.nobody_has(wanted, since_s=alone.now_s + 1.0) is None, "it was not looked for since then"


def test_a_trainer_that_has_ended_stands_beside_no_other_one() -> None:
    """Seen red: "has ended" stayed in the status for minutes, while the next trainer was followed."""
    model = following(ONE, TWO, poll_s=5.0)
    model.hears(msgspec.structs.replace(says(3), ending=True), TWO)
    model.hears(None, TWO, in_s=1.0)
    assert (model.run.ended, model.run.errors) == ((), {})
    model.hears(None, ONE, in_s=1.0)
    assert model.run.ended == (TWO,)


def test_an_agent_that_answered_before_is_said_to_be_gone() -> None:
    """Seen red: of a trainer that was ended by Ctrl-C it was asked whether an agent runs there."""
    model = following(ONE, poll_s=5.0)
    model.run.know(TWO)
    for endpoint in (ONE, TWO):
        model.hears(None, endpoint, in_s=6.0)
    assert model.run.errors == {ONE: "the trainer's agent is gone, or cut off: nobody there", TWO: "nobody there"}


@pytest.mark.parametrize("lasting", [False, True])
def test_a_trainer_that_is_gone_is_past_when_another_run_took_over(lasting: bool) -> None:
    """Seen red: its error stood in the status for ever, and a thread asked the dead port. Of one that the configuration
    names it may: another trainer may come there."""
    model = following(ONE, poll_s=5.0)
    model.run.know(ONE, lasting=lasting)
    model.run.know(TWO)
    model.hears(None, ONE)
    assert set(model.run.errors) == {ONE}, "nobody took over yet"
    model.claims(0, "next", at=TWO)
    model.hears(says(0, "next"), TWO)
    assert set(model.run.errors) == ({ONE} if lasting else set())
    assert (model.run.next_ask(ONE) is None) == (not lasting)
    for _ in range(2):
        model.run.wake(ONE)
        model.hears(None, ONE, in_s=1.0)
        assert (model.run.next_ask(ONE) is None) == (not lasting), "once, where it was woken"
    model.claims(1, "next", at=ONE)
    assert set(model.run.errors) == {ONE}, "somebody waits for its word"
    model.hears(says(1, "next"), ONE, in_s=1.0)
    assert model.run.errors == {}


def test_a_trainer_that_went_on_under_its_run_id_elsewhere_has_left_its_old_agent() -> None:
    """Seen red: the old agent was an error of the status for ever, and a thread asked the dead port. One of the same
    life, of a trainer of several hosts, is missed."""
    model = following(ONE, TWO, poll_s=5.0)
    model.run.know(BAD)
    model.hears(None, ONE)
    assert set(model.run.errors) == {ONE}, "nobody went on yet"
    model.claims(4, at=BAD)
    model.hears(says(4, life="two"), BAD)
    model.pulls("two")
    assert (model.run.errors, model.run.next_ask(ONE)) == ({}, None)
    for endpoint, life in ((TWO, "one"), (BAD, "two")):
        model.run.wake(TWO)
        model.hears(says(3 if endpoint == TWO else 4, life=life), TWO, in_s=WAIT_S)
        model.hears(None, TWO, in_s=WAIT_S)
        assert set(model.run.errors) == (set() if life == "one" else {TWO})
    model.hears(None, BAD, in_s=WAIT_S)
    assert set(model.run.errors) == {ONE, TWO, BAD}, "nobody has it any more"


def test_a_store_of_an_older_life_is_asked_on() -> None:
    store = "s3://bucket/run"
    model = following(store, poll_s=5.0)
    model.run.know(ONE)
    model.claims(4, at=ONE)
    model.hears(says(4, life="two"), ONE)
    model.pulls("two")
    model.hears(None, store, in_s=WAIT_S)
    assert set(model.run.errors) == {store}
    assert model.run.next_ask(store) is not None


def test_a_trainer_that_died_before_this_host_was_started_is_past_when_the_next_one_is_followed() -> None:
    """A controller told of both. Seen red: the first one's error stood in the status for ever, and who asked every
    second for its version found a dead port; had its agent answered late, it had taken over from the next one."""
    model = Model(ONE, TWO, poll_s=5.0)
    claim = model.claims(7, "first", at=ONE)
    model.hears(None, ONE)
    model.claims(0, "next", at=TWO)
    model.hears(says(0, "next"), TWO)
    model.pulls()
    model.run.wake(ONE)
    model.hears(None, ONE, in_s=1.0)
    assert (model.run.errors, model.run.next_ask(ONE), model.run.doubts) == ({}, None, None)
    with pytest.raises(TransferAbortedError, match="run next was told of later"):
        model.run.check(claim)
    model.run.wake(ONE)
    model.hears(says(8, "first"), ONE, in_s=1.0)
    assert (model.run.run_id, model.num_takeovers) == ("next", 0)
    model.claims(9, "first", at=ONE)
    model.hears(says(9, "first"), ONE, in_s=1.0)
    assert model.run.run_id == "first", "nobody is kept out who tells again"


def test_who_never_says_a_word_is_left_alone_when_its_time_is_over_and_another_one_is_there() -> None:
    """Told of behind the one that is followed, by a controller that had not heard of that yet. Seen red: a thread asked
    the dead port for ever."""
    model = following(TWO, poll_s=5.0)
    model.run.know(ONE)
    model.claims(7, "first", at=ONE)
    while model.run.next_ask(ONE) is not None:
        assert model.now_s < 2000
        model.hears(None, ONE, in_s=WAIT_S)
    assert (model.run.errors, model.run.doubts) == ({}, None)
    model.claims(8, "first", at=ONE)
    model.hears(says(8, "first"), ONE, in_s=1.0)
    assert model.run.run_id == "first", "a claim wakes it"


def test_a_store_that_is_away_is_no_trainer_that_is_gone() -> None:
    """Seen red: whoever runs the trainer was told to start it again."""
    model = following("s3://bucket/run", poll_s=5.0)
    model.hears(None, "s3://bucket/run", in_s=6.0)
    assert model.run.errors == {"s3://bucket/run": "nobody there"}


def test_what_answers_where_a_trainer_has_ended_and_is_no_good_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Seen red: a successor whose token this host has not was "ended" for ever, and no line said so."""
    model = following(ONE, poll_s=5.0)
    model.hears(msgspec.structs.replace(says(3), ending=True))
    model.hears(None, in_s=1.0)
    assert (model.run.ended, logged_here(caplog)) == ((ONE,), [])
    for _ in range(3):
        model.run.not_heard(ONE, "AuthError: the token is another one")
    assert (model.run.ended, set(model.run.errors)) == ((), {ONE})
    said = [record.getMessage() for record in logged_here(caplog)]
    assert [each for each in said if "AuthError" in each] == said[-1:]


def test_one_that_a_pull_failed_at_gives_way_until_a_pull_from_it_succeeds() -> None:
    model = following(ONE, TWO, poll_s=5.0)
    for endpoint in (ONE, TWO):
        model.hears(says(4), endpoint, in_s=1.0)
    assert model.target == ("r", 4, ONE)
    model.run.failed(ONE)
    assert model.target == ("r", 4, TWO)
    model.run.failed(TWO)
    assert model.target == ("r", 4, ONE), "the one that was pulled from, where all have failed"


def test_an_agent_that_a_pull_does_not_get_on_with_is_asked_once_a_second() -> None:
    model, num_asked = following(ONE), 0
    for _ in range(100):
        model.now_s += 0.05
        model.run.struggles(ONE)
        if model.run.next_ask(ONE) is not None:
            model.hears(says(3))
            num_asked += 1
    assert 4 <= num_asked <= 5


def test_who_is_pulled_from_stays_where_another_one_is_a_moment_earlier() -> None:
    """Deltas build on what it has sent."""
    model = following(ONE, TWO, poll_s=5.0)
    model.hears(says(4), TWO, in_s=1.0)
    assert model.target is None
    model.now_s += PATIENCE_S
    assert model.target == ("r", 4, TWO), "but not for ever"
    model.hears(says(4), ONE)
    assert model.target == ("r", 4, ONE)


def test_who_was_named_for_a_version_is_pulled_from_at_once() -> None:
    model = following(ONE, TWO)
    model.claims(4, at=TWO)
    model.hears(says(4), TWO)
    assert model.target == ("r", 4, TWO)


def test_a_new_run_starts_without_what_failed_in_the_one_before() -> None:
    model = following(ONE, TWO, poll_s=5.0)
    model.run.failed(ONE)
    model.hears(says(1, "next"), ONE, in_s=1.0)
    model.hears(says(1, "next"), TWO, in_s=1.0)
    assert model.target == ("next", 1, ONE)


def test_two_dead_agents_do_not_wake_each_other_on_and_on() -> None:
    model = following(ONE, TWO)
    model.claims(4, at=ONE)
    model.claims(4, at=TWO)
    num_asked, end_s = 0, model.now_s + 60.0
    while model.now_s < end_s:
        for endpoint in (ONE, TWO):
            ask = model.run.next_ask(endpoint)
            if ask is not None and ask.at_s <= model.now_s:
                model.hears(None, endpoint)
                num_asked += 1
        model.now_s += 0.01
    assert num_asked < 2 * 70


# --- lives of a trainer ---


def test_another_life_is_no_success_below_what_was_brought_and_is_pulled_above_it() -> None:
    model = following(ONE, number=5, poll_s=5.0)
    claim = model.claims(4)
    assert not claim.checked
    model.hears(says(5))
    assert claim.checked
    for number in (3, 5):
        claim = model.claims(number)
        model.hears(says(number, life="two"), in_s=1.0)
        with pytest.raises(VersionError, match="published anew"):
            model.run.check(claim)
        assert model.run.is_anew
        assert "published anew" in (model.run.doubts or "")
    model.claims(6)
    model.hears(says(6, life="two"), in_s=1.0)
    found = model.run.target(model.served, model.served)
    assert found is not None
    model.run.pulled(found.endpoint, found.version, "two")
    model.run.wake(ONE)
    model.hears(says(6, life="two"), in_s=1.0)
    assert model.run.is_anew, "engines serve the life before until they are loaded"
    model.run.loaded(v(6))
    assert not model.run.is_anew


@pytest.mark.parametrize("during", ["the pull", "the load"])
def test_another_life_that_is_noticed_during_a_load_is_not_forgotten_with_it(during: str) -> None:
    """Seen red: its engines counted as serving what its trainer publishes."""
    model = following(ONE, number=5, poll_s=5.0)
    model.hears(says(7, life="two"), in_s=1.0)
    if during == "the load":
        model.run.pulled(ONE, v(7), "two")
    model.hears(says(5, life="three"), in_s=1.0)
    if during == "the pull":
        model.run.pulled(ONE, v(7), "two")
    model.run.loaded(v(7))
    assert model.run.is_anew
    model.hears(says(7, life="two"), in_s=1.0)
    assert not model.run.is_anew


def test_another_life_is_noticed_though_nobody_says_a_word() -> None:
    model = following(ONE, number=5, poll_s=5.0)
    model.hears(says(2, life="two"), in_s=1.0)
    assert (model.run.is_anew, model.target) == (True, None)
    model.hears(says(5, life="one"), in_s=1.0)
    assert not model.run.is_anew


def test_who_does_not_say_which_life_it_is_of_is_refused_when_its_time_is_over() -> None:
    model = following(ONE, number=5)
    claim = model.claims(4)
    for _ in range(11):
        model.hears(None, in_s=PATIENCE_S)
    model.hears(None, ONE, in_s=PATIENCE_S + 0.1)
    assert model.run.next_ask(ONE) is None
    with pytest.raises(VersionError, match="does not say whether what is served is its own"):
        model.run.check(claim)


@pytest.mark.parametrize(
    ("said", "anew", "settled"),
    [
        (says(3, digest="served"), False, ["one"]),
        (says(3, digest="another"), True, []),
        (says(2), True, []),
        (says(None), False, []),
        (says(2, coming=3), False, []),
    ],
)
def test_what_was_taken_over_is_a_success_when_its_agent_says_so(
    said: AgentVersion, anew: bool, settled: list[str]
) -> None:
    model = Model(ONE)
    model.run.adopted(Adoption(version=v(3), digest="served", sure=False))
    assert not model.run.is_sure_of(v(3))
    model.hears(said)
    assert (model.run.is_anew, model.settled, model.run.is_sure_of(v(3))) == (anew, settled, bool(settled))


def test_what_was_claimed_before_an_agent_said_a_word_is_compared_with_what_was_taken_over() -> None:
    model = Model(ONE)
    model.run.adopted(Adoption(version=v(5), digest="served", sure=False))
    claims = [model.claims(number) for number in (4, 5, 6)]
    model.hears(says(4, life="two"))
    for claim in claims[:2]:
        with pytest.raises(VersionError, match="published anew"):
            model.run.check(claim)
    model.run.check(claims[2])
    model.hears(says(6, life="two"), in_s=1.0)
    assert model.target == ("r", 6, ONE)


def test_what_a_controller_vouches_for_needs_no_agent() -> None:
    model = Model()
    model.run.adopted(Adoption(version=v(3), digest="served", sure=True), ONE)
    model.served = {"e": v(3)}
    assert model.run.is_sure_of(v(3))
    assert (model.run.run_id, model.target) == ("r", None)


# --- how often agents are asked ---


def asks(model: Model, answers: Iterable[AgentVersion | None], seconds: float, *, waits: bool = False) -> list[float]:
    """When an agent that answers so is asked, by the clock."""
    times, end_s, told = [], model.now_s + seconds, iter(answers)
    while (ask := model.run.next_ask(ONE)) is not None:
        model.now_s = max(model.now_s, ask.at_s)
        if model.now_s >= end_s:
            break
        times.append(model.now_s)
        model.hears(next(told), takes_s=ask.wait_s if waits else 0.0)
    return times


def test_two_trainers_behind_one_address_are_asked_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """Seen to fail: as fast as they answered, for ever, and not a word of it."""
    caplog.set_level(logging.WARNING)
    model = Model(ONE, poll_s=5.0)
    times = asks(model, (says(1, run) for run in itertools.cycle(["a", "b"])), 100.0)
    assert len(times) <= 4 + 1 + 100 / 5.0
    warned = [record.getMessage() for record in logged_here(caplog) if "one run after another" in record.getMessage()]
    assert len(warned) == 1
    assert ONE in warned[0]


def test_an_agent_that_lets_nobody_wait_is_asked_every_poll_s() -> None:
    model = Model(ONE, poll_s=5.0)
    times = asks(model, itertools.repeat(says(1)), 100.0)
    assert all(gap == 5.0 for gap in itertools.starmap(lambda a, b: b - a, itertools.pairwise(times[5:])))


def test_an_agent_that_lets_requests_wait_has_one_that_waits() -> None:
    model = Model(ONE, poll_s=5.0)
    assert len(asks(model, itertools.repeat(says(1)), 10 * WAIT_S, waits=True)) <= 12


def test_any_number_of_claims_makes_an_agent_be_asked_every_20_ms_at_most() -> None:
    model, times = following(ONE), []
    for _ in range(500):
        model.claims(10**9, grace_s=None)
        ask = model.run.next_ask(ONE)
        assert ask is not None
        if ask.at_s <= model.now_s:
            times.append(model.now_s)
            model.hears(says(3))
    assert 20 <= len(times) <= 26


@settings(max_examples=60, deadline=None)
@given(
    answers=st.lists(
        st.none() | st.builds(says, st.none() | st.integers(0, 5), st.sampled_from("abc")), min_size=1, max_size=8
    ),
    poll_s=st.none() | st.floats(0.05, 60.0),
    claimed=st.lists(st.integers(0, 9), max_size=3),
    waits=st.booleans(),
)
def test_whatever_an_agent_answers_it_is_asked_at_a_bounded_rate(
    answers: list[AgentVersion | None], poll_s: float | None, claimed: list[int], waits: bool
) -> None:
    model = Model(ONE, poll_s=poll_s)
    for number in claimed:
        model.claims(number, "a")
    times = asks(model, itertools.cycle(answers), 20.0, waits=waits)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert all(gap >= SHORTEST_S - 1e-6 for gap in gaps)


# --- all of it, in any order ---


class Anything(RuleBasedStateMachine):
    """Trainers publish, die and come back; liars talk; agents are asked in any order. What an agent has of the run that
    is followed is served in the end, and nothing that was said keeps it from that."""

    agents = st.sampled_from([ONE, TWO, BAD])

    @initialize(poll_s=st.sampled_from([None, 5.0]))
    def begin(self, poll_s: float | None) -> None:
        self.model = Model(ONE, TWO, BAD, poll_s=poll_s)
        self.has: dict[str, Version | None] = {ONE: v(1), TWO: v(1), BAD: None}
        self.dead: set[str] = set()
        self.num_runs = 0
        self.over: set[str] = set()
        self.was: str | None = None

    @rule(endpoint=agents, by=st.integers(1, 3))
    def publish(self, endpoint: str, by: int) -> None:
        before = self.has[endpoint]
        self.has[endpoint] = v(by) if before is None else v(before.number + by, before.run_id)

    @rule(endpoint=agents)
    def restart(self, endpoint: str) -> None:
        self.num_runs += 1
        self.has[endpoint] = v(0, f"run-{self.num_runs}")

    @rule(endpoint=agents)
    def die_or_come_back(self, endpoint: str) -> None:
        self.dead ^= {endpoint}

    @rule(
        endpoint=agents,
        number=st.integers(0, 10**9),
        run_id=st.sampled_from(["r", "run-1", "false"]),
        told=st.booleans(),
    )
    def claim(self, endpoint: str, number: int, run_id: str, told: bool) -> None:
        if run_id not in self.over:
            self.model.claims(number, run_id, at=endpoint, grace_s=PATIENCE_S if told else None)

    @rule(endpoint=agents, in_s=st.floats(0.0, 20.0))
    def ask(self, endpoint: str, in_s: float) -> None:
        self.model.now_s += in_s
        ask = self.model.run.next_ask(endpoint)
        if ask is None:
            return
        self.model.now_s = max(self.model.now_s, ask.at_s)
        has = self.has[endpoint]
        said = says(None) if has is None else says(has.number, has.run_id)
        self.model.hears(None if endpoint in self.dead else said, endpoint)
        if self.model.run.run_id != self.was and self.was is not None:
            self.over.add(self.was)
        self.was = self.model.run.run_id

    @rule()
    def pull(self) -> None:
        if (found := self.model.run.target(self.model.served, self.model.served)) is None:
            return
        if found.endpoint in self.dead or self.has[found.endpoint] is None:
            self.model.run.failed(found.endpoint)
        else:
            self.model.pulls()

    @invariant()
    def what_is_pulled_is_what_an_agent_has_said(self) -> None:
        run = self.model.run
        assert run.run_id not in self.over, "an old run never takes over again"
        if (found := run.target(self.model.served, self.model.served)) is not None:
            assert found.version == run.agents[found.endpoint].newest
            assert found.version.run_id == run.run_id
            served = self.model.served["e"]
            assert served is None or served.run_id != run.run_id or served.number < found.version.number
        assert all(len(agent.claims) <= 256 for agent in run.agents.values())

    def teardown(self) -> None:
        self.dead.clear()
        self.model.now_s += 0.001  # no one is woken at the very moment at which it was asked last
        for endpoint in self.has:
            self.model.run.wake(endpoint)
        for _ in range(40):
            for endpoint in self.has:
                self.ask(endpoint, 20.0)
            self.pull()
        run_id, served = self.model.run.run_id, self.model.served["e"]
        numbers = [has.number for has in self.has.values() if has is not None and has.run_id == run_id]
        if numbers:
            assert served is not None
            assert served.run_id == run_id
            assert served.number >= max(numbers)
        if self.model.run._poll_s is None and all(self.has.values()):
            assert all(self.model.run.next_ask(endpoint) is None for endpoint in self.has), (
                "nobody is asked for nothing"
            )


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
