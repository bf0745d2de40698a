"""RolloutPool with a clock of its own: who comes in, who is left out, and when it answers no more."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any

import pytest

from tests.multiproc.pull_kit import wait_until
from tests.unit.control.pool_kit import LEASE_S, MODELS, Clock, at, beat, made, states
from weightsync.control.pool import RolloutPool
from weightsync.errors import ConfigError, StateError
from weightsync.handles.fanout import in_thread
from weightsync.types import Version
from weightsync.types.fleet import NOT_STARTED, AbsentVersion


def test_an_instance_comes_in_is_late_and_is_left_out() -> None:
    pool, clock = made()
    reply = pool.heartbeat(beat())
    assert (reply.state, reply.lease_s, reply.admitted) == ("live", LEASE_S, True), "nothing is current yet"
    assert not pool.heartbeat(beat()).admitted
    clock.now += LEASE_S / 2
    assert states(pool) == {"a": "live"}
    clock.now += 0.1
    assert states(pool) == {"a": "suspect"}
    assert [member.instance_id for member in pool.members(MODELS)] == ["a"], "it still counts"
    clock.now += LEASE_S / 2
    assert states(pool) == {"a": "evicted"}
    assert pool.members(MODELS) == ()
    assert pool.fenced("a")
    assert pool.heartbeat(beat()).admitted


def test_a_heartbeat_that_was_delivered_late_counts_for_nothing() -> None:
    """Seen red: it was taken for the newest, and who served version 2 was taken for one that serves version 1."""
    pool, clock = made()
    pool.decided([at(2)])
    pool.heartbeat(beat("a", at(1), number=1))
    assert pool.heartbeat(beat("a", at(2), number=3)).state == "live"
    clock.now += 1.0
    with pytest.raises(StateError, match="a later heartbeat of instance 'a' was heard before"):
        pool.heartbeat(beat("a", at(1), number=2))
    (status,) = pool.status({})
    assert (status.models["m"], status.state, status.heartbeat_age_s) == ("r/2", "live", 1.0)
    assert pool.heartbeat(beat("a", at(2), number=4)).lease_s == LEASE_S
    assert pool.heartbeat(beat("a", at(2))).lease_s == LEASE_S, "one of an older release says no number"
    clock.now += LEASE_S
    assert pool.heartbeat(beat("a", at(2), incarnation="2", number=1)).state == "live", "another process begins anew"


def test_a_heartbeat_that_comes_behind_the_last_word_brings_nobody_back() -> None:
    """Seen red: the pool took an instance for live, for a lease, whose process had ended."""
    pool, _ = made()
    pool.heartbeat(beat("a", number=1))
    pool.heartbeat(beat("a", number=3, leaving=True))
    with pytest.raises(StateError, match="a later heartbeat"):
        pool.heartbeat(beat("a", number=2))
    assert states(pool) == {}
    assert pool.heartbeat(beat("a", incarnation="2", number=1)).admitted


def test_at_the_very_end_of_a_lease_it_is_over() -> None:
    pool, clock = made()
    pool.heartbeat(beat())
    clock.now += LEASE_S
    assert pool.members(MODELS) == ()
    assert pool.fenced("a")


def test_one_that_is_behind_is_told_what_to_serve() -> None:
    pool, _ = made()
    pool.decided([at(3), at(7, model="other")])
    reply = pool.heartbeat(beat("a", at(2)))
    assert (reply.state, reply.lease_s, reply.catch_up) == ("joining", 0.0, (at(3),))
    assert reply.why == "r/2 of m, and the fleet is to serve r/3"
    assert pool.heartbeat(beat("a", at(3))).admitted
    assert not pool.heartbeat(beat("b", at(4))).admitted, "nobody has decided for what it serves"
    assert not pool.heartbeat(beat("c", at(9, run_id="another"))).lease_s


def test_what_nobody_has_is_what_the_fleet_is_to_serve() -> None:
    """Seen red: the fleet was said to serve what was told of alone."""
    pool, _ = made()
    pool.claim([at(24)])
    assert pool.heartbeat(beat()).why == "nothing of m, and the fleet is to serve r/24"
    assert not pool.status({})[0].failed, "it only joins"


def test_nobody_comes_in_while_two_syncs_run() -> None:
    pool, _ = made()
    with pool.syncing():
        with pool.syncing():
            assert pool.heartbeat(beat()).why == "it waits until a sync has ended"
        assert not pool.heartbeat(beat()).lease_s
    assert pool.heartbeat(beat()).admitted


def test_a_sync_that_raises_lets_others_in_again() -> None:
    pool, _ = made()
    with pytest.raises(ZeroDivisionError), pool.syncing():
        raise ZeroDivisionError
    assert pool.heartbeat(beat()).admitted


def test_an_answer_of_no_lease_may_be_lost() -> None:
    """Seen to fail where an evicted instance was taken for fenced when its heartbeat was answered."""
    pool, clock = made()
    pool.heartbeat(beat())
    with pool.syncing():
        pool.evict("a", "as told")
        clock.now += 1.0
        assert pool.heartbeat(beat()).lease_s == 0.0  # and this answer never gets there
        assert not pool.fenced("a")
        clock.now += LEASE_S - 1.0
        assert pool.fenced("a")


def test_a_second_process_waits_for_the_lease_of_the_first() -> None:
    """Evicted or not: it answers until its lease is over. Seen to fail for one that was evicted."""
    pool, clock = made()
    pool.heartbeat(beat(incarnation="1"))
    with pytest.raises(StateError, match="another process is instance 'a'"):
        pool.heartbeat(beat(incarnation="2"))
    pool.evict("a", "as told")
    with pytest.raises(StateError, match="another process"):
        pool.heartbeat(beat(incarnation="2"))
    assert not pool.fenced("a")
    clock.now += LEASE_S
    assert pool.fenced("a")
    assert pool.heartbeat(beat(incarnation="2")).admitted
    with pytest.raises(StateError, match="another process"):
        pool.heartbeat(beat(incarnation="1"))


def test_a_heartbeat_from_before_its_commit_evicts_nobody() -> None:
    """It was on its way when the sync ended. Its lease is not made longer by it; a second one in a row says the same
    of itself, and is believed. Seen to fail."""
    pool, clock = made()
    pool.heartbeat(beat("a", at(1)))
    clock.now += 5.0
    with pool.syncing():
        pool.decided([at(2)])
    reply = pool.heartbeat(beat("a", at(1)))
    assert reply.lease_s == LEASE_S - 5.0
    assert pool.members(MODELS)
    assert pool.heartbeat(beat("a", at(2))).lease_s == LEASE_S
    assert pool.heartbeat(beat("a", at(1))).lease_s > 0.0, "it was believed in between"
    assert pool.heartbeat(beat("a", at(1))).lease_s == 0.0
    assert pool.members(MODELS) == ()


def test_half_of_a_set_comes_back_when_it_has_caught_up() -> None:
    """Seen to fail: one that had failed a commit halfway was told to catch up for ever."""
    pool, clock = made()
    models = [at(1), at(1, model="n")]
    pool.decided(models)
    pool.heartbeat(beat("a", *models))
    with pool.syncing():
        pool.decided([at(2), at(2, model="n")])
        pool.evict("a", "as told")
    clock.now += LEASE_S
    reply = pool.heartbeat(beat("a", at(2), at(1, model="n"), whole=False))
    assert (reply.lease_s, [each.version for each in reply.catch_up]) == (0.0, [2, 2])
    assert not pool.heartbeat(beat("a", at(3), at(2, model="n"), whole=False)).lease_s, "newer in part is no set"
    whole = [at(2), at(2, model="n")]
    assert pool.heartbeat(beat("a", *whole, whole=False)).admitted
    assert pool.heartbeat(beat("a", *whole, whole=False)).admitted, "the answer before may be lost"
    with pool.syncing():
        assert not pool.heartbeat(beat("a", *whole, whole=False)).admitted, "a commit is under way"


def test_what_is_current_never_goes_back_within_a_run() -> None:
    """A call to an instance that was not waited for may end late. Seen to fail."""
    pool, _ = made()
    pool.decided([at(2)])
    pool.decided([at(1)])
    assert pool.current("m") == at(2)
    pool.decided([at(0, run_id="another")])
    assert pool.current("m") == at(0, run_id="another")


def test_a_new_controller_learns_what_is_served() -> None:
    """From whole sets alone; while it listens, nobody comes in. Seen to fail for models of other instances."""
    pool, clock = made(learnt=False)
    beats = [
        beat("a", at(4), at(4, model="n")),
        beat("b", at(5), at(5, model="n")),
        beat("c", at(6), at(5, model="n"), whole=False),
        beat("d", at(9), lacks=("n",)),
        beat("e", at(3, model="alone")),
        beat("f", at(2, model="alone")),
    ]
    for each in beats:
        assert not pool.heartbeat(each).lease_s
    assert pool.current("m") is None
    clock.now += LEASE_S - 0.5
    assert not any(pool.heartbeat(each).lease_s for each in beats)
    clock.now += 0.5
    replies = {each.instance_id: pool.heartbeat(each) for each in beats}
    assert [pool.current(model) for model in ("m", "n", "alone")] == [at(5), at(5, model="n"), at(3, model="alone")]
    assert {name for name, reply in replies.items() if reply.lease_s} == {"b", "e"}
    assert replies["a"].catch_up == (at(5), at(5, model="n"))


def test_evicted_ones_are_waited_for_at_most_a_lease() -> None:
    pool, clock = made()
    pool.heartbeat(beat())
    pool.evict("a", "as told")
    clock.now += LEASE_S - 0.1
    waits = in_thread(lambda: pool.wait_fenced(["a", "unknown"]), name="waits")
    with pytest.raises(TimeoutError):
        waits.result(0.3)
    clock.now += 0.1
    waits.result(LEASE_S / 2)
    assert pool.fenced("a")


def test_one_that_never_is_fenced_holds_up_nobody_for_longer() -> None:
    """The pool's clock stands still."""
    clock = Clock()
    pool = RolloutPool(lease_s=0.1, clock=clock)
    clock.now += 0.1
    pool.heartbeat(beat())
    pool.evict("a", "as told")
    began_s = time.monotonic()
    pool.wait_fenced(["a"])
    assert 1.0 < time.monotonic() - began_s < 8.0
    assert not pool.fenced("a")


def test_what_users_see() -> None:
    pool, clock = made()
    pool.heartbeat(beat("a", at(3), lacks=("n",), error="m: e1: as told"))
    clock.now += 2.0
    (seen,) = pool.status({"m": Version(run_id="r", number=5), "n": Version(run_id="r", number=5)})
    assert seen.models == {"m": "r/3", "n": None}
    assert seen.lag == {"m": 2, "n": None}
    assert (seen.heartbeat_age_s, seen.lease_left_s, seen.why) == (2.0, LEASE_S - 2.0, "m: e1: as told")
    assert seen.failed
    pool.evict("a", "it was slow")
    assert pool.status({})[0].why == "it was slow; m: e1: as told"
    assert pool.status({})[0].failed
    clock.now += 61 * LEASE_S
    assert pool.status({}) == (), "one that is silent for long is forgotten"


def test_one_that_leaves_is_forgotten_at_once() -> None:
    """Seen to fail: it stood there as evicted for 60 leases."""
    pool, _ = made()
    seen: list[dict[str, str]] = []
    pool.heartbeat(beat("a", at(1)))
    pool.heartbeat(beat("b", at(1)))
    members = {member.instance_id: member for member in pool.members(MODELS)}
    pool.subscribe(lambda: seen.append(states(pool)))
    with pool.syncing([at(2)]):
        reply = pool.heartbeat(beat("a", at(1), leaving=True))
        assert (reply.state, reply.lease_s, reply.catch_up) == ("evicted", 0.0, ())
        assert seen[0] == {"b": "live"}, "listeners are told"
        assert not pool.takes_part(members["a"])
        assert pool.takes_part(members["b"])
        pool.evict("a", "it left")
        assert pool.unfenced(MODELS) == ()
        assert pool.fenced("a")
    assert pool.heartbeat(beat("a", at(1), incarnation="2")).admitted, "its name is free"
    told = len(seen)
    pool.heartbeat(beat("stranger", at(1), leaving=True))
    assert (len(seen), set(states(pool))) == (told, {"a", "b"})


def test_a_life_that_is_over_does_not_take_the_newer_one_with_it() -> None:
    """Seen to fail."""
    pool, clock = made()
    pool.heartbeat(beat(incarnation="1"))
    clock.now += LEASE_S
    pool.heartbeat(beat(incarnation="2"))
    (member,) = pool.members(MODELS)
    pool.heartbeat(beat(incarnation="1", leaving=True))
    assert pool.takes_part(member)
    assert states(pool) == {"a": "live"}


def test_who_is_waited_for_until_it_was_heard() -> None:
    pool, clock = made()
    pool.heartbeat(beat())
    (member,) = pool.members(MODELS)
    other = dataclasses.replace(member, incarnation="2")
    assert not pool.takes_part(other)
    pool.wait_heard([other])
    waits = in_thread(lambda: pool.wait_heard([member, other]), name="waits")
    wait_until(lambda: pool._changed._waiters, "it waits", 10.0)  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        waits.result(0.3)
    clock.now += 1.0
    pool.heartbeat(beat())
    waits.result(LEASE_S / 2)


def test_who_was_let_in_is_waited_for_until_it_may_answer() -> None:
    """It hears of that at its next heartbeat; until then nobody is told that it is live."""
    pool, _ = made()
    pool.decided([at(4)])
    with pool.syncing([at(7)]):
        pool.heartbeat(beat("a", at(4), leased=False))
    waits = in_thread(lambda: pool.wait_leased(pool.members(MODELS)), name="waits")
    assert states(pool) == {"a": "joining"}
    reply = pool.heartbeat(beat("a", at(4), leased=False))
    assert (reply.state, states(pool)) == ("live", {"a": "live"})
    assert reply.every_s < LEASE_S / 3, "it says soon that it has it"
    with pytest.raises(TimeoutError):
        waits.result(0.3)
    assert pool.heartbeat(beat("a", at(4), leased=True)).every_s == LEASE_S / 3
    waits.result(LEASE_S / 4)


def test_many_at_once() -> None:
    """Heartbeats, syncs, evictions and looks from many threads; a listener calls the pool."""
    pool = RolloutPool(lease_s=0.1)
    seen = []
    pool.subscribe(lambda: seen.append(len(pool.members(MODELS))))
    stop = threading.Event()

    def beats(name: str) -> None:
        while not stop.is_set():
            pool.heartbeat(beat(name, at(1)))

    threads = [in_thread(lambda name=f"i{n}": beats(name), name="beats") for n in range(4)]  # type: ignore[misc]
    for number in range(100):
        with pool.syncing():
            pool.evict(f"i{number % 4}", "as told")
            pool.status({})
    until = time.monotonic() + 60.0
    while len(pool.members(MODELS)) < 4:
        assert time.monotonic() < until, states(pool)
    stop.set()
    for thread in threads:
        thread.result(5.0)
    assert seen


@pytest.mark.parametrize("wrong", [0.0, -1.0, 3601.0, float("nan")])
def test_leases_that_cannot_be(wrong: float) -> None:
    with pytest.raises(ConfigError):
        RolloutPool(lease_s=wrong)


def test_who_joins_comes_in_with_a_sync_where_there_is_no_time_between_two() -> None:
    """Seen to fail: with a version a second a newcomer was one behind for ever."""
    pool, _ = made()
    pool.decided([at(1)])
    pool.heartbeat(beat("a", at(1)))
    for number in (2, 3):
        goal = at(number)
        with pool.syncing([goal]):
            reply = pool.heartbeat(beat("new", at(number - 1), leased=False))
            assert (reply.lease_s, reply.catch_up) == (0.0, (goal,)), "it is told what is on its way"
            assert not pool.heartbeat(beat("new", goal, leased=False)).lease_s, "nothing is decided yet"
            assert [member.instance_id for member in pool.members(["m"])] == ["a"]
            if number == 2:  # it was not brought to anybody
                continue
            pool.decided([goal])
        assert [member.instance_id for member in pool.members(["m"])] == ["a", "new"]
        assert not pool.fenced("new") or pool.takes_part(pool.members(["m"])[1])
        with pool.syncing([at(4)]):
            reply = pool.heartbeat(beat("new", goal, leased=False))
            assert (reply.lease_s, reply.admitted) == (LEASE_S, True)
    assert pool.heartbeat(beat("late", at(5))).lease_s == 0.0, "newer than what was decided"


def test_what_nobody_could_fetch_and_is_not_there_gives_way() -> None:
    pool, _ = made()
    pool.claim([at(1000)])
    reply = pool.heartbeat(beat("a", lacks=("m",)))
    assert [each.version for each in reply.catch_up] == [1000]
    pool.heartbeat(beat("a", lacks=("m",), absent=(AbsentVersion(of=at(999), newest=1),)))
    assert pool.current("m") == at(1000), "nobody was told to serve that"
    reply = pool.heartbeat(beat("a", lacks=("m",), absent=(AbsentVersion(of=at(1000), newest=3),)))
    assert [each.version for each in reply.catch_up] == [3]
    pool.heartbeat(beat("a", lacks=("m",), absent=(AbsentVersion(of=at(3)),)))
    assert pool.current("m") is None, "its agent names another run"
    pool.decided([at(5)])
    pool.heartbeat(beat("b", lacks=("m",), absent=(AbsentVersion(of=at(5), newest=1),)))
    assert pool.current("m") == at(5), "somebody has fetched that one"


def test_who_joins_is_told_the_digest_of_what_it_may_have_already() -> None:
    pool, _ = made()
    pool.decided([at(1)])
    assert pool.heartbeat(beat("b", lacks=("m",))).digests == {}
    pool.heartbeat(beat("c", at(2), digests={"m": "of another version"}))
    pool.heartbeat(beat("a", at(1), digests={"m": "d1"}))
    assert pool.heartbeat(beat("b", lacks=("m",))).digests == {"m": "d1"}
    with pool.syncing([at(2)]):
        pool.heartbeat(beat("a", at(2), digests={"m": "d2"}))  # it has committed; the fleet's is the one before yet
        pool.heartbeat(beat("b", lacks=("m",)))
    assert pool._digests["m"][1] == "d1"
    pool.decided([at(2)])
    assert pool.heartbeat(beat("b", lacks=("m",))).digests == {}


def test_what_is_told_of_when_one_has_just_come_in_is_no_claim() -> None:
    """Seen red: a claim overtook it, and it was evicted for serving what it had come in with."""
    pool, _ = made()
    pool.decided([at(6)])
    pool.heartbeat(beat("b", at(6)))
    assert [member.instance_id for member in pool.claim([at(10)])] == ["b"]
    assert pool.current("m") == at(6)


def test_who_serves_the_goal_comes_in_whatever_it_has_staged_besides() -> None:
    """Seen red: the goal followed what was staged, and it was one behind for ever."""
    pool, _ = made()
    pool.claim([at(9)])
    pool.claim([at(5)])
    pool.heartbeat(beat("a", lacks=("m",)))
    reply = pool.heartbeat(beat("a", at(5), staged=(at(6),), leased=False))
    assert (reply.state, pool.current("m")) == ("live", at(5))


def test_who_serves_what_nobody_decided_for_answers_no_more() -> None:
    """It was told of one that came to nothing. Seen red: it had a lease, beside those of the fleet's version."""
    pool, _ = made()
    pool.decided([at(6)])
    assert pool.heartbeat(beat("a", at(6))).lease_s
    assert pool.heartbeat(beat("a", at(10))).state == "suspect", "it may be about to be decided"
    assert pool.heartbeat(beat("a", at(10))).lease_s == 0.0
    pool.decided([at(10)])
    assert pool.heartbeat(beat("a", at(10))).lease_s


def test_who_was_let_in_for_what_it_served_before_is_lent_nothing_for_what_it_serves_now() -> None:
    """It committed what a sync was to bring, which failed. Seen red: it answered with that, beside the fleet's."""
    pool, _ = made()
    pool.decided([at(4)])
    pool.heartbeat(beat("x", at(4)))
    with pool.syncing([at(7)]):
        assert pool.heartbeat(beat("c", at(4), leased=False)).catch_up == (at(7),)
    assert {each.instance_id for each in pool.members(MODELS)} == {"x", "c"}, "what it said last is the fleet's"
    with pool.syncing([at(7)]):
        assert pool.heartbeat(beat("c", at(7), leased=False)).lease_s == 0.0
        pool.decided([at(7)])
    assert "c" in {each.instance_id for each in pool.members(MODELS)}


def test_who_was_let_in_is_lent_nothing_for_what_a_failed_sync_has_left_it_with() -> None:
    """It commits what that sync was to bring while the next one runs. Seen red: it answered with it all the time."""
    pool, clock = made()
    pool.decided([at(10)])
    pool.heartbeat(beat("a", at(10), lacks=()))
    with pool.syncing([at(11)]):
        assert pool.heartbeat(beat("j", at(10), lacks=(), leased=False)).catch_up == (at(11),)
    assert pool.heartbeat(beat("j", at(10), lacks=(), leased=False)).state == "live"
    with pool.syncing([at(12)]):
        pool.decided([at(12)])
        clock.now += 1
        assert pool.heartbeat(beat("j", at(11), lacks=(), leased=False)).lease_s == 0.0
        assert states(pool)["j"] == "joining"


def test_it_is_told_when_nobody_is_left() -> None:
    """A version that was given up is all that its agent has: who is started anew could have nothing. Seen red."""
    for leave in ("says so", "is silent", "is evicted"):
        pool, clock = made()
        told: list[str] = []
        pool.on_members = lambda told=told: told.append("")  # type: ignore[misc]
        for name in "ab":
            assert pool.heartbeat(beat(name, at(1), lacks=())).lease_s
        told.clear()
        pool.evict("a", "for a test")
        assert told == [], "b is there"
        if leave == "says so":
            pool.heartbeat(beat("b", at(1), lacks=(), leaving=True))
        elif leave == "is silent":
            clock.now += LEASE_S
            states(pool)
        else:
            pool.evict("b", "for a test")
        assert told == [""]


def test_a_fleet_serves_what_each_of_it_serves() -> None:
    """Seen red: a version that one instance had alone counted as served, and nobody told the others of it."""
    pool, _ = made()
    both = (at(7), at(7, model="n"))
    pool.decided(both)
    pool.heartbeat(beat("a", at(7), lacks=(), leased=True))
    assert pool.serves([at(7)])
    assert not pool.serves(both), "nobody has n"
    pool.heartbeat(beat("b", at(7, model="n"), lacks=(), leased=True))
    assert pool.serves(both)
    pool.decided([at(8)])
    assert not pool.serves([at(8)])
    pool.heartbeat(beat("c", at(8), lacks=(), leased=True))
    assert not pool.serves([at(8)]), "a has 7 yet"
    pool.heartbeat(beat("a", at(8), lacks=(), leased=True))
    assert pool.serves([at(8)])


def test_one_that_is_ahead_says_so_and_comes_in_when_the_fleet_has_come_so_far() -> None:
    """It committed what a sync was to bring, which failed. Seen red: nothing said why it was out."""
    pool, clock = made()
    pool.decided([at(10)])
    pool.heartbeat(beat("a", at(10), lacks=()))
    reply = pool.heartbeat(beat("j", at(11), lacks=(), leased=False))
    for why in (reply.why, pool.status({})[1].why):
        assert str(why).startswith("r/11 of m, and the fleet is to serve r/10, which is older: it comes in when")
    clock.now += LEASE_S / 3
    pool.heartbeat(beat("j", at(11), lacks=(), leased=False))
    with pool.syncing([at(11)]):
        pool.decided([at(11)])
    assert "j" in {each.instance_id for each in pool.members(MODELS)}
    assert pool.status({})[1].why is None


def test_one_that_is_heard_no_more_says_for_how_long() -> None:
    """Seen red: one that was killed while it joined stood there as joining for ten minutes."""
    pool, clock = made()
    pool.decided([at(3)])
    pool.heartbeat(beat("live", at(3), lacks=()))
    pool.heartbeat(beat("j", at(2), lacks=(), leased=False))
    for _ in range(2):
        clock.now += LEASE_S / 3
    said = {each.instance_id: (each.state, each.why) for each in pool.status({})}
    assert said == {"live": ("suspect", "not heard for 8.0 s"), "j": ("evicted", "not heard for 8.0 s")}
    reply = pool.heartbeat(beat("j", at(2), lacks=(), leased=False))
    assert (reply.state, reply.why) == ("joining", "r/2 of m, and the fleet is to serve r/3")
    clock.now += 60.0
    assert {each.why for each in pool.status({})} == {"not heard for 60.0 s", "not heard for 68.0 s"}


def test_one_whose_engine_is_gone_and_that_serves_nothing_comes_in_nowhere() -> None:
    """Seen red: before the first version it came in again behind each sync that it failed."""
    pool, _ = made()
    pool.heartbeat(beat())
    pool.evict("a", "its engine failed")
    reply = pool.heartbeat(beat(gone={"e": "can't connect"}))
    assert (reply.state, reply.lease_s) == ("joining", 0.0)
    said = "it serves nothing; it was left out: its engine failed; engine e is gone: can't connect"
    assert pool.status({})[0].why == said
    assert pool.status({})[0].failed
    assert pool.heartbeat(beat()).admitted, "it is there again"
    assert not pool.status({})[0].failed


@pytest.mark.parametrize(
    ("fields", "awaited"),
    [
        ({"gone": {"e": f"{NOT_STARTED}: refused"}}, "engine e of a to start"),
        ({}, "a to load what is current"),
        ({"gone": {"e": f"{NOT_STARTED}: refused", "f": "it hangs"}}, ""),
        ({"gone": {"e": "it hangs"}}, ""),
        ({"error": "m: pull: nobody has it"}, ""),
    ],
)
def test_who_is_about_to_come_for_the_first_time_is_awaited(fields: dict[str, Any], awaited: str) -> None:
    """What has failed is not, nor who served before."""
    pool, clock = made()
    assert pool.awaited(["m"]) == ""
    pool.claim([at(3)])
    pool.heartbeat(beat("a", leased=False, **fields))
    assert (pool.awaited(["m"]), pool.awaited(["other"])) == (awaited, "")
    for name in ("b", "c", "d"):
        pool.heartbeat(beat(name, leased=False, gone={name: NOT_STARTED}))
    more = ", engine b of b to start, engine c of c to start and 1 more"
    assert pool.awaited(["m"]) == (awaited + more if awaited else "")
    pool.heartbeat(beat("e", at(2), lacks=(), leased=False))
    assert pool.awaited(["m"]) == ""
    clock.now += 2 * LEASE_S
    assert pool.awaited(["m"]) == "", "nobody is heard any more"


def test_who_fails_instead_of_coming_has_the_sync_tried_again() -> None:
    """Nobody would tell of it else: what was awaited was told as no failure. Seen red."""
    pool, clock = made()
    told: list[int] = []
    pool.on_members = lambda: told.append(1)
    pool.claim([at(3)])
    pool.heartbeat(beat("a", leased=False, gone={"e": NOT_STARTED}))
    pool.heartbeat(beat("a", leased=False))
    told.clear()
    pool.heartbeat(beat("a", leased=False))
    assert not told
    for error in ("m: load: out of memory", "m: load: out of memory", "", "m: load: out of memory"):
        pool.heartbeat(beat("a", leased=False, error=error))
        assert told == [1], "once, though it flaps"
    pool.heartbeat(beat("b", leased=False))
    clock.now += LEASE_S
    pool.status({})
    assert told == [1, 1], "b is not heard any more"


def test_an_instance_whose_engine_is_gone_says_so() -> None:
    """Seen red: it stood there as live, and then as one that joins."""
    pool, _ = made()
    pool.decided([at(3)])
    pool.heartbeat(beat("a", at(3), lacks=()))
    for state in ("live", "joining"):
        pool.heartbeat(beat("a", lacks=("m",), gone={"e1": "EngineUnreachableError: can't connect"}))
        (seen,) = pool.status({})
        assert (seen.state, seen.gone) == (state, ("e1",))
        assert "engine e1 is gone: EngineUnreachableError: can't connect" in str(seen.why)
    pool.heartbeat(beat("a", at(3), lacks=()))
    assert (pool.status({})[0].gone, pool.status({})[0].why) == ((), None)


def test_one_that_is_held_up_by_a_set_says_so() -> None:
    pool, _ = made()
    pool.claim([at(8), at(8, model="n")])
    pool.heartbeat(beat("a", lacks=("m", "n"), absent=(AbsentVersion(of=at(8)),)))
    reply = pool.heartbeat(beat("b", at(8), at(3, model="n"), lacks=(), leased=False))
    assert reply.why == "it serves other numbers of models that belong together"


def test_a_claim_does_not_hold_up_who_serves_what_was_decided_last() -> None:
    """Nobody has answered with anything newer. Seen red: a number that never came, or whose agent was gone, kept a
    fleet dark that had the version before."""
    for claims in ([at(50)], [at(1, run_id="next")]):
        pool, clock = made()
        pool.decided([at(7)])
        pool.heartbeat(beat("a", at(7), lacks=()))
        clock.now += 2 * LEASE_S
        told: list[str] = []
        pool.on_members = lambda told=told: told.append("")  # type: ignore[misc]
        pool.claim(claims)
        assert not pool.heartbeat(beat("old", at(6), lacks=(), leased=False)).lease_s
        assert not pool.heartbeat(beat("half", at(7), lacks=(), leased=False, whole=False)).lease_s
        assert pool.heartbeat(beat("a", at(7), lacks=(), leased=False)).lease_s
        assert (pool.current("m"), bool(told)) == (at(7), True), "a sync brings what is claimed"


def test_a_claim_of_a_set_gives_way_as_one() -> None:
    pool, _ = made()
    pool.decided([at(7), at(7, model="n")])
    pool.claim([at(9), at(9, model="n")])
    assert not pool.heartbeat(beat("a", at(7), at(9, model="n"), lacks=(), leased=False)).lease_s
    assert pool.current("n") == at(9, model="n")
    assert pool.heartbeat(beat("b", at(7), at(7, model="n"), lacks=(), leased=False)).lease_s
    assert [pool.current(model) for model in ("m", "n")] == [at(7), at(7, model="n")]
    pool, _ = made()
    pool.claim([at(9), at(9, model="n")])
    assert not pool.heartbeat(beat("a", at(7), at(7, model="n"), lacks=(), leased=False)).lease_s, "nobody decided"


def test_a_sync_that_was_given_up_is_tried_again_when_one_has_it_or_less_is_there() -> None:
    """Seen red: one that waited with it stayed out until the trainer spoke again; and so did all that were told of a
    number too high, after the first of them had heard that."""
    pool, _ = made()
    told: list[str] = []
    pool.decided([at(7)])
    pool.heartbeat(beat("a", at(7), lacks=()))
    pool.heartbeat(beat("j", at(6), lacks=(), leased=False))
    pool.on_members = lambda: told.append("")
    pool.heartbeat(beat("j", at(6), lacks=(), leased=False))
    assert told == []
    pool.heartbeat(beat("j", at(8), lacks=(), leased=False))
    pool.heartbeat(beat("j", at(8), lacks=(), leased=False))
    assert told == [""]
    pool, _ = made()
    pool.claim([at(50)])
    pool.heartbeat(beat("j", lacks=("m",)))
    pool.on_members = lambda: told.append("")
    for newest in (3, None):
        pool.heartbeat(beat("j", lacks=("m",), absent=(AbsentVersion(of=at(50), newest=newest),)))
    assert told == ["", ""]


def test_who_joins_can_be_asked() -> None:
    pool, clock = made()
    pool.decided([at(7)])
    pool.heartbeat(beat("a", at(7), lacks=()))
    pool.heartbeat(beat("j", at(6), lacks=(), leased=False))
    pool.heartbeat(beat("n", at(6, model="n"), lacks=(), leased=False))
    assert [member.instance_id for member in pool.members(["m"], joining=True)] == ["a", "j"]
    clock.now += LEASE_S
    pool.heartbeat(beat("k", at(6), lacks=(), leased=False))
    assert [member.instance_id for member in pool.members(["m"], joining=True)] == ["k"], "the others are silent"


def test_who_waits_with_a_version_is_counted() -> None:
    pool, clock = made()
    both = (at(8), at(8, model="n"))
    pool.decided([at(7), at(7, model="n")])
    pool.heartbeat(beat("a", at(7), at(7, model="n"), lacks=()))
    pool.heartbeat(beat("serves", *both, lacks=(), leased=False))
    pool.heartbeat(beat("half", at(7), at(8, model="n"), lacks=(), leased=False))
    pool.heartbeat(beat("staged", at(8), lacks=("n",), leased=False, staged=(at(8, model="n"),)))
    pool.heartbeat(beat("one", lacks=("m",), leased=False, staged=(at(8),)))
    pool.heartbeat(beat("none", at(1, model="other"), lacks=(), leased=False))
    assert pool.num_waiting(both) == 3
    clock.now += LEASE_S
    assert pool.num_waiting(both) == 0


def test_it_is_told_when_nobody_is_left_with_a_model() -> None:
    """Seen red: another one, with other models, took part."""
    pool, _ = made()
    told: list[str] = []
    pool.heartbeat(beat("a", at(1), lacks=()))
    pool.heartbeat(beat("n", at(1, model="n"), lacks=()))
    pool.on_members = lambda: told.append("")
    pool.evict("a", "for a test")
    assert told == [""]
