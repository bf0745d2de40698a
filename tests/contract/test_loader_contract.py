"""The library's own loaders keep the loader's contract."""

from __future__ import annotations

import torch
from torch import nn

from tests.standins.faults import FaultyLoader
from weightsync.load.base import WeightLoader
from weightsync.load.module import ModuleWeightLoader
from weightsync.testing.contracts import WeightLoaderContract


class Model(nn.Module):
    """Tied weights, buffers of several dtypes, a 0-d, an empty and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, dtype=torch.bfloat16)
        self.up = nn.Linear(6, 7, dtype=torch.bfloat16)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scales", torch.zeros(3, 5).to(torch.float8_e4m3fn))
        self.register_buffer("running", torch.zeros(4, 3).t())
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "embed.weight": torch.rand(11, 6).bfloat16(),
        "up.weight": torch.rand(7, 6).bfloat16(),
        "up.bias": torch.rand(7).bfloat16(),
        "steps": torch.tensor(seed),
        "mask": torch.tensor([seed % 2 == 0, seed % 2 == 1]),
        "scales": torch.rand(3, 5).to(torch.float8_e4m3fn),
        "running": torch.rand(3, 4),
        "nothing": torch.empty(0, 4),
    }


class TestStagedModuleLoader(WeightLoaderContract):
    def make_loader(self) -> WeightLoader:
        torch.manual_seed(0)
        return ModuleWeightLoader(Model())

    def make_weights(self, seed: int) -> dict[str, torch.Tensor]:
        return weights(seed)


class TestInPlaceModuleLoader(TestStagedModuleLoader):
    def make_loader(self) -> WeightLoader:
        torch.manual_seed(0)
        return ModuleWeightLoader(Model(), in_place=True)


class TestMappedModuleLoader(TestStagedModuleLoader):
    """Under other names than the module's."""

    def make_loader(self) -> WeightLoader:
        torch.manual_seed(0)
        return ModuleWeightLoader(Model(), name_map=lambda name: name.removeprefix("model."))

    def make_weights(self, seed: int) -> dict[str, torch.Tensor]:
        return {f"model.{name}": tensor for name, tensor in weights(seed).items()}


class TestFaultyLoaderWithoutAFault(TestStagedModuleLoader):
    def make_loader(self) -> WeightLoader:
        torch.manual_seed(0)
        return FaultyLoader(Model())
