"""MegatronCoreExporter: megatron-core's GPT models by Llama's and Qwen's names. The one file that imports megatron."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from weightsync.errors import ConfigError, UnsupportedError
from weightsync.extract.megatron_layout import cut_vocabulary, join_slices, split_gate_up, split_qkv
from weightsync.optional import imported
from weightsync.tensors import byte_view

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_WHOLE_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",  # TransformerEngine fuses the two
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}
_WHOLE = {"decoder.final_layernorm.weight": "model.norm.weight"}
_VOCABULARY = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}


class MegatronCoreExporter:
    """A plain bridge for dense decoder models of megatron-core: grouped-query attention, gated MLP, RMSNorm.

    It gathers the slices of tensor parallelism, one parameter at a time, takes fused projections apart and cuts the
    padding off the vocabulary. Where other parallelism or another architecture is used it refuses, and
    Megatron-Bridge is the choice. Data-parallel replicas each run it among their own tensor-parallel ranks.

    Args:
        vocab_size: real tokens; the embedding's further rows are padding.

    Raises:
        ConfigError: `vocab_size` is not above 0.
        MissingDependencyError: megatron-core is not installed.
    """

    def __init__(self, *, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ConfigError(f"vocab_size is a number of tokens above 0, got {vocab_size}")
        self._vocab_size = vocab_size
        needs = "MegatronCoreExporter needs megatron-core: pip install 'weightsync[megatron]'"
        self._parallel = imported("megatron.core.parallel_state", needs)

    def export_hf_weights(
        self, model: list[torch.nn.Module], cpu: bool = False, show_progress: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter under its Hugging Face name(s), whole, in the trainer's dtype.

        A collective of the tensor-parallel group for each parameter that is sliced. Tied embeddings come once.

        Args:
            model: this rank's one model chunk, under whatever wrappers Megatron put around it.
            show_progress: not used; the argument is part of a bridge's interface.

        Yields:
            Names and tensors; with one tensor-parallel rank they may be views of live weights.

        Raises:
            UnsupportedError: by the call's first step: something that this exporter does not know; nothing was sent.
        """
        gpt = self._checked_model(model)
        exports = [(parameter, self._rule(name)) for name, parameter in gpt.named_parameters()]
        group = self._parallel.get_tensor_model_parallel_group()
        for parameter, take_apart in exports:
            parts = _slices(parameter.detach(), group, _sliced_dim(parameter))
            for name, tensor in take_apart(gpt.config, parts, _sliced_dim(parameter)):
                yield name, tensor.cpu() if cpu else tensor
            del parts, tensor

    def _checked_model(self, models: list[torch.nn.Module]) -> Any:
        model: Any = models[0]
        while not hasattr(model, "decoder") and isinstance(getattr(model, "module", None), torch.nn.Module):
            model = model.module
        config = getattr(model, "config", None)
        if config is None or not hasattr(model, "decoder"):
            raise UnsupportedError(f"MegatronCoreExporter takes a GPTModel, got a {type(model).__name__}")
        refusals = {
            "pipeline parallelism": len(models) > 1 or self._parallel.get_pipeline_model_parallel_world_size() > 1,
            "an MLP without gate": not config.gated_linear_unit,
            "experts": bool(config.num_moe_experts),
            "multi-latent attention": bool(getattr(config, "multi_latent_attention", False)),
            "a gate in the attention": bool(getattr(config, "attention_output_gate", False)),
            "zero-centered norms": bool(config.layernorm_zero_centered_gamma),
            "interleaved rotary embeddings": bool(getattr(config, "rotary_interleaved", False)),
        }
        if found := [what for what, there in refusals.items() if there]:
            raise UnsupportedError(f"MegatronCoreExporter does not know {', '.join(found)}: use Megatron-Bridge")
        return model

    def _rule(self, name: str) -> Callable[..., list[tuple[str, torch.Tensor]]]:
        """How the parameter's slices become Hugging Face tensors."""
        if name in _WHOLE:
            return lambda _, parts, dim: [(_WHOLE[name], join_slices(parts, dim))]
        if name in _VOCABULARY:
            return lambda _, parts, dim: [
                (_VOCABULARY[name], cut_vocabulary(join_slices(parts, dim), self._vocab_size))
            ]
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            prefix, inner = f"model.layers.{layer[1]}.", layer[2]
            if inner in _WHOLE_IN_LAYER:
                return lambda _, parts, dim: [(prefix + _WHOLE_IN_LAYER[inner], join_slices(parts, dim))]
            module, _, kind = inner.rpartition(".")
            if module == "self_attention.linear_qkv" and kind in ("weight", "bias"):
                return lambda config, parts, dim: _qkv(f"{prefix}self_attn.", kind, config, join_slices(parts, dim))
            if module == "mlp.linear_fc1" and kind in ("weight", "bias"):
                return lambda _, parts, dim: _gate_up(f"{prefix}mlp.", kind, parts)
        raise UnsupportedError("MegatronCoreExporter does not know this parameter: use Megatron-Bridge", parameter=name)


def _qkv(prefix: str, kind: str, config: Any, fused: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    tensors = split_qkv(fused, num_query_groups=config.num_query_groups, head_dim=config.kv_channels)
    return [(f"{prefix}{which}_proj.{kind}", one) for which, one in zip("qkv", tensors, strict=True)]


def _gate_up(prefix: str, kind: str, parts: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{prefix}{which}_proj.{kind}", one) for which, one in zip(("gate", "up"), split_gate_up(parts), strict=True)
    ]


def _sliced_dim(parameter: torch.nn.Parameter) -> int | None:
    """The dimension along which tensor parallelism cuts it, as Megatron notes it on the parameter."""
    return int(getattr(parameter, "partition_dim")) if getattr(parameter, "tensor_model_parallel", False) else None  # noqa: B009


def _slices(own: torch.Tensor, group: Any, dim: int | None) -> list[torch.Tensor]:
    """Every tensor-parallel rank's slice, by rank; the own one alone where all have the whole."""
    ranks = dist.get_world_size(group)
    if dim is None or ranks == 1:
        return [own]
    gathered = torch.empty((ranks, *own.shape), dtype=own.dtype, device=own.device)
    _all_gather(byte_view(gathered), byte_view(own.contiguous()), group=group)
    return list(gathered.unbind(0))
