"""The model that the demo trains: Qwen3's architecture at a few million parameters, sharded by FSDP2.

Nothing here multiplies in bf16: a CPU without AVX-512 takes a hundred times as long for it as for fp32. The trainer
works in fp32 and casts what it sends; an engine keeps the bf16 weights that it was sent and computes with their values
in fp32.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812

from weightsync.demo.data import VOCAB_SIZE, ByteText
from weightsync.errors import ConfigError
from weightsync.optional import imported

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A size of the model and how it is trained.

    Attributes:
        heads: query heads of `head_dim` each; `kv_heads` of them share keys and values.
        intermediate: width of the MLP.
        num_rows: rows of a rank's batch.
        row_length: bytes of a row.
        updates_per_step: optimizer updates between two published versions.
        learning_rate: AdamW's, after a warm-up of `warmup_updates`.
        init_std: of the random weights; wide enough that a few dozen updates show.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    num_rows: int
    row_length: int
    updates_per_step: int
    learning_rate: float
    warmup_updates: int = 4
    init_std: float = 0.04


SIZES = {
    "medium": ModelSize(
        hidden=768, layers=8, heads=12, kv_heads=4, head_dim=64, intermediate=2304,
        num_rows=2, row_length=64, updates_per_step=2, learning_rate=5e-4,
    ),
    "small": ModelSize(
        hidden=256, layers=3, heads=4, kv_heads=2, head_dim=64, intermediate=768,
        num_rows=8, row_length=64, updates_per_step=4, learning_rate=2.5e-3,
    ),
    "tiny": ModelSize(
        hidden=48, layers=2, heads=3, kv_heads=1, head_dim=32, intermediate=96,
        num_rows=8, row_length=64, updates_per_step=4, learning_rate=1e-2,
    ),
}  # fmt: skip


def model_size(name: str) -> ModelSize:
    """The size called `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in SIZES:
        raise ConfigError(f"model size {name!r} is unknown; choose one of {', '.join(SIZES)}")
    return SIZES[name]


def build_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """A Qwen3ForCausalLM with random weights, equal in every process, on the CPU.

    Only parameters are cast to `dtype`; the rotary frequencies stay fp32 as in a trained checkpoint. Whatever the
    parameters are, the model computes in fp32, from what they hold at that moment.

    Raises:
        ConfigError: no such size.
        MissingDependencyError: transformers is not installed.
    """
    size = model_size(name)
    needs = "the demo's model needs transformers: pip install 'weightsync[demo]'"
    qwen3 = imported("transformers.models.qwen3", needs)
    config = qwen3.Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=size.hidden, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, head_dim=size.head_dim,
        intermediate_size=size.intermediate, max_position_embeddings=1024, tie_word_embeddings=True,
        use_cache=False, attention_dropout=0.0, initializer_range=size.init_std,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = qwen3.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():  # of all layers, those that compute in the dtype of their weight
        if isinstance(module, torch.nn.Linear):
            module.forward = functools.partial(_linear, module)  # type: ignore[method-assign]
        elif isinstance(module, torch.nn.Embedding):
            module.forward = functools.partial(_embedding, module)  # type: ignore[method-assign]
    return model


def _linear(module: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    return F.linear(inputs, module.weight.float(), None if module.bias is None else module.bias.float())


def _embedding(module: torch.nn.Embedding, inputs: torch.Tensor) -> torch.Tensor:
    return F.embedding(inputs, module.weight).float()


def save_byte_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of one token a byte, so that an engine which wants text can serve the model from `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # ByteLevel writes bytes that don't print as the characters from 256 on, in their order.
    printing = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    characters = [chr(byte if byte in printing else next(others)) for byte in range(VOCAB_SIZE)]
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def apply_fsdp2(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    """Shards every layer and the root in place, and returns `model`. Every rank of `mesh` calls it.

    Parameters, gradients and AdamW's state are fp32; the extractor casts what leaves the trainer.
    """
    from torch.distributed.fsdp import fully_shard

    decoder: Any = model.model
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    # A root would stay gathered after a forward without a backward. Not ours: whoever reads its parameters then finds
    # the shards that the optimizer works on.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


class ServedCopy:
    """What an engine makes of a trainer's weights: a model of the values that it gets, made without the library.

    The trainer's loss that is compared with an engine's is the loss of this copy.
    """

    def __init__(self, size: str) -> None:
        self._model = build_model(size, dtype=torch.bfloat16).eval()

    def loss(self, trained: torch.nn.Module, batch: torch.Tensor) -> float:
        """`held_out_loss` of `trained`'s weights cast to bf16. Of an FSDP2 model every rank calls it: it gathers."""
        from torch.distributed.tensor import DTensor

        with torch.no_grad():
            for held, served in zip(trained.parameters(), self._model.parameters(), strict=True):
                served.copy_(held.full_tensor() if isinstance(held, DTensor) else held)
        return held_out_loss(self._model, batch)


def next_byte_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each byte given those before it, fp32, 0-d.

    Args:
        model: any causal model whose output has `.logits`.
        batch: int64, shape (rows, length).
    """
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def held_out_loss(model: torch.nn.Module, batch: torch.Tensor) -> float:
    """`next_byte_loss` without gradients. Of an FSDP2 model every rank calls it, with the same batch."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return float(next_byte_loss(model, batch))
    finally:
        model.train(was_training)


def sample(model: torch.nn.Module, prompt: str, num_bytes: int) -> str:
    """The `num_bytes` likeliest bytes after `prompt`, one after the other; the prompt is not in it.

    Bytes that are no UTF-8 come as U+FFFD. The cost rises with the square of the length: keep it short.
    """
    tokens = torch.tensor([list(prompt.encode() or b"\n")], dtype=torch.int64)
    start = tokens.shape[1]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(num_bytes):
                logits = model(input_ids=tokens, use_cache=False).logits[:, -1]
                tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    finally:
        model.train(was_training)
    return bytes(tokens[0, start:].tolist()).decode("utf-8", errors="replace")


class TrainLoop:
    """AdamW on one rank's share of the text. Every rank makes one and calls `step` with the same numbers.

    Args:
        model: from `apply_fsdp2`, or a plain model.
        text: the same in every rank.
        rank: which share of the text.
    """

    def __init__(self, model: torch.nn.Module, text: ByteText, size: ModelSize, *, rank: int) -> None:
        self.model = model
        self.text = text
        self.size = size
        self.rank = rank
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )

    def step(self, step_index: int) -> float:
        """Runs `updates_per_step` updates; `step_index` counts from 0.

        Returns:
            This rank's mean training loss over them.
        """
        self.model.train()
        losses = []
        for index in range(self.size.updates_per_step):
            update = step_index * self.size.updates_per_step + index
            for group in self._optimizer.param_groups:
                group["lr"] = self.size.learning_rate * min(1.0, (update + 1) / self.size.warmup_updates)
            batch = self.text.batch(
                rank=self.rank, update=update, num_rows=self.size.num_rows, row_length=self.size.row_length
            )
            loss = next_byte_loss(self.model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
        return sum(losses) / len(losses)
