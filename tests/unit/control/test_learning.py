"""What a controller learns that was started anew: from whole sets, of each model, and on while nobody else decides."""

from __future__ import annotations

from tests.unit.control.pool_kit import LEASE_S, Clock, at, beat, made, states
from weightsync.control.pool import RolloutPool


def learnt_from(version: int) -> tuple[RolloutPool, Clock]:
    """A pool that has listened for a lease to two instances which serve that."""
    pool, clock = made(learnt=False)
    for _ in range(4):
        for name in "ab":
            pool.heartbeat(beat(name, at(version), lacks=(), leased=False))
        clock.now += LEASE_S / 3
    assert pool.current("m") == at(version)
    return pool, clock


def test_a_commit_that_the_controller_before_has_told_outlasts_the_listening() -> None:
    """Seen red: both had committed 8 when 7 had been learnt; they were ahead, evicted, and nobody answered again."""
    pool, clock = learnt_from(7)
    told: list[object] = []
    pool.on_learnt = told.append
    for _ in range(20):
        replies = [pool.heartbeat(beat(name, at(8), lacks=(), leased=True)) for name in "ab"]
        clock.now += 1
    assert all(reply.lease_s for reply in replies)
    assert pool.current("m") == at(8)
    assert told == [(at(8),)]


def test_the_first_of_them_is_followed_by_the_others() -> None:
    pool, clock = learnt_from(7)
    assert pool.heartbeat(beat("a", at(8), lacks=())).lease_s
    pool.heartbeat(beat("b", at(7), lacks=()))
    clock.now += 1
    assert pool.heartbeat(beat("b", at(7), lacks=())).state in ("suspect", "joining")
    assert pool.heartbeat(beat("b", at(7), lacks=(), leased=False)).catch_up == (at(8),)
    assert pool.heartbeat(beat("b", at(8), lacks=(), leased=False)).lease_s


def test_who_was_not_believed_and_is_right_brings_the_fleet_back() -> None:
    """Seen red: x, which still had 7, was heard once and gone; a and b had 8 and were ahead of it, for ever."""
    pool, clock = made(learnt=False)
    leased = dict.fromkeys("abx", True)
    for turn in range(30):
        for name, version in (("x", 7), ("a", 8), ("b", 8)):
            if name == "x" and turn:
                continue  # it was killed
            reply = pool.heartbeat(beat(name, at(version), lacks=(), leased=leased[name]))
            leased[name] = reply.lease_s > 0
        clock.now += 1
    assert pool.current("m") == at(8)
    assert leased["a"]
    assert leased["b"]


def test_one_alone_does_not_take_those_that_answer_with_it() -> None:
    """What it has may be had from nobody: they would go dark."""
    pool, clock = learnt_from(7)
    for name in "ab":
        assert pool.heartbeat(beat(name, at(7), lacks=(), leased=True)).lease_s
    for _ in range(3):
        assert not pool.heartbeat(beat("c", at(8), lacks=(), leased=False)).lease_s
        assert all(pool.heartbeat(beat(name, at(7), lacks=(), leased=True)).lease_s for name in "ab")
        clock.now += 1
    pool.heartbeat(beat("d", at(8), lacks=(), leased=False))
    assert pool.current("m") == at(8), "two of them agree"


def test_once_a_sync_has_run_nothing_more_is_learnt() -> None:
    """Of a sync that came to nothing an instance may serve what nobody decided for."""
    pool, clock = learnt_from(7)
    with pool.syncing([at(9)]):
        pass
    for _ in range(2):
        reply = pool.heartbeat(beat("a", at(9), lacks=()))
        clock.now += 1
    assert (reply.lease_s, pool.current("m")) == (0.0, at(7))


def test_a_part_of_a_set_teaches_nothing() -> None:
    pool, _ = learnt_from(7)
    pool.heartbeat(beat("a", at(8), lacks=(), whole=False))
    assert pool.current("m") == at(7)


def test_a_trainer_that_speaks_meanwhile_leaves_the_other_models_to_be_learnt() -> None:
    """Seen red: nothing was learnt of n, and who had an old version of it, or nothing, was lent a lease."""
    pool, clock = made(learnt=False)
    pool.claim([at(4)])

    def says(name: str, version: int | None, *, leased: bool) -> float:
        serves = () if version is None else (at(version, model="n"),)
        return pool.heartbeat(beat(name, *serves, lacks=("n",) if version is None else (), leased=leased)).lease_s

    says("a", 5, leased=True)
    says("old", 2, leased=False)
    clock.now += LEASE_S
    assert says("a", 5, leased=True)
    assert not says("old", 2, leased=False)
    assert not says("new", None, leased=False)
    assert (pool.current("m"), pool.current("n")) == (at(4), at(5, model="n"))
    assert states(pool) == {"a": "live", "old": "joining", "new": "joining"}
