"""What the documents take for granted: a model with fused names, a trainer's step, a config, an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from weightsync.tensors import byte_array

_T = TypeVar("_T")


class Attention(nn.Module):
    """q, k and v, which belong together; biases, which come between them."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.k_proj = nn.Linear(8, 4)
        self.v_proj = nn.Linear(8, 4, bias=False)
        self.o_proj = nn.Linear(8, 8)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.norm = nn.LayerNorm(8)


class Model(nn.Module):
    """Of a trainer, and of an engine: `load_weights` is what vLLM's and SGLang's models have."""

    def __init__(self, seed: int = 0, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.num_loads = 0

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own = dict(self.named_parameters())
        loaded = set()
        for name, tensor in pairs:
            own[name].data.copy_(tensor)
            loaded.add(name)
        self.num_loads += 1
        return loaded


def step(model: nn.Module) -> None:
    """Training: every weight becomes another."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5).add_(0.25)


def bytes_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, bytes]:
    """What an engine that computes in `dtype` serves."""
    return {
        name: byte_array(parameter.detach().to(dtype).contiguous()).tobytes()
        for name, parameter in model.named_parameters()
    }


def config(**generator: Any) -> DictConfig:
    """SkyRL's, as far as the documents read it."""
    colocate_all = generator.pop("colocate_all", False)
    backend = generator.pop("training_backend", "fsdp")
    return OmegaConf.create(
        {
            "generator": {"weight_sync_backend": "gloo", "use_cuda_ipc": None, **generator},
            "trainer": {"placement": {"colocate_all": colocate_all}, "training_backend": backend},
        }
    )


def run(coroutine: Coroutine[Any, Any, _T], timeout_s: float = 60.0) -> _T:
    """Runs a document's coroutine, with a deadline."""
    return asyncio.run(asyncio.wait_for(coroutine, timeout_s))
