"""`WeightLoaderContract` for both loaders of a PEFT model: of its adapter, and of its base."""

from __future__ import annotations

import warnings

import peft
import torch
from torch import nn

from weightsync.load.base import WeightLoader
from weightsync.load.peft import PeftAdapterLoader, PeftBaseLoader
from weightsync.peft_model import adapter_tensors
from weightsync.testing.contracts import WeightLoaderContract


class Model(nn.Module):
    """Two linear layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.register_buffer("count", torch.arange(3))


def adapted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(Model(), peft.LoraConfig(r=4, target_modules=["up", "down"]))  # type: ignore[no-any-return]


def noise(like: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        name: torch.randn(t.shape) if t.is_floating_point() else torch.randint(0, 1 << 30, t.shape)
        for name, t in like.items()
    }


class TestPeftAdapterLoader(WeightLoaderContract):
    def make_loader(self) -> WeightLoader:
        return PeftAdapterLoader(adapted())

    def make_weights(self, seed: int) -> dict[str, torch.Tensor]:
        return noise(adapter_tensors(adapted(), "default"), seed)


class TestPeftBaseLoader(WeightLoaderContract):
    def make_loader(self) -> WeightLoader:
        return PeftBaseLoader(adapted())

    def make_weights(self, seed: int) -> dict[str, torch.Tensor]:
        return noise(dict(Model().state_dict()), seed)
