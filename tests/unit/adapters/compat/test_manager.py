"""The manager calls all of its trainers at once, and waits for them as long as the config says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from tests.unit.adapters.compat.test_calls import Actor
from weightsync.adapters.compat import calls
from weightsync.adapters.compat import strategy as strategy_module
from weightsync.adapters.compat.engines import InferenceEngineClient
from weightsync.adapters.compat.manager import WeightSyncManager
from weightsync.adapters.compat.strategy import BroadcastTransferStrategy, CudaIpcTransferStrategy
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


def test_a_worker_of_the_plan_is_given_the_strategy_alone() -> None:
    """`initialize_weight_sync(strategy)`, phase 4. Seen red: it was given three arguments, and raised a TypeError."""
    given: list[Any] = []

    class Planned:
        async def initialize_weight_sync(self, strategy: Any) -> Any:
            given.append(strategy)
            return await strategy.create_sync_info(None, client)

    class Graph:
        async def initialize_weight_sync(self, strategy: Any, cfg: Any, inference_client: Any) -> Any:
            given.append((strategy, cfg, inference_client))
            return await strategy.create_sync_info(cfg, inference_client)

    class Engine:
        async def update_named_weights(self, request_dict: Any) -> None: ...

    client = InferenceEngineClient([Engine()])
    strategy = CudaIpcTransferStrategy()
    for worker in (Planned(), Graph()):
        manager = WeightSyncManager([worker], client, strategy)
        assert manager._initialize_training_senders().strategy == "cuda_ipc"
    assert given == [strategy, (strategy, None, client)]


@pytest.mark.parametrize("said", [None, "192.0.2.7"])
def test_rank_0_determines_its_address(said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Towards engines that are named by URLs. Seen red: it was this machine's loopback wherever they were."""
    asked: list[str] = []

    def towards(urls: Sequence[str], *, instead: str) -> str:
        asked.extend(urls)
        return "127.0.0.2"

    monkeypatch.setattr(strategy_module, "address_towards", towards)
    cfg: Any = {"transfer": {"master_addr": "127.0.0.3"}} if said else None

    class Client:
        engine_ids = ("http://192.0.2.9:8123", "actor-1")

        def get_world_sizes(self, *, timeout_s: float) -> dict[str, int]:
            return dict.fromkeys(self.engine_ids, 1)

    client: Any = Client()
    info = asyncio.run(BroadcastTransferStrategy().create_sync_info(cfg, client))
    assert asked == ([] if said else ["http://192.0.2.9:8123"])
    assert info.master_addr == ("127.0.0.3" if said else "127.0.0.2")


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
