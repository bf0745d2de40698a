"""What a controller's timeline says of rollout that waits for a training step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.control.test_controller import Method, until
from weightsync.control import history as history_module
from weightsync.control import model as model_module
from weightsync.control.controller import WeightSyncController
from weightsync.control.metrics import ControllerMetrics
from weightsync.control.web.headline import facts
from weightsync.types import Version

Make = Callable[..., tuple[WeightSyncController, Method]]


@pytest.fixture
def make() -> Iterator[Make]:
    controllers: list[WeightSyncController] = []

    def made(config: dict[str, Any] | None = None, retry_s: float = 0.01) -> tuple[WeightSyncController, Method]:
        method = Method()
        controllers.append(WeightSyncController(config or {}, method, retries_s=(retry_s,)))
        return controllers[-1], method

    yield made
    for controller in controllers:
        controller.close()


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(model_module, "time", found)
    monkeypatch.setattr(history_module, "time", found)
    monkeypatch.setattr(history_module, "now_s", found.monotonic)
    return found


def waits(controller: WeightSyncController) -> dict[str, tuple[float, float, str | None]]:
    """Of the newest sync."""
    return {span.name: (span.start_s, span.seconds, span.who) for span in controller.status().syncs[0].spans}


def test_the_timeline_says_how_long_rollout_waited_for_a_step(make: Make, clock: Clock) -> None:
    controller, method = make()
    seen = []

    def two_seconds(tag: str, version: Version) -> int:
        seen.append(waits(controller))
        clock.now += 2.0
        return version.number

    method.does = two_seconds
    for number in (1, 2):
        clock.now += 50.0  # rollout is free
        controller.trajectory_pool_notify_batch_ready("default")
        clock.now += 5.0
        controller.train_worker_notify_weight_update("w", "default", "r", number)
        assert waits(controller) == {"batch gate": (-5.0, 7.0, None), "trainer": (-5.0, 5.0, "w")}
    assert seen == [{"batch gate": (-5.0, 5.0, None), "trainer": (-5.0, 5.0, "w")}] * 2, "while it runs"


def test_a_sync_that_takes_long_is_seen_when_it_has_ended(clock: Clock) -> None:
    """Seen red: 20 others that began after it, and neither the status nor the metrics knew it."""
    slow, hold, method = threading.Event(), threading.Event(), Method()
    controller = WeightSyncController({"sync_mode": "fully-async"}, method, model_tags=("slow", "quick"))

    def sync(tag: str, version: Version) -> int:
        if tag == "slow":
            slow.set()
            assert hold.wait(20.0)
        return version.number

    method.does = sync
    controller.train_worker_notify_weight_update("w", "slow", "r", 1)
    assert slow.wait(20.0)
    for number in range(1, 26):
        clock.now += 1.0
        controller.train_worker_notify_weight_update("w", "quick", "r", number)
        assert controller.wait_version("r", "quick", number, timeout_s=20.0)
    found = controller.status().syncs
    assert (len(found), found[0].model_tag, found[0].outcome) == (20, "slow", "running")
    assert [each.version for each in found[1:]] == list(range(25, 6, -1))
    hold.set()
    assert controller.wait_version("r", "slow", 1, timeout_s=20.0)
    found = controller.status().syncs
    assert (found[0].model_tag, found[0].outcome, found[0].seconds) == ("slow", "served", 25.0)
    controller.close()


def test_a_wall_clock_that_is_stepped_back_hides_no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: the syncs since then stood behind those before: none counted, and one that failed was the newest."""
    method = Method()
    controller = WeightSyncController({"sync_mode": "fully-async"}, method, retries_s=())
    metrics = ControllerMetrics(controller.status, controller.records)
    controller.subscribe(lambda tag: metrics.look())
    method.does = lambda tag, version: -1 if version.number == 21 else version.number

    def bring(first: int, last: int) -> None:
        for number in range(first, last + 1):
            controller.train_worker_notify_weight_update("w", "default", "r", number)
            assert number == 21 or controller.wait_version("r", "default", number, timeout_s=20.0)
            until(lambda: controller.rollout_service_state("default").state == "running", "it has ended")

    bring(1, 21)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600.0)
    bring(22, 31)
    status = controller.status()
    assert [each.version for each in status.syncs] == [*range(31, 11, -1)]
    assert 0 <= status.now_s - status.syncs[0].started_s < 60.0
    assert not [each.text for each in facts(status) if "failed" in each.text]
    text = metrics.render()
    assert b'syncs_total{model="default",outcome="served"} 30.0' in text
    assert b'syncs_total{model="default",outcome="failed"} 1.0' in text
    controller.close()


def test_a_step_is_waited_for_since_rollout_is_locked(make: Make, clock: Clock) -> None:
    """Not since its batch was ready, and through the steps before it that end in no sync."""
    controller, method = make({"sync_mode": "batch-async", "staleness_threshold": 2})
    for _ in range(2):
        clock.now += 5.0
        controller.trajectory_pool_notify_batch_ready("default")
    for version, worker in enumerate(("first", "second"), start=1):
        clock.now += 5.0
        controller.train_worker_notify_weight_update(worker, "default", "r", version)
    assert method.synced == [("default", "r/2")]
    assert waits(controller)["trainer"] == (-10.0, 10.0, "second")


def test_a_step_is_not_waited_for_while_the_sync_before_it_runs(make: Make, clock: Clock) -> None:
    """Rollout is locked through both."""
    controller, method = make()

    def does(tag: str, version: Version) -> int:
        if version.number == 1:
            controller.trajectory_pool_notify_batch_ready(tag)
            clock.now += 2.0
        return version.number

    method.does = does
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    clock.now += 5.0
    controller.train_worker_notify_weight_update("w", "default", "r", 2)
    assert waits(controller) == {"batch gate": (-7.0, 7.0, None), "trainer": (-5.0, 5.0, "w")}


def test_who_waits_for_a_retry_waits_for_no_trainer(make: Make, clock: Clock) -> None:
    controller, method = make(retry_s=60.0)

    def once(tag: str, version: Version) -> int:
        if version.run_id == "r":
            raise RuntimeError("as told")
        return version.number

    method.does = once
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    clock.now += 5.0
    controller.train_worker_notify_weight_update("w", "default", "another", 1)
    assert waits(controller) == {"batch gate": (-5.0, 5.0, None)}


def test_where_nobody_was_locked_the_trainer_is_not_waited_for(make: Make, clock: Clock) -> None:
    """Nor in a sync that a trainer did not start: a retry, and one of a version that came during another sync."""
    controller, method = make()
    controller.train_worker_notify_weight_update("w", "default", "r", 1)
    assert "trainer" not in waits(controller), "no batch was ready"

    def does(tag: str, version: Version) -> int:
        clock.now += 2.0
        if version.number == 2:
            if len(method.synced) == 1:
                method.synced.append((tag, "failed"))
                raise RuntimeError("as told")
            controller.train_worker_notify_weight_update("w", "default", "r", 3)
        return version.number

    method.does = does
    controller.trajectory_pool_notify_batch_ready("default")
    clock.now += 5.0
    controller.train_worker_notify_weight_update("w", "default", "r", 2)
    until(lambda: controller.status().models["default"].rollout_model_version == 3, "all are served")
    found = {(sync.version, sync.outcome): [span.name for span in sync.spans] for sync in controller.status().syncs}
    assert [sync for sync, names in found.items() if "trainer" in names] == [(2, "failed")]
    assert set(found) == {(1, "served"), (2, "failed"), (2, "served"), (3, "served")}

    free, _ = make({"sync_mode": "fully-async"})
    free.trajectory_pool_notify_batch_ready("default")
    clock.now += 5.0
    free.train_worker_notify_weight_update("w", "default", "r", 1)
    until(lambda: free.status().models["default"].rollout_model_version == 1, "it is served")
    assert waits(free) == {}
