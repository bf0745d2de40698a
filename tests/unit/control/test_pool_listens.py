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
    assert pool.heartbeat(beat("a", *serves, **{"left_s": 5.0, **fields})).lease_s == 0.0  # type: ignore[misc]
    assert pool.unfenced(MODELS) == ()


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
