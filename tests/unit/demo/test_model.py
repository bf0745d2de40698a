from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.standins.processes import run_ranks
from weightsync.demo.data import ByteText
from weightsync.demo.engine import DemoEngine
from weightsync.demo.model import (
    ServedCopy,
    TrainLoop,
    apply_fsdp2,
    build_model,
    held_out_loss,
    model_size,
    next_byte_loss,
    sample,
)
from weightsync.errors import ConfigError

pytest.importorskip("transformers")


def test_every_process_builds_the_same_model_and_the_callers_randomness_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = build_model("tiny")
    assert torch.equal(torch.rand(1), expected)
    second = build_model("tiny")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = build_model("tiny", seed=1)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_small_has_a_few_million_tied_parameters() -> None:
    model: Any = build_model("small")
    assert 2e6 < sum(parameter.numel() for parameter in model.parameters()) < 4e6
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_cast_keeps_ties_and_the_fp32_rotary_frequencies() -> None:
    model: Any = build_model("tiny", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="small, tiny"):
        build_model("huge")


def test_the_loss_is_of_the_next_byte() -> None:
    """A model that always says the same byte has a loss near 0 only on text of that byte."""

    class Always(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: object) -> Any:
            logits = torch.zeros(*input_ids.shape, 256)
            logits[..., 97] = 20.0
            return type("Output", (), {"logits": logits})()

    text = torch.full((2, 9), 97)
    assert held_out_loss(Always(), text) < 1e-3
    text[:, 0] = 98  # the first byte is given, never predicted
    assert held_out_loss(Always(), text) < 1e-3
    text[:, -1] = 98
    assert held_out_loss(Always(), text) > 2
    assert sample(Always(), "x", 5) == "aaaaa"
    assert sample(Always(), "", 1) == "a"


def test_evaluating_leaves_the_mode_and_makes_no_gradients() -> None:
    model = build_model("tiny").train()
    held_out_loss(model, torch.zeros((1, 8), dtype=torch.int64))
    sample(model, "def ", 2)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    next_byte_loss(model, torch.zeros((1, 8), dtype=torch.int64)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Products(TorchDispatchMode):
    """Counts the matrix products that run in it, backward's too, by the dtypes of what they multiply."""

    NAMES = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "dot", "mv", "scaled_dot_product")

    def __init__(self) -> None:
        super().__init__()
        self.num_by_dtypes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.lstrip("_")
        if name in self.NAMES or name.startswith("scaled_dot_product"):
            dtypes = {str(arg.dtype) for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()}
            key = " ".join(sorted(dtypes))
            self.num_by_dtypes[key] = self.num_by_dtypes.get(key, 0) + 1
        return func(*args, **(kwargs or {}))


def test_the_engine_multiplies_in_fp32_and_holds_bf16() -> None:
    """A CPU without AVX-512 takes a hundred times as long for bf16. Seen red with a model that is cast alone."""
    demo = DemoEngine("engine", "tiny")
    with Products() as products:
        report = demo.report()
    demo.engine.close()
    assert report["loss"] > 0
    assert products.num_by_dtypes.keys() == {"torch.float32"}, products.num_by_dtypes
    assert sum(products.num_by_dtypes.values()) > 24 * 2 * 7, "each token goes through two layers of seven products"
    model = demo._model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_what_a_model_computes_follows_what_its_weights_hold() -> None:
    """Nothing is kept in fp32 beside the bf16 weights: a byte that is written live is computed with at once."""
    model = build_model("tiny", dtype=torch.bfloat16)
    batch = torch.arange(32).reshape(2, 16)
    before = held_out_loss(model, batch)
    for parameter in model.parameters():
        was = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.5)
        assert held_out_loss(model, batch) != before
        with torch.no_grad():
            parameter.copy_(was)
    assert held_out_loss(model, batch) == before
    same = build_model("tiny")
    with torch.no_grad():
        for parameter, held in zip(same.parameters(), model.parameters(), strict=True):
            parameter.copy_(held)
    assert held_out_loss(same, batch) == before


def train_two_ranks(rank: int, world_size: int, num_steps: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    text, size = ByteText(), model_size("tiny")
    model = apply_fsdp2(build_model("tiny"), init_device_mesh("cpu", (world_size,)))
    held_out = text.held_out(num_rows=8, row_length=64)
    losses = [held_out_loss(model, held_out)]
    loop = TrainLoop(model, text, size, rank=rank)
    train_losses = []
    with Products() as products:
        for step in range(num_steps):
            train_losses.append(loop.step(step))
            losses.append(held_out_loss(model, held_out))
        as_served = ServedCopy("tiny").loss(model, held_out)
    # Right after an evaluation: parameters must be the fp32 shards, not what the forward gathered.
    kinds = {(type(parameter).__name__, parameter.dtype) for parameter in model.parameters()}
    gathered = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
    engine = build_model("tiny", dtype=torch.bfloat16, seed=1)
    with torch.no_grad():
        for name, parameter in engine.named_parameters():
            parameter.copy_(gathered[name].to(torch.bfloat16))
    engine_loss = held_out_loss(engine, held_out)
    prompt = "def __init__(self"
    samples = sample(model, prompt, 12), sample(engine, prompt, 12)
    with torch.no_grad():
        next(engine.parameters()).mul_(1.5)
    return {
        "train": train_losses, "held_out": losses, "kinds": kinds, "engine": engine_loss, "samples": samples,
        "as_served": as_served, "products": products.num_by_dtypes, "updates": num_steps * size.updates_per_step,
        "spoiled": held_out_loss(engine, held_out),
    }  # fmt: skip


def test_two_fsdp_ranks_learn_in_fp32_and_an_engine_has_the_very_loss_of_the_served_copy() -> None:
    first, second = run_ranks(train_two_ranks, 2, 6, timeout_s=90)
    assert first["held_out"] == second["held_out"], "both ranks evaluate one model"
    assert first["train"] != second["train"], "the ranks train on different text"
    losses = first["held_out"]
    assert losses[0] > 5
    assert losses[-1] < losses[0] - 1.5
    assert losses[2] < losses[0]
    assert losses[4] < losses[2]
    assert {(kind, dtype) for kind, dtype in first["kinds"]} == {("DTensor", torch.float32)}
    assert first["engine"] == first["as_served"] == second["as_served"], "the same bytes, and the same arithmetic"
    assert 0 < abs(first["as_served"] - losses[-1]) < 1e-2, "the cast loses a little"
    assert abs(first["spoiled"] - first["as_served"]) > 1e-2
    assert first["samples"][0] == first["samples"][1]
    assert first["products"].keys() == {"torch.float32"}, "seen red with FSDP2's mixed precision in bf16"
    assert first["products"]["torch.float32"] > first["updates"] * 3 * 2 * 7, "forward and twice as many backward"
