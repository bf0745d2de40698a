"""FleetGoals: what a fleet has to serve while nobody takes part, and that it never goes back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.control.pool_kit import at, beat, made
from weightsync.control.goals import _LEADS_S, FleetGoals
from weightsync.control.pool import RolloutPool
from weightsync.types.fleet import AbsentVersion, ModelVersion


class Joining:
    """Goals, and who is on its way."""

    def __init__(self) -> None:
        self.coming = {"a", "b"}
        self.goals = FleetGoals(self.coming.__contains__)

    def offer(self, who: str, ready: list[ModelVersion], now_s: float) -> None:
        self.goals.offer(who, ("m", "n"), ready, now_s)

    @property
    def goal(self) -> int | None:
        goal = self.goals.current.get("m")
        return None if goal is None else goal.version


def test_a_claim_waits_for_who_was_told_it_and_follows_what_it_has_staged() -> None:
    """Seen red in a fleet: who came back had always staged what was newer, or older, than what it was to serve."""
    of = Joining()
    of.goals.claim([at(5)])
    of.goals.claim([at(6)])
    assert of.goal == 6, "nobody is on its way to 5"
    of.goals.tell("a", ["m", "n"])
    of.goals.claim([at(7)])
    of.goals.tell("b", ["m"])
    of.goals.claim([at(8)])
    assert of.goal == 6
    of.offer("a", [at(9)], 0.0)
    assert of.goal == 6, "9 was told by nobody yet"
    of.goals.claim([at(9)])
    of.offer("a", [at(7)], 0.0)
    of.offer("b", [at(8)], 1.0)
    assert of.goal == 7, "a is about to serve it"
    of.goals.claim([at(10)])
    of.goals.came_in({"m": at(7).of, "n": None})
    assert of.goal == 7
    of.offer("b", [at(8)], 2.0)
    assert of.goal == 7, "the next sync brings it on"
    of.goals.deny(AbsentVersion(of=at(7), newest=1))
    assert of.goal == 7, "somebody has fetched it"


def test_who_is_gone_is_waited_for_no_more() -> None:
    of = Joining()
    of.goals.claim([at(5)])
    of.goals.tell("a", ["m"])
    of.coming.remove("a")
    of.goals.claim([at(6)])
    assert of.goal == 6


def test_who_has_lost_what_it_had_staged_is_followed_no_more() -> None:
    of = Joining()
    of.goals.claim([at(9)])
    of.goals.claim([at(5)])
    of.goals.tell("a", ["m"])
    of.offer("a", [at(6)], 0.0)
    of.offer("b", [at(7)], 0.0)
    assert of.goal == 6
    of.offer("a", [], 1.0)
    of.offer("b", [at(7)], 1.0)
    assert of.goal == 7


def test_who_has_it_staged_and_never_serves_it_is_followed_for_a_time() -> None:
    """Also where it has something newer each time, or loses it and stages it anew. Seen red: it led for ever."""
    for loses in (False, True):
        of = Joining()
        of.goals.claim([at(99)])
        of.goals.claim([at(5)])
        for second in range(int(_LEADS_S)):
            of.offer("a", [at(6 + second)], float(second))
            of.offer("b", [at(90)], float(second))
            if loses:
                of.offer("a", [], float(second))
            assert of.goal == 6 + second or loses
            if of.goal == 90:
                break
        of.offer("a", [at(80)], _LEADS_S + 1)
        assert of.goal != 80, "others go before it"
        of.offer("b", [at(90)], _LEADS_S + 1)
        assert of.goal == 90


def test_who_leads_with_one_model_leads_with_all() -> None:
    """Two that wait for each other would come in after a time-out. Seen red."""
    of = Joining()
    for model in ("m", "n"):
        of.goals.claim([at(9, model=model)])
        of.goals.claim([at(5, model=model)])
    of.offer("a", [at(6)], 0.0)
    of.offer("b", [at(7, model="n")], 0.0)
    assert of.goals.current["n"] == at(5, model="n")
    of.offer("a", [at(6), at(8, model="n")], 1.0)
    assert [each.version for each in of.goals.current.values()] == [6, 8]
    of.offer("a", [at(6, model="other")], 1.0)  # it has no such model


def test_what_was_served_is_found_where_the_run_goes_on() -> None:
    of = Joining()
    of.goals.decide([at(7)])
    moved = msgspec.structs.replace(at(8), sender_endpoint="http://another-port")
    of.goals.claim([moved])
    of.goals.deny(AbsentVersion(of=moved, newest=7))
    assert of.goals.current["m"] == msgspec.structs.replace(moved, version=7)


def test_a_run_that_never_was_leaves_what_was_served() -> None:
    """Seen red: with no goal whatever somebody had was let in."""
    of = Joining()
    of.goals.decide([at(7), at(7, model="n", run_id="t")])
    of.goals.claim([at(1, run_id="s"), at(1, model="n", run_id="t2")])
    of.goals.deny(AbsentVersion(of=at(1, run_id="s")))
    assert list(of.goals.current.values()) == [at(7), at(7, model="n", run_id="t")]


def test_what_was_served_of_one_model_of_a_set_stays() -> None:
    """Seen red: what had been served of it was forgotten with the others of its set, and older was let in."""
    of = Joining()
    of.goals.claim([at(7), at(7, model="n")])
    of.goals.came_in({"m": at(7).of})
    of.goals.claim([at(8), at(8, model="n")])
    of.goals.deny(AbsentVersion(of=at(8)))
    assert of.goals.current == {"m": at(7)}
    assert of.goals.apart({"m": at(7).of, "n": at(3).of})


def test_models_of_a_set_that_were_decided_apart() -> None:
    """They were served so before they were a set. Seen red: who served just that was kept out for good."""
    of = Joining()
    of.goals.learn([at(5), at(9, model="n")], answered=True)
    of.goals.decide([at(5), at(9, model="n")])
    serves = {"m": at(5).of, "n": at(9).of}
    assert not of.goals.apart(serves)
    assert of.goals.apart({**serves, "m": at(4).of})
    of.goals.claim([at(10), at(10, model="n")])
    of.goals.deny(AbsentVersion(of=at(10)))
    assert of.goals.apart(serves), "a denial is no decision for both"


def test_models_of_a_set_that_lie_apart() -> None:
    of = Joining()
    of.goals.claim([at(8), at(8, model="n")])
    of.goals.deny(AbsentVersion(of=at(8)))
    assert of.goals.apart({"m": at(8).of, "n": at(3, model="n").of})
    assert of.goals.apart({"m": at(8).of, "n": None})
    for together in ({"m": at(8).of, "n": at(8).of}, {"m": None, "n": None}, {"m": at(8).of}, {"other": at(1).of}):
        assert not of.goals.apart(together)


def test_a_run_or_an_agent_that_takes_over_waits_for_nobody() -> None:
    of = Joining()
    of.goals.claim([at(5)])
    of.goals.tell("a", ["m"])
    of.goals.claim([at(1, run_id="next")])
    assert of.goals.current["m"] == at(1, run_id="next")
    of.offer("a", [at(5)], 0.0)
    assert of.goals.current["m"] == at(1, run_id="next")
    of.goals.tell("a", ["m"])
    moved = msgspec.structs.replace(at(2, run_id="next"), sender_endpoint="http://another-port")
    of.goals.claim([moved])
    assert of.goals.current["m"] == moved, "who is told of the old address can fetch nothing there"


def test_a_set_goes_on_and_gives_way_as_one() -> None:
    of = Joining()
    of.goals.decide([at(2), at(2, model="n")])
    of.goals.claim([at(5), at(5, model="n")])
    of.goals.tell("a", ["m", "n"])
    of.goals.claim([at(6), at(6, model="n")])
    of.offer("a", [at(6), at(7, model="n")], 0.0)
    assert [each.version for each in of.goals.current.values()] == [6, 6]
    of.goals.deny(AbsentVersion(of=at(6), newest=4))
    assert [each.version for each in of.goals.current.values()] == [4, 4]
    of.goals.deny(AbsentVersion(of=at(4, model="n"), newest=1))
    assert [each.version for each in of.goals.current.values()] == [2, 2], "it was served"
    of.goals.deny(AbsentVersion(of=at(2), newest=1))
    assert [each.version for each in of.goals.current.values()] == [2, 2], "and whoever denies it lies"


def test_what_was_never_there_is_forgotten_as_one() -> None:
    of = Joining()
    of.goals.claim([at(5), at(5, model="n")])
    of.goals.deny(AbsentVersion(of=at(5)))
    assert not of.goals.current
    of.goals.claim([at(3)])
    of.goals.tell("a", ["m"])
    of.goals.deny(AbsentVersion(of=at(3)))
    of.offer("a", [at(3)], 0.0)
    assert of.goal is None


class Claims(RuleBasedStateMachine):
    """One model, two instances that say anything, and one run after another."""

    @initialize()
    def begin(self) -> None:
        self.of = Joining()
        self.now_s = 0.0
        self.run = 1
        self.newest = 0
        self.served: dict[str, int] = {}

    @property
    def run_id(self) -> str:
        return f"r{self.run}"

    @rule(more=st.integers(0, 3))
    def is_told(self, more: int) -> None:
        self.newest += more
        self.of.goals.claim([at(self.newest, run_id=self.run_id)])

    @rule()
    def takes_over(self) -> None:
        self.run, self.newest = self.run + 1, 0

    @rule(who=st.sampled_from("ab"))
    def joins(self, who: str) -> None:
        self.of.coming.add(who)
        self.of.goals.tell(who, ["m"])

    @rule(who=st.sampled_from("ab"))
    def is_gone(self, who: str) -> None:
        self.of.coming.discard(who)

    @rule(who=st.sampled_from("ab"), numbers=st.lists(st.integers(0, 12), max_size=2), run=st.integers(0, 1))
    def offers(self, who: str, numbers: list[int], run: int) -> None:
        self.now_s += 1.0
        self.of.offer(who, [at(number, run_id=f"r{self.run - run}") for number in numbers], self.now_s)

    @rule(below=st.integers(0, 5), nothing=st.booleans())
    def denies(self, below: int, nothing: bool) -> None:
        goal = self.of.goals.current.get("m")
        if goal is not None:
            newest = None if nothing else max(0, goal.version - below)
            self.of.goals.deny(AbsentVersion(of=goal, newest=newest))

    @rule()
    def one_that_was_let_in_before_joins(self) -> None:
        for run_id, version in self.served.items():
            self.of.goals.returns({"m": at(version, run_id=run_id).of})

    @rule()
    def comes_in(self) -> None:
        goal = self.of.goals.current.get("m")
        if goal is not None:
            self.of.goals.came_in({"m": goal.of})
            self.served[goal.run_id] = goal.version

    @rule(more=st.integers(0, 2))
    def is_synced(self, more: int) -> None:
        """A sync decides for the newest, or for one that is late."""
        number = max(0, self.newest - more)
        self.of.goals.decide([at(number, run_id=self.run_id)])
        self.served[self.run_id] = max(number, self.served.get(self.run_id, 0))

    @invariant()
    def it_goes_not_below_what_was_served(self) -> None:
        goal = self.of.goals.current.get("m") if hasattr(self, "of") else None
        if goal is not None:
            assert goal.version >= self.served.get(goal.run_id, 0)

    @invariant()
    def it_goes_not_above_what_was_told(self) -> None:
        goal = self.of.goals.current.get("m") if hasattr(self, "of") else None
        if goal is not None and goal.run_id == self.run_id:
            assert goal.version <= self.newest


TestClaims = Claims.TestCase
TestClaims.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("load_s", [4.0, 31.0, 70.0])
def test_who_needs_long_comes_in_though_others_do_too(number: int, load_s: float) -> None:
    """Each loads for so long what it was told and has staged; the trainer has something newer each second. Seen red
    for two that need more than a lead: they took it from each other for ever."""
    pool, clock = made()
    newest, begun_s = 5, clock.now
    joiners = [_Joiner(name, begun_s + index) for index, name in enumerate("abc"[:number])]
    pool.claim([at(newest)])
    while not any(joiner.beats(pool, clock.now, newest, load_s) for joiner in joiners):
        clock.now += 1.0
        newest += 1
        pool.claim([at(newest)])
        assert clock.now < begun_s + 10 * load_s + 60.0


class _Joiner:
    """What a service does that joins: it stages the newest within two seconds, loads what it may, and serves that."""

    def __init__(self, name: str, begins_s: float) -> None:
        self.name = name
        self.begins_s = begins_s
        self.staged_s = begins_s + 2.0
        self.serves: int | None = None
        self.staged: int | None = None
        self.told = -1
        self.loaded_s: float | None = None

    def beats(self, pool: RolloutPool, now_s: float, newest: int, load_s: float) -> bool:
        """A second of it. Whether it has a lease."""
        if now_s < self.begins_s:
            return False
        if self.staged is None and now_s >= self.staged_s:
            self.staged = newest
        if self.loaded_s is None and self.staged is not None and self.staged <= self.told:
            self.loaded_s = now_s + load_s
        if self.loaded_s is not None and now_s >= self.loaded_s:
            self.serves, self.staged, self.loaded_s, self.staged_s = self.staged, None, None, now_s + 2.0
        serves = () if self.serves is None else (at(self.serves),)
        staged = () if self.staged is None else (at(self.staged),)
        lacks = ("m",) if self.serves is None else ()
        reply = pool.heartbeat(beat(self.name, *serves, lacks=lacks, leased=False, staged=staged))
        for each in reply.catch_up:
            if self.loaded_s is None and self.staged is not None and self.told < self.staged < each.version:
                self.staged, self.staged_s = None, now_s + 2.0
            self.told = each.version
        return reply.lease_s > 0
