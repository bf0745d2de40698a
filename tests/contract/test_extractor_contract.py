"""The library's own extractors of one process keep the extractor's contract, and so does the example of the docs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.standins.lora import peft_model, step
from tests.standins.pages import example
from weightsync.extract.base import WeightExtractor
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.extract.named import NamedTensorsExtractor
from weightsync.extract.peft import merged_extractor
from weightsync.testing.contracts import WeightExtractorContract


class Model(nn.Module):
    """q and k apart, experts, tied weights; buffers of many dtypes, a 0-d and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6, dtype=torch.bfloat16)
        self.q_proj = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(6)
        self.k_proj = nn.Linear(6, 7, bias=False, dtype=torch.float64)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scales", torch.rand(3, 5).to(torch.float8_e4m3fn))
        self.register_buffer("codes", torch.tensor([0, 9, 65535], dtype=torch.uint16))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class TestModule(WeightExtractorContract):
    @functools.cached_property
    def model(self) -> nn.Module:
        return Model()

    def make_extractor(self, **options: Any) -> WeightExtractor:
        return ModuleWeightExtractor(self.model, **options)

    def truth(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.model.state_dict().items() if name != "head.weight"}


class TestNamedTensors(TestModule):
    def make_extractor(self, **options: Any) -> WeightExtractor:
        return NamedTensorsExtractor(self.truth(), **options)


@pytest.fixture(scope="class")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
class TestFullyShardedOnOneRank(TestModule):
    @functools.cached_property
    def model(self) -> nn.Module:
        made = Model()
        mesh = init_device_mesh("cpu", (1,))
        for layer in (made.q_proj, made.norm, made.k_proj):
            fully_shard(layer, mesh=mesh)
        return made

    def make_extractor(self, **options: Any) -> WeightExtractor:
        return FSDPWeightExtractor(self.model, **options)

    def truth(self) -> dict[str, torch.Tensor]:
        whole = super().truth()
        return {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in whole.items()}


class TestMergedAdapter(WeightExtractorContract):
    """Its tensors are nowhere: what it can't cut into a rank's parts it says so."""

    @functools.cached_property
    def model(self) -> Any:
        return peft_model("llama", 8, target_modules=["q_proj", "v_proj"])

    def make_extractor(self, **options: Any) -> WeightExtractor:
        return merged_extractor(self.model, **options)

    def truth(self) -> dict[str, torch.Tensor]:
        return dict(copy.deepcopy(self.model).merge_and_unload().state_dict())

    def change(self) -> None:
        step(self.model, 1)


class TestAverage(TestModule):
    """The example of docs/extending.md."""

    @functools.cached_property
    def average(self) -> dict[str, torch.Tensor]:
        return {"q_proj.weight": torch.rand(7, 6), "norm.bias": torch.rand(6)}

    def make_extractor(self, **options: Any) -> WeightExtractor:
        made: WeightExtractor = example("extending.md")["AverageExtractor"](self.model, self.average, **options)
        return made

    def truth(self) -> dict[str, torch.Tensor]:
        return super().truth() | self.average
