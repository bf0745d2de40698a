"""Whose parameters may be written one by one: layers of vLLM's own that are known to keep nothing besides."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weightsync.load.vllm_trust import _NO_HOOK, doubts

W = torch.arange(12.0).reshape(3, 4)


def layer(**attributes: Any) -> nn.Module:
    """A layer that says it is one of vLLM's."""
    kind = type("Layer", (nn.Module,), {"__module__": "vllm.layers"})
    made = kind()
    made.weight = nn.Parameter(W.clone(), requires_grad=False)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def model(**layers: nn.Module) -> nn.Module:
    whole = nn.Module()
    for name, each in layers.items():
        whole.add_module(name, each)
    return whole


def method(name: str, module: str = "vllm.model_executor.layers.linear", **attributes: Any) -> Any:
    made = type(name, (), {"__module__": module})()
    vars(made).update(attributes)
    return made


def test_vllms_plain_layers_are_trusted() -> None:
    plain = model(
        norm=layer(eps=1e-6),
        linear=layer(quant_method=method("UnquantizedLinearMethod"), cpu_linear=lambda x, w, b: x @ w.t()),
        head=layer(quant_method=method("UnquantizedEmbeddingMethod"), names=["a", "b"], own=(W.shape, W.dtype)),
        attn=nn.Module(),
    )
    object.__setattr__(plain.get_submodule("attn"), "kv_cache", [torch.zeros(8, 8)])
    assert doubts(plain) == {}


@pytest.mark.parametrize(
    "keeps",
    [
        {"packed": W * 2},
        {"packed": [{"of": W * 2}]},
        {"packed": {frozenset([W * 2])}},
        {"packed": (W * 2).numpy()},
        {"run": (lambda packed: lambda x: x @ packed)(W * 2)},
        {"run": lambda x, packed=W * 2: x @ packed},
        {"run": functools.partial(torch.add, W * 2)},
        {"kernel": SimpleNamespace(packed=W * 2)},
        {"run": method("CPUDNNLGEMMHandler")},
        {"quant_method": method("Fp8LinearMethod")},
        {"quant_method": method("UnquantizedLinearMethod", "somebody.elses")},
        {"quant_method": method("UnquantizedLinearMethod", packed=np.ones(4))},
    ],
    ids=range(12),
)
def test_a_layer_that_may_compute_with_something_else_is_not(keeps: dict[str, Any]) -> None:
    """Seen: a patch was proved, and the layer went on with what it had packed before."""
    found = doubts(model(odd=layer(**keeps), fine=layer()))
    assert set(found) == {"odd.weight"}


def test_a_class_that_is_none_of_vllms_is_not() -> None:
    own = nn.Module()
    odd = type("Mine", (nn.Module,), {"__module__": "mine"})()
    odd.weight = nn.Parameter(W.clone())
    own.add_module("odd", odd)
    assert "none of vLLM's" in doubts(own)["odd.weight"]


def test_memory_of_a_neighbour_without_weights_is_its_parents_matter() -> None:
    """An attention that keeps products of its neighbour's weights; and one that works on them after the load."""
    quiet = type("MLAAttention", (nn.Module,), {"__module__": "vllm.layers", "process_weights_after_loading": None})
    keeping = type("Keeping", (nn.Module,), {"__module__": "vllm.layers"})()
    object.__setattr__(keeping, "product", W * 2)
    for neighbour in (quiet(), keeping):
        block = model(kv_b_proj=layer(), attn=neighbour)
        assert set(doubts(model(block=block, fine=layer()))) == {"block.kv_b_proj.weight"}


def test_a_tied_parameter_is_marked_under_every_name() -> None:
    embed, head = layer(), layer(packed=W * 2)
    head.weight = embed.weight
    assert set(doubts(model(embed=embed, head=head))) == {"embed.weight", "head.weight"}


class Experts:
    """Says it is a kernel of vLLM's experts whose hook is the one that does nothing."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        raise NotImplementedError


Experts.process_weights_after_loading.__module__, Experts.process_weights_after_loading.__qualname__ = _NO_HOOK


class Kernel:
    """As vLLM's: what it works with is two steps away."""

    def __init__(self, experts: object) -> None:
        self.impl = SimpleNamespace(fused_experts=experts)

    @property
    def fused_experts(self) -> object:
        return self.impl.fused_experts


class Packing(Experts):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        raise NotImplementedError


def experts(
    backend: str = "TRITON", kernel: Any = Experts, *, eplb: bool = False, made: bool = True, **own: Any
) -> Any:
    """Stacked experts, with a method that is one of vLLM's and a module, as vLLM has it."""
    kind = type("UnquantizedFusedMoEMethod", (nn.Module,), {"__module__": "vllm.x", "process_weights_after_loading": 0})
    how, given = kind(), kernel()
    vars(given).update(own)
    how.unquantized_backend = SimpleNamespace(name=backend)
    how.moe = SimpleNamespace(moe_parallel_config=SimpleNamespace(enable_eplb=eplb))
    how.moe_kernel = Kernel(given) if made else None
    whole = layer()
    whole.add_module("quant_method", how)
    return whole


def test_experts_are_trusted_where_their_kernel_is_given_the_parameters() -> None:
    """vLLM's method of experts is a module of its own, and works on weights: by the kernel's hook alone."""
    for backend in ("TRITON", "BATCHED_TRITON", "CPU"):
        assert doubts(model(experts=experts(backend), fine=layer())) == {}


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (experts(kernel=Packing), "Packing packs the experts' weights"),
        (experts("FLASHINFER_TRTLLM"), "FLASHINFER_TRTLLM may keep"),
        (experts(made=False), "may keep"),
        (experts(eplb=True), "moved among workers"),
        (experts(copy=W * 2), "keeps memory"),
    ],
    ids=["packs", "backend", "no kernel", "eplb", "memory"],
)
def test_other_experts_are_marked(odd: nn.Module, why: str) -> None:
    found = doubts(model(experts=odd, fine=layer()))
    assert set(found) == {"experts.weight"}
    assert why in found["experts.weight"]
