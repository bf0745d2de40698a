"""Extractors of a PEFT model against PEFT itself: its file, its configuration, its own merge; the trainer is only read.

Broken once each: with the adapter's name left in, PEFT does not load the file; with `merge` on the layer itself, the
trainer's bits differ; with alpha over the rank for rsLoRA, the configuration is refused; with the first adapter taken,
the second one's tensors come.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file

from tests.standins.lora import ATTENTION, MLP, base_model, logits, lora_config, peft_model
from weightsync.errors import ConfigError, UnsupportedError
from weightsync.extract.base import WeightExtractor
from weightsync.extract.peft import adapter_extractor, base_extractor, merged_extractor
from weightsync.types import Base

CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 8, {}),
    ("qwen2", 64, {"use_rslora": True, "alpha_pattern": {"layers.1.*q_proj": 3}}),
    ("llama", 8, {"rank_pattern": {".*down_proj": 4}, "target_modules": r".*\.\d\.(mlp|self_attn)\.(q|down)_proj"}),
    ("llama", 8, {"target_modules": ["q_proj", "embed_tokens"], "layers_to_transform": None}),
    ("llama", 4, {"target_modules": [*ATTENTION, *MLP], "exclude_modules": r".*layers\.1\.mlp.*", "use_dora": True}),
    ("qwen2", 4, {"modules_to_save": ["norm"], "lora_bias": True, "target_modules": ["q_proj", "v_proj"]}),
]  # fmt: skip


def extracted(extractor: WeightExtractor, dtype: str | None = None) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone()
        for chunk in extractor.extract_weights(dtype)
        for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
    }


def bits(model: torch.nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    """Where every tensor lies, and what is there."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.data_ptr(), tensor.detach().clone()) for name, tensor in named}


def same_bits(one: dict[str, tuple[int, torch.Tensor]], other: dict[str, tuple[int, torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        at == other[name][0] and torch.equal(tensor, other[name][1]) for name, (at, tensor) in one.items()
    )


@pytest.mark.parametrize(("kind", "rank", "changes"), CASES)
def test_an_adapter_is_a_folder_that_peft_loads(kind: str, rank: int, changes: dict[str, Any], tmp_path: Path) -> None:
    model = peft_model(kind, rank, **changes)
    extractor = adapter_extractor(model, base=Base(model_id="base", model_digest="wsd2:" + "0" * 32))
    assert extractor.adapter is not None
    save_file(extracted(extractor), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(extractor.adapter.config)
    again = peft.PeftModel.from_pretrained(base_model(kind), str(tmp_path)).eval()
    assert torch.equal(logits(again), logits(model))
    assert not torch.equal(logits(base_model(kind)), logits(model))


@pytest.mark.parametrize(("kind", "rank", "changes"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_equals_pefts_and_touches_nothing(
    kind: str, rank: int, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    """The base in both dtypes; adapters stay in float32, as PEFT has them."""
    model = peft_model(kind, rank, dtype=dtype, **changes)
    before = bits(model)
    extractor = merged_extractor(model, chunk_bytes=10_000)
    found = extracted(extractor)
    assert same_bits(before, bits(model))
    plain = base_extractor(model)
    base = {
        name: tensor for name, tensor in base_model(kind, dtype=dtype).state_dict().items() if name in extracted(plain)
    }
    assert all(torch.equal(tensor, base[name]) for name, tensor in extracted(plain).items())
    merged = dict(model.merge_and_unload().state_dict())
    assert found.keys() == base.keys()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in found.items())
    assert any(not torch.equal(tensor, base[name]) for name, tensor in found.items())


def test_a_bfloat16_adapter_is_merged_as_peft_does_it_on_a_cpu() -> None:
    """PEFT puts new tensors into such an adapter while it merges: not into the trainer's."""
    model = peft_model("llama", 8, dtype=torch.bfloat16, target_modules=["q_proj", "embed_tokens"]).to(torch.bfloat16)
    before = bits(model)
    found = extracted(merged_extractor(model))
    assert same_bits(before, bits(model))
    merged = dict(model.merge_and_unload().state_dict())
    assert all(torch.equal(tensor, merged[name]) for name, tensor in found.items())


def test_of_several_adapters_the_named_one_comes() -> None:
    model = peft_model("llama", 8)
    model.add_adapter("other", lora_config(4, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="default, other"):
        adapter_extractor(model)
    with pytest.raises(ConfigError, match="no adapter 'third'"):
        adapter_extractor(model, adapter="third")
    other = adapter_extractor(model, adapter="other")
    assert other.adapter is not None
    assert other.adapter.rank == 4
    want = peft.get_peft_model_state_dict(model, adapter_name="other")
    assert {name: t.shape for name, t in extracted(other).items()} == {name: t.shape for name, t in want.items()}


@pytest.mark.parametrize("modules", [["q_proj"], ["q_proj", "v_proj"], ["v_proj"]])
def test_an_adapter_that_is_made_anew_has_the_modules_that_it_had(modules: list[str]) -> None:
    """Seen red: of more modules the tensors of the old ones came, beside a configuration that names all."""
    model = peft_model("llama", 8, target_modules=["q_proj"])
    extractor = adapter_extractor(model)
    assert extractor.read_adapter is not None
    model.delete_adapter("default")
    model.add_adapter("default", lora_config(4, target_modules=modules))
    if modules == ["q_proj"]:
        assert extractor.read_adapter().rank == 4
        return
    with pytest.raises(ConfigError, match="adapter 'default' has other tensors than it had: make a new publisher"):
        extractor.read_adapter()


def test_what_can_not_be_published_is_refused() -> None:
    model = peft_model("llama", 8)
    model.base_model.model.model.layers[0].self_attn.q_proj.set_scale("default", 3.0)
    with pytest.raises(UnsupportedError, match="by hand") as caught:
        adapter_extractor(model)
    assert caught.value.parameter == "model.layers.0.self_attn.q_proj"
    merged = peft_model("llama", 8)
    merged.merge_adapter()
    with pytest.raises(UnsupportedError, match="unmerge"):
        merged_extractor(merged)
    tied = peft_model("llama", 8, target_modules=["lm_head"])
    tied.base_model.model.model.embed_tokens.weight = tied.base_model.model.lm_head.base_layer.weight
    with pytest.raises(UnsupportedError, match="tied"):
        merged_extractor(tied)
    for saved in (["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]):  # seen red: an engine had one for both
        with pytest.raises(UnsupportedError, match=r"tied weights.*ensure_weight_tying"):
            merged_extractor(peft_model("qwen2", 8, modules_to_save=saved))
    other = peft.get_peft_model(base_model(), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(UnsupportedError, match="IA3"):
        adapter_extractor(other)
    with pytest.raises(ConfigError, match="PEFT model"):
        adapter_extractor(base_model())


class _Codes(torch.nn.Module):
    """As a GPTQ layer: codes and scales, and no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = 8, 8
        self.register_buffer("qweight", torch.ones(8, 8, dtype=torch.int32))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.qweight.to(hidden.dtype).T


@pytest.mark.parametrize("kind", ["codes", "attention"])
def test_merging_into_a_layer_without_a_weight_of_its_own_is_refused(kind: str) -> None:
    """Seen red: the base's bytes came out under the merged model's names, and nothing was raised."""
    config = peft.LoraConfig(r=2, target_modules=["layer", "head"], init_lora_weights=False)
    layer: torch.nn.Module = torch.nn.MultiheadAttention(8, 2)
    if kind == "codes":
        layer = _Codes()
        linear = importlib.import_module("peft.tuners.lora.gptq").GPTQLoraLinear
        config._register_custom_module({_Codes: linear, torch.nn.Linear: peft.tuners.lora.Linear})
    base = torch.nn.Module()
    base.layer, base.head = layer, torch.nn.Linear(8, 8)
    model = peft.get_peft_model(base, config)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="no weight of its own") as caught:
        merged_extractor(model)
    assert caught.value.parameter == "layer"
    adapter_extractor(model)


def test_no_path_of_the_trainers_machine_goes_out() -> None:
    model = peft_model("llama", 8)
    model.peft_config["default"].base_model_name_or_path = "/home/somebody/model"
    adapter = adapter_extractor(model).adapter
    assert adapter is not None
    assert "/home" not in adapter.config


def test_two_tied_weights_that_are_trained_as_one_are_one() -> None:
    """As PEFT's own warning advises. Seen red: KeyError 'modules_to_save.default.weight', and a refusal."""
    model = peft_model("qwen2", 8, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    trained = model.base_model.model.model.embed_tokens.modules_to_save["default"].weight
    assert model.base_model.model.lm_head.modules_to_save["default"].weight is trained
    found = extracted(adapter_extractor(model))
    assert [name for name, tensor in found.items() if torch.equal(tensor, trained)] == [
        "base_model.model.model.embed_tokens.weight"
    ]
    whole = extracted(merged_extractor(model))
    assert torch.equal(whole["model.embed_tokens.weight"], trained)
    assert "lm_head.weight" not in whole


def test_an_adapter_that_is_called_like_a_part_of_a_path_is_refused() -> None:
    """Seen red: PEFT's file of the other one went out without layer 1."""
    model = peft_model("llama", 8)
    model.add_adapter("1", lora_config(4))
    with pytest.raises(UnsupportedError, match=r"'1'\): give that one another name") as caught:
        adapter_extractor(model, adapter="default")
    assert str(caught.value.parameter).startswith("model.layers.1.")
    assert len(extracted(adapter_extractor(model, adapter="1"))) == 2 * 2 * len([*ATTENTION, *MLP])
