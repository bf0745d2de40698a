"""Whatever a trainer hands over becomes the right extractor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightsync.config import WeightSyncConfig
from weightsync.errors import ConfigError, UnsupportedError, WeightSyncError
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.extract.named import NamedTensorsExtractor
from weightsync.verbs.weights import extractor_from

CONFIG = WeightSyncConfig()


def test_a_module_and_a_list_of_modules_and_an_extractor() -> None:
    model = nn.Linear(3, 2)
    assert type(extractor_from(model, CONFIG)) is FSDPWeightExtractor
    assert type(extractor_from(model, WeightSyncConfig.load({"transfer": {"training_backend": "module"}}))) is (
        ModuleWeightExtractor
    )
    made = ModuleWeightExtractor(model)
    assert extractor_from(made, CONFIG) is made
    with pytest.raises(ConfigError, match=r"needs bridge=.* by itself, not in a list"):
        extractor_from([model], CONFIG)


def test_a_mapping_is_read_anew_at_each_step_and_tied_tensors_come_once() -> None:
    one = torch.ones(4)
    tensors = {"a": one, "b": torch.zeros(2), "tied": one}
    extractor = extractor_from(tensors, CONFIG, name_map=lambda name: f"model.{name}")
    assert isinstance(extractor, NamedTensorsExtractor)
    assert [spec.name for spec in extractor.metadata("float32")] == ["model.a", "model.b"]
    tensors["b"] = torch.full((2,), 7.0)
    found = {
        name: t for chunk in extractor.extract_weights() for name, t in zip(chunk.names, chunk.tensors, strict=True)
    }
    assert found["model.b"].tolist() == [7.0, 7.0]
    tensors["b"] = torch.zeros(3)
    with pytest.raises(WeightSyncError, match="has changed"):
        list(extractor.extract_weights())


def test_what_is_none_of_these_is_refused_in_words() -> None:
    model = nn.Linear(3, 2)
    for wrong in (3, "model", [], [model, 3], model.named_parameters()):
        with pytest.raises(ConfigError, match="weights are a module"):
            extractor_from(wrong, CONFIG)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="names and tensors"):
        extractor_from({"a": 3}, CONFIG)  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="own names"):
        extractor_from(ModuleWeightExtractor(model), CONFIG, name_map=str)
    with pytest.raises(ConfigError, match="bridge"):
        extractor_from({"a": torch.ones(1)}, CONFIG, bridge=object())


def test_a_zero3_model_is_seen_by_its_parameters() -> None:
    model = nn.Linear(3, 2)
    model.weight.ds_shape = (2, 3)  # type: ignore[assignment]
    with pytest.raises((UnsupportedError, WeightSyncError)) as caught:
        extractor_from(model, WeightSyncConfig.load({"transfer": {"training_backend": "module"}}))
    assert "DeepSpeedWeightExtractor" in str(caught.value)
