"""WeightSyncController: real threads and timers around the machine; the method that moves weights is a stand-in."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from weightsync.clients.host import RolloutClient
from weightsync.config import WeightSyncConfig
from weightsync.control.controller import WeightSyncController
from weightsync.control.events import Trained
from weightsync.control.locks import ModuleLocks
from weightsync.control.method import SyncMethod
from weightsync.control.methods.pull import PullMethod
from weightsync.errors import ConfigError, InvalidRequestError, StateError, VersionError
from weightsync.handles.fanout import in_thread
from weightsync.types import Version
from weightsync.types.control import ValidationRun

LONG_S = 20.0


class Method(SyncMethod):
    """Syncs what it is told to, or does what the test wants."""

    def __init__(self) -> None:
        self.synced: list[tuple[str, str]] = []
        self.evicted: list[str] = []
        self.does: Callable[[str, Version], int] = lambda tag, version: version.number
        self.running: dict[str, int] = {}
        self._lock = threading.Lock()

    def sync_weights(self, model_tag: str, version: Version) -> int:
        with self._lock:
            self.running[model_tag] = self.running.get(model_tag, 0) + 1
            assert self.running[model_tag] == 1, "two syncs of one model at once"
        try:
            served = self.does(model_tag, version)
            self.synced.append((model_tag, str(version)))
            return served
        finally:
            with self._lock:
                self.running[model_tag] -= 1

    def evict_failed(self, model_tag: str) -> list[str]:
        self.evicted.append(model_tag)
        return ["engine-3"]


class Module:
    """A dataloader or a pool: remembers whether it is locked."""

    def __init__(self) -> None:
        self.locked: set[str] = set()
        self.calls: list[str] = []
        self.fails = False

    def lock(self, model_tag: str) -> None:
        self.calls.append("lock")
        self.locked.add(model_tag)
        if self.fails:
            raise RuntimeError("as told")

    def unlock(self, model_tag: str) -> None:
        self.calls.append("unlock")
        self.locked.discard(model_tag)


@pytest.fixture
def made() -> Iterator[Callable[..., tuple[WeightSyncController, Method]]]:
    controllers: list[WeightSyncController] = []

    def make(config: dict[str, Any] | None = None, **options: Any) -> tuple[WeightSyncController, Method]:
        method = Method()
        controllers.append(WeightSyncController(config or {}, method, **{"retries_s": (0.01,), **options}))
        return controllers[-1], method

    yield make
    for controller in controllers:
        controller.close()


Make = Callable[..., tuple[WeightSyncController, Method]]


def until(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def test_a_step_in_mode_sync(made: Make) -> None:
    """From the batch on rollout is blocked; the notification returns when the weights are served."""
    controller, method = made()
    loader, pool = Module(), Module()
    controller.set_module_references(loader, pool)
    assert controller.check_rollout_service_status("default") == "continue"
    controller.trajectory_pool_notify_batch_ready("default")
    assert controller.check_rollout_service_status("default") == "block"
    assert (loader.locked, pool.locked) == (set(), {"default"}), "a sync locks the pool alone"
    seen = []
    method.does = lambda tag, version: seen.append(controller.rollout_service_state(tag)) or version.number  # type: ignore[func-returns-value]
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    assert method.synced == [("default", "r/1")]
    assert (seen[0].state, seen[0].staleness, seen[0].blocked) == ("syncing", 1, True)
    assert controller.check_rollout_service_status("default") == "continue"
    until(lambda: loader.locked == pool.locked == set(), "they are unlocked, by the sync's thread")
    state = controller.rollout_service_state("default")
    assert (state.state, state.train_model_version, state.rollout_model_version) == ("running", 1, 1)
    assert [record.detail for record in controller.recorder.records() if record.name == "sync"] == ["default r/1"]


@pytest.mark.parametrize(
    "error", [RuntimeError("as told"), OSError(5, "as told"), KeyboardInterrupt("as told")], ids=repr
)
def test_whatever_a_method_raises_is_tried_again_by_a_timer(made: Make, error: BaseException) -> None:
    """Seen to fail where only our own errors were caught: the model stayed in "syncing", and rollout blocked."""
    controller, method = made()
    failures, seen = [error], []

    def once(tag: str, version: Version) -> int:
        if failures:
            raise failures.pop()
        seen.append(str(controller.rollout_service_state(tag).last_error))
        return version.number

    method.does = once
    controller.trajectory_pool_notify_batch_ready("default")
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    assert controller.await_rollout_service("default", timeout_s=LONG_S) == "continue"
    assert "as told" in seen[0], "while it is tried again"
    state = controller.rollout_service_state("default")
    assert (state.rollout_model_version, state.last_error, state.num_failed) == (1, None, 0)


@pytest.mark.parametrize("answer", [0, None, "1", True])
def test_a_method_that_serves_something_else_has_failed(made: Make, answer: Any) -> None:
    controller, method = made(retries_s=())
    method.does = lambda tag, version: answer
    controller.train_worker_notify_weight_update("w", "default", "r", 2)
    assert "2 was asked for" in str(controller.rollout_service_state("default").last_error)


def test_after_the_last_retry_rollout_goes_on_and_operators_are_told(made: Make) -> None:
    told: list[tuple[str, Version]] = []
    controller, method = made(on_give_up=lambda tag, version: told.append((tag, version)), after_failure="evict")

    def fails(tag: str, version: Version) -> int:
        raise RuntimeError("as told")

    method.does = fails
    controller.trajectory_pool_notify_batch_ready("default")
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    until(lambda: told, "giving up")
    assert told == [("default", Version(run_id="r", number=1))]
    assert method.evicted == ["default"]
    state = controller.rollout_service_state("default")
    assert (state.overdue, state.blocked, state.state) == (True, False, "running")
    method.does = lambda tag, version: version.number
    controller.train_worker_notify_weight_update("w", "default", "r", 2)
    assert not controller.rollout_service_state("default").overdue


def test_a_model_that_hangs_holds_up_no_other(made: Make) -> None:
    """Seen in systems of this kind: one lock for all models."""
    controller, method = made(model_tags=("actor", "verifier"))
    go = threading.Event()

    def hangs(tag: str, version: Version) -> int:
        assert tag != "actor" or go.wait(LONG_S)
        return version.number

    method.does = hangs
    slow = in_thread(lambda: controller.train_worker_notify_weight_update("w", "actor", "r", 1), name="slow")
    until(lambda: controller.rollout_service_state("actor").state == "syncing", "the sync")
    assert controller.await_rollout_service("actor", timeout_s=0.05) == "block"
    controller.train_worker_notify_weight_update("w", "verifier", "r", 1)
    assert controller.check_rollout_service_status("verifier") == "continue"
    waiting = in_thread(lambda: controller.await_rollout_service("actor", timeout_s=LONG_S), name="waits")
    go.set()
    assert waiting.result(LONG_S) == "continue"
    slow.result(LONG_S)


def test_fully_async_waits_for_nobody(made: Make) -> None:
    controller, method = made({"sync_mode": "fully-async"})
    go = threading.Event()
    method.does = lambda tag, version: version.number if go.wait(LONG_S) else 0
    for number in (1, 2, 3):
        controller.trajectory_pool_notify_batch_ready("default")
        controller.train_worker_notify_weight_update("w", "default", "r", number)
        assert controller.check_rollout_service_status("default") == "continue"
    go.set()
    until(lambda: controller.rollout_service_state("default").rollout_model_version == 3, "the newest version")
    assert method.synced == [("default", "r/1"), ("default", "r/3")]


def test_validation_is_started_and_ended(made: Make) -> None:
    started: list[ValidationRun] = []
    controller, _ = made({"validate_freq": 2}, on_validate=lambda tag, validation: started.append(validation))
    loader, pool = Module(), Module()
    controller.set_module_references(loader, pool)
    for number in (1, 2):
        controller.trajectory_pool_notify_batch_ready("default")
        controller.train_worker_notify_weight_update("w", "default", "r", number)
    end = time.monotonic() + LONG_S
    while not started:  # it is told by the sync's thread
        assert time.monotonic() < end
        time.sleep(0.001)
    assert started == [ValidationRun(run_id="r", version=2, stands_for=(2,))]
    assert controller.rollout_service_state("default").waiting_for_validation == started[0]
    assert loader.locked == pool.locked == {"default"}, "a validation locks both"
    assert controller.check_rollout_service_status("default") == "continue", "and not the service that it needs"
    state = controller.rollout_service_state("default")
    assert (state.dataloader_locked, state.pool_locked, state.blocked) == (True, True, False)
    controller.trajectory_pool_notify_batch_ready("default")  # a sync is due when the validation ends
    controller.end_validate("default")
    controller.end_validate("default")
    assert (loader.locked, pool.locked) == (set(), {"default"})
    assert not controller.rollout_service_state("default").dataloader_locked
    controller.train_worker_notify_weight_update("w", "default", "r", 3)
    until(lambda: loader.locked == pool.locked == set(), "they are unlocked, by the sync's thread")
    assert loader.calls == ["lock", "unlock"]


def test_one_object_may_be_both_dataloader_and_pool(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is locked as long as either is. Red where each of the two is locked and unlocked for itself."""
    monkeypatch.setattr("weightsync.control.locks._MOMENT_S", LONG_S)
    both = Module()
    controller, _ = made({"validate_freq": 1}, on_validate=lambda *_: None)
    controller.set_module_references(both, both)
    controller.trajectory_pool_notify_batch_ready("default")
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    assert both.locked == {"default"}
    controller.end_validate("default")
    assert (both.locked, both.calls) == (set(), ["lock", "unlock"])


class Batches(list[str], Module):  # type: ignore[misc]
    """A pool that is a list: it can't be hashed, and equals any other that has as much."""

    def __init__(self) -> None:
        list.__init__(self)
        Module.__init__(self)


def test_a_pool_may_be_a_list(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the first batch ended in a TypeError; so did the version, and its sync was not begun, nor ended."""
    monkeypatch.setattr("weightsync.control.locks._MOMENT_S", LONG_S)
    controller, method = made({"validate_freq": 1}, on_validate=lambda *_: None)
    loader, pool = Batches(), Batches()
    controller.set_module_references(loader, pool)  # type: ignore[arg-type]
    controller.trajectory_pool_notify_batch_ready("default")
    assert (loader.locked, pool.locked) == (set(), {"default"})
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    assert method.synced == [("default", "r/1")]
    until(lambda: loader.locked == pool.locked == {"default"}, "two that are equal are locked, each of them")
    controller.end_validate("default")
    assert (loader.calls, pool.calls[-1]) == (["lock", "unlock"], "unlock")


def test_what_locks_raise_loses_no_sync(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a model stayed in "syncing", and no sync was ever begun."""
    controller, method = made()

    def raises() -> None:
        raise RuntimeError("as told")

    monkeypatch.setattr(controller._models["default"], "apply_locks", raises)
    controller.train_worker_notify_weight_update("w", "default", "r", 1, timeout_s=LONG_S)
    assert method.synced == [("default", "r/1")]


def test_a_pool_may_tell_of_a_batch_when_it_is_unlocked(made: Make) -> None:
    """Seen red: its thread waited for itself, and so did every later call and `close`."""
    controller, method = made()
    pool, tells = Module(), [True]

    def unlock(model_tag: str) -> None:
        pool.locked.discard(model_tag)
        if tells:
            tells.pop()
            controller.trajectory_pool_notify_batch_ready(model_tag)  # one that has waited

    pool.unlock = unlock  # type: ignore[method-assign]
    controller.set_module_references(Module(), pool)
    controller.trajectory_pool_notify_batch_ready("default")
    for number in (1, 2):
        told = in_thread(
            lambda number=number: controller.train_worker_notify_weight_update("w", "default", "r", number),  # type: ignore[misc]
            name="trainer",
        )
        told.result(LONG_S)
        until(lambda: pool.locked == ({"default"} if number == 1 else set()), "as the state wants it")  # noqa: B023
    assert method.synced == [("default", "r/1"), ("default", "r/2")]
    in_thread(controller.close, name="close").result(LONG_S)


def test_a_module_that_tells_of_a_change_and_can_not_be_unlocked_is_tried_again_later() -> None:
    """Seen red: at once, a hundred thousand times a second, and whoever had unlocked it never returned."""
    pool, tries, closed = Module(), list[str](), threading.Event()
    wanted: list[Module] = [pool]
    locks = ModuleLocks("m", lambda: wanted, closed)

    def unlock(model_tag: str) -> None:
        tries.append(model_tag)
        locks.apply()  # as the word of a batch does
        if len(tries) < 20:
            raise OSError("not now")

    pool.unlock = unlock  # type: ignore[method-assign]
    locks.apply()
    wanted.clear()
    closed.set()  # no timer
    locks.apply()
    assert tries == ["m"]
    locks.apply()
    assert tries == ["m"] * 2, "with the next change"


def test_a_pool_with_a_lock_of_its_own_waits_for_nobody_who_waits_for_it(made: Make) -> None:
    """One thread unlocks it, another is in it and tells of a batch. Seen red: each waited for the other, for good."""
    controller, _ = made()
    pool, mutex, unlocking = Module(), threading.Lock(), threading.Event()

    def unlock(model_tag: str) -> None:
        unlocking.set()
        with mutex:
            pool.locked.discard(model_tag)

    pool.unlock = unlock  # type: ignore[method-assign]
    controller.set_module_references(Module(), pool)
    controller.trajectory_pool_notify_batch_ready("default")
    with mutex:
        controller._models["default"].trained(Trained(worker="w", run_id="r", version=1))
        assert unlocking.wait(LONG_S)
        put = in_thread(lambda: controller.trajectory_pool_notify_batch_ready("default"), name="put")
        put.result(LONG_S)
    until(lambda: pool.calls == ["lock", "lock"], "whoever unlocked it has locked it for that batch")
    assert pool.locked == {"default"}


def test_what_another_thread_is_about_to_unlock_is_unlocked_when_a_call_returns(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red where a call left it to that thread, and returned."""
    monkeypatch.setattr("weightsync.control.locks._MOMENT_S", LONG_S)
    controller, _ = made()
    pool, locking, go = Module(), threading.Event(), threading.Event()

    def lock(model_tag: str) -> None:
        locking.set()
        assert go.wait(LONG_S)
        pool.locked.add(model_tag)

    pool.lock = lock  # type: ignore[method-assign]
    controller.set_module_references(Module(), pool)
    ready = in_thread(lambda: controller.trajectory_pool_notify_batch_ready("default"), name="ready")
    assert locking.wait(LONG_S)
    dropped = in_thread(lambda: controller.trajectory_pool_notify_batch_dropped("default"), name="dropped")
    with pytest.raises(TimeoutError):
        dropped.result(0.05)
    go.set()
    dropped.result(LONG_S)
    assert pool.locked == set()
    ready.result(LONG_S)


def test_an_interrupt_within_a_module_leaves_it_to_the_next(made: Make) -> None:
    controller, _ = made()
    pool, interrupts = Module(), [KeyboardInterrupt()]

    def lock(model_tag: str) -> None:
        if interrupts:
            raise interrupts.pop()
        pool.locked.add(model_tag)

    pool.lock = lock  # type: ignore[method-assign]
    controller.set_module_references(Module(), pool)
    with pytest.raises(KeyboardInterrupt):
        controller.trajectory_pool_notify_batch_ready("default")
    controller.trajectory_pool_notify_batch_ready("default")
    assert pool.locked == {"default"}


def test_the_service_fields_are_those_of_the_configuration(made: Make) -> None:
    """Of each model its own. Red where a field is left out of `ModelControl.seen`, or taken of another model."""
    service = {"model": "m", "weight_type": "full", "backend": "sglang", "base_url": "http://localhost:8000"}
    other = WeightSyncConfig(inference_service={"model": "n", "backend": "vllm", "base_url": "http://h:1"})
    config = {"sync_method": "disk", "sync_weight_path": "/path/to/weights", "inference_service": service}
    controller, _ = made(config, model_tags=("a", "b"), configs={"b": other})
    fields = ("model_name", "weight_type", "weight_path", "backend", "base_url")
    found = {tag: tuple(getattr(state, name) for name in fields) for tag, state in controller.status().models.items()}
    assert found == {
        "a": ("m", "full", "/path/to/weights", "sglang", "http://localhost:8000"),
        "b": ("n", "full", "", "vllm", "http://h:1"),
    }
    bare, _ = made()
    assert [getattr(bare.rollout_service_state("default"), name) for name in fields] == ["", "full", "", "", ""]


def test_a_module_or_a_callback_that_raises_locks_nobody_for_ever(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.control.locks._MOMENT_S", LONG_S)

    def raises(*_: Any) -> None:
        raise RuntimeError("as told")

    controller, _ = made({"validate_freq": 1}, on_validate=raises)
    bad, good = Module(), Module()
    bad.fails = True
    controller.set_module_references(bad, good)
    controller.trajectory_pool_notify_batch_ready("default")
    assert good.locked == {"default"}
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    controller.end_validate("default")
    assert good.locked == bad.locked == set()


def test_a_module_that_could_not_be_unlocked_is_tried_again(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: one error of `unlock`, and the pool was locked until the next batch, which never came."""
    monkeypatch.setattr("weightsync.control.locks._AGAIN_S", (0.01, 0.02))
    controller, _ = made()
    pool, unlocked, tries = Module(), threading.Event(), iter(range(100))

    def unlock(model_tag: str) -> None:
        if next(tries) < 2:
            raise RuntimeError("as told")
        pool.locked.discard(model_tag)
        unlocked.set()

    pool.unlock = unlock  # type: ignore[method-assign]
    controller.set_module_references(Module(), pool)
    controller.trajectory_pool_notify_batch_ready("default")
    assert pool.locked == {"default"}
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    assert unlocked.wait(LONG_S)
    assert pool.locked == set()


def _no_threads(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    """The next `num` threads of a controller can't be started."""
    starts, left = threading.Thread.start, [None] * num

    def start(thread: threading.Thread) -> None:
        if left and (isinstance(thread, threading.Timer) or thread.name.startswith("weightsync-sync-")):
            left.pop()
            raise RuntimeError("can't start new thread")
        starts(thread)

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("num", [2, 50])
def test_where_no_thread_can_be_started_a_model_waits_for_nothing(
    made: Make, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    """Seen red: the retry's timer was lost, and with it the model: it waited for a retry for ever."""
    controller, method = made()
    with monkeypatch.context() as patch:
        _no_threads(patch, num)
        controller.train_worker_notify_weight_update("w", "default", "r", 1, timeout_s=LONG_S)
    state = controller.rollout_service_state("default")
    assert (state.rollout_model_version, state.overdue) == ((1, False) if num == 2 else (0, True))
    controller.train_worker_notify_weight_update("w", "default", "r", 2, timeout_s=LONG_S)
    assert controller.rollout_service_state("default").rollout_model_version == 2
    assert method.synced[-1] == ("default", "r/2")


def test_a_validation_that_nothing_can_time_is_over(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: everything was locked for a validation that nobody had been told of."""
    told: list[ValidationRun] = []
    controller, method = made({"validate_freq": 1}, on_validate=lambda tag, validation: told.append(validation))
    with monkeypatch.context() as patch:

        def sync(tag: str, version: Version) -> int:
            _no_threads(patch, 1)
            return version.number

        method.does = sync
        controller.train_worker_notify_weight_update("w", "default", "r", 1, timeout_s=LONG_S)
        until(lambda: controller.rollout_service_state("default").last_validation, "its end")
    state = controller.rollout_service_state("default")
    assert (state.waiting_for_validation, state.pool_locked, told) == (None, False, [])
    assert "can't start new thread" in str(state.last_validation)


def test_a_method_that_can_not_say_its_instances_loses_no_sync(made: Make) -> None:
    """Seen red: of a version that came while another was tried nothing was heard any more."""
    given_up: list[str] = []
    controller, method = made(retries_s=(), on_give_up=lambda tag, version: given_up.append(str(version)))

    def sync(tag: str, version: Version) -> int:
        if version.number == 1:
            controller.train_worker_notify_weight_update("w", "default", "r", 2, timeout_s=0.001)
            raise RuntimeError("as told")
        return version.number

    def instances() -> tuple[Any, ...]:
        raise RuntimeError("as told")

    method.does, method.instances = sync, instances  # type: ignore[method-assign]
    controller.train_worker_notify_weight_update("w", "default", "r", 1, timeout_s=0.001)
    assert controller.wait_version("r", "default", 2, timeout_s=LONG_S)
    assert given_up == ["r/1"]


def test_a_sync_by_hand(made: Make) -> None:
    controller, method = made({"sync_mode": "batch-async", "staleness_threshold": 9})
    assert controller.sync_weight_to_rollout_service("default")
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    assert method.synced == []
    assert controller.sync_weight_to_rollout_service("default")
    assert method.synced == [("default", "r/1")]

    def fails(tag: str, version: Version) -> int:
        raise RuntimeError("as told")

    method.does = fails
    controller.train_worker_notify_weight_update("w", "default", "r", 2)
    assert not controller.sync_weight_to_rollout_service("default")


@pytest.mark.parametrize("mode", ["sync", "batch-async"])
def test_a_sync_by_hand_comes_behind_a_validation(made: Make, mode: str) -> None:
    """Seen red: it was said at once that the newest version is not served, and it never was: a trainer's last one."""
    controller, method = made({"sync_mode": mode, "validate_freq": 2})
    controller.train_worker_notify_weight_update("w", "default", "r", 2)
    until(lambda: controller.rollout_service_state("default").waiting_for_validation, "version 2 is validated")
    controller.train_worker_notify_weight_update("w", "default", "r", 3, timeout_s=0.01)
    assert not controller.sync_weight_to_rollout_service("default", timeout_s=0.01)
    waiting = in_thread(lambda: controller.sync_weight_to_rollout_service("default", timeout_s=LONG_S), name="last")
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    controller.end_validate("default")
    assert waiting.result(LONG_S)
    assert method.synced == [("default", "r/2"), ("default", "r/3")]


def test_a_sync_by_hand_comes_behind_the_one_of_an_older_version(made: Make) -> None:
    """Seen red: it waited for that one alone, and the newest, which was not due, was never asked for."""
    controller, method = made({"sync_mode": "batch-async"})
    go = threading.Event()
    method.does = lambda tag, version: version.number if go.wait(LONG_S) else 0
    for number in (2, 3):
        controller.train_worker_notify_weight_update("w", "default", "r", number, timeout_s=0.01)
    waiting = in_thread(lambda: controller.sync_weight_to_rollout_service("default", timeout_s=LONG_S), name="last")
    until(lambda: controller._models["default"].state.wanted, "it is asked for")
    go.set()
    assert waiting.result(LONG_S)
    assert method.synced == [("default", "r/2"), ("default", "r/3")]


def test_closing_wakes_whoever_waits_and_unlocks(made: Make) -> None:
    controller, _ = made()
    pool = Module()
    controller.set_module_references(Module(), pool)
    controller.trajectory_pool_notify_batch_ready("default")
    waiting = in_thread(lambda: controller.await_rollout_service("default", timeout_s=LONG_S), name="waits")
    controller.close()
    controller.close()
    waiting.result(LONG_S)
    assert pool.locked == set()
    with pytest.raises(StateError, match="closed"):
        controller.trajectory_pool_notify_batch_ready("default")


def test_what_can_not_be_is_refused(made: Make) -> None:
    controller, _ = made()
    with pytest.raises(InvalidRequestError, match="no model 'other'"):
        controller.check_rollout_service_status("other")
    for version in (-1, 1.5, True, 1 << 60):
        with pytest.raises(InvalidRequestError):
            controller.train_worker_notify_weight_update("w", "default", "r", version)  # type: ignore[arg-type]
    for worker, run_id in (("", "r"), ("w", ""), ("w" * 513, "r"), ("w", "r" * 513)):
        with pytest.raises(InvalidRequestError, match="1 to 512 characters"):
            controller.train_worker_notify_weight_update(worker, "default", run_id, 1)
    controller.train_worker_notify_weight_update("w", "default", "r", 5)
    with pytest.raises(VersionError):
        controller.train_worker_notify_weight_update("w", "default", "r", 4)
    with pytest.raises(StateError, match="takes no such holder"):
        controller.set_tinker_service_holder(object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stranger"):
        made(configs={"stranger": controller._models["default"]._config})


@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0, 1e9, "1"], ids=str)
def test_times_that_nobody_can_wait_are_refused(made: Make, seconds: Any) -> None:
    """Seen red: an OverflowError, and only where there was something to wait for; or a wait of 30 years."""
    controller, method = made()
    waits: list[Callable[[], object]] = [
        lambda: controller.await_rollout_service("default", timeout_s=seconds),
        lambda: controller.wait_version("r", "default", 0, timeout_s=seconds),
        lambda: controller.sync_weight_to_rollout_service("default", timeout_s=seconds),
        lambda: controller.train_worker_notify_weight_update("w", "default", "r", 1, timeout_s=seconds),
        lambda: PullMethod({"a": RolloutClient("http://127.0.0.1:9")}, {}, timeout_s=seconds),
    ]
    for wait in waits:
        with pytest.raises(InvalidRequestError, match="timeout_s is a number of seconds"):
            wait()
    assert (method.synced, controller.rollout_service_state("default").train_model_version) == ([], 0)


@pytest.mark.parametrize("seed", range(12))
def test_any_weather_ends_in_calm(made: Make, seed: int) -> None:
    """Threads that call everything while syncs fail at random: afterwards nobody is blocked, and all is served."""
    weather = random.Random(seed)
    mode = weather.choice(["sync", "batch-async", "fully-async"])
    controller, method = made({"sync_mode": mode, "validate_freq": 3}, model_tags=("a", "b"), retries_s=(0.0, 0.001))
    modules = Module(), Module()
    controller.set_module_references(*modules)

    def may_fail(tag: str, version: Version) -> int:
        if weather.random() < 0.4:
            raise RuntimeError("bad weather")
        return version.number

    method.does = may_fail

    def train(tag: str) -> None:
        for number in range(1, 30):
            controller.trajectory_pool_notify_batch_ready(tag)
            for worker in ("w0", "w1"):
                controller.train_worker_notify_weight_update(worker, tag, "r", number, timeout_s=LONG_S)

    over = threading.Event()

    def look(tag: str) -> None:
        while not over.is_set():
            state = controller.rollout_service_state(tag)
            assert state.staleness >= 0
            if state.waiting_for_validation:
                controller.end_validate(tag)
            controller.await_rollout_service(tag, timeout_s=0.001)

    lookers = [in_thread(lambda tag=tag: look(tag), name="look") for tag in ("a", "b")]  # type: ignore[misc]
    trainers = [in_thread(lambda tag=tag: train(tag), name="train") for tag in ("a", "b")]  # type: ignore[misc]
    for trainer in trainers:
        trainer.result(LONG_S)
    method.does = lambda tag, version: version.number
    for tag in ("a", "b"):
        until(lambda: controller.sync_weight_to_rollout_service(tag, timeout_s=1.0), "calm")  # noqa: B023
        until(lambda: not controller.rollout_service_state(tag).pool_locked, "the end of a validation")  # noqa: B023
        assert controller.check_rollout_service_status(tag) == "continue"
    over.set()
    for looker in lookers:
        looker.result(LONG_S)
    until(lambda: modules[0].locked == modules[1].locked == set(), "they are unlocked, by the last sync's thread")


def test_a_validation_that_nobody_ends_does_not_hold_rollout_for_ever() -> None:
    """Whether the callback fails, or who validates is gone."""

    def fails(tag: str, validation: ValidationRun) -> None:
        raise RuntimeError("no validator")

    for options in ({"on_validate": fails}, {"validate_timeout_s": 0.05}):
        controller = WeightSyncController({"validate_freq": 1}, Method(), **options)  # type: ignore[arg-type]
        controller.train_worker_notify_weight_update("w", "default", "r", 1)
        assert controller.wait_version("r", "default", 1, timeout_s=LONG_S)
        assert controller.await_rollout_service("default", timeout_s=LONG_S) == "continue"
        end = time.monotonic() + LONG_S
        while (ended := controller.rollout_service_state("default").last_validation) is None:
            assert time.monotonic() < end
            time.sleep(0.01)  # between two looks
        assert "error" in (ended.result or {})
        until(lambda: not controller.rollout_service_state("default").pool_locked, "its end")  # noqa: B023
        controller.close()


def _waiting(seconds: float) -> list[threading.Thread]:
    """Timers that were set to so many seconds."""
    return [each for each in threading.enumerate() if getattr(each, "interval", None) == seconds]


def test_a_step_that_gives_nothing_does_not_hold_rollout_for_ever(made: Make) -> None:
    """Its trainer says so, or is gone. Seen red: rollout was blocked for good, and a trainer that came back too."""
    controller, _ = made()
    controller.trajectory_pool_notify_batch_ready("default")
    waiter = in_thread(lambda: controller.await_rollout_service("default", timeout_s=LONG_S), name="waits")
    controller.trajectory_pool_notify_batch_dropped("default")
    assert waiter.result(LONG_S) == "continue"
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(InvalidRequestError, match="num_batches is a whole number from 1 on"):
            controller.trajectory_pool_notify_batch_dropped("default", wrong)  # type: ignore[arg-type]

    hasty, _ = made(step_timeout_s=0.05)
    pool = Module()
    hasty.set_module_references(Module(), pool)
    hasty.trajectory_pool_notify_batch_ready("default")
    assert hasty.await_rollout_service("default", timeout_s=LONG_S) == "continue"
    until(lambda: not pool.locked, "it is unlocked, by the timer's thread")
    state = hasty.rollout_service_state("default")
    assert "no version came within 0.05 s" in str(state.lost_step)
    assert state.last_error is None, "no sync has failed"
    hasty.train_worker_notify_weight_update("w", "default", "r", 1)  # the step was late
    state = hasty.rollout_service_state("default")
    assert (state.rollout_model_version, state.lost_step, state.blocked) == (1, None, False)


def test_a_step_that_is_lost_unlocks_the_pool_and_is_told_until_the_trainer_speaks(made: Make) -> None:
    """Seen red: rollout's next batch took it from the status at once, and nobody ever saw it there."""
    controller, _ = made()
    pool, model = Module(), controller._models["default"]
    controller.set_module_references(Module(), pool)
    controller.trajectory_pool_notify_batch_ready("default")
    awaited = model._step.awaited
    assert awaited is not None
    model._step_lost(awaited)
    assert pool.calls == ["lock", "unlock"]
    assert controller.rollout_service_state("default").lost_step is not None
    controller.trajectory_pool_notify_batch_ready("default")
    state = controller.rollout_service_state("default")
    assert (state.lost_step is not None, state.blocked) == (True, True)
    controller.trajectory_pool_notify_batch_dropped("default")
    assert controller.rollout_service_state("default").lost_step is None


def test_a_step_is_never_dropped_where_the_configuration_says_so(made: Make) -> None:
    controller, _ = made({"fleet": {"step_timeout_s": None}})
    controller.trajectory_pool_notify_batch_ready("default")
    assert controller.check_rollout_service_status("default") == "block"
    assert controller._models["default"]._step._alarm._timer is None


def test_a_step_for_which_no_thread_could_wait_is_timed_at_the_next_word(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: it was never timed, and rollout stayed blocked for good."""
    seconds = 4322.5
    controller, _ = made(step_timeout_s=seconds)
    with monkeypatch.context() as patch:
        _no_threads(patch, 1)
        controller.trajectory_pool_notify_batch_ready("default")
    assert not _waiting(seconds)
    controller.trajectory_pool_notify_batch_ready("default")
    timer = controller._models["default"]._step._alarm._timer
    assert timer is not None
    assert timer.interval <= seconds


def test_a_step_that_has_ended_leaves_no_timer(made: Make) -> None:
    """Nor does one that is dropped, that waits for a validation, or whose controller is closed."""
    seconds = 4321.5
    controller, _ = made({"validate_freq": 2}, step_timeout_s=seconds)
    controller.trajectory_pool_notify_batch_ready("default")
    (first,) = _waiting(seconds)
    controller.trajectory_pool_notify_batch_ready("default")
    assert _waiting(seconds) == [first], "a batch that is told of meanwhile gives no more time"
    controller.trajectory_pool_notify_batch_dropped("default")
    until(lambda: not _waiting(seconds), "dropped")
    for number in (1, 2):
        controller.trajectory_pool_notify_batch_ready("default")
        assert len(_waiting(seconds)) == 1
        controller.train_worker_notify_weight_update("w", "default", "r", number)
        until(lambda: not _waiting(seconds), "its version is there")
    controller.trajectory_pool_notify_batch_ready("default")
    assert not _waiting(seconds), "the dataloader is locked by a validation: no step can end"
    controller.end_validate("default")
    until(lambda: len(_waiting(seconds)) == 1, "the validation has ended")
    controller.close()
    until(lambda: not _waiting(seconds), "closed")


def test_a_timer_that_woke_as_the_version_came_drops_no_other_step(made: Make) -> None:
    controller, _ = made()
    controller.trajectory_pool_notify_batch_ready("default")
    model = controller._models["default"]
    first = model._step.awaited
    assert first is not None
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    controller.trajectory_pool_notify_batch_ready("default")
    model._step_lost(first)
    assert (controller.check_rollout_service_status("default"), model.state.num_pending) == ("block", 1)
    second = model._step.awaited
    assert second is not None
    controller.trajectory_pool_notify_batch_dropped("default")
    controller.trajectory_pool_notify_batch_ready("default")
    assert model._step.awaited == second, "the same step, told of anew"
    model._step_lost(second)
    assert (controller.check_rollout_service_status("default"), model.state.num_pending) == ("block", 1)


def test_a_late_word_of_another_validation_ends_none(made: Make) -> None:
    """Seen red: who validated version 1, and was too late, ended the validation of version 2."""
    controller, _ = made({"validate_freq": 1})
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    controller.end_validate("default", {"reward": 1.0}, version=1)
    controller.train_worker_notify_weight_update("w", "default", "r", 2)
    controller.end_validate("default", {"reward": 1.0}, version=1)
    state = controller.rollout_service_state("default")
    assert state.waiting_for_validation == ValidationRun(run_id="r", version=2, stands_for=(2,))
    controller.end_validate("default", {"reward": 2.0}, version=2)
    ended = controller.rollout_service_state("default").last_validation
    assert ended is not None
    assert (ended.of.version, ended.result) == (2, {"reward": 2.0})


def test_a_callback_that_fails_late_ends_no_other_validation() -> None:
    """Seen red: it had ended its own, and the next one ended with its error."""
    begun: list[ValidationRun] = []
    first: list[threading.Thread] = []
    go = threading.Event()

    def validates(tag: str, validation: ValidationRun) -> None:
        begun.append(validation)
        if len(begun) == 1:
            first.append(threading.current_thread())
            controller.end_validate(tag, {"reward": 1.0})
            assert go.wait(LONG_S)
            raise RuntimeError("as told")

    controller = WeightSyncController({"validate_freq": 1}, Method(), on_validate=validates)
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    until(lambda: begun, "version 1 is validated")
    until(lambda: controller.rollout_service_state("default").waiting_for_validation is None, "its end")
    controller.train_worker_notify_weight_update("w", "default", "r", 2)
    until(lambda: len(begun) == 2, "version 2 is validated")
    go.set()
    until(lambda: not first[0].is_alive(), "it has failed")
    assert controller.rollout_service_state("default").waiting_for_validation == begun[1]
    controller.close()


def test_a_validation_that_was_ended_leaves_no_timer() -> None:
    """Seen to fail: each one kept a thread for an hour."""
    told, seconds = threading.Event(), 1234.5

    def waiting() -> list[threading.Thread]:
        return _waiting(seconds)

    for ends in ("end_validate", "close"):
        told.clear()
        controller = WeightSyncController(
            {"validate_freq": 1}, Method(), validate_timeout_s=seconds, on_validate=lambda *_: told.set()
        )
        controller.train_worker_notify_weight_update("w", "default", "r", 1)
        assert told.wait(LONG_S)
        assert len(waiting()) == 1
        if ends == "end_validate":
            controller.end_validate("default")
        else:
            controller.close()
        until(lambda: not waiting(), "its thread ends")
        controller.close()


def test_the_configuration_says_what_no_argument_does(made: Make) -> None:
    """Retries, and what is done after the last one, were read by `build_controller` alone."""
    fleet = {"retries_s": [0.0, 0.0], "after_failure": "evict", "validate_timeout_s": 0.05}
    own = WeightSyncConfig(fleet={"retries_s": []})
    method = Method()
    controller = WeightSyncController({"fleet": fleet}, method, model_tags=("a", "b"), configs={"b": own})
    policies = {tag: controller._models[tag].policy for tag in ("a", "b")}
    assert (policies["a"].retries_s, policies["a"].after_failure) == ((0.0, 0.0), "evict")
    assert (policies["b"].retries_s, policies["b"].after_failure) == ((), "keep")
    assert controller._shared.validate_timeout_s == 0.05
    controller.close()
