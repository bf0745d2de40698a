"""NamedTensorsExtractor: what named_parameters() gives, extracted as the module would be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from weightsync.errors import ConfigError, ExtractError, UnsupportedError
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.extract.named import NamedTensorsExtractor
from weightsync.tensors import byte_array


def extracted(extractor: Any, dtype: str | None) -> dict[str, bytes]:
    return {
        name: byte_array(tensor).tobytes()
        for chunk in extractor.extract_weights(dtype)
        for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
    }


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_it_gives_what_the_modules_extractor_gives(dtype: str | None) -> None:
    model = tied()
    named = NamedTensorsExtractor(model.named_parameters())
    of_module = ModuleWeightExtractor(model)
    assert named.metadata(dtype) == of_module.metadata(dtype)
    assert extracted(named, dtype) == extracted(of_module, dtype)
    assert named.can_shard_locally()
    parts = list(named.local_parts(dtype))
    assert [part.spec for part in parts] == list(named.metadata(dtype))
    live = [part.tensor.data_ptr() for part in parts]
    assert live == [parameter.data_ptr() for parameter in model.parameters()], "live weights, not copies"


def test_names_lose_what_wrappers_put_into_them_and_tied_tensors_come_once() -> None:
    model = tied()
    pairs = [("_orig_mod.a._checkpoint_wrapped_module.w", model[0].weight), ("b.w", model[2].weight)]
    assert [spec.name for spec in NamedTensorsExtractor(iter(pairs)).metadata()] == ["a.w"]


def test_a_state_dict_gives_tied_weights_under_both_names() -> None:
    """As the advice for an engine whose output layer is its own says."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight  # type: ignore[assignment]
    specs = NamedTensorsExtractor(model.state_dict()).metadata()
    assert [spec.name for spec in specs] == ["0.weight", "1.weight"]


def test_later_changes_of_the_weights_are_seen_and_later_tensors_are_not() -> None:
    model = nn.Linear(2, 2)
    extractor = NamedTensorsExtractor(model.named_parameters(), name_map=lambda name: None if name == "bias" else name)
    with torch.no_grad():
        model.weight.fill_(3)
    assert extracted(extractor, None) == {"weight": torch.full((2, 2), 3.0).numpy().tobytes()}


@pytest.mark.parametrize(
    ("named", "error"),
    [
        ([torch.ones(2)], ConfigError),
        ([("w",)], ConfigError),
        ([("w", 5)], ConfigError),
        ([(5, torch.ones(2))], ConfigError),
        (5, ConfigError),
        ({"w": 5}, ConfigError),
        ([("w", torch.ones(2)), ("w", torch.ones(3))], ConfigError),
        ([], ExtractError),
        ([("w", torch.empty(2, device="meta"))], ExtractError),
        ([("w", torch.eye(3).to_sparse())], UnsupportedError),
    ],
)
def test_what_is_no_list_of_named_tensors_is_told_so(named: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        NamedTensorsExtractor(named)
