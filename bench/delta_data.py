"""Real deltas for the benchmarks: bf16 weights before and after one AdamW update of a training run.

A small Qwen3 learns the sources of Python's library, byte by byte: fp32 weights and gradients, AdamW with betas 0.9
and 0.95, gradients clipped to norm 1. A short pre-training at an ordinary learning rate comes first; from its end one
run starts at each learning rate, with a new optimizer, as an RL run starts from a checkpoint. The weights cast to bf16
before and after an update are a pair. *early* is the second update of a run, where Adam's steps have nearly the
learning rate's size everywhere; *late* is its last one, where the second moments have settled.

All randomness has a seed: one machine, thread count and torch make the same bytes each time. What was made is kept in
a folder of this user's alone below the temporary one (`WEIGHTSYNC_BENCH_CACHE` names another).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from weightsync.demo.data import VOCAB_SIZE, ByteText
from weightsync.demo.model import next_byte_loss
from weightsync.errors import MissingDependencyError

Bits: TypeAlias = npt.NDArray[np.uint16]
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]

PHASES = ("early", "late")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and how. The default is what is reported: 16.8 M parameters, 32 MiB in bf16.

    Attributes:
        hidden: width; with `layers`, `heads`, `kv_heads`, `head_dim` and `intermediate` the model's size.
        num_rows: rows of a batch, of `row_length` bytes each.
        pretrain_updates: updates before the runs, at `pretrain_learning_rate` after a warm-up of 4.
        updates: of each run; the last one is its *late* pair.
        early_update: the update of each run that is its *early* pair, counted from 1.
        learning_rates: one run each.
        seed: of the weights and of the text's order.
    """

    hidden: int = 512
    layers: int = 5
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    intermediate: int = 1664
    num_rows: int = 4
    row_length: int = 64
    pretrain_updates: int = 48
    pretrain_learning_rate: float = 1e-3
    updates: int = 40
    early_update: int = 2
    learning_rates: tuple[float, ...] = (1e-6, 2e-6, 5e-6, 1e-5)
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """All weights in bf16 before and after one update, as their bits, one tensor behind the other."""

    learning_rate: float
    phase: str
    old: Bits
    new: Bits


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """What the runs gave.

    Attributes:
        shapes: name and shape of each tensor, in the order in which pairs have them.
        pairs: by learning rate and phase, in the recipe's order.
        densities: learning rate to the share of elements that each of its updates changed.
        losses: mean training loss of the first and of the last four updates of each stage.
        seconds: how long it took to train.
    """

    shapes: Shapes
    pairs: tuple[Pair, ...]
    densities: dict[float, list[float]]
    losses: dict[str, tuple[float, float]]
    seconds: float

    def pair(self, learning_rate: float, phase: str) -> Pair:
        """The pair of one run."""
        return next(pair for pair in self.pairs if (pair.learning_rate, pair.phase) == (learning_rate, phase))


def trained(recipe: Recipe | None = None) -> Trained:
    """The recipe's pairs, from the cache where they are there.

    Raises:
        MissingDependencyError: transformers is not installed.
    """
    recipe = recipe or Recipe()
    folder = _cache_folder()
    path = folder / f"deltas-{_key(recipe)}.npz" if folder else None
    if path is not None and path.exists():
        return _load(path)
    if recipe == Recipe():
        print("training the model whose deltas are measured: a minute or two on two cores", file=sys.stderr)
    made = train(recipe)
    if path is not None:
        _save(path, made)
    return made


def train(recipe: Recipe) -> Trained:
    """Runs the recipe.

    Raises:
        MissingDependencyError: transformers is not installed.
    """
    started = time.perf_counter()
    text = ByteText(seed=recipe.seed)
    model = _model(recipe)
    parameters = dict(model.named_parameters())
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in parameters.items())
    losses: dict[str, tuple[float, float]] = {}
    found = []
    optimizer = _optimizer(model, recipe.pretrain_learning_rate)
    for update in range(recipe.pretrain_updates):
        optimizer.param_groups[0]["lr"] = recipe.pretrain_learning_rate * min(1.0, (update + 1) / 4)
        found.append(_update(model, optimizer, text, update, recipe))
    losses["pretrain"] = _ends(found)
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    pairs, densities = [], {}
    for rate in recipe.learning_rates:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(start[name])
        optimizer, found = _optimizer(model, rate), []
        shares: list[float] = []
        old = _bits(parameters.values())
        for number in range(1, recipe.updates + 1):
            found.append(_update(model, optimizer, text, recipe.pretrain_updates + number, recipe))
            new = _bits(parameters.values())
            shares.append(round(float(np.count_nonzero(old != new) / len(old)), 6))
            for phase, wanted in (("early", recipe.early_update), ("late", recipe.updates)):
                if number == wanted:
                    pairs.append(Pair(learning_rate=rate, phase=phase, old=old, new=new))
            old = new
        densities[rate] = shares
        losses[f"{rate:g}"] = _ends(found)
    seconds = time.perf_counter() - started
    return Trained(shapes=shapes, pairs=tuple(pairs), densities=densities, losses=losses, seconds=seconds)


def tiled(pair: Pair, shapes: Shapes, num_elements: int, *, old: Bits, new: Bits) -> list[tuple[str, int]]:
    """Fills a model of any size from one pair: tiles of it, each with its rows in an order of its own.

    Within a tile every tensor's rows (of a vector: its elements) are permuted, in `old` and `new` alike. So no
    tile repeats the bytes of another, and nothing but the order of real rows is made up. The last tile is cut off.

    Args:
        pair: what is tiled.
        shapes: of its tensors.
        num_elements: how large the model gets.
        old: room for so many elements; `new` likewise.

    Returns:
        Name and number of elements of each tensor that was written, in order.
    """
    parts: list[tuple[str, int]] = []
    at = tile = 0
    while at < num_elements:
        random = np.random.default_rng([7, tile])
        low = 0
        for name, shape in shapes:
            size, row = math.prod(shape), math.prod(shape[1:])
            order = random.permutation(size // row)
            count = min(size, num_elements - at)
            for source, target in ((pair.old, old), (pair.new, new)):
                rows = source[low : low + size].reshape(-1, row)[order[: -(-count // row)]]
                target[at : at + count] = rows.reshape(-1)[:count]
            if count:
                parts.append((f"tile{tile}.{name}", count))
            at += count
            low += size
        tile += 1
    return parts


def _model(recipe: Recipe) -> torch.nn.Module:
    try:
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError as error:
        raise MissingDependencyError("real deltas need transformers: pip install weightsync[demo]") from error
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=recipe.hidden, num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads, num_key_value_heads=recipe.kv_heads, head_dim=recipe.head_dim,
        intermediate_size=recipe.intermediate, max_position_embeddings=1024, tie_word_embeddings=True,
        use_cache=False, attention_dropout=0.0, initializer_range=0.02,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model: torch.nn.Module = Qwen3ForCausalLM(config)
    return model.float().train()


def _optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)


def _update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, text: ByteText, update: int, recipe: Recipe
) -> float:
    """One update, and its loss."""
    batch = text.batch(rank=0, update=update, num_rows=recipe.num_rows, row_length=recipe.row_length)
    loss = next_byte_loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def _bits(parameters: Any) -> Bits:
    flat = torch.cat([parameter.detach().reshape(-1).bfloat16() for parameter in parameters])
    return flat.view(torch.uint16).numpy()


def _ends(losses: Sequence[float]) -> tuple[float, float]:
    return round(float(np.mean(losses[:4])), 3), round(float(np.mean(losses[-4:])), 3)


def _key(recipe: Recipe) -> str:
    """What the bytes depend on: this file, the recipe, torch, its threads, and Python, whose sources are the text."""
    facts = [Path(__file__).read_text(), repr(recipe), torch.__version__, str(torch.get_num_threads()), sys.version]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]


def _cache_folder() -> Path | None:
    """A folder that is ours alone, or None: who else may write there could give us what they like."""
    given = os.environ.get("WEIGHTSYNC_BENCH_CACHE")
    folder = Path(given) if given else Path(tempfile.gettempdir()) / f"weightsync-bench-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return folder
    return None


def _save(path: Path, made: Trained) -> None:
    """Writes it whole or not at all, in place of what other recipes left."""
    facts = {
        "shapes": made.shapes,
        "pairs": [(pair.learning_rate, pair.phase) for pair in made.pairs],
        "densities": list(made.densities.items()),
        "losses": made.losses,
        "seconds": made.seconds,
    }
    arrays = {f"{side}{index}": getattr(pair, side) for index, pair in enumerate(made.pairs) for side in ("old", "new")}
    begun = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        for other in path.parent.glob("deltas-*.npz"):
            other.unlink(missing_ok=True)
        with begun.open("wb") as file:
            np.savez(file, facts=np.array(json.dumps(facts)), **arrays)
        begun.replace(path)
    except OSError as error:
        print(f"the trained deltas are not kept for the next time: {error}", file=sys.stderr)
    finally:
        begun.unlink(missing_ok=True)


def _load(path: Path) -> Trained:
    with np.load(path, allow_pickle=False) as stored:
        facts = json.loads(str(stored["facts"]))
        pairs = tuple(
            Pair(learning_rate=rate, phase=phase, old=stored[f"old{index}"], new=stored[f"new{index}"])
            for index, (rate, phase) in enumerate(facts["pairs"])
        )
    return Trained(
        shapes=tuple((name, tuple(shape)) for name, shape in facts["shapes"]),
        pairs=pairs,
        densities=dict(facts["densities"]),
        losses={name: (first, last) for name, (first, last) in facts["losses"].items()},
        seconds=facts["seconds"],
    )
