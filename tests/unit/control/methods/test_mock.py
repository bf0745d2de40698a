"""The method `mock`: it says what it was told to say, remembers what it was asked, and moves nothing."""

from __future__ import annotations

import logging

import pytest

from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.mock import MockCall, MockMethod
from weightsync.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NoEnginesError,
    SyncFailedError,
    TransferAbortedError,
)
from weightsync.handles.fanout import in_thread
from weightsync.types import Version

LONG_S = 20.0


def v(number: int, run_id: str = "run") -> Version:
    return Version(run_id=run_id, number=number)


def test_it_serves_what_it_is_asked_for_and_says_that_nothing_is_moved(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        method = MockMethod()
    assert "nothing is moved" in caplog.text
    method.trained("m", v(1))
    assert method.sync_weights("m", v(1)) == 1
    assert method.sync_weights("m", v(3)) == 3
    assert method.sync_weights("m", v(2)) == 3, "it does not go back within a run"
    assert method.sync_weights("m", v(1, "new")) == 1
    assert method.served("m") == v(1, "new")
    assert method.served("other") is None
    assert [(call.call, call.outcome) for call in method.asked] == [
        ("trained", ""), ("sync_weights", "1"), ("sync_weights", "3"), ("sync_weights", "3"), ("sync_weights", "1"),
    ]  # fmt: skip


def test_a_dry_run_of_days_keeps_its_last_calls() -> None:
    """Seen red: all were kept."""
    method = MockMethod()
    for number in range(10_005):
        method.trained("m", v(number))
    assert len(method.asked) == 10_000
    assert method.asked[-1].version == v(10_004)


def test_it_fails_as_often_as_it_was_told() -> None:
    method = MockMethod(2, failures={2: 2})
    for _ in range(2):
        with pytest.raises(SyncFailedError) as caught:
            method.sync_weights("m", v(2))
        assert set(caught.value.causes) == {"mock-1"}
    assert method.served("m") is None
    assert method.sync_weights("m", v(2)) == 2
    method.fail(3)
    with pytest.raises(SyncFailedError):
        method.sync_weights("m", v(3))
    assert method.asked[-1] == MockCall(call="sync_weights", model_tag="m", version=v(3), outcome="SyncFailedError")


def test_whoever_failed_is_evicted_of_that_model_and_with_nobody_left_nothing_is_served() -> None:
    method = MockMethod(2, failures={1: 2})
    assert method.evict_failed("m") == []
    for left in (("mock-0",), ()):
        with pytest.raises(SyncFailedError):
            method.sync_weights("m", v(1))
        method.evict_failed("m")
        assert method.live("m") == left
    assert method.live("other") == ("mock-0", "mock-1")
    with pytest.raises(NoEnginesError):
        method.sync_weights("m", v(1))
    assert method.sync_weights("other", v(1)) == 1


def test_a_delay_has_a_deadline_and_ends_when_it_is_closed() -> None:
    slow = MockMethod(delay_s=LONG_S, timeout_s=0.05)
    with pytest.raises(DeadlineExceededError):
        in_thread(lambda: slow.sync_weights("m", v(1)), name="slow").result(LONG_S / 2)
    assert MockMethod(delay_s=0.01).sync_weights("m", v(1)) == 1
    method = MockMethod(delay_s=LONG_S)
    waiting = in_thread(lambda: method.sync_weights("m", v(1)), name="waiting")
    method.close()
    with pytest.raises(TransferAbortedError):
        waiting.result(LONG_S)
    assert method.served("m") is None


def test_many_at_once_are_all_remembered() -> None:
    method = MockMethod(delay_s=0.001)
    syncs = [in_thread(lambda n=n: method.sync_weights("m", v(n)), name="s") for n in range(1, 40)]  # type: ignore[misc]
    for sync in syncs:
        sync.result(LONG_S)
    assert {call.version.number for call in method.asked if call.version} == set(range(1, 40))
    assert method.served("m") == v(39)


def test_settings_that_can_not_be_are_refused() -> None:
    with pytest.raises(NoEnginesError):
        MockMethod(0)
    for wrong in ({"delay_s": -1.0}, {"timeout_s": 0.0}, {"failures": {1: -1}}):
        with pytest.raises(InvalidRequestError):
            MockMethod(**wrong)


def test_under_a_controller_that_evicts() -> None:
    method = MockMethod(2, failures={1: 2})
    controller = WeightSyncController({"sync_mode": "sync"}, method, retries_s=(0.01,), after_failure="evict")
    controller.train_worker_notify_weight_update("worker", "default", "run", 1, timeout_s=LONG_S)
    assert controller.sync_weight_to_rollout_service("default", timeout_s=LONG_S)
    assert method.live("default") == ("mock-0",)
    assert method.served("default") == v(1)
    assert [call.call for call in method.asked if call.call != "trained"] == [
        "sync_weights",
        "sync_weights",
        "evict_failed",
        "sync_weights",
    ]
    controller.close()
