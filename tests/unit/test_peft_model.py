"""Whose tensors are whose in a PEFT model, however it is wrapped."""

from __future__ import annotations

import pytest
import torch

from tests.standins.lora import base_model, peft_model
from weightsync.errors import UnsupportedError
from weightsync.peft_model import adapter_name, adapter_names, adapter_tensors, base_names, lora_layers, peft_model_in


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


def test_tokens_that_are_trained_hide_no_tensor_of_the_base() -> None:
    """Seen red: the embedding had no name, so the base's digest, and the merged model, were without it."""
    model = peft_model("qwen2", 8, trainable_token_indices=[1, 2])
    base = base_names(model)
    assert set(base.values()) == {name for name, _ in base_model("qwen2").named_parameters()}
    assert base["base_model.model.model.embed_tokens.token_adapter.base_layer.weight"] == "model.embed_tokens.weight"
    with pytest.raises(UnsupportedError, match="trainable_token_indices"):
        adapter_name(model, None)


def test_what_is_not_known_around_a_module_is_refused() -> None:
    """Seen red: the module had no name, and nothing was raised."""
    model = peft_model("llama", 8, modules_to_save=["norm"])
    wrapper = model.base_model.model.model.norm
    wrapper.__class__ = type("OtherWrapper", (type(wrapper).__mro__[1],), {})
    del wrapper.modules_to_save
    with pytest.raises(UnsupportedError, match="OtherWrapper") as caught:
        base_names(model)
    assert caught.value.parameter == "base_model.model.model.norm"
