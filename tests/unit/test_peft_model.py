"""Whose tensors are whose in a PEFT model, however it is wrapped."""

from __future__ import annotations

import torch

from tests.standins.lora import base_model, peft_model
from weightsync.peft_model import adapter_names, adapter_tensors, base_names, lora_layers, peft_model_in


def test_a_peft_model_is_seen_through_its_wrappers() -> None:
    model = peft_model()
    assert peft_model_in(model) is model
    assert peft_model_in(torch.compile(model)) is model
    assert peft_model_in(base_model()) is None
    assert peft_model_in({"a": torch.ones(1)}) is None


def test_every_tensor_is_the_adapters_or_the_bases() -> None:
    model = peft_model("qwen2", 8, modules_to_save=["norm"])
    ours, base = adapter_names(model, "default"), base_names(model)
    assert set(base.values()) == {name for name, _ in base_model("qwen2").named_parameters()}
    assert ours.keys().isdisjoint(base)
    left = {name for name, _ in model.named_parameters()} - ours.keys() - base.keys()
    assert not left
    assert set(ours.values()) == set(adapter_tensors(model, "default"))
    merged = base_names(model, merged="default")
    assert merged["base_model.model.model.norm.modules_to_save.default.weight"] == "model.norm.weight"
    assert len(dict(lora_layers(model, "default"))) == 14
