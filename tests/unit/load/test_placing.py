"""Placing: what is seen at a glance is what a look at each tensor would have found, whatever changed in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weightsync.errors import ManifestMismatchError, UnsupportedError
from weightsync.load.placing import Placing
from weightsync.tensors import spec_of
from weightsync.types import Manifest, Version


def model() -> nn.Module:
    """With a transient buffer, a plain attribute, and a tied weight."""
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False))
    module[3].weight = module[0].weight
    module[1].register_buffer("mask", torch.ones(3), persistent=False)
    module[1].scale = 2.0  # type: ignore[assignment]
    return module


def manifest_of(module: nn.Module, *, rename: dict[str, str] | None = None) -> Manifest:
    names = {name: (rename or {}).get(name, name) for name in module.state_dict() if name != "3.weight"}
    specs = tuple(spec_of(new, module.state_dict()[old]) for old, new in names.items())
    return Manifest(version=Version(run_id="r", number=1), model_id="m", tensors=specs)


def placing_of(module: nn.Module) -> Placing:
    return Placing(module, name_map=lambda name: name, ignore=frozenset())


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often each tensor was looked at."""
    counted: list[int] = []
    look = Placing._looked_at

    def counting(*given: object) -> dict[str, torch.Tensor]:
        counted.append(1)
        return look(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(Placing, "_looked_at", counting)
    return counted


def test_the_same_manifest_and_model_are_looked_at_once(looks: list[int]) -> None:
    module = model()
    placing, manifest = placing_of(module), manifest_of(module)
    first = placing.place(manifest, swapped=True)
    assert set(first) == {spec.name for spec in manifest.tensors}
    module[1].weight.data = torch.zeros(4, 4)  # as a commit does
    module[1].bias = nn.Parameter(torch.ones(4))  # another tensor of that kind, where the first was
    again = placing.place(manifest, swapped=True)
    assert len(looks) == 1
    assert again["1.bias"] is module[1].bias
    assert {name for name in first if again[name] is not first[name]} == {"1.bias"}
    assert list(again) == list(first)
    placing.place(manifest_of(module), swapped=True)
    assert len(looks) == 2, "another manifest"


def test_a_manifest_by_a_tied_tensors_other_name_stays_with_it(looks: list[int]) -> None:
    module = model()
    placing = placing_of(module)
    manifest = manifest_of(module, rename={"0.weight": "3.weight"})
    for _ in range(2):
        assert placing.place(manifest, swapped=True)["3.weight"] is module[0].weight
    assert len(looks) == 1


def _other_shape(module: nn.Module) -> None:
    module[1].bias = nn.Parameter(torch.ones(7))


def _other_dtype(module: nn.Module) -> None:
    module[1].bias.data = module[1].bias.data.double()


def _one_more(module: nn.Module) -> None:
    module[1].extra = nn.Parameter(torch.ones(1))


def _now_persistent(module: nn.Module) -> None:
    module[1]._non_persistent_buffers_set.clear()


def _untied(module: nn.Module) -> None:
    module[3].weight = nn.Parameter(module[3].weight.detach().clone())


@pytest.mark.parametrize("change", [_other_shape, _other_dtype, _one_more, _now_persistent, _untied])
def test_a_model_that_has_changed_is_refused(change: Callable[[nn.Module], None]) -> None:
    """Seen to fail: with what was seen taken for what is there."""
    module = model()
    placing, manifest = placing_of(module), manifest_of(module)
    placing.place(manifest, swapped=True)
    change(module)
    with pytest.raises(ManifestMismatchError):
        placing.place(manifest, swapped=True)


def _view_in_a_buffer(module: nn.Module) -> None:
    module[1].mask = module[1].bias.detach()[:3]  # of a buffer that does not persist


def _view_in_an_attribute(module: nn.Module) -> None:
    module[1].scale = module[1].weight.detach()[0]


def _view_of_a_sibling(module: nn.Module) -> None:
    module[2].weight.data = module[1].weight.data.view(-1)[:4]


@pytest.mark.parametrize("change", [_view_in_a_buffer, _view_in_an_attribute, _view_of_a_sibling])
def test_who_looks_into_a_swapped_tensor_is_seen_at_every_begin(change: Callable[[nn.Module], None]) -> None:
    """Seen to fail: where what lies beside the manifest's tensors was not asked again."""
    module = model()
    placing, manifest = placing_of(module), manifest_of(module)
    placing.place(manifest, swapped=True)
    change(module)
    placing.place(manifest, swapped=False)
    with pytest.raises(UnsupportedError, match="share memory"):
        placing.place(manifest, swapped=True)


def test_nothing_is_kept_alive() -> None:
    import weakref

    module = model()
    placing, manifest = placing_of(module), manifest_of(module)
    placing.place(manifest, swapped=True)
    gone = weakref.ref(module[1].weight)
    module[1].weight = nn.Parameter(torch.zeros(4, 4))
    assert gone() is None


@pytest.mark.parametrize(
    ("left_out", "hint"),
    [
        ("2.running_mean", "named_parameters() has no buffers"),
        ("2.weight", None),
        ("1.lm_head.weight", "sends them once: push model.state_dict()"),
    ],
)
def test_what_is_missing_is_said_in_words_that_fit(left_out: str, hint: str | None) -> None:
    """Seen red: the advice for buffers came with every missing parameter, and none where the output layer was."""
    module = model()
    module[1].lm_head = nn.Linear(4, 5, bias=False)
    specs = tuple(spec for spec in manifest_of(module).tensors if spec.name != left_out)
    manifest = Manifest(version=Version(run_id="r", number=1), model_id="m", tensors=specs)
    with pytest.raises(ManifestMismatchError) as caught:
        placing_of(module).place(manifest, swapped=False)
    said, _, advice = caught.value.message.partition("; ")
    assert said == f"the trainer does not send 1 of the model's tensors: {left_out}"
    assert advice == "" if hint is None else hint in advice
