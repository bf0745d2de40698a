"""A controller that was started again listens for a lease: who was lent one before goes on until that is over."""

from __future__ import annotations

import math

import pytest

from tests.unit.control.pool_kit import LEASE_S, MODELS, at, beat, made
from weightsync.control.pool import RolloutPool
from weightsync.errors import InvalidRequestError, StateError
from weightsync.types.fleet import HeartbeatReply

SERVES = (at(4), at(4, model="n"))


def heard(pool: RolloutPool, left_s: float, name: str = "a") -> HeartbeatReply:
    return pool.heartbeat(beat(name, *SERVES, left_s=left_s))


def test_it_keeps_what_it_was_lent_and_is_lent_nothing() -> None:
    """Seen red: each restart of a controller made its whole fleet dark for most of a lease, and cut off what was being
    generated."""
    pool, clock = made(learnt=False)
    pool.claim([at(5), at(5, model="n")])
    clock.now += 1.0
    for left_s in (9.0, 8.0):
        reply = heard(pool, left_s)
        assert (reply.state, reply.lease_s, reply.catch_up) == ("joining", left_s, ()), "who answers fetches nothing"
        assert reply.every_s <= 1.0
        (status,) = pool.status({})
        assert (status.state, status.lease_left_s) == ("joining", left_s)
        clock.now += 1.0
    assert pool.unfenced(MODELS) == ("a",), "a sync waits for it"
    assert pool.members(MODELS) == ()
    clock.now += 7.0
    assert pool.unfenced(MODELS) == ()
    assert heard(pool, 0.0).lease_s == 0.0
    clock.now += 3.0
    assert (heard(pool, 0.0).state, heard(pool, 0.0).lease_s) == ("live", LEASE_S), "it has listened"


@pytest.mark.parametrize("fields", [{"whole": False}, {"serves": SERVES[:1], "lacks": ("n",)}, {"left_s": 0.0}])
def test_who_serves_part_of_a_set_or_was_lent_nothing_refuses_at_once(fields: dict[str, object]) -> None:
    pool, _ = made(learnt=False)
    pool.know_sets([MODELS])
    serves = fields.pop("serves", SERVES)
    told = beat("a", *serves, **{"left_s": 5.0, **fields})  # type: ignore[misc]
    assert pool.heartbeat(told).lease_s == 0.0
    assert pool.unfenced(MODELS) == (("a",) if told.left_s else ()), "it may not have heard that"


def test_behind_the_listening_it_answers_with_what_is_current_or_not_at_all() -> None:
    pool, clock = made(learnt=False)
    heard(pool, 1.0)
    pool.heartbeat(beat("b", at(5), at(5, model="n")))
    clock.now += LEASE_S
    reply = heard(pool, 5.0)
    assert (reply.lease_s, reply.catch_up) == (0.0, (at(5), at(5, model="n")))


def test_one_that_was_lent_more_than_this_controller_lends_is_waited_for() -> None:
    """Seen red: it called a version served beside an instance that answered with the one before."""
    pool, clock = made(learnt=False)
    heard(pool, 3 * LEASE_S)
    clock.now += 2 * LEASE_S
    assert heard(pool, LEASE_S).state == "joining"
    assert heard(pool, LEASE_S, name="b").state == "joining", "nobody comes in before"
    clock.now += LEASE_S
    assert heard(pool, 0.0).state == "live"


def test_whoever_says_that_it_may_answer_is_waited_for() -> None:
    """A controller beside this one has lent it that, and it may not hear that this one ends it. Seen red: it counted as
    one that answers no more."""
    pool, clock = made()
    pool.decided([at(5), at(5, model="n")])
    assert heard(pool, 9.0).lease_s == 0.0
    assert pool.unfenced(MODELS) == ("a",)
    clock.now += 9.0
    assert pool.unfenced(MODELS) == ()


def test_a_lease_that_is_longer_than_this_controllers_is_waited_for_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a version was called served after this controller's own lease, beside who answered with the one before
    for as long as another one had lent it."""
    pool, clock = made()
    pool.decided([at(4), at(4, model="n")])
    assert heard(pool, 5 * LEASE_S).state == "live"
    pool.evict("a", "as told")
    clock.now += 2 * LEASE_S
    assert pool.unfenced(MODELS) == ("a",)
    waits = list[float]()
    monkeypatch.setattr(pool, "_wait", lambda done, within_s: waits.append(within_s))
    pool.wait_fenced(("a",))
    assert waits[0] > 3 * LEASE_S
    clock.now += 3 * LEASE_S
    assert pool.unfenced(MODELS) == ()


def test_who_goes_on_meanwhile_is_among_those_that_may_answer() -> None:
    pool, _ = made(learnt=False)
    heard(pool, 5.0)
    pool.heartbeat(beat("b", *SERVES))
    assert {each.instance_id: each.may_answer("m") for each in pool.status({})} == {"a": True, "b": False}


def test_another_process_of_its_name_waits_until_it_is_over() -> None:
    pool, clock = made(learnt=False)
    heard(pool, 5.0)
    with pytest.raises(StateError, match=r"has a lease for 5\.0 s"):
        pool.heartbeat(beat("a", *SERVES, incarnation="2"))
    clock.now += 5.0
    assert pool.heartbeat(beat("a", *SERVES, incarnation="2", left_s=0.0)).state == "joining"


def test_a_word_that_it_comes_in_is_said_again_to_one_whose_models_are_of_no_set() -> None:
    """Its lease file was torn, and the word was lost on its way. Seen red: its engines refused until the next commit,
    while the pool counted it among those that answer."""
    pool, _ = made()
    pool.know_sets([])
    assert pool.heartbeat(beat("a", whole=False)).admitted
    assert pool.heartbeat(beat("a", whole=False)).admitted
    assert not pool.heartbeat(beat("a")).admitted


@pytest.mark.parametrize("left_s", [-1.0, 4000.0, math.nan])
def test_what_no_lease_can_have_left_is_refused(left_s: float) -> None:
    with pytest.raises(InvalidRequestError, match="a lease has 0 to 3600 s left"):
        beat("a", *SERVES, left_s=left_s)
