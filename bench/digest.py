"""How fast are the digests? Rows `digest` (xxh3 of every tensor) and `shard_digest` (the whole model's)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from bench.harness import BenchArgs, Memcpy, Row, facts, medians_s
from weightsync.codec.digest import digest_of, patch_sum, shard_sum
from weightsync.codec.model_digest import ShardSum
from weightsync.codec.tensor_digest import tensor_digests
from weightsync.types import Box, HeldTensor, TensorSpec

ROWS = {
    "digest": "xxh3-128 of every tensor, all cores, over one memcpy",
    "shard_digest": "shard-independent digest of the whole model, all cores, over one memcpy",
}
_TARGETS = {"digest": 1.0, "shard_digest": 2.0}
_CHANGED = (0.01, 0.02, 0.04)


def run(args: BenchArgs) -> list[Row]:
    """Measures both rows on a bf16 model with a dense transformer's shapes."""
    flat, model = _model(args.num_bytes)
    specs = {name: TensorSpec(name=name, dtype="bfloat16", shape=tuple(tensor.shape)) for name, tensor in model.items()}
    rows = []
    if "digest" in args.rows:
        taken = medians_s({"memcpy": Memcpy(flat), "digest": lambda: tensor_digests(model)}, args.repeats)
        rows.append(_row("digest", args, taken, len(model)))
    if "shard_digest" in args.rows:
        whole = [HeldTensor(spec=specs[name], box=None, tensor=model[name]) for name in model]
        functions: dict[str, Callable[[], object]] = {
            "memcpy": Memcpy(flat),
            "shard_digest": lambda: digest_of(whole, specs.values()),
        }
        for axis in (0, 1):
            parts = list(_shards(model, specs, axis))
            functions[f"shard_{axis}_of_3"] = lambda parts=parts: _total(parts)  # type: ignore[misc]
        for share in _CHANGED:
            patches = list(_patches(model, specs, share))
            functions[f"patch_{share:.0%}"] = lambda patches=patches: [patch_sum(*patch) for patch in patches]  # type: ignore[misc]
        rows.append(_row("shard_digest", args, medians_s(functions, args.repeats), len(model)))
    return rows


def _row(name: str, args: BenchArgs, taken: dict[str, float], num_tensors: int) -> Row:
    ratios = {key: round(value / taken["memcpy"], 3) for key, value in taken.items() if key not in ("memcpy", name)}
    return Row(
        row=name,
        ratio=taken[name] / taken["memcpy"],
        target=_TARGETS[name],
        detail={
            **facts(args),
            "num_tensors": num_tensors,
            "seconds": {key: round(value, 5) for key, value in taken.items()},
            "other_ratios": ratios,
        },
    )


def _shapes(num_bytes: int) -> dict[str, tuple[int, ...]]:
    """A dense transformer of about `num_bytes` in bf16: hidden 1024, as many layers as fit."""
    hidden, inner, heads, kv_heads, head = 1024, 3072, 16, 8, 128
    layer = {
        "self_attn.q_proj.weight": (heads * head, hidden),
        "self_attn.k_proj.weight": (kv_heads * head, hidden),
        "self_attn.v_proj.weight": (kv_heads * head, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (max(16, num_bytes // (4 * 2 * hidden)), hidden)}
    layer_bytes = 2 * sum(math.prod(shape) for shape in layer.values())
    for index in range(max(1, num_bytes * 3 // 4 // layer_bytes)):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer.items()})
    return shapes


def _model(num_bytes: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One flat buffer that is filled, and the model's tensors in it."""
    shapes = _shapes(num_bytes)
    total = sum(math.prod(shape) for shape in shapes.values())
    some = torch.randn(min(total, 1 << 22), generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    flat = some.repeat(-(-total // some.numel()))[:total].contiguous()
    model, at = {}, 0
    for name, shape in shapes.items():
        model[name] = flat[at : at + math.prod(shape)].view(shape)
        at += math.prod(shape)
    return flat, model


def _shards(model: dict[str, torch.Tensor], specs: dict[str, TensorSpec], axis: int) -> Iterator[HeldTensor]:
    """Every tensor in three uneven parts along `axis`, each in memory of its own, as ranks hold them."""
    for name, tensor in model.items():
        if axis >= tensor.dim():
            yield HeldTensor(spec=specs[name], box=None, tensor=tensor)
            continue
        at = 0
        for part in tensor.chunk(3, dim=axis):
            offset = tuple(at if dim == axis else 0 for dim in range(tensor.dim()))
            yield HeldTensor(
                spec=specs[name], box=Box(offset=offset, shape=tuple(part.shape)), tensor=part.contiguous()
            )
            at += part.shape[axis]


def _total(parts: list[HeldTensor]) -> ShardSum:
    return sum((shard_sum(part) for part in parts), ShardSum.zero())


def _patches(
    model: dict[str, torch.Tensor], specs: dict[str, TensorSpec], share: float
) -> Iterator[tuple[TensorSpec, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A change of `share` of every tensor's elements at random places."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.items():
        gaps = torch.randint(1, round(2 / share), (int(tensor.numel() * share) + 1,), generator=generator)
        places = gaps.cumsum(0)
        places = places[places < tensor.numel()]
        old = tensor.reshape(-1)[places]
        yield specs[name], places, old, old + 1
