"""SGLang's custom weight loader and the loader with a bracket. SGLang itself does not run here: the model is a plain
module whose `load_weights` fuses, pads, and passes over names as SGLang's models do."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.host.fakes import Bench, begin, chunk
from tests.unit.host.fakes import manifest as bench_manifest
from tests.unit.host.fakes import model as bench_model
from tests.unit.host.fakes import weights as bench_weights
from weightsync.errors import LoadError, ManifestMismatchError, StateError, UnsupportedError, WeightSyncError
from weightsync.load.sglang import FUSED, SGLangWeightLoader, load_weights
from weightsync.testing.contracts import bytes_of, manifest_of
from weightsync.types import Full, Patch, StageRequest

BF16 = torch.bfloat16


class Attention(nn.Module):
    """Fused: 4 rows of q, 2 of k, 2 of v."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(6, 8, dtype=BF16)
        self.o_proj = nn.Linear(4, 6, bias=False, dtype=BF16)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(6, 10, bias=False, dtype=BF16)


class Model(nn.Module):
    """A padded vocabulary, tied weights, fused modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 6, dtype=BF16)
        self.embed.weight.weight_loader = _padded  # type: ignore[attr-defined]
        self.attn = Attention()
        self.mlp = Mlp()
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 16, bias=False, dtype=BF16)
        self.head.weight = self.embed.weight
        self.fails_at: str | None = None
        self.says: Any = "what was loaded"

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        own = dict(self.named_parameters(remove_duplicate=False))
        loaded = set()
        starts = {"q_proj": 0, "k_proj": 4, "v_proj": 6, "gate_proj": 0, "up_proj": 5}
        for name, tensor in weights:
            if name == self.fails_at:
                raise RuntimeError("injected")
            path = name.split(".")
            fused = next((whole for whole, parts in FUSED.items() if len(path) > 1 and path[-2] in parts), None)
            target = name if fused is None else ".".join((*path[:-2], fused, path[-1]))
            if target not in own:
                continue  # silently, as SGLang's do
            if fused is not None:
                own[target].data[starts[path[-2]] : starts[path[-2]] + len(tensor)] = tensor
            else:
                getattr(own[target], "weight_loader", _copied)(own[target], tensor)
            loaded.add(target)
        return loaded if self.says == "what was loaded" else self.says


def _padded(own: torch.Tensor, tensor: torch.Tensor) -> None:
    own.data[: len(tensor)] = tensor
    own.data[len(tensor) :] = 0


def _copied(own: torch.Tensor, tensor: torch.Tensor) -> None:
    own.data.copy_(tensor)


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "embed.weight": torch.rand(11, 6).to(BF16),
        "attn.q_proj.weight": torch.rand(4, 6).to(BF16),
        "attn.k_proj.weight": torch.rand(2, 6).to(BF16),
        "attn.v_proj.weight": torch.rand(2, 6).to(BF16),
        "attn.q_proj.bias": torch.rand(4).to(BF16),
        "attn.k_proj.bias": torch.rand(2).to(BF16),
        "attn.v_proj.bias": torch.rand(2).to(BF16),
        "attn.o_proj.weight": torch.rand(6, 4).to(BF16),
        "mlp.gate_proj.weight": torch.rand(5, 6).to(BF16),
        "mlp.up_proj.weight": torch.rand(5, 6).to(BF16),
        "norm.weight": torch.rand(6),
        "norm.bias": torch.rand(6),
    }


def content(model: nn.Module) -> dict[str, bytes]:
    return {name: bytes_of(tensor) for name, tensor in model.named_parameters()}


def test_sglang_finds_the_function_under_the_name_that_the_docs_give() -> None:
    path, _, name = "weightsync.load.sglang.load_weights".rpartition(".")
    assert getattr(importlib.import_module(path), name) is load_weights


def test_the_function_loads_what_it_is_given_in_parts() -> None:
    model, new = Model(), weights(1)
    items = list(new.items())
    load_weights(model, items[:5])
    load_weights(model, iter(items[5:]))
    assert bytes_of(model.attn.qkv_proj.weight[4:6]) == bytes_of(new["attn.k_proj.weight"])
    assert bytes_of(model.mlp.gate_up_proj.weight[5:]) == bytes_of(new["mlp.up_proj.weight"])
    assert bytes_of(model.embed.weight[:11]) == bytes_of(new["embed.weight"])


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("attn.rotary.inv_freq", torch.zeros(3)),  # SGLang's loader would pass over it
        ("attn.k_proj.scale", torch.zeros(3)),
        ("norm.weight", torch.zeros(6, dtype=BF16)),  # and convert this
        ("norm.weight", torch.zeros(7)),
        ("attn.o_proj.weight", torch.zeros(4, 6, dtype=BF16)),
        ("attn.q_proj.weight", torch.zeros(4, 7, dtype=BF16)),
        ("attn.q_proj.weight", torch.zeros(24, dtype=BF16)),
        ("embed.weight", torch.zeros(66, dtype=BF16)),
    ],
)
def test_the_function_refuses_what_does_not_fit_and_changes_nothing(name: str, tensor: torch.Tensor) -> None:
    model = Model()
    before = content(model)
    with pytest.raises(ManifestMismatchError) as caught:
        load_weights(model, [("norm.bias", torch.ones(6)), (name, tensor)])
    assert caught.value.parameter == name
    assert content(model) == before


def test_the_function_refuses_nothing_and_a_name_twice() -> None:
    for pairs in ([], [("norm.bias", torch.ones(6)), ("norm.bias", torch.zeros(6))]):
        with pytest.raises(ManifestMismatchError):
            load_weights(Model(), pairs)


def test_a_model_that_says_it_loaded_less_has_failed() -> None:
    model = Model()
    model.says = {"norm.weight"}
    with pytest.raises(LoadError, match="passed over 1") as caught:
        load_weights(model, [("norm.bias", torch.ones(6))])
    assert caught.value.parameter == "norm.bias"
    model.says = None  # releases that say nothing
    load_weights(model, [("norm.bias", torch.ones(6))])


def test_models_that_can_not_be_loaded_are_refused() -> None:
    quantised = Model()
    quantised.quant_config = object()  # type: ignore[assignment]
    for model in (nn.Linear(2, 2), quantised):
        with pytest.raises(UnsupportedError):
            load_weights(model, [("weight", torch.zeros(2, 2))])
        with pytest.raises(UnsupportedError):
            SGLangWeightLoader(model).begin(manifest_of({"weight": torch.zeros(2, 2)}))


def sync(loader: SGLangWeightLoader, new: dict[str, torch.Tensor], number: int) -> None:
    loader.begin(manifest_of(new, number))
    loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in new.items())
    loader.verify()
    loader.commit(manifest_of(new, number).version)


def test_a_commit_that_fails_half_way_is_not_healthy_until_the_next() -> None:
    model = Model()
    loader = SGLangWeightLoader(model)
    sync(loader, weights(1), 1)
    model.fails_at = "mlp.up_proj.weight"
    with pytest.raises(LoadError, match="injected") as caught:
        sync(loader, weights(2), 2)
    assert "half-loaded" in (caught.value.state_left or "")
    loader.abort("it failed")
    assert not loader.healthy
    model.fails_at = None
    sync(loader, weights(3), 3)
    assert loader.healthy
    assert {held.spec.name: bytes_of(held.tensor) for held in loader.live_tensors()} == {
        name: bytes_of(tensor) for name, tensor in weights(3).items()
    }


def test_a_loader_that_puts_a_tensor_elsewhere_is_found_out() -> None:
    model = Model()
    load = model.load_weights

    def swapped(pairs: Iterable[tuple[str, torch.Tensor]]) -> Any:
        named = dict(pairs)
        named["attn.k_proj.weight"], named["attn.v_proj.weight"] = (
            named["attn.v_proj.weight"], named["attn.k_proj.weight"],
        )  # fmt: skip
        return load(named.items())

    model.load_weights = swapped  # type: ignore[method-assign,assignment]
    loader = SGLangWeightLoader(model)
    with pytest.raises(LoadError, match="not those that were loaded") as caught:
        sync(loader, weights(1), 1)
    assert caught.value.parameter == "attn.k_proj.weight"
    assert not loader.healthy


class Assigning(nn.Module):
    """Takes what it is given as it is, and copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Linear(3, 2)
        self.copied = nn.Linear(3, 2)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            own = self.get_parameter(name)
            if name.startswith("kept"):
                own.data = tensor
            else:
                own.data.copy_(tensor)


def test_what_the_model_took_for_its_own_is_not_written_again() -> None:
    """What was staged and aborted is not seen live. Seen red with the host memory kept."""
    model = Assigning()
    loader = SGLangWeightLoader(model)
    first, second = ({name: torch.full_like(p, value) for name, p in model.named_parameters()} for value in (1.0, 2.0))
    sync(loader, first, 1)
    served = content(model)
    own = dict(loader._staging)
    assert own.keys() == {"copied.weight", "copied.bias"}, "what was copied is used again"
    loader.begin(manifest_of(second, 2))
    loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in second.items())
    assert all(loader._staging[name] is tensor for name, tensor in own.items())
    loader.abort("enough")
    assert content(model) == served
    sync(loader, second, 3)
    assert content(model) == {name: bytes_of(tensor) for name, tensor in second.items()}


@pytest.mark.parametrize("lacks", ["attn.k_proj.weight", "norm.bias", "embed.weight", "mlp.gate_proj.weight"])
def test_a_manifest_without_a_part_is_refused_by_its_name(lacks: str) -> None:
    new = {name: tensor for name, tensor in weights(1).items() if name != lacks}
    with pytest.raises(ManifestMismatchError) as caught:
        SGLangWeightLoader(Model()).begin(manifest_of(new))
    assert caught.value.parameter == lacks


def test_tied_weights_come_under_one_of_their_names() -> None:
    new = weights(1)
    new["head.weight"] = new.pop("embed.weight")
    sync(SGLangWeightLoader(Model()), new, 1)
    with pytest.raises(ManifestMismatchError, match="are one"):
        SGLangWeightLoader(Model()).begin(manifest_of({**new, "embed.weight": new["head.weight"]}))


def test_parts_that_do_not_fill_the_whole_are_refused_but_for_a_shard() -> None:
    new = {**weights(1), "attn.q_proj.weight": torch.rand(8, 6).to(BF16)}
    with pytest.raises(ManifestMismatchError, match="8 rows together"):
        SGLangWeightLoader(Model()).begin(manifest_of(new))
    sharded = SGLangWeightLoader(Model(), tp_size=2)
    sharded.begin(manifest_of(new))
    sharded.abort("enough")
    with pytest.raises(WeightSyncError, match="shard"):
        list(sharded.live_tensors())


def patched(loader: SGLangWeightLoader, new: dict[str, torch.Tensor], name: str, value: float, number: int) -> None:
    """Changes the first and the last element of one tensor, in `new` too."""
    flat = new[name].view(-1)
    where = torch.tensor([0, len(flat) - 1])
    loader.begin_patch(manifest_of(new, number))
    loader.load_weights([Patch(name=name, positions=where, values=torch.full((2,), value, dtype=flat.dtype))])
    assert [change.old.tolist() for change in loader.prepare_patch()] == [flat[where].tolist()]
    loader.commit(manifest_of(new, number).version)
    flat[where] = value


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """These layers are none of SGLang's, and compute with nothing but their parameters."""
    monkeypatch.setattr("weightsync.load.sglang.doubts", lambda model, home: {})


@pytest.mark.usefixtures("trusted")
def test_a_patch_enters_fused_tied_and_padded_parameters_and_is_taken_back() -> None:
    model, fresh, new = Model(), Model(), weights(1)
    loader = SGLangWeightLoader(model)
    sync(loader, new, 1)
    assert (loader.proved, loader.marked) == (True, {})
    for number, name in enumerate(new, 2):
        patched(loader, new, name, 7.0 + number, number)
        fresh.load_weights(new.items())
        assert content(model) == content(fresh), name
    before = content(model)
    patched(loader, dict(new), "attn.k_proj.weight", 99.0, 50)
    assert content(model) != before
    loader.rollback()
    assert content(model) == before


@pytest.mark.usefixtures("trusted")
def test_a_bracket_that_ends_before_a_byte_came_leaves_no_trace() -> None:
    """As that of a check. Seen red: the next patch had no base."""
    model, new = Model(), weights(1)
    loader = SGLangWeightLoader(model)
    sync(loader, new, 1)
    told = loader.layers()
    loader.begin(manifest_of(weights(2), 2))
    loader.abort("nothing but a check")
    assert (loader.proved, loader.layers()) == (True, told)
    patched(loader, new, "attn.k_proj.weight", 7.0, 3)


@pytest.mark.usefixtures("trusted")
def test_a_commit_reads_live_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is paused for that long. Seen red: twice."""
    loader, looked, equal = SGLangWeightLoader(Model()), [], torch.equal
    monkeypatch.setattr(torch, "equal", lambda one, other: bool(looked.append(one)) or equal(one, other))
    sync(loader, weights(1), 1)
    assert (loader.proved, len(looked)) == (True, len(weights(1)))


def test_a_layer_that_may_compute_with_something_else_takes_whole_versions() -> None:
    model = Model()
    model.attn.o_proj.quant_method = object()  # type: ignore[assignment]
    loader = SGLangWeightLoader(model)
    sync(loader, weights(1), 1)
    assert not loader.proved
    with pytest.raises(UnsupportedError, match="may keep it in a form of its own"):
        loader.begin_patch(manifest_of(weights(1), 2))
    assert {each.spec.name for each in loader.live_tensors()} == weights(1).keys()  # proved, all the same


def test_a_worker_of_several_takes_whole_versions() -> None:
    loader = SGLangWeightLoader(Model(), tp_size=2)
    with pytest.raises(StateError, match="load it in full"):
        loader.begin_patch(manifest_of(weights(1), 2))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_worker_of_several_proves_nothing(tp_size: int) -> None:
    """Its staging is not what will be live, and nobody reads that again."""

    class Plain(nn.Sequential):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                self.get_parameter(name).data.copy_(tensor)

    bench = Bench(loader=SGLangWeightLoader(Plain(*bench_model()), tp_size=tp_size))
    for number in (1, 2):
        bench.receiver.tensors = bench_weights(number)
        bench.worker.begin(begin(number))
        for seq in (0, 1):
            bench.worker.update(chunk(seq))
        reply = bench.worker.stage(StageRequest(session="s", manifest=bench_manifest(number, seed=number)))
        bench.worker.commit("s")
        proved = True if tp_size == 1 else None
        assert (reply.digests_equal, bench.worker.describe().digests_equal) == (proved, proved)
        assert bench.worker.verify().digests_equal is proved
        if tp_size > 1:
            assert "shard" in str(reply.unprovable)


@pytest.mark.usefixtures("trusted")
def test_a_model_that_keeps_what_it_was_given_is_not_patched() -> None:
    """What it kept is the staging: there is no base beside what is live."""
    model = Assigning()
    loader = SGLangWeightLoader(model)
    new = {name: tensor.clone() for name, tensor in dict(model.named_parameters()).items()}
    sync(loader, new, 1)
    with pytest.raises((StateError, UnsupportedError)):
        loader.begin_patch(manifest_of(new, 2))
