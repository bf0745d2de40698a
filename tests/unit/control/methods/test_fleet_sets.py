"""FleetMethod: sets of models, versions and runs that come at once, and what ends late."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.responses import Response

from tests.unit.control.fleet_instances import (
    LEASE_S,
    LONG_S,
    PAIR,
    SENDER,
    Instance,
    World,
    bring,
    raises,
    status_500,
    until,
    v,
)
from weightsync.control.controller import WeightSyncController
from weightsync.control.pool import RolloutPool
from weightsync.errors import (
    DeadlineExceededError,
    EngineUnreachableError,
    NoEnginesError,
    NotPublishedError,
    SyncFailedError,
    TransferAbortedError,
)
from weightsync.handles.fanout import in_thread
from weightsync.types.fleet import HeartbeatRequest, ModelVersion, PrepareRequest


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_who_failed_before_and_came_right_is_not_evicted_later(world: World) -> None:
    """Seen to fail: another model of the set was not published, and who had failed long ago was put out for it."""
    (_a, b, _), method = world.three(PAIR), world.method("all", (PAIR,), barrier_timeout_s=0.2)
    b.on_prepare = status_500
    method.trained("critic", v(1), SENDER)
    with pytest.raises(SyncFailedError):
        bring(method, 1)
    b.on_prepare = lambda asked: None
    assert bring(method, 1) == 1
    with pytest.raises(DeadlineExceededError, match="critic has published 1"):
        bring(method, 2)
    assert method.evict_failed("actor") == []
    assert b.state == "live"


def test_two_models_of_a_set_do_the_work_once(world: World) -> None:
    instances, method = world.three(PAIR), world.method("all", (PAIR,))
    for model in PAIR:
        method.trained(model, v(1), SENDER)
    go = threading.Event()

    async def waits(_: Any) -> None:
        await asyncio.to_thread(go.wait, LONG_S)

    instances[0].on_prepare = waits
    syncs = [in_thread(lambda model=model: method.sync_weights(model, v(1)), name=model) for model in PAIR]  # type: ignore[misc]
    until(lambda: any(span.who == "the other models of the set" for m in PAIR for span in method.spans(m)), "one waits")
    go.set()
    assert [each.result(LONG_S) for each in syncs] == [1, 1]
    for each in instances:
        assert each.names() == ["prepare", "commit"]
        assert [one.model_id for one in each.calls[0][1]] == list(PAIR)


def test_both_models_of_a_set_fail_together_and_can_be_tried_again(world: World) -> None:
    (_, b, _), method = world.three(PAIR), world.method("all", (PAIR,))
    for model in PAIR:
        method.trained(model, v(1), SENDER)
    b.on_prepare = status_500
    syncs = [in_thread(lambda model=model: method.sync_weights(model, v(1)), name=model) for model in PAIR]  # type: ignore[misc]
    for each in syncs:
        with pytest.raises(SyncFailedError, match="1 of 3 instances failed: b"):
            each.result(LONG_S)
    b.on_prepare = lambda asked: None
    assert [method.sync_weights(model, v(1)) for model in PAIR] == [1, 1]


def test_an_instance_is_asked_for_its_own_models_alone(world: World) -> None:
    both, one = world.instance("a", PAIR).beat(), world.instance("b", ("critic",)).beat()
    world.instance("c", ("other",)).beat()
    method = world.method("all", (PAIR,))
    method.trained("critic", v(1), SENDER)
    assert bring(method, 1) == 1
    assert [each.model_id for each in both.calls[0][1]] == list(PAIR)
    assert [each.model_id for each in one.calls[0][1]] == ["critic"]
    assert world.instances[2].calls == []


def test_the_next_version_waits_for_the_one_before(world: World) -> None:
    """Two models of a set: one still waits for version 1 when the other comes with 2."""
    (a, *_), method = world.three(PAIR), world.method("all", (PAIR,))
    for model in PAIR:
        method.trained(model, v(1), SENDER)
    go = threading.Event()

    async def waits(_: Any) -> None:
        await asyncio.to_thread(go.wait, LONG_S)

    a.on_prepare = waits
    first = in_thread(lambda: method.sync_weights("actor", v(1)), name="first")
    until(lambda: a.calls, "it runs")
    for model in PAIR:
        method.trained(model, v(2), SENDER)
    second = in_thread(lambda: method.sync_weights("critic", v(2)), name="second")
    until(lambda: method._running[PAIR][0][0].version == 2, "it waits")
    assert a.names() == ["prepare"]
    go.set()
    assert (first.result(LONG_S), second.result(LONG_S)) == (1, 2)
    assert [calls[1][0].version for calls in a.calls] == [1, 1, 2, 2]


def test_a_version_that_fails_takes_nothing_from_the_next(world: World) -> None:
    """Seen to fail: version 2 was forgotten when 1 failed, and brought twice at once."""
    (a, *_), method = world.three(PAIR), world.method("all", (PAIR,))
    for model in PAIR:
        method.trained(model, v(1), SENDER)
    go, again = threading.Event(), threading.Event()

    async def waits(asked: PrepareRequest) -> Response | None:
        if asked.versions[0].version == 1:
            await asyncio.to_thread(go.wait, LONG_S)
            return status_500(asked)
        await asyncio.to_thread(again.wait, LONG_S)
        return None

    a.on_prepare = waits
    first = in_thread(lambda: method.sync_weights("actor", v(1)), name="first")
    until(lambda: a.calls, "it runs")
    for model in PAIR:
        method.trained(model, v(2), SENDER)
    second = in_thread(lambda: method.sync_weights("critic", v(2)), name="second")
    until(lambda: method._running[PAIR][0][0].version == 2, "it waits")
    go.set()
    with pytest.raises(SyncFailedError):
        first.result(LONG_S)
    until(lambda: len(world.steps) and a.names()[-1] == "prepare" and len(a.calls) > 2, "2 is prepared")
    third = in_thread(lambda: method.sync_weights("actor", v(2)), name="third")
    until(lambda: any(span.who == "the other models of the set" for span in method.spans("actor")), "it waits for 2")
    again.set()
    assert (second.result(LONG_S), third.result(LONG_S)) == (2, 2)
    assert [versions[0].version for name, versions in a.calls if name == "prepare"] == [1, 2]


@pytest.mark.parametrize(("number", "run_id"), [(2, "r"), (1, "next")])
def test_a_call_that_was_not_waited_for_takes_nothing_back(world: World, number: int, run_id: str) -> None:
    """It ends when the fleet has gone on. Seen to fail: what is current went back to the version of that call, also to
    the run before."""
    (a, b, _), method = world.three(), world.method(prepare_timeout_s=8.0)
    go, others = threading.Event(), set(threading.enumerate())

    async def waits(asked: PrepareRequest) -> None:
        if asked.versions[0].of == v(1):
            await asyncio.to_thread(go.wait, LONG_S)

    b.on_prepare = waits
    began = in_thread(lambda: bring(method, 1), name="sync")
    until(lambda: b.calls, "it is asked")
    b.silent()
    assert began.result(LONG_S) == 1
    b.beat()
    assert bring(method, number, run_id=run_id) == number
    mine = [each for each in threading.enumerate() if each.name == "weightsync-fleet" and each not in others]
    go.set()
    until(lambda: not any(each.is_alive() for each in mine), "the late call ends")
    current = world.pool.current("actor")
    assert current is not None
    assert current.of == v(number, run_id)
    assert a.served["actor"].of == v(number, run_id)


def test_an_instance_that_is_gone_and_does_not_beat(world: World) -> None:
    (a, b, _), method = world.three(), world.method("all")
    b.close()
    assert bring(method, 1) == 1
    assert b.state == "evicted"
    assert a.served["actor"].of == v(1)


def test_an_instance_that_cannot_be_reached_and_beats(world: World) -> None:
    (_, b, _), method = world.three(), world.method("all")
    b.server.close()
    with pytest.raises(SyncFailedError) as caught:
        bring(method, 1)
    assert isinstance(caught.value.causes["b"], EngineUnreachableError)
    assert method.evict_failed("actor") == ["b"]


def test_a_new_run_ends_the_wait_of_the_old_one(world: World) -> None:
    world.three(PAIR)
    method = world.method("all", (PAIR,))
    old = in_thread(lambda: bring(method, 1, run_id="old"), name="old")
    until(method.barriers, "it waits")
    method.trained("actor", v(1, "new"), "http://new-agent")
    with pytest.raises(TransferAbortedError, match="run new"):
        old.result(LONG_S)
    method.trained("critic", v(1), SENDER)
    assert method.sync_weights("actor", v(1, "new")) == 1
    assert world.instances[0].calls[0][1][0].sender_endpoint == "http://new-agent"


def test_who_joins_fetches_meanwhile_and_comes_in_when_the_sync_has_ended(world: World) -> None:
    one, method = world.instance("a").beat(), world.method()
    go = threading.Event()

    async def waits(_: Any) -> None:
        await asyncio.to_thread(go.wait, LONG_S)

    one.on_prepare = waits
    done = in_thread(lambda: bring(method, 1), name="sync")
    until(lambda: one.calls, "it runs")
    late = world.instance("late")
    assert late.beat_once() == 0.0, "it is told what to fetch"
    assert late.served["actor"].of == v(1)
    assert late.beat_once() == 0.0, "it has that, and nobody has decided for it"
    assert {each.instance_id: each.state for each in method.instances()} == {"a": "live", "late": "joining"}
    go.set()
    done.result(LONG_S)
    assert late.beat_once() == LEASE_S
    assert method.instances()[1].lag == {"actor": 0}


def test_who_joins_is_asked_for_a_number_that_nobody_can_fetch(world: World) -> None:
    """Seen red: nobody took part, so nobody was asked, and no lower number was told of any more."""
    world.pool.decided([ModelVersion(model_id="actor", run_id="r", version=1, sender_endpoint=SENDER)])
    joins, method = world.instance("joins"), world.method()
    joins.on_check = raises(NotPublishedError("as told", version=str(v(51)), newest=3))
    joins.served["actor"] = ModelVersion(model_id="actor", run_id="before", version=1, sender_endpoint=SENDER)
    assert joins.beat_once() == 0.0
    with pytest.raises(NotPublishedError) as caught:
        bring(method, 51)
    assert caught.value.newest == 3
    assert method.barrier.published()["actor"].version == 3
    joins.on_check = status_500
    with pytest.raises(NoEnginesError):
        bring(method, 4)


def test_that_a_trainer_has_ended_counts_where_all_say_so(world: World) -> None:
    """Seen red: a trainer that had ended was a failure of the instances, which were put out for it."""
    instances, method = world.three(), world.method("all")
    for each in instances[1:]:
        each.on_prepare = raises(NotPublishedError("the trainer has ended, and nobody has r/1 any more"))
    with pytest.raises(SyncFailedError, match="2 of 3 instances failed"):
        bring(method, 1)
    instances[0].on_prepare = instances[1].on_prepare
    with pytest.raises(NotPublishedError, match="nobody has r/1 any more") as caught:
        bring(method, 1)
    assert caught.value.newest is None


def test_of_a_set_one_trainer_that_has_ended_says_nothing_of_the_others(world: World) -> None:
    instances, method = [world.instance(name, PAIR).beat() for name in ("a", "b")], world.method("all", (PAIR,))
    for each in instances:
        each.on_prepare = raises(NotPublishedError("the actor's trainer has ended, and nobody has r/1 any more"))
    method.trained("critic", v(1), SENDER)
    with pytest.raises(SyncFailedError, match="2 of 2 instances failed"):
        bring(method, 1)


def test_who_joins_is_asked_for_a_set_that_waits(world: World) -> None:
    """Seen red: a number too high of one model held up its set until the barrier's time was over."""
    world.pool.decided([ModelVersion(model_id=model, run_id="r", version=1, sender_endpoint=SENDER) for model in PAIR])
    joins, method = world.instance("joins", PAIR), world.method("all", (PAIR,), barrier_timeout_s=LONG_S)
    joins.on_check = raises(NotPublishedError("as told", version=str(v(51)), newest=3))
    joins.beat_once()
    joins.served.clear()
    joins.beat_once()
    method.trained("critic", v(3), SENDER)
    with pytest.raises(NotPublishedError):
        bring(method, 51)
    assert method.barrier.published()["actor"].version == 3


def test_who_comes_in_while_an_agent_is_asked_is_brought_that_at_once(world: World) -> None:
    """Seen red: the sync had failed for want of one, and nobody tried again when that was the last retry."""
    one = ModelVersion(model_id="actor", run_id="r", version=1, sender_endpoint=SENDER)
    world.pool.decided([one])
    joins, method = world.instance("joins"), world.method()
    joins.beat_once()
    joins.served.clear()
    joins.beat_once()

    def comes_in(_: Any) -> None:
        joins.served["actor"] = one
        assert joins.beat_once() == LEASE_S

    joins.on_check = comes_in
    assert bring(method, 2) == 2
    assert joins.served["actor"].of == v(2)


@pytest.mark.parametrize("mode", ["sync", "batch-async"])
@pytest.mark.parametrize("heard", [("actor",), PAIR], ids=["one is not heard", "apart"])
@pytest.mark.parametrize("told", [False, True], ids=["silent trainers", "a trainer tells it again"])
def test_a_controller_that_was_started_again_leaves_a_set_as_it_is_served(
    world: World, mode: str, heard: tuple[str, ...], told: bool
) -> None:
    """By instances of one model each, which mix nothing. Seen red: rollout was locked until the barrier's end, for a
    number that nobody would publish."""
    world.pool._learning.until_s = time.monotonic() + 2 * LONG_S  # it listens
    for number, model in enumerate(heard):
        _serves(world, model, 5 - number).beat_once()
    method = world.method(sets=(PAIR,), barrier_timeout_s=2 * LONG_S)
    with contextlib.closing(WeightSyncController({"sync_mode": mode}, method, model_tags=PAIR)) as controller:
        if told:  # by another of its addresses
            controller.train_worker_notify_weight_update(
                "w", "actor", "r", 5, sender_endpoint="http://b", timeout_s=0.0
            )
            until(lambda: method.spans("actor") == () and controller.rollout_service_state("actor").blocked, "it syncs")
        world.pool._learning.until_s = time.monotonic()
        for each in world.instances:
            each.beat()
        for number, model in enumerate(heard):
            state = functools.partial(controller.rollout_service_state, model)
            until(lambda state=state, n=5 - number: state().rollout_model_version == n, "learnt")  # type: ignore[misc]
            assert controller.await_rollout_service(model, timeout_s=LONG_S) == "continue"
    assert all(each.names() == [] for each in world.instances), "nothing is brought"


def test_what_is_served_apart_does_not_overtake_its_set(world: World) -> None:
    """Which is on its way."""
    for model in PAIR:
        world.instance(model, (model,)).beat()
    method, go = world.method(sets=(PAIR,)), threading.Event()
    method.trained("critic", v(5), SENDER)
    bring(method, 5)

    async def waits(_: Any) -> None:
        await asyncio.to_thread(go.wait, LONG_S)

    for model, each in zip(PAIR, world.instances, strict=True):
        method.trained(model, v(6), SENDER)
        each.on_prepare = waits
    sync = in_thread(lambda: method.sync_weights("critic", v(6)), name="sync")
    until(lambda: world.instances[0].names()[-1] == "prepare", "it is on its way")
    late = in_thread(lambda: method.sync_weights("actor", v(5)), name="late")
    until(lambda: any(span.name == "transfer" for span in method.spans("actor")), "it waits for the set")
    go.set()
    assert (late.result(LONG_S), sync.result(LONG_S)) == (6, 6)


def _serves(world: World, model: str, number: int) -> Instance:
    """An instance of that model alone, which serves that."""
    one = world.instance(model, (model,))
    one.served = {model: ModelVersion(model_id=model, run_id="r", version=number, sender_endpoint=SENDER)}
    return one


def test_a_method_tells_its_pool_of_its_sets(world: World) -> None:
    """Half of what is no set may answer, and half of a set may not."""
    serves = tuple(ModelVersion(model_id=model, run_id="r", version=1, sender_endpoint=SENDER) for model in PAIR)

    def lent_s() -> float:
        beat = HeartbeatRequest(instance_id="half", incarnation="1", url=SENDER, serves=serves, whole=False)
        return world.pool.heartbeat(beat).lease_s

    world.method(sets=(PAIR,))
    assert lent_s() == 0.0
    world.pool = RolloutPool(lease_s=LEASE_S)
    world.pool._learning.until_s = 0.0
    world.method()
    assert lent_s() == LEASE_S
