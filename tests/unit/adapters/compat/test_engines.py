"""A document's loader that keeps the tensors it is given: they are its own, and the next version never shows early.
The manager calls all of its trainers at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.adapters.compat.engines import InferenceEngineClient, WeightLoader, WeightSyncManager
from weightsync.adapters.compat.strategy import BroadcastTransferStrategy
from weightsync.errors import StateError
from weightsync.testing.contracts import manifest_of
from weightsync.types import Full, Version


class Assigns(WeightLoader):
    def __init__(self) -> None:
        self.model = nn.Linear(4, 4, bias=False)
        self.fails = False

    async def load_weights(self, named_tensors: Mapping[str, torch.Tensor]) -> None:  # type: ignore[override]
        if self.fails:
            raise RuntimeError("injected")
        self.model.load_state_dict(named_tensors, assign=True)

    @property
    def live(self) -> float:
        return self.model.weight[0, 0].item()


class AssignsPairs(Assigns):
    async def load_weights(self, receiver: AsyncIterator[tuple[str, torch.Tensor]], request: Any) -> None:  # type: ignore[override]
        async for name, tensor in receiver:
            getattr(self.model, name).data = tensor


class AssignsPlainly(Assigns):
    def load_weights(self, named_tensors: Mapping[str, torch.Tensor]) -> None:  # type: ignore[override]
        self.model.load_state_dict(named_tensors, assign=True)


class AssignsPairsPlainly(Assigns):
    def load_weights(self, receiver: AsyncIterator[tuple[str, torch.Tensor]], request: Any) -> None:  # type: ignore[override]
        async def pairs() -> dict[str, torch.Tensor]:
            return {name: tensor async for name, tensor in receiver}

        self.model.load_state_dict(asyncio.run(pairs()), assign=True)


def stage(loader: WeightLoader, number: int) -> Version:
    tensors = {"weight": torch.full((4, 4), float(number))}
    loader._loader.begin(manifest_of(tensors, number))
    loader._loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in tensors.items())
    loader._loader.verify()
    return manifest_of(tensors, number).version


@pytest.mark.parametrize("kind", [Assigns, AssignsPairs])
def test_a_version_that_is_only_staged_is_not_live(kind: type[Assigns]) -> None:
    """Seen red with the host memory of one version used for the next."""
    loader = kind()
    for number in (1, 2):
        loader._loader.commit(stage(loader, number))
        assert loader.live == number
        stage(loader, number + 10)
        assert loader.live == number
        loader._loader.abort("the trainer died")
        assert (loader.live, loader._loader.healthy) == (number, True)


def test_a_commit_that_failed_is_not_tried_again() -> None:
    """What it gave is gone. Seen red with the proof kept."""
    loader = Assigns()
    version = stage(loader, 1)
    loader.fails = True
    with pytest.raises(RuntimeError, match="injected"):
        loader._loader.commit(version)
    loader.fails = False
    with pytest.raises(StateError):
        loader._loader.commit(version)
    assert not loader._loader.healthy


@pytest.mark.parametrize("kind", [AssignsPlainly, AssignsPairsPlainly])
def test_a_loader_need_not_be_a_coroutine(kind: type[Assigns]) -> None:
    """Seen red: its weights were in, then None was awaited, and the engine fenced."""
    loader = kind()
    loader._loader.commit(stage(loader, 1))
    assert (loader.live, loader._loader.healthy) == (1, True)


def manager_of(trainers: list[Any]) -> WeightSyncManager:
    return WeightSyncManager(trainers, InferenceEngineClient([]), BroadcastTransferStrategy())


def test_a_manager_has_a_thread_for_each_trainer() -> None:
    """They meet in collectives. Seen red: beyond asyncio's threads, CPUs + 4, ranks were never called."""
    num_trainers = 40
    all_here = threading.Barrier(num_trainers, timeout=20)

    class Rank:
        def sync_weights(self) -> int:
            return all_here.wait()

    assert manager_of([Rank() for _ in range(num_trainers)]).sync_weights() in range(num_trainers)
