"""FleetMethod against services that answer over HTTP as they are told to: commit policies and failures."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.control.fleet_instances import (
    LEASE_S,
    LONG_S,
    SENDER,
    Does,
    World,
    answer,
    bring,
    raises,
    served,
    status_500,
    until,
    v,
)
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.errors import ConfigError, InvalidRequestError, NoEnginesError, SyncFailedError, VersionError
from weightsync.handles.fanout import in_thread
from weightsync.types.fleet import NOT_STARTED, HeartbeatRequest, ModelVersion, PrepareReply
from weightsync.types.service import ServiceStatus


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.mark.parametrize("policy", ["each", "all", "quorum(2)", "quorum(3)"])
def test_every_instance_serves_it(world: World, policy: str) -> None:
    instances, method = world.three(), world.method(policy, straggler_s=LONG_S)
    assert bring(method, 1) == 1
    for each in instances:
        assert each.names() == ["prepare", "commit"]
        assert each.served["actor"].of == v(1)
        assert each.calls[0][1][0].sender_endpoint == SENDER
    names = {(span.name, span.who) for span in method.spans("actor")}
    assert names >= {("barrier", None), ("transfer", "a"), ("commit", "b"), ("load", "c"), ("pause", "a")}
    assert method.spans("critic") == ()
    if policy != "each":
        assert [at for at, _ in world.steps].index("commit") > world.steps.index(("decide", ""))


def test_who_waited_for_an_agent_is_told_from_who_waited_for_bytes(world: World) -> None:
    """One behind the other; and nobody can have waited longer than the call took."""
    instances, method = world.three(), world.method("all")
    for each, waited_s in zip(instances, (0.0, 1e-4, 60.0), strict=True):
        each.on_prepare = lambda asked, waited_s=waited_s: answer(  # type: ignore[misc]
            PrepareReply(versions=asked.versions, models={}, waited_s=waited_s)
        )
    began_s = time.monotonic()
    bring(method, 1)
    took_s = time.monotonic() - began_s
    spans = {(span.name, span.who): span for span in method.spans("actor")}
    assert ("agent", "a") not in spans
    assert spans["agent", "b"].seconds == 1e-4
    assert spans["transfer", "b"].seconds > 0
    assert 1e-4 < spans["agent", "c"].seconds <= took_s
    for who in ("b", "c"):
        agent, transfer = spans["agent", who], spans["transfer", who]
        assert agent.start_s >= 0
        assert transfer.start_s == pytest.approx(agent.start_s + agent.seconds)


def test_what_is_served_already_asks_nobody(world: World) -> None:
    (one, *_), method = world.three(), world.method()
    bring(method, 1)
    bring(method, 1)
    method.sync_weights("actor", v(1))
    assert one.names() == ["prepare", "commit"]


@pytest.mark.parametrize("is_there", [False, True], ids=["brought by a sync", "caught up with"])
def test_a_version_is_served_when_who_was_let_in_unasked_may_answer(world: World, is_there: bool) -> None:
    """Its next heartbeat gets it a lease. Seen red: its fleet said that it serves the version, and it refused."""
    pool, method = world.pool, world.method()
    pool.lease_s = 4 * LONG_S  # it does not give up by itself
    has = [ModelVersion(model_id="actor", run_id="r", version=1, sender_endpoint=SENDER)] if is_there else []
    one = world.instance("a")
    one.served = {each.model_id: each for each in has}
    with pool.syncing():
        one.beat_once(leased=False)
    pool.decided(has)
    done = in_thread(lambda: bring(method, 1), name="sync")
    until(lambda: is_there or one.served, "it is committed")
    with pytest.raises(TimeoutError):
        done.result(0.3)
    one.beat_once(leased=False)  # it is lent one
    one.beat_once(leased=True)
    assert done.result(LONG_S) == 1


def test_nobody_there_and_nobody_said_where(world: World) -> None:
    method = world.method()
    with pytest.raises(InvalidRequestError, match="give train_worker_notify_weight_update"):
        method.sync_weights("actor", v(1))
    with pytest.raises(NoEnginesError, match="no rollout service takes part"):
        bring(method, 1)
    world.instance("a").beat()
    with pytest.raises(NoEnginesError):
        bring(method, 1, "another")
    assert bring(method, 2) == 2
    with pytest.raises(ConfigError):
        FleetMethod(world.pool, commit_policy="quorum(0)")


def test_a_controller_that_only_listens_yet_waits_for_whom_it_has_heard_of(world: World) -> None:
    """Seen red: after each restart of a controller "nobody answers" was an error of its log, and trainers went on, some
    seconds before it let its hosts in."""
    world.pool._learning.until_s = time.monotonic() + 0.5
    one, method = world.instance("a"), world.method()
    one.served = {"actor": ModelVersion(model_id="actor", run_id="r", version=1, sender_endpoint=SENDER)}
    one.beat_once()
    done = in_thread(lambda: bring(method, 2), name="sync")
    one.beat()
    assert done.result(LONG_S) == 2
    assert one.served["actor"].of == v(2)


def test_a_controller_that_only_listens_yet_waits_for_its_first_heartbeat(world: World) -> None:
    """Seen red: a trainer's word that came before any heartbeat was a sync that had failed, until it had listened."""
    world.pool._learning.until_s = time.monotonic() + 4 * LONG_S
    one, method = world.instance("a"), world.method()
    one.served = {"actor": ModelVersion(model_id="actor", run_id="r", version=1, sender_endpoint=SENDER)}
    done = in_thread(lambda: bring(method, 2), name="sync")
    until(lambda: world.pool.current("actor"), "it is claimed")
    one.beat_once()
    world.pool._learning.until_s = time.monotonic()  # it has listened
    one.beat()
    assert done.result(LONG_S) == 2


def test_engines_that_have_not_started_are_waited_for_and_nothing_has_failed(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen red: eight syncs that failed, and an error, in a good start."""
    given_up = threading.Event()
    controller = WeightSyncController(
        {"sync_mode": "sync"}, world.method(), model_tags=("starts",), retries_s=(0.0, 0.0),
        on_give_up=lambda tag, version: given_up.set(),
    )  # fmt: skip
    world.pool.heartbeat(
        HeartbeatRequest(
            instance_id="a", incarnation="1", url="http://127.0.0.1:9", lacks=("starts",), leased=False,
            gone={"http://e": f"{NOT_STARTED}: can't connect"},
        )
    )  # fmt: skip
    assert world.pool.status({})[0].why == "it serves nothing; engine http://e has not started yet: can't connect"
    controller.train_worker_notify_weight_update("w", "starts", "r", 1, sender_endpoint=SENDER)
    assert given_up.wait(LONG_S)
    own = (threading.current_thread().name, "weightsync-sync-starts")  # other controllers' threads may still write
    warned = [each for each in caplog.records if each.levelno >= logging.WARNING and each.threadName in own]
    logged = [each.getMessage() for each in warned]
    assert [each for each in logged if "sync" in each or "is not served" in each] == [
        "model starts: r/1 is not served: no rollout service takes part yet: waits for engine http://e of a to start"
    ]
    assert controller.rollout_service_state("starts").overdue, "who looks is told"
    world.instance("a", ("starts",)).beat()
    assert controller.wait_version("r", "starts", 1, timeout_s=LONG_S), "it is tried again when it is there"
    controller.close()


def test_with_nobody_there_nothing_is_said_to_go_on(world: World, caplog: pytest.LogCaptureFixture) -> None:
    given_up = threading.Event()
    controller = WeightSyncController(
        {"sync_mode": "sync"}, world.method(), model_tags=("actor",), retries_s=(),
        on_give_up=lambda tag, version: given_up.set(),
    )  # fmt: skip
    controller.train_worker_notify_weight_update("w", "actor", "r", 1, sender_endpoint=SENDER)
    assert given_up.wait(LONG_S)
    assert "r/1 is not served after all retries: nobody answers (NoEnginesError" in caplog.text
    controller.close()


@pytest.mark.parametrize("fault", [raises(SyncFailedError("as told", causes={})), status_500], ids=["typed", "500"])
def test_each_goes_on_without_who_fails_to_stage(world: World, fault: Does) -> None:
    """And waits until its lease is over."""
    (a, b, c), method = world.three(), world.method()
    b.on_prepare, b.learns = fault, False
    done = in_thread(lambda: bring(method, 1), name="sync")
    until(lambda: b.state == "joining", "it is evicted")
    assert not done.done(), "it may not have heard yet that it has no lease"
    assert done.result(LONG_S) == 1
    assert world.pool.fenced("b")
    assert (a.served["actor"].of, c.served["actor"].of) == (v(1), v(1))
    assert "commit" not in b.names()
    b.on_prepare, b.learns = lambda asked: None, True
    until(lambda: b.state == "live", "it has caught up")


@pytest.mark.parametrize("policy", ["all", "quorum(3)"])
def test_too_few_have_staged_and_nothing_is_committed(world: World, policy: str) -> None:
    (a, b, c), method = world.three(), world.method(policy)
    b.on_prepare = raises(SyncFailedError("no room", causes={}))
    with pytest.raises(SyncFailedError, match=r"1 of 3 instances failed: b: SyncFailedError: .*no room") as caught:
        bring(method, 1)
    assert list(caught.value.causes) == ["b"]
    for each in (a, b, c):
        assert each.names() == ["prepare", "release"]
        assert each.state == "live"
    assert world.pool.current("actor") is None
    assert method.evict_failed("actor") == ["b"]
    assert world.pool.fenced("b")
    assert method.evict_failed("actor") == []
    assert b.state == "joining", "the next sync goes on without it: see test_fleet_evicts.py"


@pytest.mark.parametrize("policy", ["each", "all", "quorum(2)"])
def test_one_that_leaves_meanwhile_is_not_waited_for(world: World, policy: str) -> None:
    """Seen to fail: it was waited for until it had answered."""
    (a, b, c), method = world.three(), world.method(policy, prepare_timeout_s=LONG_S)
    left = threading.Event()

    async def hangs(_: Any) -> None:
        while not left.is_set():
            await asyncio.sleep(0.01)

    b.on_prepare = hangs
    began = in_thread(lambda: bring(method, 1), name="sync")
    until(lambda: b.calls, "it is asked")
    b.silent()
    world.pool.heartbeat(HeartbeatRequest(instance_id="b", incarnation="1", url=b.url, lacks=b.models, leaving=True))
    assert b.state == "unknown"
    assert began.result(LONG_S / 2) == 1
    left.set()
    assert (a.served["actor"].of, c.served["actor"].of) == (v(1), v(1))


def test_one_that_left_and_came_back_commits_nothing_of_a_sync_that_has_failed(world: World) -> None:
    """Seen red: its thread decided for the fleet, and told it to commit, when nobody synced any more."""
    a, method = world.instance("a").beat(), world.method(prepare_timeout_s=LONG_S)
    over, others = threading.Event(), set(threading.enumerate())

    async def hangs(_: Any) -> None:
        while not over.is_set():
            await asyncio.sleep(0.01)

    a.on_prepare = hangs
    began = in_thread(lambda: bring(method, 1), name="sync")
    until(lambda: a.calls, "it is asked")
    a.silent()
    world.pool.evict("a", "it was not heard")
    with pytest.raises(SyncFailedError, match="it left the pool meanwhile"):
        began.result(LONG_S / 2)
    a.beat()
    mine = [each for each in threading.enumerate() if each.name == "weightsync-fleet" and each not in others]
    assert len(mine) == 1
    over.set()
    until(lambda: not mine[0].is_alive(), "its call has ended")
    assert a.names() == ["prepare"]
    assert world.pool.current("actor") is None


def test_all_but_one_that_left_the_pool(world: World) -> None:
    (a, b, c), method = world.three(), world.method("all", prepare_timeout_s=LONG_S)
    over = threading.Event()

    async def hangs(_: Any) -> None:
        while not over.is_set():
            await asyncio.sleep(0.01)

    b.on_prepare = hangs
    began = in_thread(lambda: bring(method, 1), name="sync")
    until(lambda: b.calls, "it is asked")
    b.silent()
    assert began.result(LONG_S) == 1
    assert b.state == "evicted"
    over.set()
    assert (a.served["actor"].of, c.served["actor"].of) == (v(1), v(1))


def test_a_quorum_does_not_wait_for_who_hangs(world: World) -> None:
    """It is evicted, though its heartbeats come; it comes back by catching up."""
    (a, b, c), method = world.three(), world.method("quorum(2)", prepare_timeout_s=LONG_S)
    over = threading.Event()

    async def hangs(_: Any) -> None:
        while not over.is_set():
            await asyncio.sleep(0.01)

    b.on_prepare = hangs
    began_s = time.monotonic()
    assert bring(method, 1) == 1
    assert time.monotonic() - began_s < LONG_S / 2
    over.set()
    assert (a.served["actor"].of, c.served["actor"].of) == (v(1), v(1))
    until(lambda: b.state == "live" and b.served["actor"].of == v(1), "it has caught up")


def test_a_quorum_is_there_although_one_fails(world: World) -> None:
    (_, b, _), method = world.three(), world.method("quorum(2)")
    b.on_prepare = status_500
    assert bring(method, 1) == 1
    assert "commit" not in b.names()


@pytest.mark.parametrize("policy", ["each", "all"])
@pytest.mark.parametrize("lie", ["another version", "another run", "nothing"])
def test_a_commit_that_was_none(world: World, policy: str, lie: str) -> None:
    """A 200 that says something else than what was asked for."""
    (a, b, _), method = world.three(), world.method(policy)
    other = {
        "another version": served(ModelVersion(model_id="actor", run_id="r", version=0)),
        "another run": served(ModelVersion(model_id="actor", run_id="x", version=1)),
        "nothing": answer(ServiceStatus(models={})),
    }[lie]
    b.on_commit, b.learns = lambda asked: other, False
    done = in_thread(lambda: bring(method, 1), name="sync")
    until(lambda: b.state == "joining", "it is evicted")
    assert "answered commit well and serves" in str(world.pool.status({})[1].why)
    b.learns = True
    assert done.result(LONG_S) == 1
    assert world.pool.current("actor") is not None
    assert a.served["actor"].of == v(1)


def test_a_commit_that_fails_is_told_again(world: World) -> None:
    (_, b, _), method = world.three(), world.method("all", commit_timeout_s=LONG_S)
    b.on_commit = lambda asked: status_500(asked) if b.names().count("commit") < 3 else None
    assert bring(method, 1) == 1
    assert b.names() == ["prepare", "commit", "commit", "commit"]
    assert b.state == "live"


def test_all_fail_to_commit(world: World) -> None:
    """After the commit point there is no way back: all are out, and come in again with what is current."""
    instances, method = world.three(), world.method("all", commit_timeout_s=1.0)
    for each in instances:
        each.on_commit = status_500
    with pytest.raises(SyncFailedError, match="3 of 3"):
        bring(method, 1)
    back = {member.instance_id for member in world.pool.members(["actor"])}  # some may be, and others not yet
    assert all(each.served["actor"].of == v(1) for each in instances if each.name in back)
    assert world.pool.current("actor") is not None
    until(lambda: [each.state for each in instances] == ["live"] * 3, "they have caught up")
    assert bring(method, 1) == 1
    assert {each.served["actor"].of for each in instances} == {v(1)}


def test_an_instance_that_has_staged_something_newer(world: World) -> None:
    (_, b, _), method = world.three(), world.method("all")
    newer = ModelVersion(model_id="actor", run_id="r", version=2)
    b.on_prepare = lambda asked: answer(PrepareReply(versions=(newer,), models={}))
    with pytest.raises(SyncFailedError, match="the trainer has gone on") as caught:
        bring(method, 1)
    assert isinstance(caught.value.causes["b"], VersionError)


def test_a_prepare_without_a_word_of_it_is_a_failure(world: World) -> None:
    (_, b, _), method = world.three(), world.method("all")
    b.on_prepare = lambda asked: answer(PrepareReply(versions=(), models={}))
    with pytest.raises(SyncFailedError, match="it has staged None of model actor"):
        bring(method, 1)


def test_each_that_all_fail_to_stage_changes_nothing(world: World) -> None:
    instances, method = world.three(), world.method()
    for each in instances:
        each.on_prepare = status_500
    with pytest.raises(SyncFailedError, match="3 of 3"):
        bring(method, 1)
    assert [each.state for each in instances] == ["live"] * 3
    assert world.pool.current("actor") is None
    assert method.evict_failed("actor") == ["a", "b", "c"]


def test_what_is_served_already_waits_for_who_may_answer_with_less(world: World) -> None:
    """Seen red: one was left out and had not heard it; the gate opened while it answered with the version before."""
    world.pool.lease_s = 2 * LEASE_S
    (a, b, c), method = world.three(), world.method("all", commit_timeout_s=0.5)
    bring(method, 1)
    for each in (a, b, c):
        each.on_commit = status_500
        if each is not a:
            each.silent()
    with pytest.raises(SyncFailedError, match="3 of 3"):
        bring(method, 2)
    until(lambda: a.state == "live" and a.served["actor"].of == v(2), "it has caught up")
    late = [name for name in "bc" if not world.pool.fenced(name)]
    assert method.sync_weights("actor", v(2)) == 2
    assert late, "or this shows nothing"
    assert all(world.pool.fenced(name) for name in "bc")


def test_a_quorum_counts_who_has_it_and_waits_for_it(world: World) -> None:
    """It committed what a sync was to bring, which failed. Seen red: it was out until the fleet had come so far, and
    the fleet never came so far without it."""
    a, method = world.instance("a").beat(), world.method("quorum(2)")
    world.pool.decided([ModelVersion(model_id="actor", run_id="r", version=1, sender_endpoint=SENDER)])
    until(lambda: a.state == "live" and a.served, "it serves that")
    with pytest.raises(SyncFailedError, match="2 have to stage it, and 1 take part"):
        bring(method, 2)
    waits = world.instance("waits")
    has = ModelVersion(model_id="actor", run_id="r", version=2, sender_endpoint=SENDER)
    waits.served["actor"] = has
    assert waits.beat_once() == 0.0
    waits.served["actor"] = has
    assert method.sync_weights("actor", v(2)) == 2
    assert (waits.beat_once(), a.served["actor"].of) == (LEASE_S, v(2))


def test_a_quorum_counts_nobody_twice(world: World) -> None:
    """It had staged it, was left out, and had it staged once more. Seen red: it counted as two."""
    a, method = world.instance("a"), world.method("quorum(2)")
    one, two = (ModelVersion(model_id="actor", run_id="r", version=n, sender_endpoint=SENDER) for n in (1, 2))
    world.pool.decided([one])
    a.served["actor"] = one
    assert a.beat_once() == LEASE_S
    staged = set(world.pool.members(["actor"]))
    with world.pool.syncing([two]):
        world.pool.evict("a", "as told")
        world.pool.heartbeat(
            HeartbeatRequest(instance_id="a", incarnation="1", url=a.url, serves=(one,), staged=(two,), leased=False)
        )
        assert world.pool.num_waiting([two]) == 1
        assert not method._are_enough(staged, (two,), 2)


def test_a_quorum_that_is_not_there_waits_for_no_run_that_is_over(world: World) -> None:
    """Seen red: the run that took over waited for `straggler_s`, too."""
    a, method = world.instance("a").beat(), world.method("quorum(2)", straggler_s=100 * LONG_S)
    world.pool.decided([ModelVersion(model_id="actor", run_id="r", version=1, sender_endpoint=SENDER)])
    until(lambda: a.state == "live" and a.served, "it serves that")
    counted = threading.Event()
    world.pool.num_waiting = lambda versions: counted.set() or 0  # type: ignore[method-assign,func-returns-value]
    first = in_thread(lambda: bring(method, 2), name="first")
    assert counted.wait(LONG_S)
    method.trained("actor", v(1, "next"), SENDER)
    with pytest.raises(SyncFailedError, match="2 have to stage it"):
        first.result(LONG_S)
