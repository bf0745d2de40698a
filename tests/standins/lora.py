"""PEFT models that are small and built alike in every process: their weights, steps and logits follow from numbers."""

from __future__ import annotations

import warnings
from typing import Any

import torch

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def base_model(kind: str = "llama", *, seed: int = 7, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A causal language model of two layers, without any adapter."""
    import transformers

    config_kind, model_kind = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }[kind]
    config = config_kind(
        vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=kind == "qwen2",
    )  # fmt: skip
    torch.manual_seed(seed)
    model = model_kind(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too are no round numbers
            parameter.add_(0.01 * torch.randn(parameter.shape).to(dtype))
    return model.eval()  # type: ignore[no-any-return]


def lora_config(rank: int = 8, **changes: Any) -> Any:
    """PEFT's configuration, on attention and MLP where nothing else is said."""
    import peft

    return peft.LoraConfig(**{"r": rank, "lora_alpha": 16, "target_modules": [*ATTENTION, *MLP], **changes})


def peft_model(
    kind: str = "llama", rank: int = 8, *, seed: int = 7, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """The same base with an adapter that is not zero."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base_model(kind, seed=seed, dtype=dtype), lora_config(rank, **changes))
    step(model, 0)
    return model.eval()


def adapter_parameters(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


@torch.no_grad()
def step(model: Any, number: int) -> None:
    """What version `number` of the adapter is; the same on every rank and in every process."""
    for index, (_, parameter) in enumerate(adapter_parameters(model)):
        made = torch.Generator().manual_seed(1000 * number + index)
        value = 0.2 * torch.randn(tuple(parameter.shape), generator=made)
        if hasattr(parameter, "to_local"):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value.to(parameter.dtype), parameter.device_mesh, parameter.placements)
            parameter.to_local().copy_(value.to_local())
        else:
            parameter.copy_(value)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of a fixed prompt."""
    return model(input_ids=torch.arange(12).view(1, 12)).logits.float()  # type: ignore[no-any-return]
