"""megatron-core on the CPU, and a cutter of Hugging Face weights into its layout, made without the library.

Megatron asks for a CUDA device in two places of a forward pass: `_on_cpu` answers with the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

VOCAB_MULTIPLE = 96
"""Of rows a tensor-parallel rank, to which Megatron pads the vocabulary: 128 tokens become 192 rows on two ranks."""


def megatron_model(config: Any, tensor_parallel: int) -> Any:
    """A GPTModel of megatron-core that computes what the Hugging Face model of `config` computes."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    _on_cpu()
    if parallel_state.model_parallel_is_initialized():  # an earlier model of this process
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    multiple = VOCAB_MULTIPLE * tensor_parallel
    settings = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        tensor_model_parallel_size=tensor_parallel,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        settings,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=-(-config.vocab_size // multiple) * multiple,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=int(config.rope_parameters["rope_theta"]),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        parallel_output=False,
    )


def _on_cpu() -> None:
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: torch.device("cpu")
    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()


def megatron_shard(whole: Mapping[str, torch.Tensor], config: Any, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """One tensor-parallel rank's parameters from Hugging Face's, written head by head."""
    dim, queries_a_group = config.head_dim, config.num_attention_heads // config.num_key_value_heads

    def rows(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
        return tensor[start : start + count]

    def my_rows(tensor: torch.Tensor) -> torch.Tensor:
        count = tensor.shape[0] // ranks
        return rows(tensor, rank * count, count)

    def my_columns(tensor: torch.Tensor) -> torch.Tensor:
        return my_rows(tensor.t()).t()

    def vocabulary(tensor: torch.Tensor) -> torch.Tensor:
        multiple = VOCAB_MULTIPLE * ranks
        padding = -tensor.shape[0] % multiple
        return my_rows(torch.cat([tensor, tensor.new_full((padding, tensor.shape[1]), -1)]))

    shard = {
        "embedding.word_embeddings.weight": vocabulary(whole["model.embed_tokens.weight"]),
        "decoder.final_layernorm.weight": whole["model.norm.weight"],
    }
    if "lm_head.weight" in whole:
        shard["output_layer.weight"] = vocabulary(whole["lm_head.weight"])
    groups = range(config.num_key_value_heads * rank // ranks, config.num_key_value_heads * (rank + 1) // ranks)
    for layer in range(config.num_hidden_layers):
        here, there = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        q, k, v = (whole[f"{here}self_attn.{which}_proj.weight"] for which in "qkv")
        heads = []
        for group in groups:
            heads += [rows(q, (group * queries_a_group + i) * dim, dim) for i in range(queries_a_group)]
            heads += [rows(k, group * dim, dim), rows(v, group * dim, dim)]
        shard |= {
            there + "input_layernorm.weight": whole[here + "input_layernorm.weight"],
            there + "self_attention.linear_qkv.weight": torch.cat(heads),
            there + "self_attention.q_layernorm.weight": whole[here + "self_attn.q_norm.weight"],
            there + "self_attention.k_layernorm.weight": whole[here + "self_attn.k_norm.weight"],
            there + "self_attention.linear_proj.weight": my_columns(whole[here + "self_attn.o_proj.weight"]),
            there + "pre_mlp_layernorm.weight": whole[here + "post_attention_layernorm.weight"],
            there + "mlp.linear_fc1.weight": torch.cat(
                [my_rows(whole[f"{here}mlp.{which}_proj.weight"]) for which in ("gate", "up")]
            ),
            there + "mlp.linear_fc2.weight": my_columns(whole[here + "mlp.down_proj.weight"]),
        }
    return shard


def megatron_whole(model: nn.Module, config: Any, ranks: int) -> dict[str, torch.Tensor]:
    """The inverse of `megatron_shard`, without a second list of rules: it shards the elements' numbers, and so learns
    where each local value belongs."""
    with torch.device("meta"):
        from transformers import Qwen3ForCausalLM

        shapes = {name: p.shape for name, p in Qwen3ForCausalLM(config).named_parameters()}
    found = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    starts, numbers, total = {}, {}, 0
    for name, shape in shapes.items():
        starts[name] = total
        numbers[name] = torch.arange(total, total + shape.numel()).view(shape)
        total += shape.numel()
    flat = torch.full((total,), float("nan"))
    placed = [megatron_shard(numbers, config, rank, ranks) for rank in range(ranks)]
    for name, parameter in model.named_parameters():
        parts = [torch.empty_like(parameter) for _ in range(ranks)]
        dist.all_gather(parts, parameter.detach().contiguous())
        for part, shard in zip(parts, placed, strict=True):
            real = shard[name] >= 0
            flat[shard[name][real]] = part[real]
    for name, shape in shapes.items():
        found[name] = flat[starts[name] : starts[name] + shape.numel()].view(shape)
    assert not flat.isnan().any()
    return found
