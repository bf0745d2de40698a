"""Runs that another has taken over from: their workers, their timers, and what a pool has learnt of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.control.pool_kit import at
from tests.unit.control.pool_kit import made as made_pool
from tests.unit.control.test_controller import LONG_S, Method, until
from tests.unit.control.test_state import Machine
from weightsync.control import controller as controller_module
from weightsync.control.controller import WeightSyncController
from weightsync.control.events import BatchReady, RetryDue, StartSync, SyncFailed, Trained
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.state import _MAX_REPLACED, _MAX_WORKERS
from weightsync.errors import NotPublishedError, StateError, VersionError
from weightsync.handles.fanout import in_thread
from weightsync.types import Version
from weightsync.types.fleet import ModelVersion

AGENT = "http://agent"


def test_a_run_that_was_taken_over_from_does_not_come_back() -> None:
    """Seen to fail: a worker of it that was late took over again."""
    machine = Machine(mode="fully-async")
    machine.train(7, run_id="r1")
    machine.train(1, run_id="r2")
    before = machine.state
    for version in (6, 7, 8, None):
        with pytest.raises(VersionError, match="run r1 was taken over by r2: a trainer that starts again has a new"):
            machine.train(version, "late", run_id="r1")
    assert machine.state == before
    assert machine.train(2, run_id=None) == ()
    assert machine.state.train_version == 2, "no run_id is the run that is known"


def test_a_run_that_nobody_could_serve_gives_way_to_the_one_before() -> None:
    """Seen to fail: one word of a run that does not exist shut the right one out for good."""
    machine = Machine(mode="fully-async", retries_s=(1.0,))
    machine.train(1, run_id="r0")
    machine.train(1, run_id="right")
    machine.synced(1)
    machine.synced(1)
    machine.train(1, run_id="stray")
    with pytest.raises(VersionError, match="taken over by stray"):
        machine.train(2, run_id="right")
    machine(SyncFailed())
    machine(RetryDue())
    machine(SyncFailed())
    assert machine.state.overdue
    with pytest.raises(VersionError, match="run r0 was taken over"):
        machine.train(2, run_id="r0")
    assert machine.train(2, run_id="right") == (StartSync(run_id="right", version=2),)
    assert machine.state.replaced == ("r0", "stray")
    assert not machine.state.overdue
    machine.train(3, run_id="right")


def test_the_last_runs_alone_are_remembered() -> None:
    machine = Machine(mode="fully-async")
    for number in range(_MAX_REPLACED + 2):
        machine.train(1, run_id=f"r{number}")
    assert machine.state.replaced == tuple(f"r{number}" for number in range(1, _MAX_REPLACED + 1))


def test_what_is_learnt_takes_over_from_nobody() -> None:
    """Seen to fail."""
    machine = Machine(mode="fully-async")
    assert machine(Trained(worker="fleet", run_id="r1", version=3, learnt=True)) == (StartSync(run_id="r1", version=3),)
    machine.train(1, run_id="r2")
    for run_id in ("r1", "r0"):
        with pytest.raises(VersionError, match=f"run {run_id} was taken over by r2"):
            machine(Trained(worker="fleet", run_id=run_id, version=3, learnt=True))


def test_a_run_has_so_many_workers() -> None:
    """Seen to fail: each name was kept as long as the run."""
    machine = Machine(mode="batch-async", staleness_threshold=99)
    for number in range(_MAX_WORKERS):
        machine.train(1, f"w{number}")
    before = machine.state
    with pytest.raises(StateError, match="4096 workers have told of versions of run r"):
        machine.train(1, "one more")
    assert machine.state == before
    machine.train(2, "w7")
    machine.train(1, "one more", run_id="again")
    assert machine.state.told == (("one more", 1),)


class Remembers(Method):
    """Its syncs are as told; it remembers of what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def trained(self, model_tag: str, version: Version, sender_endpoint: str | None = None) -> None:
        self.told.append(str(version))


@pytest.fixture
def made() -> Iterator[tuple[WeightSyncController, Remembers]]:
    method = Remembers()
    controller = WeightSyncController({}, method, retries_s=(60.0, 60.0, 60.0))
    yield controller, method
    controller.close()


def test_a_method_hears_nothing_of_a_run_that_was_taken_over_from(made: tuple[WeightSyncController, Remembers]) -> None:
    """Seen to fail: a barrier held it for the newest run."""
    controller, method = made
    controller.train_worker_notify_weight_update("w", "default", "r1", 5)
    controller.train_worker_notify_weight_update("w", "default", "r2", 1)
    with pytest.raises(VersionError, match="taken over by r2"):
        controller.train_worker_notify_weight_update("late", "default", "r1", 6)
    assert method.told == ["r1/5", "r2/1"]


def test_no_run_takes_over_between_the_look_and_the_notification(made: tuple[WeightSyncController, Remembers]) -> None:
    """Seen to fail without the lock: the method was told of a run that was refused."""
    controller, method = made
    controller.train_worker_notify_weight_update("w", "default", "r1", 5)
    began: list[Any] = []
    told = method.trained

    def slow(model_tag: str, version: Version, sender_endpoint: str | None = None) -> None:
        if not began:  # r1's worker is past its look: the new run's comes now
            began.append(
                in_thread(lambda: controller.train_worker_notify_weight_update("w", "default", "r2", 1), name="r2")
            )
            began[0].add_done_callback(lambda _: over.set())
            over.wait(0.2)
        told(model_tag, version, sender_endpoint)

    over = threading.Event()
    method.trained = slow  # type: ignore[method-assign]
    controller.train_worker_notify_weight_update("late", "default", "r1", 6)
    began[0].result(LONG_S)
    assert method.told == ["r1/5", "r1/6", "r2/1"]
    assert controller.rollout_service_state("default").run_id == "r2"


def test_a_pool_that_has_learnt_late_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer was quicker. Seen to fail: its run was taken over from by the one that was served."""
    monkeypatch.setattr(controller_module, "in_thread", lambda call, name: call())
    pool = RolloutPool(lease_s=0.2)
    method = FleetMethod(pool, barrier_timeout_s=1.0)
    controller = WeightSyncController({"sync_mode": "fully-async"}, method, model_tags=["m", "n"])
    controller.train_worker_notify_weight_update("trainer", "m", "r2", 1, sender_endpoint=AGENT)
    pool.on_learnt(
        tuple(ModelVersion(model_id=tag, run_id="r1", version=9, sender_endpoint=AGENT) for tag in ("m", "n"))
    )
    seen = {tag: state.run_id for tag, state in controller.status().models.items()}
    assert seen == {"m": "r2", "n": "r1"}
    assert {tag: each.run_id for tag, each in method.barrier.published().items()} == seen
    controller.close()


def test_what_a_pool_has_learnt_is_brought_to_all_whatever_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: one instance had it, and the others went on with what they had until the trainer spoke again."""
    monkeypatch.setattr(controller_module, "in_thread", lambda call, name: call())
    method = Remembers()
    controller = WeightSyncController({"sync_mode": "batch-async", "staleness_threshold": 9}, method)
    controller._learnt([ModelVersion(model_id="default", run_id="r1", version=1, sender_endpoint=AGENT)])
    assert controller.wait_version("r1", "default", 1, timeout_s=LONG_S)
    controller.close()


@pytest.mark.parametrize("mode", ["sync", "batch-async", "fully-async"])
@pytest.mark.parametrize("with_batch", [False, True])
def test_number_0_is_served_no_more_where_an_earlier_run_is(mode: Any, with_batch: bool) -> None:
    """A controller was started anew while number 0 was on its way. Seen red: VersionError, and it was never brought."""
    machine = Machine(mode=mode)
    assert machine.train(0, run_id="new") == ()
    if with_batch:
        machine(BatchReady())
    learnt = Trained(worker="fleet", run_id="old", version=57, learnt=True)
    assert machine(learnt) == (StartSync(run_id="new", version=0),)
    assert machine.state.rollout_version == -1
    machine.synced()
    assert (machine.state.rollout_version, machine.state.wanted) == (0, False)
    with pytest.raises(VersionError, match="run old was taken over by new"):
        machine(learnt)


def test_a_number_0_that_was_told_before_a_pool_has_learnt_is_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it counted as served at once, and hosts went on with the run before."""
    monkeypatch.setattr(controller_module, "in_thread", lambda call, name: call())
    method = Remembers()
    controller = WeightSyncController({"sync_mode": "sync"}, method)
    controller.train_worker_notify_weight_update("w", "default", "new", 0)
    controller._learnt([ModelVersion(model_id="default", run_id="old", version=57, sender_endpoint=AGENT)])
    until(lambda: method.synced == [("default", "new/0")], "it is brought")
    assert controller.wait_version("new", "default", 0, timeout_s=LONG_S)
    assert method.told == ["new/0"], "nothing of a run new that has 57"
    controller.close()


class Timer:
    """One that fires when the test says so."""

    def __init__(self, fires: list[Callable[[], None]], call: Callable[[], None]) -> None:
        self._fires, self._call = fires, call

    def start(self) -> None:
        self._fires.append(self._call)

    def cancel(self) -> None: ...


def test_a_timer_of_a_sync_of_an_older_run_does_nothing(
    made: tuple[WeightSyncController, Remembers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: the new run's retry began with the old one's timer, and its own was forgotten."""
    controller, method = made
    fires: list[Callable[[], None]] = []
    monkeypatch.setattr(threading, "Timer", lambda seconds, call: Timer(fires, call))
    go, tried = threading.Event(), []

    def does(tag: str, version: Version) -> int:
        tried.append(str(version))
        if len(tried) <= 2:
            raise RuntimeError("as told")
        assert go.wait(LONG_S)
        return version.number

    method.does = does
    controller.train_worker_notify_weight_update("w", "default", "r1", 5)
    until(lambda: len(fires) == 1, "its retry is due")
    controller.train_worker_notify_weight_update("w", "default", "r2", 1)
    until(lambda: len(fires) == 2, "the new run's retry is due")
    fires[0]()
    state = controller.rollout_service_state("default")
    assert (state.state, state.num_failed) == ("need_sync", 1)
    assert state.retry_in_s is not None
    fires[1]()
    assert controller.rollout_service_state("default").state == "syncing"
    go.set()
    assert controller.wait_version("r2", "default", 1, timeout_s=LONG_S)
    controller.train_worker_notify_weight_update("w", "default", "r2", 2)
    for fire in fires:
        fire()
    assert tried == ["r1/5", "r2/1", "r2/1", "r2/2"]
    assert controller.rollout_service_state("default").state == "running"


def test_what_was_taken_over_from_is_not_shown_as_tried_again(made: tuple[WeightSyncController, Remembers]) -> None:
    """Seen to fail."""
    controller, method = made
    go = threading.Event()

    def does(tag: str, version: Version) -> int:
        if version.run_id == "r1":
            raise RuntimeError("as told")
        assert go.wait(LONG_S)
        return version.number

    method.does = does
    controller.train_worker_notify_weight_update("w", "default", "r1", 5)
    until(lambda: controller.rollout_service_state("default").retry_in_s, "its retry is due")
    controller.train_worker_notify_weight_update("w", "default", "r2", 1, timeout_s=0.0)
    assert controller.rollout_service_state("default").retry_in_s is None
    go.set()


@pytest.mark.parametrize("mode", ["sync", "batch-async"])
def test_a_notification_waits_for_a_validation_and_then_for_its_sync(mode: str) -> None:
    """Seen red where it waited for the syncs alone that it started: it returned at once, and the trainer stepped while
    a push of its weights ran.
    """
    method, threshold = Method(), {"staleness_threshold": 1} if mode == "batch-async" else {}
    controller = WeightSyncController({"sync_mode": mode, "validate_freq": 1, **threshold}, method)
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    until(lambda: controller.rollout_service_state("default").waiting_for_validation, "the validation of version 1")
    controller.train_worker_notify_weight_update("w", "default", "r", 2, timeout_s=0.05)
    assert method.synced == [("default", "r/1")], "no sync beside a validation, and no wait beyond its time"
    syncing, go = threading.Event(), threading.Event()

    def slow(tag: str, version: Version) -> int:
        syncing.set()
        assert go.wait(LONG_S)
        return version.number

    method.does = slow
    told = in_thread(
        lambda: controller.train_worker_notify_weight_update("w", "default", "r", 3, timeout_s=LONG_S), name="trainer"
    )
    with pytest.raises(TimeoutError):
        told.result(0.1)
    controller.end_validate("default")
    assert syncing.wait(LONG_S)
    with pytest.raises(TimeoutError):
        told.result(0.1)
    go.set()
    told.result(LONG_S)
    assert controller.rollout_service_state("default").rollout_model_version == 3
    controller.close()


@pytest.mark.parametrize(
    ("freq", "newest", "tries"), [(0, 4, [2, 4, 4]), (2, 3, [2, 3])], ids=["last try", "validation"]
)
def test_who_comes_or_goes_while_a_model_is_busy_is_not_forgotten(freq: int, newest: int, tries: list[int]) -> None:
    """Seen red: nobody asked again when the last try or the validation had ended, and a fleet without anybody that
    takes part stayed so: its agent had no older version.
    """
    method, (pool, _) = Method(), made_pool()
    method.pool = pool
    tried: list[int] = []
    running, go = threading.Event(), threading.Event()

    def fails_once(tag: str, version: Version) -> int:
        tried.append(version.number)
        if tried == [2, 4]:
            running.set()
            assert go.wait(LONG_S)
            raise RuntimeError("left the pool meanwhile")
        return version.number

    method.does = fails_once
    config = {"sync_mode": "batch-async", "validate_freq": freq}
    controller = WeightSyncController(config, method, model_tags=["m"], retries_s=())
    controller.train_worker_notify_weight_update("w", "m", "r", 2)
    pool.decided([at(2)])  # nobody takes part any more
    if freq:
        until(lambda: controller.rollout_service_state("m").waiting_for_validation, "the validation of version 2")
    controller._models["m"].trained(Trained(worker="w", run_id="r", version=newest))
    assert freq or running.wait(LONG_S)
    controller._try_again()  # what `on_members` calls, in a thread
    go.set()
    controller.end_validate("m")
    assert controller.wait_version("r", "m", newest, timeout_s=LONG_S)
    assert tried == tries
    controller.close()


@pytest.mark.parametrize("comes", [True, False], ids=["it comes", "it never comes"])
def test_an_evaluation_that_is_told_of_too_early_is_waited_for(monkeypatch: pytest.MonkeyPatch, comes: bool) -> None:
    """Seen red: with the first denial the wait was over, and the version was synced later without a validation."""
    monkeypatch.setattr("weightsync.control.denials._AGAIN_S", (0.01, 0.01))
    method, tried = Method(), list[int]()

    def too_early(tag: str, version: Version) -> int:
        tried.append(version.number)
        if version.number == 5 and (tried.count(5) == 1 or not comes):
            raise NotPublishedError("its agent has 4", newest=4)
        return version.number

    method.does, method.asks_agents = too_early, True  # type: ignore[misc]
    controller = WeightSyncController({"sync_mode": "fully-async"}, method)
    told = in_thread(
        lambda: controller.train_worker_notify_weight_update("w", "default", "r", 5, evaluate=True, timeout_s=LONG_S),
        name="trainer",
    )
    if comes:
        until(lambda: controller.rollout_service_state("default").waiting_for_validation, "the validation")
        assert not told.done()
        controller.end_validate("default", version=5)
    told.result(LONG_S / 2)
    assert tried == ([5, 4, 5] if comes else [5, 4, 5, 5])
    ended = controller.rollout_service_state("default").last_validation
    assert (ended.of.version if ended else None) == (5 if comes else None)
    controller.close()
