"""What a controller learns that was started anew: from whole sets, of each model, and on while nobody else decides."""

from __future__ import annotations

from tests.unit.control.pool_kit import LEASE_S, Clock, at, beat, made, states
from weightsync.control.pool import RolloutPool
from weightsync.types.fleet import AbsentVersion


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
    for name in "de":
        assert pool.current("m") == at(7), "no more than those that answer"
        pool.heartbeat(beat(name, at(8), lacks=(), leased=False))
    assert pool.current("m") == at(8), "they are more"


def test_one_that_answers_does_not_take_two_others_with_it() -> None:
    """A commit of the controller before. Seen red: the two that had 7 were left out, and could have 8 from nobody."""
    pool, clock = learnt_from(7)
    told: list[object] = []
    pool.on_learnt = told.append
    for name in "abc":
        assert pool.heartbeat(beat(name, at(7), lacks=())).lease_s
    for _ in range(3):
        assert not pool.heartbeat(beat("a", at(8), lacks=())).lease_s
        assert all(pool.heartbeat(beat(name, at(7), lacks=())).lease_s for name in "bc")
        clock.now += 1
    assert [member.instance_id for member in pool.members("m")] == ["b", "c"], "it has no part in the sync"
    assert (pool.current("m"), told[0]) == (at(7), (at(8),)), "a sync brings them there"
    with pool.syncing([at(8)]):
        pool.decided([at(8)])
    assert pool.heartbeat(beat("a", at(8), lacks=(), leased=False)).lease_s


def test_what_others_that_have_other_models_serve_holds_up_nobody() -> None:
    """Seen red: b, which answers with n, counted against the only instance of m."""
    pool, clock = made(learnt=False)
    for _ in range(3):
        pool.heartbeat(beat("x", at(7), lacks=(), leased=False))
        pool.heartbeat(beat("b", at(1, model="n"), lacks=()))
        clock.now += LEASE_S / 3
    for _ in range(int(LEASE_S) + 2):  # x is gone, and is forgotten after a lease
        assert pool.heartbeat(beat("b", at(1, model="n"), lacks=())).lease_s
        reply = pool.heartbeat(beat("a", at(8), lacks=(), leased=False))
        clock.now += 1
    assert (reply.lease_s > 0, pool.current("m")) == (True, at(8))


def test_a_set_is_learnt_as_one() -> None:
    """Seen red: half a set agreed with one that had 8 of both; half of the goal was theirs, and half a set came in."""
    pool, clock = made(learnt=False)
    sets = {version: (at(version), at(version, model="n")) for version in (7, 8)}
    for _ in range(4):
        pool.heartbeat(beat("x", *sets[7], lacks=()))
        clock.now += LEASE_S / 3
    half = beat("h", sets[8][0], sets[7][1], lacks=(), whole=False, leased=False)
    for _ in range(3):
        assert pool.heartbeat(beat("x", *sets[7], lacks=())).lease_s
        assert not pool.heartbeat(half).lease_s
        assert not pool.heartbeat(beat("a", *sets[8], lacks=(), leased=False)).lease_s
        clock.now += 1
    assert [pool.current(model) for model in ("m", "n")] == list(sets[7])


def test_a_trainers_word_behind_the_listening_finds_who_may_answer() -> None:
    """Seen red: nobody had sent a heartbeat since then, so the fleet was to serve what it had not fetched."""
    pool, clock = made(learnt=False)
    for _ in range(3):
        for name in "ab":
            pool.heartbeat(beat(name, at(7), lacks=(), leased=False))
        clock.now += LEASE_S / 3
    assert [member.instance_id for member in pool.claim([at(8)])] == ["a", "b"]
    assert pool.heartbeat(beat("a", at(7), lacks=(), leased=False)).lease_s


def test_a_claim_gives_way_to_what_instances_answer_with() -> None:
    """Its sync is tried again when they take part. Seen red: they answered nothing until they had loaded it, and with
    a number that is not there they came in with whatever each had."""
    for claim in (at(9), at(1000), at(3), at(1, run_id="next")):
        pool, clock = made(learnt=False)
        for turn in range(4):
            for name, version in (("a", 7), ("b", 7), ("c", 6)):
                pool.heartbeat(beat(name, at(version), lacks=(), leased=turn == 0))
            if turn == 1:
                pool.claim([claim])
            clock.now += LEASE_S / 3
        assert [member.instance_id for member in pool.members("m")] == ["a", "b"], claim
        assert pool.current("m") == at(7)


def test_a_claim_stays_before_what_nobody_could_answer_with() -> None:
    """Of the last of a fleet, that was being left behind; where it is denied that counts. Seen red: with no goal left
    each came in with what it had."""
    for newest, goal in ((None, at(7)), (6, at(7)), (8, at(8))):
        pool, clock = made(learnt=False)
        pool.heartbeat(beat("a", at(7), lacks=(), leased=False))
        pool.claim([at(1000)])
        clock.now += LEASE_S
        assert pool.heartbeat(beat("a", at(7), lacks=(), leased=False)).catch_up == (at(1000),)
        absent = AbsentVersion(of=at(1000), newest=newest)
        reply = pool.heartbeat(beat("a", at(7), lacks=(), leased=False, absent=(absent,)))
        assert (pool.current("m"), reply.lease_s > 0) == (goal, goal == at(7))


def test_a_claim_that_is_denied_and_leaves_no_goal_is_learnt_from() -> None:
    """All were cut off while the controller listened. Seen red: each came in with what it had, 7 beside 6."""
    pool, clock = made(learnt=False)
    pool.claim([at(1000, run_id="none")])
    clock.now += 2 * LEASE_S
    for name, version in (("a", 7), ("b", 6), ("c", 7)):
        assert not pool.heartbeat(beat(name, at(version), lacks=(), leased=False)).lease_s
    absent = AbsentVersion(of=at(1000, run_id="none"))
    leases = {
        name: pool.heartbeat(beat(name, at(version), lacks=(), leased=False, absent=(absent,))).lease_s > 0
        for name, version in (("b", 6), ("a", 7), ("c", 7))
    }
    assert (leases, pool.current("m")) == ({"a": True, "b": False, "c": True}, at(7))


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


def test_who_has_one_model_of_a_set_takes_the_others_out_of_none() -> None:
    """Seen red: a, which has m alone, had 5; b was to serve that beside 1 of n, and came in with half of a set."""
    pool, clock = made(learnt=False)
    pool.know_sets([("m", "n")])
    old, half = (at(1), at(1, model="n")), (at(5), at(1, model="n"))
    for _ in range(4):
        assert not pool.heartbeat(beat("b", *old, lacks=(), leased=False)).lease_s
        reply = pool.heartbeat(beat("a", at(5), lacks=()))
        clock.now += LEASE_S / 3
    assert reply.lease_s
    assert not pool.heartbeat(beat("b", *half, lacks=(), leased=False)).lease_s
    pool.decided([at(5), at(5, model="n")])
    assert pool.heartbeat(beat("b", at(5), at(5, model="n"), lacks=(), leased=False)).lease_s


def test_numbers_of_a_set_that_two_instances_have_apart_are_no_set() -> None:
    """Each has one model. Seen red: c came in with 5 of the one and 3 of the other."""
    pool, clock = made(learnt=False)
    pool.know_sets([("m", "n")])
    for _ in range(4):
        pool.heartbeat(beat("a", at(5), lacks=()))
        pool.heartbeat(beat("b", at(3, model="n"), lacks=()))
        pool.heartbeat(beat("c", at(1), at(1, model="n"), lacks=(), leased=False))
        clock.now += LEASE_S / 3
    assert (pool.current("m"), pool.current("n")) == (at(5), at(3, model="n"))
    for whole in (False, True):
        assert not pool.heartbeat(beat("c", at(5), at(3, model="n"), lacks=(), leased=False, whole=whole)).lease_s
    pool.decided([at(6), at(6, model="n")])
    assert pool.heartbeat(beat("c", at(6), at(6, model="n"), lacks=(), leased=False)).lease_s


def test_a_model_without_a_set_is_never_half_of_one() -> None:
    """It had committed something below a number that nobody has, of which it was told. Seen red: its controller was
    started anew, and left it out for half of a set until the trainer's next word."""
    for models, lacks, lent in (("m", "", LEASE_S), ("mx", "", LEASE_S), ("mn", "", 0.0), ("m", "n", 0.0)):
        pool, clock = made(learnt=False)
        pool.know_sets([("m", "n")])
        serves = [at(2, model=model) for model in models]
        for _ in range(4):
            reply = pool.heartbeat(beat("a", *serves, lacks=tuple(lacks), whole=False, leased=False))
            clock.now += LEASE_S / 3
        assert reply.lease_s == lent, (models, lacks)
