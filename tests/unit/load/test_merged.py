"""An adapter merged into a plain module equals PEFT's merge to the bit, and the base comes back to the bit.

Broken once: with the base taken from what is live, version 2 is merged into version 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weightsync
from tests.standins.lora import base_model, logits, peft_model, step
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import LoadError, ManifestMismatchError, StateError, UnsupportedError
from weightsync.extract.peft import adapter_extractor
from weightsync.load.merged import MergedAdapterLoader
from weightsync.load.module import ModuleWeightLoader
from weightsync.types import Full, Manifest, Version


def bracket(loader: MergedAdapterLoader, trained: Any, number: int = 1) -> Manifest:
    """A version, up to `verify`."""
    extractor = adapter_extractor(trained)
    manifest = Manifest(
        version=Version(run_id="run", number=number), model_id="a", tensors=extractor.metadata(), artifact="lora",
        adapter=extractor.adapter,
    )  # fmt: skip
    loader.begin(manifest)
    for chunk in extractor.extract_weights():
        loader.load_weights(Full(name=n, tensor=t.clone()) for n, t in zip(chunk.names, chunk.tensors, strict=True))
    loader.verify()
    return manifest


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "rank", "changes"),
    [
        ("llama", 8, {}),
        ("qwen2", 64, {"use_rslora": True, "rank_pattern": {".*up_proj": 5}, "alpha_pattern": {".*q_proj": 3}}),
        ("llama", 4, {"target_modules": ["q_proj", "embed_tokens"]}),
    ],
)
def test_versions_equal_pefts_merge_and_the_base_comes_back(
    kind: str, rank: int, changes: dict[str, Any], dtype: torch.dtype, adapter_dtype: torch.dtype
) -> None:
    here = base_model(kind, dtype=dtype)
    before, loader = state(here), MergedAdapterLoader(here)
    places = {name: tensor.data_ptr() for name, tensor in here.state_dict().items()}
    for number in (1, 2, 3):
        trained = peft_model(kind, rank, dtype=dtype, **changes)
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(adapter_dtype)
        step(trained, number)
        served = state(here)
        manifest = bracket(loader, trained, number)
        assert equal(state(here), served)  # until the commit
        loader.commit(manifest.version)
        assert equal(state(here), state(trained.merge_and_unload()))
        base = loader.base_tensors()
        assert all(torch.equal(tensor, before[name]) for name, tensor in base.items())
    loader.unmerge()
    assert equal(state(here), before)
    assert {name: tensor.data_ptr() for name, tensor in here.state_dict().items()} == places
    assert not loader.merged


def test_modules_that_a_later_adapter_leaves_out_are_the_bases_again() -> None:
    here = base_model()
    before, loader = state(here), MergedAdapterLoader(here)
    loader.commit(bracket(loader, peft_model()).version)
    second = peft_model(target_modules=["v_proj"])
    loader.commit(bracket(loader, second, 2).version)
    assert equal(state(here), state(second.merge_and_unload()))
    assert torch.equal(
        here.state_dict()["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"]
    )


def test_an_abort_changes_nothing() -> None:
    here = base_model()
    loader = MergedAdapterLoader(here)
    loader.commit(bracket(loader, peft_model()).version)
    served, first = state(here), logits(here)
    trained = peft_model()
    step(trained, 9)
    bracket(loader, trained, 2)
    with pytest.raises(StateError, match="unmerge after"):
        loader.unmerge()
    loader.abort("a reason")
    assert equal(state(here), served)
    assert torch.equal(logits(here), first)
    loader.commit(bracket(loader, trained, 3).version)
    assert not torch.equal(logits(here), first)


def test_a_weight_that_somebody_else_has_replaced_is_no_base() -> None:
    here = base_model()
    loader = MergedAdapterLoader(here)
    loader.commit(bracket(loader, peft_model()).version)
    weight = here.model.layers[0].self_attn.q_proj.weight  # type: ignore[union-attr, index]
    weight.data = weight.data.clone()
    for what in (loader.unmerge, lambda: bracket(loader, peft_model(), 2)):
        with pytest.raises(LoadError, match="replaced") as caught:
            what()
        assert caught.value.parameter == "model.layers.0.self_attn.q_proj"


def load_base(model: torch.nn.Module, how: str, *, num_versions: int = 2) -> None:
    """The model gets another base, so often."""
    trained = base_model(seed=8)
    if how == "by hand":
        model.load_state_dict(trained.state_dict())
        return
    engine = EmbeddedEngine.of(ModuleWeightLoader(model, in_place=how == "in place"))
    with weightsync.push(trained, engine, model_id="base", dtype="keep") as push:
        for number in range(num_versions):
            with torch.no_grad():
                next(trained.parameters()).view(-1)[0] += number
            push.step()


@pytest.mark.parametrize("how", ["swapped", "in place", "by hand"])
def test_a_base_that_was_loaded_over_a_merged_adapter_is_seen(how: str) -> None:
    """Where it is swapped twice it lies where the merged weight lay. Seen red: the next version was merged into the
    base before, beside the rest of the new one, and served as the new pair."""
    here = base_model()
    loader = MergedAdapterLoader(here)
    first = bracket(loader, peft_model())
    loader.commit(first.version)
    load_base(here, how)
    after = state(here)
    for what in (loader.unmerge, lambda: bracket(loader, peft_model(), 2)):
        with pytest.raises(LoadError, match=r"written or replaced.*make another loader"):
            what()
    assert equal(state(here), after)
    again = MergedAdapterLoader(here)
    again.commit(bracket(again, peft_model(), 2).version)
    again.unmerge()
    assert equal(state(here), after)


@pytest.mark.parametrize("how", ["swapped", "in place", "by hand"])
def test_a_base_that_comes_between_merge_and_commit_is_seen(how: str) -> None:
    """Also one that is swapped twice. Seen red: the sum with the base before was served beside the rest of the new."""
    here, trained = base_model(), peft_model()
    loader = MergedAdapterLoader(here)
    manifest = bracket(loader, trained)
    load_base(here, how)
    after = state(here)
    with pytest.raises(LoadError, match="since the adapter was merged with"):
        loader.commit(manifest.version)
    loader.abort("as the worker does")
    assert loader.healthy
    assert equal(state(here), after)
    loader.commit(bracket(loader, trained, 2).version)
    loader.unmerge()
    assert equal(state(here), after)


@pytest.mark.parametrize(
    ("trained", "kind", "error", "said"),
    [
        ({"use_dora": True}, "llama", UnsupportedError, "use_dora"),
        ({"modules_to_save": ["norm"]}, "llama", UnsupportedError, "modules_to_save"),
        ({"bias": "lora_only"}, "llama", UnsupportedError, "bias"),
        ({"target_modules": ["up"]}, "linear", ManifestMismatchError, "no such tensor"),
    ],
)
def test_what_can_not_be_merged_is_refused(
    trained: dict[str, Any], kind: str, error: type[Exception], said: str
) -> None:
    here = base_model()
    before, loader = state(here), MergedAdapterLoader(here)
    if kind == "linear":
        import peft

        other = torch.nn.Sequential()
        other.add_module("up", torch.nn.Linear(4, 4))
        model = peft.get_peft_model(other, peft.LoraConfig(r=2, **trained))
    else:
        model = peft_model(kind, **trained)
    with pytest.raises(error, match=said):
        bracket(loader, model)
    assert equal(state(here), before)
    loader.commit(bracket(loader, peft_model()).version)  # nothing is left open


@pytest.mark.parametrize("how", ["tied", "a view of another", "a module at two places"])
def test_a_weight_that_is_also_elsewhere_is_not_merged_into(how: str) -> None:
    """Seen red: the output layer got the embedding's adapter; a view of a fused weight got one that nobody reads."""
    if how == "tied":
        here, trained = base_model("qwen2"), peft_model("qwen2", target_modules=["q_proj", "embed_tokens"])
    elif how == "a module at two places":
        here, trained = base_model(), peft_model(target_modules=r".*layers\.0\.self_attn\.q_proj")
        layers: Any = here.model.layers  # type: ignore[union-attr]
        layers[1].self_attn.q_proj = layers[0].self_attn.q_proj
    else:
        here, trained = base_model(), peft_model()
        attention: Any = here.model.layers[1].self_attn  # type: ignore[union-attr, index]
        rows = [attention.q_proj.weight.detach(), attention.k_proj.weight.detach()]
        attention.fused = torch.nn.Parameter(torch.cat(rows))
        attention.q_proj.weight = torch.nn.Parameter(attention.fused.detach()[: len(rows[0])])
    before, loader = state(here), MergedAdapterLoader(here)
    with pytest.raises(UnsupportedError, match=r"(another place|share memory).*load the adapter into a PEFT"):
        bracket(loader, trained)
    assert equal(state(here), before)


def test_two_modules_of_an_adapter_do_not_come_to_one_here() -> None:
    """By a name map that is not one to one. Seen red: the last one was merged, over the others."""
    here = base_model()
    before = state(here)
    loader = MergedAdapterLoader(here, name_map=lambda name: name.replace("layers.1", "layers.0"))
    with pytest.raises(UnsupportedError, match="merged twice"):
        bracket(loader, peft_model())
    assert equal(state(here), before)


def test_another_shape_or_half_an_adapter_is_refused() -> None:
    loader = MergedAdapterLoader(base_model())
    extractor = adapter_extractor(peft_model(rank=8))
    table = extractor.metadata()
    version = Version(run_id="run", number=1)
    with pytest.raises(ManifestMismatchError, match="other half"):
        loader.begin(
            Manifest(version=version, model_id="a", tensors=table[:-1], artifact="lora", adapter=extractor.adapter)
        )
    other = adapter_extractor(peft_model(rank=4)).adapter
    with pytest.raises(ManifestMismatchError, match="of rank 4"):
        loader.begin(Manifest(version=version, model_id="a", tensors=table, artifact="lora", adapter=other))
