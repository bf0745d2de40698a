"""VLLMWeightLoader up to the commit, which needs vLLM (tests/engines, tests/contract/test_vllm_generations.py)."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weightsync.errors import LoadError, ManifestMismatchError, StateError, UnsupportedError
from weightsync.load import vllm_reload
from weightsync.load.vllm import VLLMWeightLoader
from weightsync.tensors import spec_of
from weightsync.types import Full, Manifest, Version


def hf_config(*, tied: bool) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        tie_word_embeddings=tied,
        architectures=["Qwen3ForCausalLM"],
    )


def checkpoint(*, tied: bool) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, in bfloat16."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    return {name: p.detach().bfloat16() for name, p in Qwen3ForCausalLM(hf_config(tied=tied)).named_parameters()}


def loader_of(config: Any) -> VLLMWeightLoader:
    """A loader of a model that vLLM would have built; its fused names don't matter before the commit."""
    fused = nn.Linear(2, 2).bfloat16()
    return VLLMWeightLoader(fused, model_config=SimpleNamespace(hf_config=config, dtype=torch.bfloat16))


def manifest(tensors: dict[str, torch.Tensor]) -> Manifest:
    return Manifest(
        version=Version(run_id="r", number=1),
        model_id="m",
        tensors=tuple(spec_of(name, tensor) for name, tensor in tensors.items()),
    )


def replaced(tensors: dict[str, torch.Tensor], name: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The same with one tensor exchanged, or left out."""
    return {key: value for key, value in {**tensors, name: tensor}.items() if value is not None}


def test_a_whole_checkpoint_is_taken() -> None:
    loader = loader_of(hf_config(tied=False))
    loader.begin(manifest(checkpoint(tied=False)))
    with pytest.raises(StateError, match="under way"):
        loader.begin(manifest(checkpoint(tied=False)))
    loader.abort("enough")
    loader.begin(manifest(checkpoint(tied=False)))


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.norm.weight", None, "lacks 1 of the model's tensors, the first is model.norm.weight"),
        ("model.layers.0.self_attn.q_proj.bias", torch.zeros(8).bfloat16(), "no such tensor"),
        ("model.norm.weight", torch.zeros(9).bfloat16(), r"the engine's model has \(8,\)"),
        ("model.norm.weight", torch.zeros(8), "would convert"),
    ],
    ids=["missing", "extra", "shape", "dtype"],
)
def test_what_vllm_would_load_in_part_or_convert_is_refused(name: str, tensor: torch.Tensor, words: str) -> None:
    """Before anything is changed: the next good manifest is taken."""
    loader = loader_of(hf_config(tied=False))
    whole = checkpoint(tied=False)
    with pytest.raises(ManifestMismatchError, match=words) as caught:
        loader.begin(manifest(replaced(whole, name, tensor)))
    assert caught.value.parameter == name
    loader.begin(manifest(whole))


def test_tied_weights_come_once_under_any_of_their_names() -> None:
    whole = checkpoint(tied=True)
    assert "lm_head.weight" not in whole
    loader = loader_of(hf_config(tied=True))
    loader.begin(manifest(whole))
    loader.abort("next")
    other = replaced(replaced(whole, "lm_head.weight", whole["model.embed_tokens.weight"]),
                     "model.embed_tokens.weight", None)  # fmt: skip
    loader.begin(manifest(other))
    loader.abort("next")
    assert loader._expected.canonical("lm_head.weight") == "model.embed_tokens.weight"
    with pytest.raises(ManifestMismatchError, match="are one in the engine's model"):
        loader.begin(manifest({**whole, **other}))


def test_a_model_that_transformers_does_not_know_is_said_to_be_unchecked(caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of(SimpleNamespace(architectures=["NobodyKnowsForCausalLM"]))
    with caplog.at_level(logging.WARNING):
        loader.begin(manifest({"anything": torch.zeros(2).bfloat16()}))
    assert "checked by vLLM alone" in caplog.text
    assert not loader._expected.known


def test_the_bucket_is_free_when_load_weights_returns() -> None:
    """Staged bytes are a copy: the transport reuses the bucket at once."""
    whole = checkpoint(tied=False)
    loader = loader_of(hf_config(tied=False))
    loader.begin(manifest(whole))
    for name, tensor in whole.items():
        bucket = tensor.clone()
        loader.load_weights([Full(name=name, tensor=bucket)])
        bucket.fill_(7)
    loader.verify()
    assert all(torch.equal(loader._staging[name], tensor) for name, tensor in whole.items())


def test_a_buffer_that_vllm_skips_is_not_left_stale_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose loader knows parameters alone; a buffer that is in no checkpoint is nothing to miss."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("mean", torch.zeros(2))
            self.register_buffer("cache", torch.zeros(2), persistent=False)

        def load_weights(self, weights: Any) -> set[str]:
            return {name for name, _ in weights if name == "weight"}

    monkeypatch.setattr(vllm_reload, "_layerwise", lambda: SimpleNamespace(initialize_layerwise_reload=lambda _: None))
    reload = vllm_reload.LayerwiseReload(Model(), SimpleNamespace(quantization=None), None)
    reload.load([("weight", torch.ones(2)), ("cache", torch.ones(2))])
    reload.check(strict=False)
    reload.load([("mean", torch.ones(2))])
    with pytest.raises(LoadError, match="skipped 1 buffers") as caught:
        reload.check(strict=False)
    assert caught.value.parameter == "mean"


def test_staging_is_allocated_once() -> None:
    whole = checkpoint(tied=False)
    loader = loader_of(hf_config(tied=False))
    loader.begin(manifest(whole))
    first = {name: tensor.data_ptr() for name, tensor in loader._staging.items()}
    loader.abort("again")
    loader.begin(manifest(whole))
    assert {name: tensor.data_ptr() for name, tensor in loader._staging.items()} == first


def test_chunks_are_checked() -> None:
    whole = checkpoint(tied=False)
    loader = loader_of(hf_config(tied=False))
    name, tensor = next(iter(whole.items()))
    with pytest.raises(StateError, match="begin first"):
        loader.load_weights([Full(name=name, tensor=tensor)])
    loader.begin(manifest(whole))
    loader.load_weights([Full(name=name, tensor=tensor)])
    with pytest.raises(ManifestMismatchError, match="came twice"):
        loader.load_weights([Full(name=name, tensor=tensor)])
    with pytest.raises(ManifestMismatchError, match="not in the manifest"):
        loader.load_weights([Full(name="odd", tensor=tensor)])
    with pytest.raises(ManifestMismatchError, match="announced was"):
        loader.load_weights([Full(name="model.norm.weight", tensor=tensor)])
    with pytest.raises(ManifestMismatchError, match="did not arrive"):
        loader.verify()
    with pytest.raises(StateError, match="what was loaded is"):
        loader.commit(Version(run_id="r", number=1))
    assert loader.healthy, "nothing of it touched the live model"


def test_live_weights_are_unprovable_and_a_part_is_refused() -> None:
    loader = loader_of(hf_config(tied=False))
    with pytest.raises(UnsupportedError, match="can't be read back"):
        next(iter(loader.live_tensors()))
    with pytest.raises(UnsupportedError, match="not shown its model"):
        VLLMWeightLoader(None, model_config=None).begin(manifest(checkpoint(tied=False)))
