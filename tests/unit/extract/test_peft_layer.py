"""A merged copy of one layer shares no tensor with the layer, and carries none of its hooks."""

from __future__ import annotations

import torch

from tests.standins.lora import peft_model
from weightsync.extract.peft import merged_copy


def test_the_copy_is_apart() -> None:
    layer = peft_model("llama", 8).base_model.model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda *_: (_ for _ in ()).throw(AssertionError("a hook ran")))
    own = {tensor.data_ptr() for tensor in layer.parameters()}
    before = {name: tensor.clone() for name, tensor in layer.named_parameters()}
    asked: list[int] = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(id(tensor))
        return tensor

    base = merged_copy(layer, "default", gather)
    assert len(asked) == len(set(asked)) == 3
    assert own.isdisjoint(tensor.data_ptr() for tensor in base.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.named_parameters())
    assert not layer.merged_adapters
    layer.merge()
    assert torch.equal(layer.get_base_layer().weight, base.weight)
