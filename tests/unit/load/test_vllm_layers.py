"""Which layers of a vLLM model tensors go to, and a patch of tensors whose layers are loaded alone, with undo."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.errors import LoadError, StateError, UnsupportedError
from weightsync.load.vllm import VLLMWeightLoader
from weightsync.load.vllm_layers import LayerNotes, SomeLayers
from weightsync.load.vllm_reload import LayerwiseReload
from weightsync.tensors import spec_of
from weightsync.types import Full, Manifest, Patch, Version


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)


class Attention(nn.Module):
    """Without parameters; works on its neighbours'."""

    def process_weights_after_loading(self, dtype: object) -> None: ...


class Block(nn.Module):
    """q and k in one packed parameter, as vLLM's CPU build has them, and one that is as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.qk = nn.Linear(4, 6, bias=False)
        self.attn.run = Attention()
        self.norm = nn.Module()
        self.norm.weight = parameter(4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            block, part = int(name[0]), name[2:]
            layers: Any = self.blocks[block]
            own = layers.norm.weight if part == "norm" else layers.attn.qk.weight
            own.weight_loader(own, tensor, part)


def load_part(own: torch.Tensor, tensor: torch.Tensor, part: str) -> None:
    """Its checkpoint form is that of the parameter."""
    {"q": own[:4], "k": own[4:], "norm": own}[part].copy_(tensor)


for_trace = load_part
PATHS = ["blocks.0.attn.qk", "blocks.0.norm", "blocks.1.attn.qk", "blocks.1.norm"]


class PackingReload:
    """As vLLM's own: a layer is loaded when all of it was given, `qk` is turned around then. Fails where it is told."""

    fail_at: int | None = None
    num_steps = 0
    reloaded: list[list[str]] = []  # noqa: RUF012  (of each)

    def __init__(self, model: Model, *_: Any, only: Iterable[str] | None = None) -> None:
        kind = type(self)
        self._model = model
        self._layers = dict((model if only is None else SomeLayers(model, list(only))).named_modules())
        kind.reloaded.append(sorted(path for path in self._layers if path in PATHS))
        self.notes = LayerNotes()
        self._given: dict[str, list[tuple[torch.Tensor, str]]] = {}
        for path in kind.reloaded[-1]:
            own = self._layers[path].weight

            def online_process_loader(_: Any, tensor: torch.Tensor, part: str, *, path: str = path) -> None:
                self._step()
                self._given.setdefault(path, []).append((tensor, part))

            own.weight_loader = online_process_loader  # type: ignore[union-attr]
        self.notes.watch(model)

    def _step(self) -> None:
        kind = type(self)
        kind.num_steps += 1
        if kind.num_steps == kind.fail_at:
            raise RuntimeError("vLLM's")

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._model.load_weights(self.notes.giving(weights))

    def check(self, *, strict: bool) -> None:
        self._step()
        for path, parts in self._given.items():
            own: Any = self._layers[path].weight
            assert sum(tensor.numel() for tensor, _ in parts) == own.numel(), "a layer gets all of its elements"

    def close(self) -> None:
        self.finish()

    def put_back(self) -> None:
        """Its tensors have stayed where they are."""

    def finish(self) -> None:
        """What a layer did not get is filled with what happens to be there."""
        given, self._given = self._given, {}
        for path, parts in given.items():
            own: Any = self._layers[path].weight
            fresh = torch.full_like(own, -1.0)
            for tensor, part in parts:
                load_part(fresh, tensor, part)
            own.copy_(fresh.flip(0) if path.endswith("qk") else fresh)
        for path in self.reloaded[-1]:
            self._layers[path].weight.weight_loader = for_trace  # type: ignore[union-attr]


class Packed:
    """A loader of a model whose `qk` are packed, with versions of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reload = type("Reload", (PackingReload,), {"reloaded": []})
        monkeypatch.setattr("weightsync.load.vllm.LayerwiseReload", self.reload)
        monkeypatch.setattr("weightsync.load.vllm.doubts", lambda model: {})
        self.model = Model()
        for path in PATHS:
            self.model.get_submodule(path).weight.weight_loader = for_trace  # type: ignore[union-attr]
        config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Nobody"]), dtype=torch.float32)
        self.loader = VLLMWeightLoader(self.model, model_config=config)
        counted = itertools.count(1.0)
        shapes = {"q": (4, 4), "k": (2, 4), "norm": (4,)}
        self.whole = {
            f"{block}.{part}": torch.arange(24.0)[: torch.Size(shape).numel()].reshape(shape) + 100 * next(counted)
            for block in range(2)
            for part, shape in shapes.items()
        }
        self._number = 0

    def manifest(self) -> Manifest:
        self._number += 1
        specs = tuple(spec_of(name, tensor) for name, tensor in self.whole.items())
        return Manifest(version=Version(run_id="r", number=self._number), model_id="m", tensors=specs)

    def full(self) -> None:
        new = self.manifest()
        self.loader.begin(new)
        self.loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in self.whole.items())
        self.loader.verify()
        self.loader.cover([self.loader.coverage()])
        self.loader.commit(new.version)

    def prepared(self, changes: dict[str, tuple[int, float]]) -> Manifest:
        """A change of one element of each tensor, ready to be committed; `whole` is as before."""
        new = self.manifest()
        self.loader.begin_patch(new)
        for name, (where, value) in changes.items():
            patch = Patch(name=name, positions=torch.tensor([where]), values=torch.tensor([value]))
            self.loader.load_weights([patch])
        list(self.loader.prepare_patch())
        return new

    def patched(self, changes: dict[str, tuple[int, float]]) -> None:
        self.loader.commit(self.prepared(changes).version)
        self.whole = {name: tensor.clone() for name, tensor in self.whole.items()}
        for name, (where, value) in changes.items():
            self.whole[name].view(-1)[where] = value

    def serves(self) -> bool:
        blocks: Any = self.model.blocks
        return all(
            torch.equal(block.attn.qk.weight.flip(0), torch.cat([self.whole[f"{index}.q"], self.whole[f"{index}.k"]]))
            and torch.equal(block.norm.weight, self.whole[f"{index}.norm"])
            for index, block in enumerate(blocks)
        )


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Packed:
    made = Packed(monkeypatch)
    made.full()
    assert made.serves()
    assert (made.loader.proved, made.loader.takes_patch) == (False, True)
    assert sorted(made.loader.marked) == ["0.k", "0.q", "1.k", "1.q"]
    return made


def test_a_patch_reloads_the_layers_that_changed_and_writes_what_is_live(packed: Packed) -> None:
    """Seen to fail: with the changed tensors alone given to the layer, and without the change in the base."""
    packed.patched({"1.k": (3, 7.0), "0.norm": (2, 8.0)})
    assert packed.serves()
    assert packed.reload.reloaded == [PATHS, [], ["blocks.1.attn.qk"]]
    packed.patched({"0.norm": (1, 9.0)})
    assert packed.serves()
    assert len(packed.reload.reloaded) == 3, "nothing is reloaded for what is written where it is live"
    packed.patched({"0.q": (0, 10.0), "1.q": (15, 11.0)})
    assert packed.serves()
    assert packed.reload.reloaded[3:] == [["blocks.0.attn.qk", "blocks.1.attn.qk"]]


@pytest.mark.parametrize("layout", ["the same", "another"])
def test_a_bracket_that_ends_before_a_byte_came_leaves_no_trace(packed: Packed, layout: str) -> None:
    """As that of `weightsync check`. Seen red: what was loaded before it could not be patched any more, and its layers
    were not told."""
    told, whole = packed.loader.layers(), packed.whole
    packed.whole = whole if layout == "the same" else {**whole, "1.norm": torch.zeros(8)}
    packed.loader.begin(packed.manifest())
    packed.loader.abort("nothing but a check")
    packed.whole = whole
    assert (packed.loader.takes_patch, packed.loader.layers()) == (True, told)
    packed.patched({"1.k": (3, 7.0), "1.norm": (2, 8.0)})
    assert packed.serves()


def test_a_bracket_that_can_not_begin_leaves_no_trace(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: where there was no memory for another layout the next version went out in full."""
    whole = packed.whole

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("as told")

    packed.whole = {**whole, "1.norm": torch.zeros(8)}
    with monkeypatch.context() as patch:
        patch.setattr("weightsync.load.vllm.staging_for", fails)
        with pytest.raises(MemoryError):
            packed.loader.begin(packed.manifest())
    packed.whole = whole
    packed.patched({"1.k": (3, 7.0), "1.norm": (2, 8.0)})
    assert packed.serves()


def test_it_is_taken_back_and_the_next_one_builds_on_what_was(packed: Packed) -> None:
    before = packed.whole
    packed.patched({"1.k": (3, 7.0), "0.norm": (2, 8.0)})
    packed.loader.rollback()
    packed.whole = before
    assert packed.serves()
    packed.patched({"1.q": (3, 7.0)})
    assert packed.serves()
    packed.loader.settle()
    with pytest.raises(StateError, match="no patch"):
        packed.loader.rollback()
    packed.patched({"1.q": (4, 7.0)})
    assert packed.serves()


def test_a_failure_at_every_step_of_a_reload_leaves_exactly_what_was(packed: Packed) -> None:
    """And where taking it back fails too, nothing is served until a full load."""
    for point in range(1, 6):
        packed.reload.num_steps, packed.reload.fail_at = 0, point
        new = packed.prepared({"1.k": (3, 70.0 + point), "0.q": (0, 80.0), "0.norm": (2, 90.0)})
        with pytest.raises(LoadError, match="writing a patch failed"):
            packed.loader.commit(new.version)
        assert packed.loader.healthy
        assert packed.serves(), point
        packed.loader.abort("as told")
        assert packed.serves(), point
    packed.reload.num_steps, packed.reload.fail_at = 0, None
    packed.patched({"1.k": (3, 7.0), "0.q": (0, 8.0)})
    assert packed.serves()
    assert packed.reload.num_steps == 5, "so many steps there are"


def test_what_can_not_be_taken_back_is_not_served(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed.reload, "check", lambda self, strict: [][1])
    new = packed.prepared({"1.k": (3, 7.0)})
    with pytest.raises(LoadError, match="could not be undone"):
        packed.loader.commit(new.version)
    assert not packed.loader.healthy
    packed.loader.abort("as told")
    assert not packed.loader.takes_patch
    with pytest.raises(StateError, match="half-loaded"):
        packed.prepared({"1.k": (3, 7.0)})
    monkeypatch.undo()
    again = Packed(monkeypatch)
    again.full()
    assert again.serves()


def test_a_loader_that_computes_what_it_loads_has_no_layers_to_load_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tensors a layer was made of is not known then. Seen to fail: by the name that was given last."""
    packed = Packed(monkeypatch)
    load = packed.reload.load

    def computed(self: PackingReload, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = self.notes.giving
        monkeypatch.setattr(self.notes, "giving", lambda pairs: ((name, each + 0) for name, each in given(pairs)))
        load(self, weights)

    monkeypatch.setattr(packed.reload, "load", computed)
    packed.full()
    assert packed.serves()
    assert not packed.loader.takes_patch
    with pytest.raises(UnsupportedError, match="is loaded with what is computed"):
        packed.prepared({"1.k": (3, 7.0)})


def test_a_loader_that_vllm_keeps_is_watched_once() -> None:
    """Its metadata of a parameter keeps what was put on it. Seen to fail: each full load put a loader around the one
    before, and what was loaded between two of them was noted as odd."""
    model, calls = Model(), []  # type: ignore[var-annotated]

    def online_process_loader(param: object, tensor: torch.Tensor) -> None:
        calls.append(tensor)

    own: Any = model.get_submodule("blocks.0.norm").weight
    own.weight_loader = online_process_loader
    told = []
    for number in range(3):
        notes = LayerNotes()
        notes.watch(model)
        for _, tensor in notes.giving([(f"v{number}", torch.ones(4))]):
            own.weight_loader(own, tensor)
        notes.done()
        own.weight_loader(own, torch.ones(4))
        told.append((notes.odd, notes.names_in(["blocks.0.norm"])))
    assert told == [(None, ["v0"]), (None, ["v1"]), (None, ["v2"])]
    assert len(calls) == 6
    assert own.weight_loader.__wrapped__ is online_process_loader


def test_where_vllm_has_no_such_loaders_all_is_loaded_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Packed(monkeypatch)
    monkeypatch.setattr(LayerNotes, "watch", lambda self, model: None)
    packed.full()
    with pytest.raises(UnsupportedError, match=r"0.q goes into none of its layers"):
        packed.prepared({"1.k": (3, 7.0)})


@pytest.mark.parametrize("odd", ["release", "torchao"])
def test_a_vllm_that_reloads_no_layers_alone_is_known_before_the_pause(
    monkeypatch: pytest.MonkeyPatch, odd: str
) -> None:
    """Where nothing could be taken back either. Seen to fail: without the look at it."""
    packed = Packed(monkeypatch)
    made = packed.reload.__init__

    def older(self: PackingReload, model: Model, *given: Any, only: Any = None) -> None:
        if only is not None:
            raise AttributeError("'SomeLayers' object has no attribute 'parameters'")
        made(self, model, *given)

    if odd == "release":
        monkeypatch.setattr(packed.reload, "__init__", older)
    else:
        packed.model._do_torchao_reload = True  # type: ignore[assignment]
    packed.full()
    assert packed.serves()
    assert not packed.loader.takes_patch
    with pytest.raises(UnsupportedError, match="can't reload some layers" if odd == "release" else "torchao"):
        packed.prepared({"1.k": (3, 7.0)})


def test_attention_goes_with_the_layers_beside_it() -> None:
    """It may have computed something from them."""
    some = SomeLayers(Model(), ["blocks.1.attn.qk"])
    assert [path for path, _ in some.named_modules()] == ["blocks.1.attn.qk", "blocks.1.attn.run"]
    assert [name for name, _ in some.named_parameters()] == ["blocks.1.attn.qk.weight"]
    assert len(list(some.modules())) == 2


def test_vllms_reload_opens_some_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And repacks an output layer that is tied to one of them, no other."""
    opened: list[list[str]] = []

    def note(some: Any, *_: Any) -> None:
        opened.append([path for path, _ in some.named_modules()])

    layerwise = SimpleNamespace(initialize_layerwise_reload=note, finalize_layerwise_reload=note)
    monkeypatch.setattr("weightsync.load.vllm_reload._layerwise", lambda: layerwise)
    monkeypatch.setattr("weightsync.load.vllm_reload._is_cpu", lambda: True)
    model = Model()
    model.head, repacked = nn.Module(), []  # type: ignore[var-annotated]
    model.head.weight = model.get_submodule("blocks.0.norm").weight
    model.head.quant_method = SimpleNamespace(process_weights_after_loading=repacked.append)  # type: ignore[assignment]
    for path, times in (("blocks.1.norm", 0), ("blocks.0.norm", 1)):
        LayerwiseReload(model, SimpleNamespace(quantization=None), None, only=[path]).finish()
        assert repacked == [model.head] * times
    assert opened == [["blocks.1.attn.run", "blocks.1.norm"]] * 2 + [["blocks.0.attn.run", "blocks.0.norm"]] * 2
