"""What the verbs make of a PEFT model, and which arguments they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import weightsync
from tests.standins.lora import base_model, peft_model
from weightsync.codec.digest import digest_of
from weightsync.config import WeightSyncConfig
from weightsync.errors import ConfigError, UnsupportedError
from weightsync.tensors import spec_of
from weightsync.trainer.ranks import TrainingRanks
from weightsync.types import Base, HeldTensor, Version
from weightsync.verbs.lora import BASE_MODEL_ID, lora_choice


def extractor_of(weights: Any, **said: Any) -> Any:
    choice = lora_choice(weights, **{"adapter": None, "merge": False, "base": None, **said})
    assert choice is not None
    config = choice.settings(WeightSyncConfig(), dtype_given=False)
    return choice.extractor(weights, config, TrainingRanks(timeout_s=5), name_map=None, timeout_s=5)


def test_an_adapter_is_bound_to_the_digest_of_its_base_and_keeps_its_dtype() -> None:
    model = peft_model("qwen2")
    plain = dict(base_model("qwen2").named_parameters())
    held = [HeldTensor(spec=spec_of(name, tensor), box=None, tensor=tensor.detach()) for name, tensor in plain.items()]
    found = extractor_of(model).adapter.base
    assert found == Base(model_id=BASE_MODEL_ID, model_digest=digest_of(held, [each.spec for each in held]))
    choice = lora_choice(model, adapter=None, merge=False, base=None)
    assert choice is not None
    assert choice.settings(WeightSyncConfig(), dtype_given=False).extract.dtype is None
    assert (
        choice.settings(WeightSyncConfig.load({"extract": {"dtype": "float16"}}), dtype_given=False).extract.dtype
        == "float16"
    )
    merged = lora_choice(model, adapter=None, merge=True, base=None)
    assert merged is not None
    assert merged.settings(WeightSyncConfig(), dtype_given=False).extract.dtype == "bfloat16"


def test_a_base_is_given_in_several_ways() -> None:
    """Seen red: a given `Base` was taken for a publisher that has published nothing, at each step."""

    class Publisher:
        version: Version | None = None
        model_id = "actor"

    model, publisher = peft_model(), Publisher()
    base = Base(model_id="b", model_digest="wsd2:" + "1" * 32)
    given = extractor_of(model, base=base)
    said = lora_choice(model, adapter=None, merge=False, base=base)
    assert said is not None
    said.bind(given)
    assert given.adapter.base == base
    assert extractor_of(model, base=base.model_digest).adapter.base.model_digest == base.model_digest
    assert extractor_of(model, base=False).adapter.base is None
    choice = lora_choice(model, adapter=None, merge=False, base=publisher)
    assert choice is not None
    extractor = extractor_of(model, base=publisher)
    with pytest.raises(ConfigError, match="published nothing"):
        choice.bind(extractor)
    publisher.version = Version(run_id="run", number=3)
    choice.bind(extractor)
    assert extractor.adapter.base == Base(model_id="actor", version=publisher.version)


def test_what_is_set_after_the_first_step_goes_out_or_is_refused() -> None:
    """Seen red: the configuration of the beginning went out, and engines multiplied by the old scaling."""
    model = peft_model()
    layers = [module for module in model.modules() if hasattr(module, "scale_layer")]
    choice = lora_choice(model, adapter=None, merge=False, base=False)
    assert choice is not None
    extractor = extractor_of(model, base=False)
    before = extractor.adapter
    choice.bind(extractor)
    assert extractor.adapter == before
    model.peft_config["default"].lora_alpha = 4
    for layer in layers:
        layer.lora_alpha["default"] = 4
        layer.set_scale("default", 1.0)
    choice.bind(extractor)
    assert extractor.adapter.scaling_of("model.layers.0.mlp.up_proj") == 0.5 != before.scaling_of("")
    layers[3].scale_layer(0.5)
    with pytest.raises(UnsupportedError, match="by hand"):
        choice.bind(extractor)
    layers[3].scale_layer(2.0)
    choice.bind(extractor)
    layers[3].scaling["default"] = math.nextafter(0.5, 1.0)  # as PEFT leaves it that has scaled, and scaled back
    choice.bind(extractor)


@pytest.mark.parametrize("said", [{"adapter": "default"}, {"merge": True}, {"base": False}])
def test_what_is_said_of_an_adapter_needs_one(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="PEFT model"):
        lora_choice(torch.nn.Linear(2, 2), **{"adapter": None, "merge": False, "base": None, **said})


@pytest.mark.parametrize(("options", "waits_s"), [({}, 600.0), ({"timeout_s": 7.0}, 7.0)])
def test_ranks_agree_on_the_base_within_the_time_out_of_the_publisher(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, float], waits_s: float
) -> None:
    """Seen red: 60 s, whatever the configuration said."""
    asked: list[float] = []

    class Ranks(TrainingRanks):
        def __init__(self, *, timeout_s: float, alone: bool = False) -> None:
            asked.append(timeout_s)
            super().__init__(timeout_s=timeout_s, alone=alone)

    for module in ("verbs.publishing", "trainer.publisher"):
        monkeypatch.setattr(f"weightsync.{module}.TrainingRanks", Ranks)
    config = {"sync_method": "pull", "transfer": {"join_timeout_s": 600}}
    with weightsync.publish(peft_model(), "m", port=0, config=config, **options):
        assert asked == [waits_s, waits_s]


def test_a_canary_of_another_adapter_is_refused() -> None:
    """Seen red: it was asked of the active one, and engines refused each version of the other."""
    model: Any = peft_model("qwen2")
    model.add_adapter("b", model.peft_config["default"])
    choice = lora_choice(model, adapter="b", merge=False, base=None, canary=[1, 2, 3])
    assert choice is not None
    made = extractor_of(model, adapter="b")
    with pytest.raises(ConfigError, match=r"'b' is published, and the canary would be asked of default"):
        choice.bind(made)
    model.set_adapter("b")
    choice.bind(made)
    assert made.canary is not None
    with model.disable_adapter(), pytest.raises(ConfigError, match="asked of none"):
        choice.bind(made)


def test_contradictions_are_refused() -> None:
    model = peft_model()
    with pytest.raises(ConfigError, match="keep one"):
        extractor_of(model, merge=True, base=False)
    with pytest.raises(ConfigError, match="Base"):
        extractor_of(model, base=3)
    with pytest.raises(ConfigError, match="PEFT's names"):
        weightsync.push(model, peft_model(), name_map=str)
    megatron = WeightSyncConfig.load({"transfer": {"training_backend": "megatron"}})
    choice = lora_choice(model, adapter=None, merge=False, base=False)
    assert choice is not None
    with pytest.raises(UnsupportedError, match="Megatron"):
        choice.extractor(model, megatron, TrainingRanks(timeout_s=5), name_map=None, timeout_s=5)


def test_a_base_that_is_trained_beside_its_adapter_is_refused() -> None:
    """Seen red: engines served each adapter on the base of the beginning, and proved it."""
    model: Any = peft_model()
    choice = lora_choice(model, adapter=None, merge=False, base=None)
    assert choice is not None
    made = extractor_of(model)
    choice.bind(made)
    norm = model.get_parameter("base_model.model.model.norm.weight")
    norm.requires_grad_(True)
    for call in (lambda: choice.bind(made), lambda: extractor_of(model)):
        with pytest.raises(UnsupportedError, match="trained beside the adapter") as caught:
            call()
        assert caught.value.parameter == "model.norm.weight"
    extractor_of(model, base=False)
    extractor_of(model, merge=True)
    norm.requires_grad_(False)
    choice.bind(made)
    with pytest.raises(UnsupportedError, match="trained beside the adapter"):  # PEFT's biases are the base's own
        extractor_of(peft_model("qwen2", 8, bias="lora_only"))
