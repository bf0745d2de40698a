"""vLLM's own layerwise reload, with failures anywhere in it: what is live is whole, or nobody calls it healthy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="needs vLLM: pip install weightsync[engines-cpu]")

from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import layerwise, record_metadata_for_reloading

from tests.unit.load.test_vllm_layers import Packed
from weightsync.errors import LoadError, ManifestMismatchError, WeightSyncError
from weightsync.load.vllm import VLLMWeightLoader
from weightsync.load.vllm_reload import LayerwiseReload

ROWS = {"q": slice(0, 4), "k": slice(4, 6)}


class Packs(QuantizeMethodBase):  # type: ignore[misc]
    """Turns a layer's rows around, in place of packing it."""

    def create_weights(self, *_: Any, **__: Any) -> None: ...

    def apply(self, *_: Any, **__: Any) -> Any: ...

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight.data.copy_(layer.weight.data.flip(0).clone())  # type: ignore[union-attr,operator]


def into_rows(param: nn.Parameter, loaded: torch.Tensor, part: str | None = None) -> None:
    """A weight_loader of stacked parts; vLLM looks for the first one's name."""
    (param.data if part is None else param.data[ROWS[part]]).copy_(loaded)


def layer(*shape: int, packs: bool) -> nn.Module:
    made = nn.Module()
    made.weight = nn.Parameter(torch.zeros(shape), requires_grad=False)
    made.weight.weight_loader = into_rows  # type: ignore[attr-defined]
    if packs:
        made.quant_method = Packs()  # type: ignore[assignment]
    return made


class Model(nn.Module):
    """Two blocks: q and k stacked in a layer that packs, and a norm. `shared`: block 0's k is block 1's too."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = nn.Module()
            block.qk, block.norm = layer(6, 4, packs=True), layer(4, packs=False)
            self.blocks.append(block)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        done = set()
        for name, tensor in weights:
            index, part = name.split(".")
            for to in ("0", "1") if self.shared and name == "0.k" else (index,):
                path = f"blocks.{to}.{'norm' if part == 'norm' else 'qk'}.weight"
                parameter: Any = self.get_parameter(path)
                parameter.weight_loader(parameter, tensor, *(() if part == "norm" else (part,)))
                done.add(path)
        return done


class Real(Packed):
    """The same operations as `Packed`'s, on vLLM's own reload."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, shared: bool = False) -> None:
        monkeypatch.setattr("weightsync.load.vllm.doubts", lambda model: {})
        self.model: Any = Model(shared=shared)
        record_metadata_for_reloading(self.model)
        config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["Nobody"]), dtype=torch.float32, quantization=None
        )
        self.loader = VLLMWeightLoader(self.model, model_config=config)
        counted, shapes = itertools.count(1.0), {"q": (4, 4), "k": (2, 4), "norm": (4,)}
        self.whole = {
            f"{block}.{part}": torch.arange(24.0)[: torch.Size(shape).numel()].reshape(shape) + 100 * next(counted)
            for block in range(2)
            for part, shape in shapes.items()
            if not (shared and (block, part) == (1, "k"))
        }
        self._number = 0
        self.places = {name: p.data_ptr() for name, p in self.model.named_parameters()}

    def wrong(self) -> list[str]:
        """What is not as `whole` has it, or lies elsewhere than at first."""
        found = [name for name, p in self.model.named_parameters() if p.is_meta or p.data_ptr() != self.places[name]]
        for index, block in enumerate(self.model.blocks):
            k = self.whole.get(f"{index}.k", self.whole["0.k"])
            wanted = torch.cat([self.whole[f"{index}.q"], k])
            if block.qk.weight.is_meta or not torch.equal(block.qk.weight.flip(0), wanted):
                found.append(f"{index}.qk")
            if block.norm.weight.is_meta or not torch.equal(block.norm.weight, self.whole[f"{index}.norm"]):
                found.append(f"{index}.norm")
        return found


class Fails:
    """Raises at some of the steps of a reload, which are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: set[int] = set()
        self._count = 0
        inside = (
            "_place_kernel_tensors",
            "_copy_and_restore_kernel_tensors",
            "materialize_layer",
            "restore_layer_on_meta",
        )
        for owner, name in (
            *((layerwise, each) for each in inside),
            (LayerwiseReload, "check"), (LayerwiseReload, "finish"), (Packs, "process_weights_after_loading"),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def only(self, *at: int) -> None:
        """At these steps from here on, and at no other."""
        self.at, self._count = set(at), 0

    def _wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*args: Any, **given: Any) -> Any:
            self._step()
            result = function(*args, **given)
            self._step()
            return result

        return stepped

    def _step(self) -> None:
        self._count += 1
        if self._count in self.at:
            raise torch.OutOfMemoryError(f"planted at step {self._count}")


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Fails:
    return Fails(monkeypatch)


@pytest.mark.parametrize("step", range(1, 30))
def test_a_failure_at_any_step_of_a_patch_is_undone_to_the_bit_and_to_the_place(
    monkeypatch: pytest.MonkeyPatch, fails: Fails, step: int
) -> None:
    """Seen to fail: a parameter was left without memory and called healthy, and no full load brought it back."""
    real = Real(monkeypatch)
    real.full()
    fails.only(step)
    try:
        real.patched({"0.q": (0, 50.0), "1.norm": (1, 7.0)})
    except LoadError:
        real.loader.abort("as told")
    fails.only()
    if real.loader.healthy:
        assert real.wrong() == []
    elif real.loader._broken is not None:  # it says that it has to be restarted
        return
    real.whole = {name: tensor + 1.0 for name, tensor in real.whole.items()}
    real.full()
    assert (real.loader.healthy, real.wrong()) == (True, [])
    real.patched({"0.q": (3, 5.0)})
    assert real.wrong() == []


@pytest.mark.parametrize("seed", range(12))
def test_whatever_fails_in_whatever_order_what_is_called_healthy_is_whole(
    monkeypatch: pytest.MonkeyPatch, fails: Fails, seed: int
) -> None:
    rng = random.Random(seed)
    real = Real(monkeypatch)
    real.full()
    for _ in range(60):
        kind = rng.choice(["ok", "ok", "fail", "fail", "twice", "abort", "rollback", "full", "full fails"])
        if not real.loader.takes_patch:
            kind = rng.choice(["full", "full fails"])
        before = dict(real.whole)
        changes = {n: (rng.randrange(t.numel()), rng.random()) for n, t in real.whole.items() if rng.random() < 0.35}
        at = {"fail": (rng.randrange(1, 14),), "twice": (rng.randrange(1, 10), rng.randrange(10, 22))}
        fails.only(*(at.get(kind) or ((rng.randrange(1, 30),) if kind == "full fails" else ())))
        try:
            if kind.startswith("full"):
                real.whole = {name: tensor + rng.random() for name, tensor in real.whole.items()}
                real.full()
            elif kind == "abort":
                real.prepared(changes)
                real.loader.abort("as told")
            else:
                real.patched(changes)
                if kind == "rollback":
                    real.loader.rollback()
                    real.whole = before
        except WeightSyncError:
            fails.only()
            real.loader.abort("as told")
            if not kind.startswith("full"):
                real.whole = before
            if real.loader._broken is not None:
                assert not real.loader.takes_patch
                return
        fails.only()
        assert not real.loader.healthy or real.wrong() == [], kind


def test_a_tensor_of_two_layers_is_given_to_both_where_one_is_reloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: the second layer, which was not open, got it unpacked."""
    real = Real(monkeypatch, shared=True)
    real.full()
    real.patched({"0.q": (0, 50.0)})
    assert real.wrong() == []


def test_a_patch_of_other_tensors_than_are_live_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: after it what is live was audited by the names of what was refused, and called wrong."""
    real = Real(monkeypatch)
    real.full()
    left = real.whole.pop("1.norm")
    with pytest.raises(ManifestMismatchError, match="only one of this version and the one that is live has it"):
        real.prepared({})
    real.whole["1.norm"] = left.double()
    with pytest.raises(ManifestMismatchError, match="float64"):
        real.prepared({})
    real.whole["1.norm"] = left
    assert len(list(real.loader.audited())) == len(real.whole)
    real.patched({"1.norm": (0, 3.0)})
    assert real.wrong() == []
