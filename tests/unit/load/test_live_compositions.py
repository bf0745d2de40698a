"""Random compositions of what engines' loaders do: a change through the plan ends where the loader puts it."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.unit.load.test_live_plan import Loaded, numbered, planned
from weightsync.load.live import ShardPatch
from weightsync.tensors import spec_of
from weightsync.types import Patch

_SIZES = st.integers(1, 5)


class Composed(Loaded):
    """Live parameters, each made of several checkpoint tensors; `tensors` are these.

    Attributes:
        odd: names of tensors that are loaded into one place with others: their elements can't be told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self.odd: set[str] = set()

    def checkpoint(self, *shape: int) -> str:
        name = f"t{len(self.tensors)}"
        self.tensors[name] = numbered(*shape, start=1000 * len(self.tensors))
        return name

    def into(self, name: str, live: torch.Tensor, *views: tuple[str, tuple[int, ...]]) -> None:
        """Has the loader copy a tensor, viewed so, to a view of a live one."""

        def copy(_: nn.Module, tensor: torch.Tensor) -> None:
            for view, arguments in views:
                tensor = getattr(tensor, view)(*arguments)
            live.copy_(tensor)

        self.copies[name] = copy


def fused(draw: st.DrawFn, model: Composed, name: str) -> None:
    """Rows of several tensors one behind the other; this worker's part of each; perhaps turned; perhaps padded."""
    parts = draw(st.lists(_SIZES, min_size=1, max_size=3))
    width, workers, turned, padding = (
        draw(_SIZES),
        draw(st.integers(1, 2)),
        draw(st.booleans()),
        draw(st.integers(0, 2)),
    )
    shape = sum(parts) + padding, width
    live = model.own(name, *(reversed(shape) if turned else shape)).data
    live = live.t() if turned else live
    at = 0
    for rows in parts:
        by_rows = draw(st.booleans())
        whole = (rows * workers, width) if by_rows else (rows, width * workers)
        rank = draw(st.integers(0, workers - 1))
        cut = (0, rank * rows, rows) if by_rows else (1, rank * width, width)
        model.into(model.checkpoint(*whole), live.narrow(0, at, rows), ("narrow", cut))
        at += rows


def stacked(draw: st.DrawFn, model: Composed, name: str) -> None:
    """Experts, some of them of other workers, each of two halves; perhaps turned."""
    experts, rows, width, turned = draw(st.integers(1, 4)), draw(_SIZES), draw(_SIZES), draw(st.booleans())
    first, count = 0, experts
    if draw(st.booleans()) and experts > 1:
        first, count = draw(st.integers(0, 1)), experts - 1
    live = model.own(name, count, *((width, 2 * rows) if turned else (2 * rows, width))).data
    for expert in range(experts):
        for half in (0, 1):
            tensor = model.checkpoint(rows, width)
            if not first <= expert < first + count:
                model.copies[tensor] = lambda *_: None
                continue
            mine = live[expert - first]
            mine = mine.t() if turned else mine
            model.into(tensor, mine.narrow(0, half * rows, rows), ("contiguous", ()))


def viewed(draw: st.DrawFn, model: Composed, name: str) -> None:
    """One with other dimensions than the checkpoint's."""
    one, two, three = draw(_SIZES), draw(_SIZES), draw(_SIZES)
    live = model.own(name, one * two, three).data
    views: list[tuple[str, tuple[int, ...]]] = [("view", (one * two, three))]
    if draw(st.booleans()):
        live = live.view(one, two, three).transpose(1, 2)
        views = [("transpose", (1, 2))]
    model.into(model.checkpoint(one, two, three), live, *views)


def tied(draw: st.DrawFn, model: Composed, name: str) -> None:
    """One parameter in two layers; the checkpoint has it once; or twice, and nobody knows which is live."""
    shape = draw(_SIZES), draw(_SIZES)
    live = model.own(name, *shape)
    model.get_submodule(f"layer_{name}").register_parameter("again", nn.Parameter(live, requires_grad=False))
    model.get_submodule(f"layer_{name}").again = live
    twice = draw(st.booleans())
    names = [model.checkpoint(*shape) for _ in range(1 + twice)]
    for each in names:
        model.into(each, live.data)
    model.odd.update(names if twice else ())


@st.composite
def models(draw: st.DrawFn) -> Composed:
    model = Composed()
    for number, kind in enumerate(
        draw(st.lists(st.sampled_from([fused, stacked, viewed, tied]), min_size=1, max_size=4))
    ):
        kind(draw, model, f"p{number}")
    return model


@given(model=models(), seed=st.integers(0, 10**6), share=st.floats(0.05, 0.9))
def test_a_change_ends_where_the_loader_would_have_put_it(model: Composed, seed: int, share: float) -> None:
    """And comes back, to the bit. What is loaded twice into one place is marked, and nothing else."""
    model.load_weights(model.tensors.items())
    plan = planned(model, model.tensors)
    assert set(plan.marked) == model.odd
    assert plan.compare(model.tensors) == {}
    assert set(plan.uncovered([plan.coverage()], [spec_of(*each) for each in model.tensors.items()])).isdisjoint(
        name for name, found in plan.pieces.items() if sum(math.prod(each.box.shape) for each in found)
        == model.tensors[name].numel()
    )  # fmt: skip
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    after = {name: tensor.clone() for name, tensor in model.tensors.items()}
    patch = ShardPatch(plan, {name: tensor.clone() for name, tensor in model.tensors.items()})
    for name, tensor in after.items():
        where = (torch.rand(tensor.numel(), generator=generator) < share).nonzero().reshape(-1)
        if name not in plan.marked and where.numel():
            values = torch.rand(len(where), generator=generator)
            tensor.view(-1)[where] = values
            patch.add(Patch(name=name, positions=where, values=values))
    patch.gather()
    patch.apply()
    written = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.load_weights(after.items())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, written[name]), name
    patch.undo()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    patch.close()
