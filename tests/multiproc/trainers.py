"""One small Hugging Face model under each training backend, with real optimizer steps and a truth made without the
library; and an engine process that serves the same model. Every builder runs in a training rank, inside a gloo default
group.

DeepSpeed compiles a shared-memory helper at its first start on a CPU, half a minute or more: `start_deepspeed` says
that it is not to be had, and gloo does the work.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.multiproc.megatron_cpu import megatron_model, megatron_shard, megatron_whole
from tests.multiproc.spine import TOKEN
from tests.standins.processes import RankPool, children, preload
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.engine.worker import EngineWorker
from weightsync.extract.base import WeightExtractor
from weightsync.extract.deepspeed import DeepSpeedWeightExtractor
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.extract.megatron import MegatronWeightExtractor
from weightsync.extract.megatron_export import MegatronCoreExporter
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.handles.fanout import EngineFanout
from weightsync.handles.http import HttpEngine
from weightsync.load.module import ModuleWeightLoader
from weightsync.tensors import byte_array
from weightsync.trainer.push import PushSync

KINDS = ("module", "fsdp", "deepspeed", "megatron")
SEED = 11
SEQUENCE = 16
VOCAB = 128
LEARNING_RATE = 1e-3
preload("transformers.models.qwen3.modeling_qwen3")


@dataclasses.dataclass(kw_only=True)
class Trainer:
    """A training rank's side.

    Attributes:
        extractor: the library's, on the wrapped model.
        step: one step of AdamW on tokens that the argument decides. A collective.
        truth: the whole weights by Hugging Face's names (tied ones once), in the trainer's dtype, gathered by
            means of the backend or of this file. A collective; every rank gets them.
        logits: the model's for tokens [batch, sequence], whole. A collective.
        model: as the backend has it.
    """

    extractor: WeightExtractor
    step: Callable[[int], None]
    truth: Callable[[], dict[str, torch.Tensor]]
    logits: Callable[[torch.Tensor], torch.Tensor]
    model: Any


def hf_config(*, tied: bool = False, **changes: Any) -> Any:
    """A Qwen3 of two layers: grouped queries, norms of queries and keys, no biases."""
    from transformers import Qwen3Config

    settings: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": VOCAB,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
        **changes,
    }
    return Qwen3Config(**settings)


def hf_model(*, tied: bool = False, seed: int = SEED, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """The model that every trainer starts from; norms are not all ones, so that none can be swapped unseen."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    model: nn.Module = Qwen3ForCausalLM(hf_config(tied=tied, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "proj" in name:
                parameter.mul_(3.0)  # larger logits: a wrong layout shows
    return model.to(dtype)


def build_trainer(kind: str, rank: int, world_size: int, *, tied: bool = False, **options: Any) -> Trainer:
    """The model under `kind`, one of `KINDS`.

    Args:
        kind: the training backend.
        rank: of the default group.
        world_size: of the default group; Megatron uses all of it for tensor parallelism.
        tied: whether the output layer is the embedding.
        options: `chunk_bytes` for the extractor; for DeepSpeed also `stage` and `bf16`.
    """
    settings = {"chunk_bytes": options.pop("chunk_bytes", 30_000)}
    builders = {"module": _module, "fsdp": _fsdp, "deepspeed": _deepspeed, "megatron": _megatron}
    return builders[kind](rank, world_size, tied, settings, **options)


def tokens_of(number: int, *, rank: int = 0, batch: int = 2) -> torch.Tensor:
    """Random token ids [batch, SEQUENCE]."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(0, VOCAB, (batch, SEQUENCE), generator=generator)


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each next token."""
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def cast_bytes_of(truth: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, bytes]:
    """What an engine must hold, by name."""
    return {name: byte_array(tensor.to(dtype).contiguous()).tobytes() for name, tensor in truth.items()}


# --- module and FSDP2 ---


def _module(rank: int, world_size: int, tied: bool, settings: dict[str, Any]) -> Trainer:
    model: nn.Module = hf_model(tied=tied)
    if world_size > 1:
        model = DistributedDataParallel(model)
    inner = model.module if world_size > 1 else model
    return _torch_trainer(model, ModuleWeightExtractor(model, **settings), rank, lambda: _whole_of(inner))


def _fsdp(rank: int, world_size: int, tied: bool, settings: dict[str, Any]) -> Trainer:
    model = hf_model(tied=tied)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return _torch_trainer(model, FSDPWeightExtractor(model, **settings), rank, lambda: _whole_of(model))


def _torch_trainer(
    model: nn.Module, extractor: WeightExtractor, rank: int, truth: Callable[[], dict[str, torch.Tensor]]
) -> Trainer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step(number: int) -> None:
        tokens = tokens_of(number, rank=rank)
        optimizer.zero_grad()
        next_token_loss(model(input_ids=tokens).logits, tokens).backward()
        optimizer.step()

    return Trainer(extractor=extractor, step=step, truth=truth, logits=_no_grad_logits(model), model=model)


def _no_grad_logits(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    @torch.no_grad()
    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens).logits.float()

    return logits


def _whole_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Torch's own gathering of each parameter."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }


# --- DeepSpeed ---


def start_deepspeed(rank: int) -> Any:
    """Deepspeed on gloo, without its compiled helper; the default group is there already."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = str(rank)
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed


def deepspeed_engine(model: nn.Module, rank: int, *, stage: int = 3, bf16: bool = False, **zero: Any) -> Any:
    """The engine of `deepspeed.initialize` with torch's AdamW."""
    deepspeed = start_deepspeed(rank)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": stage,
            **({"stage3_param_persistence_threshold": 200} if stage == 3 else {}),
            **zero,
        },
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def _deepspeed(
    rank: int, world_size: int, tied: bool, settings: dict[str, Any], *, stage: int = 3, bf16: bool = False
) -> Trainer:
    engine = deepspeed_engine(hf_model(tied=tied), rank, stage=stage, bf16=bf16)

    def step(number: int) -> None:
        tokens = tokens_of(number, rank=rank)
        engine.backward(next_token_loss(engine(input_ids=tokens).logits, tokens))
        engine.step()

    def truth() -> dict[str, torch.Tensor]:
        """One parameter at a time through DeepSpeed's own context, the whole model kept."""
        import deepspeed

        found = {}
        for name, parameter in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        return found

    extractor = DeepSpeedWeightExtractor(engine, **settings)
    return Trainer(extractor=extractor, step=step, truth=truth, logits=_no_grad_logits(engine), model=engine)


# --- Megatron ---


def _megatron(rank: int, world_size: int, tied: bool, settings: dict[str, Any]) -> Trainer:
    model = megatron_model(hf_config(tied=tied), world_size)
    whole = {name: p.detach() for name, p in hf_model(tied=tied).named_parameters()}
    with torch.no_grad():
        for name, tensor in megatron_shard(whole, hf_config(tied=tied), rank, world_size).items():
            model.get_parameter(name).copy_(tensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        hidden = torch.triu(torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool), 1)
        return model(tokens, positions, hidden)[..., :VOCAB]

    def step(number: int) -> None:
        tokens = tokens_of(number)  # all ranks see the same batch: they share one model
        optimizer.zero_grad()
        next_token_loss(logits(tokens), tokens).backward()
        for name, parameter in model.named_parameters():
            if "q_layernorm" in name or "k_layernorm" in name:  # every rank knows the gradient of its heads alone
                dist.all_reduce(parameter.grad)
        optimizer.step()

    def truth() -> dict[str, torch.Tensor]:
        return megatron_whole(model, hf_config(tied=tied), world_size)

    extractor = MegatronWeightExtractor([model], bridge=MegatronCoreExporter(vocab_size=VOCAB), **settings)
    return Trainer(extractor=extractor, step=step, truth=truth, logits=torch.no_grad()(logits), model=model)


# --- an engine with the same model, and a trainer that pushes to it ---


def hf_engine(tied: bool, conn: Any) -> None:
    """Serves a Qwen3 of other weights; answers on `conn`: its URL first, then all its bytes each time it is asked."""
    torch.set_num_threads(1)
    model = hf_model(tied=tied, seed=SEED + 1, dtype=torch.bfloat16)
    engine = EmbeddedEngine([EngineWorker(ModuleWeightLoader(model), track="engine")], engine_id="engine")
    conn.send(EngineServer(engine, port=0, token=TOKEN).start())
    while conn.recv() is not None:
        conn.send(cast_bytes_of(dict(model.named_parameters())))
    engine.close()
    os._exit(0)


def train_and_push(
    rank: int, world_size: int, kind: str, url: str, steps: int, options: dict[str, Any]
) -> tuple[list[Any], list[dict[str, bytes]]]:
    """Steps and syncs.

    Returns:
        The report of each sync, and on rank 0 what the engine then has to hold.
    """
    trainer = build_trainer(kind, rank, world_size, **options)
    client = EngineFanout([HttpEngine(url, engine_id="engine", token=TOKEN)]) if rank == 0 else None
    push = PushSync(
        trainer.extractor, client, dtype="bfloat16", transfer_timeout_s=30.0, join_timeout_s=10.0, pause_timeout_s=5.0
    )
    push.initialize()
    reports, expected = [], []
    for version in range(1, steps + 1):
        trainer.step(version)
        reports.append(push.sync_weights(version))
        truth = cast_bytes_of(trainer.truth())
        expected.append(truth if rank == 0 else {})
    push.close()
    return reports, expected


def check_push(kind: str, ranks: RankPool, **options: Any) -> None:
    """A trainer on `ranks` steps and syncs twice; the engine holds the second truth, byte for byte."""
    with children() as start:
        engine = start(hf_engine, options.get("tied", False), talk=True)
        url = engine.recv()
        results = ranks.run(train_and_push, kind, url, 2, options)
        first, second = results[0][1]
        for reports, _ in results:
            assert [report.version.number for report in reports] == [1, 2]
            assert all(report.digests_equal is True for report in reports)
            assert reports[-1].num_chunks >= 3
        engine.conn.send("weights")
        held = engine.recv()
        engine.conn.send(None)
    assert held == second
    assert held != first
