"""ModuleWeightLoader: what the contract does not say: ties, buffers, strides, storages, names left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.test_loader_contract import Model, weights
from weightsync.errors import LoadError, ManifestMismatchError, StateError, UnsupportedError
from weightsync.load import module as loading
from weightsync.load.module import ModuleWeightLoader
from weightsync.testing.contracts import bytes_of, manifest_of
from weightsync.types import Full, Patch, Version


def sync(loader: ModuleWeightLoader, tensors: dict[str, torch.Tensor], number: int = 1) -> None:
    manifest = manifest_of(tensors, number)
    loader.begin(manifest)
    loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in tensors.items())
    loader.verify()
    loader.commit(manifest.version)


modes = pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in place"])


@modes
@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_tensor_comes_under_either_name(in_place: bool, name: str) -> None:
    model = Model()
    tensors = weights(1)
    tied = tensors.pop("embed.weight")
    sync(ModuleWeightLoader(model, in_place=in_place), {name: tied, **tensors})
    assert model.head.weight is model.embed.weight, "still tied"
    assert bytes_of(model.head.weight) == bytes_of(tied)


@modes
def test_a_tied_tensor_under_both_names_is_refused(in_place: bool) -> None:
    """Which of the two would win?"""
    tensors = {**weights(1), "head.weight": weights(2)["embed.weight"]}
    with pytest.raises(ManifestMismatchError, match="one in the engine's model") as caught:
        ModuleWeightLoader(Model(), in_place=in_place).begin(manifest_of(tensors))
    assert caught.value.parameter == "head.weight"


@modes
def test_the_name_of_a_tied_tensor_may_change_from_sync_to_sync(in_place: bool) -> None:
    model = Model()
    loader = ModuleWeightLoader(model, in_place=in_place)
    for number, name in enumerate(["embed.weight", "head.weight", "embed.weight"], start=1):
        tensors = weights(number)
        tied = tensors.pop("embed.weight")
        sync(loader, {name: tied, **tensors}, number)
        assert bytes_of(model.embed.weight) == bytes_of(tied)


@modes
def test_a_buffer_that_is_not_persistent_is_no_part_of_a_publication(in_place: bool) -> None:
    model = Model()
    model.scratch.fill_(5)
    loader = ModuleWeightLoader(model, in_place=in_place)
    sync(loader, weights(1))
    assert model.scratch.tolist() == [5, 5]
    with pytest.raises(ManifestMismatchError) as caught:
        loader.begin(manifest_of({**weights(1), "scratch": torch.zeros(2)}))
    assert caught.value.parameter == "scratch"


@modes
def test_persistent_buffers_come_along_whatever_their_dtype_and_strides(in_place: bool) -> None:
    model = Model()
    assert not model.running.is_contiguous()
    for number in (1, 2, 3):
        sync(ModuleWeightLoader(model, in_place=in_place), weights(number), number)
        for name in ("steps", "mask", "scales", "running", "nothing"):
            assert bytes_of(getattr(model, name)) == bytes_of(weights(number)[name]), name


def test_in_place_keeps_storages_and_staged_keeps_objects() -> None:
    """Captured graphs need the first, optimisers and hooks the second."""
    model = Model()
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    sync(ModuleWeightLoader(model, in_place=True), weights(1))
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    before = list(model.parameters())
    sync(ModuleWeightLoader(model), weights(2))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_staging_costs_the_model_once_and_no_more() -> None:
    """Two sets of tensors alternate; a third is never made."""
    model = Model()
    loader = ModuleWeightLoader(model)
    seen: set[int] = set()
    for number in range(1, 7):
        sync(loader, weights(number), number)
        seen.add(model.up.weight.data_ptr())
    assert len(seen) == 2
    loader.begin(manifest_of(weights(9), 9))
    loader.abort("as told")
    sync(loader, weights(10), 10)
    assert model.up.weight.data_ptr() in seen


def test_a_generation_that_reads_while_staged_chunks_arrive_sees_the_old_weights() -> None:
    model = Model()
    loader = ModuleWeightLoader(model)
    sync(loader, weights(1))
    loader.begin(manifest_of(weights(2), 2))
    for name, tensor in weights(2).items():
        loader.load_weights([Full(name=name, tensor=tensor)])
        for other, old in weights(1).items():
            assert bytes_of(model.get_parameter(other) if "." in other else getattr(model, other)) == bytes_of(old)


@pytest.mark.parametrize("loaded", [False, True])
def test_in_place_an_abort_after_a_byte_refuses_to_serve_until_the_next_commit(loaded: bool) -> None:
    loader = ModuleWeightLoader(Model(), in_place=True)
    sync(loader, weights(1))
    loader.begin(manifest_of(weights(2), 2))
    if loaded:
        loader.load_weights([Full(name="up.bias", tensor=weights(2)["up.bias"])])
    loader.abort("as told")
    assert loader.healthy is not loaded
    loader.begin(manifest_of(weights(3), 3))
    loader.abort("an abort that touched nothing heals nothing")
    assert loader.healthy is not loaded
    sync(loader, weights(4), 4)
    assert loader.healthy


def test_in_place_a_refused_update_before_any_byte_was_written_loses_nothing() -> None:
    loader = ModuleWeightLoader(Model(), in_place=True)
    sync(loader, weights(1))
    loader.begin(manifest_of(weights(2), 2))
    with pytest.raises(ManifestMismatchError):
        loader.load_weights([Full(name="up.bias", tensor=torch.zeros(8).bfloat16())])
    loader.abort("refused")
    assert loader.healthy


def test_in_place_nothing_is_written_before_what_its_gpu_has_queued_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU; with one: tests/gpu/test_cuda_streams.py. Seen red: an answer that was computed yet was of two
    versions."""
    module, gpu = Model(), torch.device("cuda", 1)
    before = bytes_of(module.embed.weight)
    seen: list[tuple[torch.device, bool]] = []
    monkeypatch.setattr(loading, "gpus_of", lambda tensors: {gpu} if list(tensors) else set())
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda gpu: seen.append((gpu, bytes_of(module.embed.weight) == before))
    )
    for number in (1, 2):
        sync(ModuleWeightLoader(module, in_place=True), weights(number), number)
        before = bytes_of(module.embed.weight)
    assert seen == [(gpu, True)] * 2, "once a version"
    sync(ModuleWeightLoader(module), weights(3), 3)
    assert len(seen) == 2, "the spare set is nobody's"


def test_in_place_a_copy_that_failed_half_way_counts_as_written() -> None:
    """An expanded tensor can't be written to; nobody knows how far the copy came."""
    model = nn.Module()
    model.register_buffer("wide", torch.zeros(1).expand(4))
    loader = ModuleWeightLoader(model, in_place=True)
    loader.begin(manifest_of({"wide": torch.ones(4)}))
    with pytest.raises(LoadError) as caught:
        loader.load_weights([Full(name="wide", tensor=torch.ones(4))])
    assert caught.value.parameter == "wide"
    loader.abort("failed")
    assert not loader.healthy


def test_staged_an_expanded_tensor_is_no_problem() -> None:
    model = nn.Module()
    model.register_buffer("wide", torch.zeros(1).expand(4))
    sync(ModuleWeightLoader(model), {"wide": torch.arange(4.0)})
    assert model.wide.tolist() == [0, 1, 2, 3]


def test_names_left_out_on_purpose() -> None:
    model = Model()
    loader = ModuleWeightLoader(model, ignore=["rotary.table"])
    tensors = {**weights(1), "rotary.table": torch.ones(3)}
    sync(loader, tensors)
    assert bytes_of(model.up.weight) == bytes_of(weights(1)["up.weight"])
    with pytest.raises(UnsupportedError, match=r"rotary\.table"):  # a digest of the rest would prove too little
        list(loader.live_tensors())
    with pytest.raises(ManifestMismatchError, match="does not send"):
        ModuleWeightLoader(model, ignore=["up.bias"]).begin(manifest_of(weights(1)))


@modes
def test_a_patch_in_a_full_bracket_is_refused_in_words(in_place: bool) -> None:
    loader = ModuleWeightLoader(Model(), in_place=in_place)
    loader.begin(manifest_of(weights(1)))
    patch = Patch(name="up.bias", positions=torch.tensor([0]), values=torch.ones(1).bfloat16())
    with pytest.raises(UnsupportedError) as caught:
        loader.load_weights([patch])
    assert caught.value.parameter == "up.bias"


def test_live_tensors_before_the_first_sync_are_the_models() -> None:
    model = Model()
    found = {held.spec.name: held.tensor for held in ModuleWeightLoader(model).live_tensors()}
    assert {*weights(1)} <= set(found)
    assert "scratch" not in found
    assert found["up.weight"].data_ptr() == model.up.weight.data_ptr()


@modes
def test_a_commit_of_another_version_leaves_the_bracket_open(in_place: bool) -> None:
    model = Model()
    loader = ModuleWeightLoader(model, in_place=in_place)
    loader.begin(manifest_of(weights(1), 1))
    loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in weights(1).items())
    loader.verify()
    with pytest.raises(StateError, match="contract/1, not contract/2"):
        loader.commit(Version(run_id="contract", number=2))
    loader.commit(Version(run_id="contract", number=1))
    assert bytes_of(model.up.weight) == bytes_of(weights(1)["up.weight"])


@modes
def test_the_module_may_be_cast_between_two_syncs(in_place: bool) -> None:
    """Spares of another kind are not reused."""
    model = nn.Linear(3, 2)
    loader = ModuleWeightLoader(model, in_place=in_place)
    kinds: list[Any] = [torch.float32, torch.bfloat16, torch.float32]
    for number, kind in enumerate(kinds, start=1):
        model.to(kind)
        tensors = {"weight": torch.rand(2, 3).to(kind), "bias": torch.rand(2).to(kind)}
        sync(loader, tensors, number)
        assert bytes_of(model.weight) == bytes_of(tensors["weight"])


def replaced(model: nn.Module) -> None:
    """As `load_state_dict(assign=True)` of somebody's: other tensors under the same names."""
    model.load_state_dict({name: torch.zeros_like(held) for name, held in model.state_dict().items()}, assign=True)


@modes
def test_tensors_that_were_replaced_before_verify_are_not_verified(in_place: bool) -> None:
    model, tensors = nn.Linear(2, 2), {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    loader = ModuleWeightLoader(model, in_place=in_place)
    loader.begin(manifest_of(tensors))
    loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in tensors.items())
    replaced(model)
    with pytest.raises(LoadError, match="another tensor there than when") as caught:
        loader.verify()
    assert caught.value.parameter == "weight"
    assert not loader.healthy, "nobody knows what it holds"
    loader.abort("it was replaced")
    sync(loader, tensors, 2)
    assert (loader.healthy, bytes_of(model.weight)) == (True, bytes_of(tensors["weight"]))


@modes
@pytest.mark.parametrize("held", ["parameter", "buffer", "tied"])
def test_a_tensor_that_is_replaced_after_verify_is_not_committed_and_not_audited(in_place: bool, held: str) -> None:
    """Red where the loader trusted what it placed: "committed, healthy", and the audit read what nobody holds."""
    model, tensors = Model(), weights(1)
    loader = ModuleWeightLoader(model, in_place=in_place)

    def replace() -> None:
        if held == "parameter":
            replaced(model)
        elif held == "buffer":
            model.steps = torch.zeros_like(model.steps)
        else:
            model.head.weight = nn.Parameter(torch.zeros_like(model.head.weight))

    loader.begin(manifest_of(tensors))
    loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in tensors.items())
    loader.verify()
    assert len(list(loader.live_tensors())) == len(tensors)
    replace()
    with pytest.raises(LoadError, match="another tensor there than when"):
        loader.commit(Version(run_id="contract", number=1))
    assert not loader.healthy
    with pytest.raises(StateError):
        loader.commit(Version(run_id="contract", number=1))
    loader.abort("it was replaced")

    model = Model()
    loader = ModuleWeightLoader(model, in_place=in_place)
    sync(loader, tensors)
    assert len(list(loader.live_tensors())) == len(tensors)
    replace()
    for read in (loader.live_whole, lambda: list(loader.live_tensors())):
        with pytest.raises(LoadError, match="another tensor there than when"):
            read()


@pytest.mark.parametrize("late", [False, True])
def test_a_tensor_that_is_replaced_in_the_bracket_of_a_patch_is_not_patched(late: bool) -> None:
    model, tensors = nn.Linear(2, 2), {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    loader = ModuleWeightLoader(model)
    sync(loader, tensors)
    manifest = manifest_of(tensors, 2)
    loader.begin_patch(manifest)
    if late:
        list(loader.prepare_patch())
    replaced(model)
    with pytest.raises(LoadError, match="another tensor there than when"):
        loader.commit(manifest.version) if late else loader.prepare_patch()
    assert not loader.healthy
    assert not model.weight.any(), "what somebody put there was not written to"


def test_a_module_that_is_replaced_is_seen_by_the_audit() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    loader = ModuleWeightLoader(model)
    sync(loader, {"0.weight": torch.ones(2, 2)})
    model[0] = nn.Linear(2, 2, bias=False)
    with pytest.raises(LoadError, match="another tensor there than when"):
        list(loader.live_tensors())
    model[0] = nn.Linear(2, 2)
    with pytest.raises(LoadError, match="another tensor there than when"):
        list(loader.live_tensors())


def test_a_model_that_was_built_in_inference_mode_is_swapped_again_and_again() -> None:
    """Seen red: the first swap left tensors that are none of that mode, and count no writes either. The commit raised
    behind the second swap, with the new weights live under the old version."""
    with torch.inference_mode():
        model = nn.Linear(3, 2)
    loader = ModuleWeightLoader(model)
    for number in (1, 2, 3):
        new = {"weight": torch.full((2, 3), float(number)), "bias": torch.full((2,), float(number))}
        sync(loader, new, number)
        assert loader.healthy
        assert all(torch.equal(tensor, new[name]) for name, tensor in model.state_dict().items())
