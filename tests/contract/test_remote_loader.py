"""A loader whose model is another engine's keeps the contract of the loader that it speaks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.contract import test_loader_contract as shared
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.remote import RemoteWeightLoader
from weightsync.engine.server import EngineServer
from weightsync.load.base import WeightLoader
from weightsync.load.module import ModuleWeightLoader
from weightsync.testing.contracts import WeightLoaderContract, bytes_of

TOKEN = "a-token-for-tests-only"


class TestRemoteLoader(WeightLoaderContract):
    """Chunks of 60 bytes: most tensors travel alone."""

    in_place = False

    @pytest.fixture(autouse=True)
    def _engines(self) -> Iterator[None]:
        self.far: dict[WeightLoader, ModuleWeightLoader] = {}
        self.servers: list[tuple[RemoteWeightLoader, EngineServer, EmbeddedEngine]] = []
        yield
        for each in self.servers:
            for part in each:
                part.close()

    def make_loader(self) -> WeightLoader:
        torch.manual_seed(0)
        there = ModuleWeightLoader(shared.Model(), in_place=self.in_place)
        engine = EmbeddedEngine.of(there)
        server = EngineServer(engine, token=TOKEN)
        loader = RemoteWeightLoader(server.start(), token=TOKEN, chunk_bytes=60, timeout_s=20)
        self.servers.append((loader, server, engine))
        self.far[loader] = there
        return loader

    def live(self, loader: WeightLoader) -> dict[str, bytes]:
        """As it lies over there."""
        return {held.spec.name: bytes_of(held.tensor) for held in self.far[loader].live_tensors()}

    def patched(self) -> tuple[WeightLoader, dict[str, torch.Tensor]]:
        """No server for cases that it skips."""
        assert "patch" not in RemoteWeightLoader.accepts
        pytest.skip("this loader takes whole tensors alone")

    def make_weights(self, seed: int) -> dict[str, torch.Tensor]:
        return shared.weights(seed)


class TestRemoteInPlaceLoader(TestRemoteLoader):
    in_place = True
