"""A live plan says where the model's own loader puts each element, or marks the tensor: random loaders."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weightsync.load.live_plan import LivePiece, LivePlan
from weightsync.load.live_trace import trace
from weightsync.plan.boxes import whole_box
from weightsync.tensors import spec_of
from weightsync.types import Box

Copy = Callable[[nn.Module, torch.Tensor], None]


class Loaded(nn.Module):
    """A model of named parameters, and a loader that does for each checkpoint tensor what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[str, Copy] = {}

    def own(self, name: str, *shape: int) -> torch.Tensor:
        parameter = nn.Parameter(torch.full(shape, -1.0), requires_grad=False)
        layer = nn.Module()
        layer.register_parameter("weight", parameter)
        self.add_module(f"layer_{name}", layer)
        object.__setattr__(self, name, parameter)
        return parameter

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.copies[name](self, tensor)


def planned(model: Loaded, tensors: dict[str, torch.Tensor], **options: Any) -> LivePlan:
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    plan = trace(model, model.load_weights, specs, names={}, **options)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), "tracing wrote into the live model"
    assert plan.pieces.keys() | plan.marked.keys() == tensors.keys()
    assert not plan.pieces.keys() & plan.marked.keys()
    return plan


def check(model: Loaded, tensors: dict[str, torch.Tensor]) -> LivePlan:
    """The plan's scatter equals the loader's result wherever the plan says anything."""
    plan = planned(model, tensors)
    model.load_weights(tensors.items())
    loaded = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert plan.compare(tensors) == {}, "what the loader has written is what the plan says"
    for name, pieces in plan.pieces.items():
        for piece in pieces:
            cut = tuple(slice(at, at + size) for at, size in zip(piece.box.offset, piece.box.shape, strict=True))
            piece.live.fill_(-2.0)
            assert name in plan.compare(tensors)
            piece.live.copy_(tensors[name][cut])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded[name])
    return plan


def numbered(*shape: int, start: int) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape), dtype=torch.float32).reshape(shape)


def test_what_vllms_loaders_do() -> None:
    """Fused rows, a rank's columns, a padded vocabulary, stacked experts, a transposed one."""
    model = Loaded()
    for name, shape in {"qkv": (12, 8), "o": (8, 4), "emb": (10, 8), "experts": (3, 4, 8), "turned": (8, 6)}.items():
        model.own(name, *shape)
    shapes = {
        "q": (4, 8),
        "k": (4, 8),
        "v": (4, 8),
        "o": (8, 8),
        "emb": (7, 8),
        "e0": (4, 8),
        "e2": (4, 8),
        "t": (6, 8),
    }
    tensors = {name: numbered(*shape, start=1000 * n) for n, (name, shape) in enumerate(shapes.items())}

    def emb(m: Any, tensor: torch.Tensor) -> None:
        m.emb.data[:7].copy_(tensor)
        m.emb.data[7:].fill_(0)

    model.copies = {
        **{
            name: lambda m, w, at=at: m.qkv.data.narrow(0, at, 4).copy_(w)
            for name, at in (("q", 0), ("k", 4), ("v", 8))
        },
        "o": lambda m, w: m.o.data.copy_(w.narrow(1, 4, 4)),
        "emb": emb,
        **{f"e{n}": lambda m, w, n=n: m.experts.data[n].copy_(w.to(w.device).contiguous()) for n in (0, 2)},
        "t": lambda m, w: m.turned.data.copy_(w.t()),
    }
    plan = check(model, tensors)
    assert plan.marked == {}
    assert plan.pieces["o"][0].box.offset == (0, 4)
    assert plan.pieces["k"][0].live.data_ptr() == model.get_parameter("layer_qkv.weight").data_ptr() + 4 * 8 * 4
    assert (plan.moved(model), plan.strayed()) == (None, None)
    model.get_parameter("layer_qkv.weight").data = torch.zeros(12, 8)
    assert (plan.moved(model), plan.strayed()) == ("layer_qkv.weight", "layer_qkv.weight")


def test_a_parameter_that_another_took_the_place_of_has_strayed() -> None:
    """The same memory, but what the layer computes with is the new one."""
    model = Loaded()
    model.own("p", 4, 6)
    model.copies = {"w": lambda m, w: m.p.data.copy_(w)}
    plan = check(model, {"w": torch.rand(4, 6)})
    assert plan.strayed() is None
    model.get_submodule("layer_p").weight = nn.Parameter(model.p.data)
    assert plan.strayed() == plan.moved(model) == "layer_p.weight"


@pytest.mark.parametrize(
    ("words", "copy"),
    [
        ("computed by add", lambda m, w: m.p.data.copy_(w + 1)),
        ("converted", lambda m, w: m.p.data.copy_(w.to(torch.bfloat16))),
        ("several places", lambda m, w: m.p.data.copy_(w[:1].expand(4, 6))),
        ("no box", lambda m, w: m.p.data[:2].copy_(w[::2])),
        ("mixed", lambda m, w: m.p.data.copy_(w.reshape(6, 4).t())),
        ("_local_scalar_dense", lambda m, w: m.p.data.fill_(w[0, 0].item())),
        ("raised ValueError in <genexpr>", lambda m, w: (_ for _ in ()).throw(ValueError("no"))),
        ("written by mul_", lambda m, w: (m.p.data.copy_(w), m.p.data.mul_(2))),
    ],
)
def test_what_is_no_copy_of_a_part_is_marked(words: str, copy: Copy) -> None:
    """The tensors behind it are planned yet."""
    model = Loaded()
    model.own("p", 4, 6)
    model.own("other", 3)
    model.copies = {"p": copy, "other": lambda m, w: m.other.data.copy_(w)}
    plan = planned(model, {"p": numbered(4, 6, start=0), "other": numbered(3, start=50)})
    assert words in plan.marked["p"], plan.marked
    assert set(plan.pieces) == {"other"}


def test_a_loader_that_raises_before_it_takes_a_tensor_is_tried_once() -> None:
    """Seen red: it was called for ever."""
    model, calls = Loaded(), []
    model.own("p", 4, 6)

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        calls.append(weights)
        assert len(calls) < 10, "it is called again and again"
        raise RuntimeError("not now")

    plan = trace(model, load, [spec_of("p", numbered(4, 6, start=0))], names={})
    assert (len(calls), "RuntimeError" in plan.marked["p"]) == (1, True)


def test_what_is_said_of_a_tensor_that_the_loader_raises_at() -> None:
    """Why, where, and what to do. Seen red: "its loader can't be traced: AttributeError: ..."."""
    model = Loaded()
    model.own("p", 4, 6)
    model.copies = {"p": lambda m, w: m.p.weight_loader(w)}
    why = planned(model, {"p": numbered(4, 6, start=0)}).marked["p"]
    assert "it raised AttributeError in <lambda> (test_live_plan.py:" in why, "a bug of a loader, perhaps: all of it"
    assert "What arrives is proved all the same, what is live is not: please report it" in why
    model.own("packed", 0)
    why = planned(model, {"p": numbered(4, 6, start=0)}).marked["p"]
    assert "the engine keeps 1 parameters in another form, packed or quantised" in why
    assert "what is live is proved only where the engine keeps its parameters as they are loaded" in why
    assert "AttributeError" not in why


def test_of_two_tensors_in_one_place_both_are_marked() -> None:
    model = Loaded()
    model.own("p", 4, 6)
    model.copies = {"a": lambda m, w: m.p.data[:3].copy_(w), "b": lambda m, w: m.p.data[2:].copy_(w)}
    plan = planned(model, {"a": numbered(3, 6, start=0), "b": numbered(2, 6, start=50)})
    assert set(plan.marked) == {"a", "b"}


def test_of_many_tensors_all_that_are_in_one_place_are_marked() -> None:
    """One that reaches over several others; most have a place of their own."""
    model = Loaded()
    own = model.own("big", 1300)
    places = {"all": slice(0, 100), "head": slice(10, 20), "tail": slice(30, 40)}
    places |= {f"own.{index}": slice(index, index + 1) for index in range(100, 1300)}
    for name, at in places.items():
        model.copies[name] = lambda _, tensor, at=at: own[at].copy_(tensor)  # type: ignore[misc]
    tensors = {name: numbered(at.stop - at.start, start=0) for name, at in places.items()}
    assert planned(model, tensors).marked.keys() == {"all", "head", "tail"}


def test_an_empty_tensor_and_an_empty_part_are_no_reason_to_mark_anything() -> None:
    """A rank may have none of a tensor's rows."""
    model = Loaded()
    for name, shape in (("p", (4, 6)), ("none", (0, 6))):
        model.own(name, *shape)
    model.copies = {
        "p": lambda m, w: m.p.data.copy_(w),
        "none": lambda m, w: m.none.data.copy_(w),
        "elsewhere": lambda m, w: m.p.data[4:].copy_(w[2:]),
    }
    tensors = {"p": numbered(4, 6, start=0), "none": numbered(0, 6, start=0), "elsewhere": numbered(2, 6, start=0)}
    plan = check(model, tensors)
    assert plan.marked == {}
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    assert plan.uncovered([plan.coverage()], specs).keys() == {"elsewhere"}, "of which no element is live"


def test_a_layer_that_has_more_than_it_is_given_is_marked() -> None:
    """A scale that some other code fills: what the layer computes with is not the checkpoint's tensor alone."""
    model = Loaded()
    model.own("p", 4, 6)
    model.get_submodule("layer_p").register_buffer("scale", torch.ones(4))
    model.copies = {"p": lambda m, w: m.p.data.copy_(w)}
    tensors = {"p": numbered(4, 6, start=0)}
    assert "scale besides" in planned(model, tensors).marked["p"]
    assert planned(model, tensors, unloaded=["scale"]).marked == {}, "vLLM's maps of experts, e.g."


@pytest.mark.parametrize(
    ("name", "why", "said"),
    [
        ("p", "as told", "layer_p.weight: as told"),
        ("layer_p.weight", "as told", "as told"),
        ("p", "layer_p keeps memory in handler", "layer_p keeps memory in handler"),
    ],
)
def test_what_must_not_be_written_one_by_one_is_marked(name: str, why: str, said: str) -> None:
    """Seen red: a doctor named the tensor three times, "lm_head.weight (1): lm_head.weight: lm_head keeps memory"."""
    model = Loaded()
    model.own("p", 4, 6)
    model.copies = {"p": lambda m, w: m.p.data.copy_(w)}
    spec = spec_of(name, numbered(4, 6, start=0))
    plan = trace(model, model.load_weights, [spec], names={name: "p"}, doubts={"layer_p.weight": why})
    assert plan.marked == {name: said}


def test_a_loader_that_swallows_what_it_is_told_and_one_that_skips_are_found() -> None:
    """Seen: both were taken for whole, and proved, with nothing live."""
    model = Loaded()
    for name in "abc":
        model.own(name, 4, 6)

    def swallows(m: Any, w: torch.Tensor) -> None:
        with contextlib.suppress(Exception):
            m.a.data.copy_(w * 2)

    model.copies = {"a": swallows, "b": lambda m, w: None, "c": lambda m, w: m.c.data[:2].copy_(w[:2])}
    tensors = {name: numbered(4, 6, start=100 * n) for n, name in enumerate("abc")}
    plan = planned(model, tensors)
    assert "computed by mul" in plan.marked["a"]
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    assert set(plan.uncovered([plan.coverage()], specs)) == {"b", "c"}
    other = {"b": [whole_box((4, 6))], "c": [Box(offset=(2, 0), shape=(2, 6))]}
    assert plan.uncovered([plan.coverage(), other], specs) == {}


@pytest.mark.parametrize(
    "load",
    [
        lambda m, w: setattr(m.get_submodule("layer_p"), "weight", nn.Parameter(w, requires_grad=False)),
        lambda m, w: setattr(m.p, "data", w),
        lambda m, w: torch._foreach_zero_([m.p.data, m.other.data]),
        lambda m, w: torch.add(m.other.data, 1, out=m.other.data),
        lambda m, w: m.get_submodule("layer_p").__delattr__("weight"),
    ],
    ids=["parameter", "data", "foreach", "out", "deleted"],
)
def test_tracing_changes_nothing_whatever_the_loader_does(load: Copy) -> None:
    """Seen: the live parameter was on no device after it, or zero, and the engine healthy."""
    model = Loaded()
    model.own("p", 4, 6)
    model.own("other", 3)
    held, other = model.get_parameter("layer_p.weight"), model.get_parameter("layer_other.weight")
    model.copies = {"p": load}
    plan = planned(model, {"p": numbered(4, 6, start=0)})
    assert model.get_parameter("layer_p.weight") is held
    assert model.get_parameter("layer_other.weight") is other
    assert set(plan.marked) == {"p"} or plan.uncovered([plan.coverage()], [spec_of("p", numbered(4, 6, start=0))])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_are_compared_to_the_bit(dtype: torch.dtype) -> None:
    """Also where the engine's lie in steps. Seen red: KeyError, for those of 16 bytes."""
    live = torch.randn(4, 6, dtype=dtype)[:, ::2]
    piece = LivePiece(name="a", box=whole_box((4, 3)), live=live, owner="a")
    plan = LivePlan(pieces={"a": (piece,)}, marked={}, _places={})
    assert plan.compare({"a": live.contiguous()}) == {}
    other = live.clone()
    other[3, 2] *= -1
    assert list(plan.compare({"a": other})) == ["a"]


def test_what_was_repacked_afterwards_is_found_by_comparing() -> None:
    """Rows that change places after the load: no tracer sees it."""
    model = Loaded()
    model.own("p", 4, 6)
    model.own("fine", 3)
    model.copies = {"p": lambda m, w: m.p.data.copy_(w), "fine": lambda m, w: m.fine.data.copy_(w)}
    tensors = {"p": numbered(4, 6, start=0), "fine": numbered(3, start=50)}
    plan = planned(model, tensors)
    model.load_weights(tensors.items())
    model.get_parameter("layer_p.weight").data.copy_(model.get_parameter("layer_p.weight").data.flip(0).clone())
    odd = plan.compare(tensors)
    assert set(odd) == {"p"}
    left = plan.without(odd)
    assert (set(left.pieces), set(left.marked)) == ({"fine"}, {"p"})


@st.composite
def sources(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Any, ...]]]:
    """A shape, and what is done to a tensor of it: views, one after the other."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    kinds = st.sampled_from(["narrow", "transpose", "select", "unsqueeze", "view", "flatten", "chunk", "contiguous"])
    return shape, [
        (kind, draw(st.integers(0, 99)), draw(st.integers(0, 99))) for kind in draw(st.lists(kinds, max_size=4))
    ]


def viewed(tensor: torch.Tensor, steps: list[tuple[Any, ...]]) -> torch.Tensor:
    for kind, one, other in steps:
        dim = one % max(1, tensor.dim())
        if kind == "narrow" and tensor.dim():
            size = tensor.shape[dim]
            start = other % size
            tensor = tensor.narrow(dim, start, max(1, (size - start + 1) // 2))
        elif kind == "transpose" and tensor.dim() > 1:
            tensor = tensor.transpose(dim, other % tensor.dim())
        elif kind == "select" and tensor.dim() > 1:
            tensor = tensor.select(dim, other % tensor.shape[dim])
        elif kind == "unsqueeze":
            tensor = tensor.unsqueeze(dim)
        elif kind == "view" and tensor.dim() and tensor.shape[dim] % 2 == 0:
            tensor = tensor.unflatten(dim, (2, tensor.shape[dim] // 2))
        elif kind == "flatten" and tensor.is_contiguous():
            tensor = tensor.reshape(-1)
        elif kind == "chunk" and tensor.dim():
            tensor = tensor.chunk(2, dim)[0]
        elif kind == "contiguous":
            tensor = tensor.contiguous()
    return tensor


@given(parts=st.lists(sources(), min_size=1, max_size=5), stacked=st.booleans(), turned=st.booleans())
def test_any_views_of_a_tensor_are_planned_as_loaded_or_marked(
    parts: list[tuple[tuple[int, ...], list[tuple[Any, ...]]]], stacked: bool, turned: bool
) -> None:
    """Each part goes to rows of one fused parameter, or to one of its own; transposed on the way, or not."""
    model, tensors = Loaded(), {}
    for number, (shape, steps) in enumerate(parts):
        name = f"t{number}"
        tensors[name] = numbered(*shape, start=1000 * number)
        target = viewed(tensors[name], steps)
        place = tuple(reversed(target.shape)) if turned else tuple(target.shape)
        model.own(name, *((3, *place) if stacked else place))

        def copy(m: nn.Module, w: torch.Tensor, name: str = name, steps: list[tuple[Any, ...]] = steps) -> None:
            live = m.get_parameter(f"layer_{name}.weight").data
            live = live[1] if stacked else live
            live = live.permute(*reversed(range(live.dim()))) if turned and live.dim() else live
            live.copy_(viewed(w, steps))

        model.copies[name] = copy
    check(model, tensors)
