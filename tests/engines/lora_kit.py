"""LoRA adapters for tests of engines: a PEFT model of the tiny model, its versions, and what PEFT says of each.

A version's weights are made from its number alone, so every process has the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.engines.vllm_support import PROMPTS, Server, build_model, save_checkpoint

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
MAX_RANK = 64
BASE = "base"
MIDDLEWARE = "weightsync.engine.vllm.lora_middleware.LoraMiddleware"
ENV = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
STRENGTH = 0.3
"""So strong that two versions say clearly different things."""


def lora_options(*, max_loras: int = 4, max_rank: int = MAX_RANK) -> tuple[str, ...]:
    """Words of a server's command line."""
    return (
        *("--enable-lora", "--max-lora-rank", str(max_rank), "--max-loras", str(max_loras)),
        *("--served-model-name", BASE, "--middleware", MIDDLEWARE),
    )


def lora_server(
    folder: Path, *, max_loras: int = 4, max_rank: int = MAX_RANK, env: dict[str, str] | None = None,
    options: Sequence[str] = (), seed: int = 0,
) -> Server:  # fmt: skip
    """A vLLM server of the tiny model that takes adapters; not started yet."""
    checkpoint = save_checkpoint(folder / "base", build_model(seed))
    return Server(
        checkpoint, folder / "server", env={**ENV, **(env or {})},
        options=(*lora_options(max_loras=max_loras, max_rank=max_rank), *options),
    )  # fmt: skip


def peft_model(
    *, rank: int = 8, modules: Sequence[str] = (*ATTENTION, *MLP), alpha: float | None = None, seed: int = 0
) -> Any:
    """A PEFT model over the tiny model in bfloat16, as a trainer of it would have it; its adapter in bfloat16, too."""
    from peft import LoraConfig, get_peft_model

    base = build_model(seed).to(torch.bfloat16)
    config = LoraConfig(r=rank, lora_alpha=2 * rank if alpha is None else alpha, target_modules=list(modules))
    return get_peft_model(base, config, autocast_adapter_dtype=False)


def set_version(model: nn.Module, number: int) -> None:
    """Gives the adapter the weights of a version: as if so many steps had been made."""
    chance = torch.Generator().manual_seed(10_000 + number)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_" in name:
                scale = STRENGTH if "lora_A" in name else STRENGTH / tensor.shape[1] ** 0.5
                tensor.copy_(torch.randn(tensor.shape, generator=chance) * scale)


def scores_of(model: nn.Module, prompt: Sequence[int]) -> list[float]:
    """The log-probability of every token but the first, by PEFT's own forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(prompt)])).logits[0].float()
    scores = torch.log_softmax(logits, -1)
    return [float(scores[place, token]) for place, token in enumerate(prompt[1:])]


def publisher_main(conn: Any, model_id: str, options: dict[str, Any]) -> None:
    """A trainer: publishes the version that it is told, and answers with PEFT's scores of the prompts.

    Args:
        conn: to whoever started it.
        model_id: under which it publishes.
        options: of `peft_model`; under "publish" those of `weightsync.publish`.
    """
    import weightsync

    torch.set_num_threads(1)
    said = options.pop("publish", {})
    model = peft_model(**options)
    with weightsync.publish(model, model_id, port=0, last_wait_s=0, **said) as publisher:
        conn.send((publisher.run_id, publisher.endpoint))
        while (order := conn.recv()) is not None:
            set_version(model, order)
            publisher.step()
            conn.send((publisher.version.number, [scores_of(model, prompt) for prompt in PROMPTS]))
    os._exit(0)
