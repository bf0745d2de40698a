"""A loader behind HTTP keeps the contract of the loader that it speaks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.contract import test_loader_contract as shared
from weightsync.load.base import WeightLoader
from weightsync.load.module import ModuleWeightLoader
from weightsync.load.remote import RemoteWeightLoader
from weightsync.load.remote_server import RemoteLoadServer
from weightsync.testing.contracts import WeightLoaderContract

TOKEN = "a-token-for-tests-only"


class TestRemoteLoader(WeightLoaderContract):
    """Requests of 60 bytes: the larger tensors are cut."""

    in_place = False

    @pytest.fixture(autouse=True)
    def _servers(self) -> Iterator[None]:
        self.servers: list[RemoteLoadServer] = []
        self.loaders: list[RemoteWeightLoader] = []
        yield
        for loader in self.loaders:
            loader.close()
        for server in self.servers:
            server.close()

    def make_loader(self) -> WeightLoader:
        torch.manual_seed(0)
        server = RemoteLoadServer(ModuleWeightLoader(shared.Model(), in_place=self.in_place), token=TOKEN)
        self.servers.append(server)
        loader = RemoteWeightLoader(server.start(), token=TOKEN, request_bytes=60, timeout_s=20)
        self.loaders.append(loader)
        return loader

    def patched(self) -> tuple[WeightLoader, dict[str, torch.Tensor]]:
        """No server for cases that it skips."""
        assert "patch" not in RemoteWeightLoader.accepts
        pytest.skip("this loader takes whole tensors alone")

    def make_weights(self, seed: int) -> dict[str, torch.Tensor]:
        return shared.weights(seed)


class TestRemoteInPlaceLoader(TestRemoteLoader):
    in_place = True
