"""The manager calls all of its trainers at once, and waits for them as long as the config says."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from tests.unit.adapters.compat.test_calls import Actor
from weightsync.adapters.compat import calls
from weightsync.adapters.compat.engines import InferenceEngineClient
from weightsync.adapters.compat.manager import WeightSyncManager
from weightsync.adapters.compat.strategy import BroadcastTransferStrategy
from weightsync.errors import DeadlineExceededError


def test_a_manager_has_a_thread_for_each_trainer() -> None:
    """They meet in collectives. Seen red: beyond asyncio's threads, CPUs + 4, ranks were never called."""
    num_trainers = 40
    all_here = threading.Barrier(num_trainers, timeout=20)

    class Rank:
        def sync_weights(self) -> int:
            return all_here.wait()

    manager = WeightSyncManager(
        [Rank() for _ in range(num_trainers)], InferenceEngineClient([]), BroadcastTransferStrategy()
    )
    assert manager.sync_weights() in range(num_trainers)


@pytest.mark.parametrize("of_strategy", [False, True])
def test_a_manager_waits_as_long_as_the_config_says(of_strategy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: 300 s, whatever the manager and the strategy were told."""
    monkeypatch.setattr(calls, "_MARGIN_S", 0.01)
    said = {"transfer": {"transfer_timeout_s": 0.02, "join_timeout_s": 0.01}}
    cfg: Any = None if of_strategy else said
    strategy = BroadcastTransferStrategy(said if of_strategy else None)
    manager = WeightSyncManager([Actor(Future())], InferenceEngineClient([]), strategy, cfg)
    with pytest.raises(DeadlineExceededError, match=r"no answer to sync_weights within 0\.04 s"):
        manager.sync_weights()
