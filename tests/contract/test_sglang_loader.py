"""SGLang's loader keeps the contract, over a plain module that fuses as SGLang's models do."""

from __future__ import annotations

import torch

from tests.unit.load.test_sglang import Model, weights
from weightsync.errors import UnsupportedError
from weightsync.load.base import WeightLoader
from weightsync.load.sglang import SGLangWeightLoader
from weightsync.testing.contracts import WeightLoaderContract, bytes_of


class TestSGLangLoader(WeightLoaderContract):
    def make_loader(self) -> WeightLoader:
        torch.manual_seed(0)
        return SGLangWeightLoader(Model())

    def make_weights(self, seed: int) -> dict[str, torch.Tensor]:
        return weights(seed)

    def live(self, loader: WeightLoader) -> dict[str, bytes]:
        assert isinstance(loader, SGLangWeightLoader)
        try:
            return super().live(loader)
        except UnsupportedError:  # before the first load it does not know the checkpoint's names
            return {name: bytes_of(tensor) for name, tensor in loader._model.named_parameters()}
