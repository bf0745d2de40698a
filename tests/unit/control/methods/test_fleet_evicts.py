"""FleetMethod with `after_failure: evict`: one sync goes on without who failed all retries; then that one is back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.control.fleet_instances import SENDER, World, bring, raises, until, v
from weightsync.control.controller import WeightSyncController
from weightsync.errors import SyncFailedError

NO_ROOM = raises(SyncFailedError("no room", causes={}))


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def why(world: World, name: str) -> str:
    return {each.instance_id: each.why or "" for each in world.pool.status({})}[name]


def test_all_others_are_synced_without_who_failed_all_retries(world: World) -> None:
    """Seen red: its next heartbeat let it in before that sync, which failed by it again, as did each later version."""
    (a, b, c), method = world.three(), world.method("all")
    assert bring(method, 1) == 1
    b.on_prepare, b.learns = NO_ROOM, False
    controller = WeightSyncController(
        {"sync_mode": "sync"}, method, model_tags=("actor",), retries_s=(0.01,), after_failure="evict"
    )
    for number in (2, 3):
        controller.train_worker_notify_weight_update("w", "actor", "r", number, sender_endpoint=SENDER)
        until(lambda at=number: controller.rollout_service_state("actor").rollout_model_version == at, "it is served")  # type: ignore[misc]
        state = controller.rollout_service_state("actor")
        assert (state.overdue, state.num_failed) == (False, 0)
        assert (a.served["actor"].of, b.served["actor"].of, c.served["actor"].of) == (v(number), v(1), v(number))
    assert b.names() == ["prepare", "commit", *["prepare", "release"] * 2], "version 3 was not held up by it"
    b.on_prepare, b.learns = lambda asked: None, True
    until(lambda: b.state == "live", "it has caught up")
    assert b.served["actor"].of == v(3)
    controller.close()


@pytest.mark.parametrize("policy", ["all", "quorum(3)"])
def test_who_was_left_out_comes_in_when_that_sync_has_ended_well_or_not(world: World, policy: str) -> None:
    """Seen red: it came in before."""
    (a, b, c), method = world.three(), world.method(policy)
    assert bring(method, 1) == 1
    b.on_prepare = NO_ROOM
    with pytest.raises(SyncFailedError, match="1 of 3"):
        bring(method, 2)
    assert method.evict_failed("actor") == ["b"]
    assert world.pool.fenced("b")
    assert b.state == "joining"
    assert why(world, "b") == "the next sync goes on without it; it was left out: it failed all retries of a sync"
    a.on_prepare = NO_ROOM
    with pytest.raises(SyncFailedError):
        method.sync_weights("actor", v(2))
    until(lambda: b.state == "live", "what is current is what it serves")
    assert b.served["actor"].of == v(1)
    assert c.state == "live"


def test_where_all_failed_nobody_is_left_out(world: World) -> None:
    """A trainer that is dead: all answer with what they have. Seen red where all were left out: no sync may follow."""
    instances, method = world.three(), world.method("all")
    assert bring(method, 1) == 1
    for each in instances:
        each.on_prepare = NO_ROOM
    with pytest.raises(SyncFailedError, match="3 of 3"):
        bring(method, 2)
    assert method.evict_failed("actor") == ["a", "b", "c"]
    until(lambda: all(each.state == "live" for each in instances), "they go on")


def test_who_was_left_out_comes_in_after_a_sync_that_was_not_begun(world: World) -> None:
    """It waits in vain for the other model of its set. Seen red: where each sync's end lets nobody in, it stays out."""
    (_, b, _), method = world.three(), world.method("all", sets=(("actor", "critic"),), barrier_timeout_s=0.05)
    world.pool.leave_out("actor", ["b"])
    world.pool.evict("b", "as told")
    world.pool.wait_fenced(["b"])
    assert b.state == "joining"
    method.trained("actor", v(1), SENDER)
    with pytest.raises(Exception, match="critic"):
        method.sync_weights("actor", v(1))
    until(lambda: b.state == "live", "it is over")


def test_one_that_comes_back_after_a_sync_that_was_given_up_is_no_reason_to_try_it_again(world: World) -> None:
    """Too few are left without it. Seen red: it came in when that sync had ended, as somebody who might make it go, and
    was tried, evicted and let in for ever."""
    (_, b, _), method = world.three(), world.method("quorum(3)")
    assert bring(method, 1) == 1
    b.on_prepare, b.learns = NO_ROOM, False
    controller = WeightSyncController(
        {"sync_mode": "sync"}, method, model_tags=("actor",), retries_s=(0.01,), after_failure="evict"
    )
    controller.train_worker_notify_weight_update("w", "actor", "r", 2, sender_endpoint=SENDER)
    until(lambda: controller.rollout_service_state("actor").overdue, "it is given up")
    until(lambda: b.state == "live", "it is back")
    seen = b.num_beats
    until(lambda: b.num_beats > seen + 20, "it is heard again and again")
    assert [each.outcome for each in controller.status().syncs] == ["failed"] * 3
    assert controller.rollout_service_state("actor").state == "running"
    controller.close()
