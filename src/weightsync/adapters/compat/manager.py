"""The call graph's controller: what it has training and inference actors do, and how long it waits for them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weightsync.adapters.compat.calls import answer_of, arguments_of, done, in_thread, patience_s
from weightsync.adapters.compat.engines import InferenceEngineClient
from weightsync.adapters.compat.strategy import WeightTransferStrategy
from weightsync.types import WeightSyncInitInfo


class WeightSyncManager:
    """The call graph's controller: `initialize()` once, `sync_weights()` after a training step.

    Args:
        trainers: the training actors, of every rank, with `initialize_weight_sync(strategy, cfg, inference_client)`, or
            the plan's `initialize_weight_sync(strategy)`, and `sync_weights()`: objects here, or Ray's actor handles.
        cfg: its deadlines, of an actor's call too; the strategy's where not given.
    """

    def __init__(
        self,
        trainers: Sequence[Any],
        inference_client: InferenceEngineClient,
        strategy: WeightTransferStrategy,
        cfg: Any = None,
    ) -> None:
        self._trainers, self._client, self._strategy, self._cfg = list(trainers), inference_client, strategy, cfg

    def initialize(self) -> None:
        """Has both sides make their ends."""
        self._initialize_inference_receivers(self._initialize_training_senders())

    def sync_weights(self) -> Any:
        """Pushes; returns when every engine serves the weights. The first rank's answer.

        Raises:
            DeadlineExceededError: an actor did not answer in time.
            WeightSyncError: as the trainers raise it.
        """
        return self._trigger_training_sync()

    def _initialize_training_senders(self) -> WeightSyncInitInfo:
        method, given = "initialize_weight_sync", (self._strategy, self._cfg, self._client)
        each_takes = [arguments_of(each, method) for each in self._trainers]
        one = all(takes is not None and len(takes) == 1 for takes in each_takes)  # the plan's: of the strategy alone
        return self._all(method, *given[: 1 if one else 3])  # type: ignore[no-any-return]

    def _initialize_inference_receivers(self, sync_info: WeightSyncInitInfo) -> None:
        done(self._client.initialize_weight_sync(self._strategy, sync_info, self._cfg))

    def _trigger_training_sync(self) -> Any:
        return self._all("sync_weights")

    def _all(self, method: str, *args: Any) -> Any:
        timeout_s = patience_s(self._strategy.config(self._cfg))

        async def asked() -> list[Any]:
            calls = [functools.partial(answer_of, each, method, *args, timeout_s=timeout_s) for each in self._trainers]
            with ThreadPoolExecutor(len(calls)) as pool:  # a thread each: ranks wait for each other in collectives
                return await asyncio.gather(*(in_thread(call, pool) for call in calls))

        return done(asked())[0]
