"""What a loader of an adapter refuses before anything is changed. Its bracket is tested by the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.standins.lora import base_model, lora_config, peft_model, step
from weightsync.errors import ConfigError, LoadError, ManifestMismatchError, StateError, UnsupportedError
from weightsync.extract.peft import adapter_extractor
from weightsync.load.peft import PeftAdapterLoader, PeftBaseLoader
from weightsync.peft_model import adapter_tensors
from weightsync.testing.contracts import manifest_of as contract_manifest
from weightsync.testing.contracts.loader_patches import patches_of
from weightsync.types import Full, Manifest, Version


def manifest_of(model: Any) -> Manifest:
    extractor = adapter_extractor(model)
    version = Version(run_id="run", number=1)
    return Manifest(
        version=version, model_id="a", tensors=extractor.metadata(), artifact="lora", adapter=extractor.adapter
    )


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        ({"rank": 16}, "rank 16, here it has 8"),
        ({"use_rslora": True}, "scaling"),
        ({"target_modules": ["q_proj"]}, "does not send 24"),
        ({"modules_to_save": ["norm"]}, "no such tensor"),
    ],
)
def test_an_adapter_of_another_make_is_refused(trained: dict[str, Any], said: str) -> None:
    here = peft_model()
    before = {name: tensor.clone() for name, tensor in adapter_tensors(here, "default").items()}
    loader = PeftAdapterLoader(here)
    with pytest.raises(ManifestMismatchError, match=said):
        loader.begin(manifest_of(peft_model(**trained)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter_tensors(here, "default").items())
    loader.begin(manifest_of(peft_model()))  # nothing is left open


def test_an_adapter_that_was_replaced_is_not_written_past() -> None:
    here = peft_model()
    loader = PeftAdapterLoader(here)
    here.delete_adapter("default")
    here.add_adapter("default", lora_config())
    with pytest.raises(LoadError, match="another loader"):
        loader.begin(manifest_of(peft_model()))


def sync(loader: PeftAdapterLoader | PeftBaseLoader, tensors: dict[str, torch.Tensor], number: int) -> None:
    loader.begin(contract_manifest(tensors, number))
    loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in tensors.items())
    loader.verify()
    loader.commit(Version(run_id="contract", number=number))


@pytest.mark.parametrize("how", ["other buffers", "other parameters"])
def test_a_base_whose_tensors_were_replaced_is_not_written_past(how: str) -> None:
    """Seen red: its versions were proved in tensors that the model did not compute with any more."""
    import peft

    plain = base_model()
    plain.register_buffer("scale", torch.ones(3))
    here = peft.get_peft_model(plain, lora_config())
    base = PeftAdapterLoader(here).base_tensors()
    new = {name: torch.full_like(tensor, 7) for name, tensor in base.items()}
    loader = PeftBaseLoader(here)
    sync(loader, new, 1)
    if how == "other buffers":
        here.double().float()
    else:
        plain.load_state_dict({name: tensor.clone() for name, tensor in plain.state_dict().items()}, assign=True)
    for look in (lambda: sync(loader, new, 2), lambda: list(loader.live_tensors()), loader.live_whole):
        with pytest.raises(LoadError, match=r"the base of the model was replaced .* another loader"):
            look()
    sync(PeftBaseLoader(here), new, 3)
    assert all(torch.equal(tensor, new[name]) for name, tensor in PeftAdapterLoader(here).base_tensors().items())


def test_what_an_adapter_is_merged_into_in_place_is_refused() -> None:
    """Seen red: versions were proved, and the model computed without them."""
    here = peft_model()
    adapter, base = PeftAdapterLoader(here), PeftBaseLoader(here)
    tensors = dict(adapter.base_tensors())
    here.merge_adapter()
    with pytest.raises(UnsupportedError, match=r"merged in place.*unmerge it first"):
        adapter.begin(manifest_of(peft_model()))
    with pytest.raises(UnsupportedError, match="merged in place"):
        base.begin(contract_manifest(tensors, 1))
    here.unmerge_adapter()
    adapter.begin(manifest_of(peft_model()))
    base.begin(contract_manifest(tensors, 1))


@pytest.fixture(params=["adapter", "base"])
def loaded(request: pytest.FixtureRequest) -> tuple[Any, PeftAdapterLoader | PeftBaseLoader, dict[str, torch.Tensor]]:
    """A model, a loader of a part of it with version 1, and that version."""
    here = peft_model()
    loader = PeftAdapterLoader(here) if request.param == "adapter" else PeftBaseLoader(here)
    version = {name: tensor.detach().clone() for name, tensor in loader._tensors.items()}
    sync(loader, version, 1)
    return here, loader, version


def state(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_as(model: Any, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_adapter_that_is_merged_in_place_before_the_commit_stops_it(loaded: Any) -> None:
    """Seen red: the commit went through, and PEFT's unmerge took a product off the base that had never been added."""
    here, loader, version = loaded
    loader.begin(contract_manifest(version, 2))
    loader.load_weights(Full(name=name, tensor=tensor + 1) for name, tensor in version.items())
    loader.verify()
    here.merge_adapter()
    before = state(here)
    with pytest.raises(UnsupportedError, match=r"merged in place.*unmerge it first"):
        loader.commit(Version(run_id="contract", number=2))
    loader.abort("as the worker does")
    assert loader.healthy
    assert is_as(here, before)
    here.unmerge_adapter()
    sync(loader, {name: tensor + 1 for name, tensor in version.items()}, 3)


@pytest.mark.parametrize("when", ["begin", "prepare", "commit", "rollback"])
def test_no_patch_is_written_or_undone_while_an_adapter_is_merged_in_place(loaded: Any, when: str) -> None:
    """Seen red: as above; and at its begin the worker took it for a model that can never be patched."""
    here, loader, version = loaded
    patches, _ = patches_of(version, 2)

    def begin() -> None:
        loader.begin_patch(contract_manifest(version, 2))

    def load() -> None:
        loader.load_weights(patches)

    def prepare() -> None:
        loader.prepare_patch()

    def commit() -> None:
        loader.commit(Version(run_id="contract", number=2))

    steps = [begin, load, prepare, commit, loader.rollback]
    at = {"begin": 0, "prepare": 2, "commit": 3, "rollback": 4}[when]
    for step_of in steps[:at]:
        step_of()
    here.merge_adapter()
    before = state(here)
    kind = {"begin": StateError, "rollback": LoadError}.get(when, UnsupportedError)
    with pytest.raises(kind, match="merged in place"):
        steps[at]()
    loader.abort("as the worker does")
    assert loader.healthy == (when != "rollback")
    assert is_as(here, before)
    here.unmerge_adapter()
    sync(loader, version, 3)
    assert loader.healthy
    for step_of in steps:
        step_of()


def test_what_is_no_peft_model_has_no_such_loader() -> None:
    for kind in (PeftAdapterLoader, PeftBaseLoader):
        with pytest.raises(ConfigError, match="PEFT model"):
            kind(base_model())
    two = peft_model()
    two.add_adapter("second", lora_config(4, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="adapter="):
        PeftAdapterLoader(two)
    assert len(adapter_tensors(two, "second")) == 4
    assert PeftAdapterLoader(two, adapter="second").artifacts == {"lora"}


def test_the_base_is_the_one_without_adapters() -> None:
    here = peft_model("qwen2")
    found = PeftAdapterLoader(here).base_tensors()
    want = dict(base_model("qwen2").named_parameters())
    assert {name: (t.shape, t.dtype) for name, t in found.items()} == {n: (t.shape, t.dtype) for n, t in want.items()}
    assert all(torch.equal(tensor, want[name]) for name, tensor in found.items())
    step(here, 5)
    assert all(torch.equal(tensor, want[name]) for name, tensor in PeftAdapterLoader(here).base_tensors().items())


def test_a_base_weight_of_other_strides_is_written_and_seen_to_be() -> None:
    """It has no flat view."""
    here = peft_model()
    weight = next(module for name, module in here.named_modules() if name.endswith("q_proj.base_layer")).weight
    weight.data = weight.data.t().contiguous().t()
    loader = PeftBaseLoader(here, in_place=True)
    for number in (1, 2):
        base = PeftAdapterLoader(here).base_tensors()
        new = {name: torch.full(tensor.shape, number, dtype=tensor.dtype) for name, tensor in base.items()}
        before = [tensor._version for tensor in base.values()]
        loader.begin(contract_manifest(new, number))
        loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in new.items())
        loader.verify()
        loader.commit(Version(run_id="contract", number=number))
        assert all(torch.equal(tensor, new[name]) for name, tensor in base.items())
        assert all(tensor._version > count for tensor, count in zip(base.values(), before, strict=True))
