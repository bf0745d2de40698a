"""CheckpointDigest: the digest that a trainer says of the same weights, in its dtype, whatever the model's size."""

from __future__ import annotations

import json
import types
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weightsync.codec.digest import digest_of
from weightsync.engine.vllm import lora_base
from weightsync.engine.vllm.lora_base import CheckpointDigest
from weightsync.errors import BusyError
from weightsync.tensors import spec_of
from weightsync.types import Deadline, HeldTensor, TensorTable


def weights() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    found = {f"layer.{i}.weight": torch.randn(7, 5, generator=made).to(torch.bfloat16) for i in range(6)}
    return {**found, "steps": torch.arange(4)}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    specs = TensorTable.of(spec_of(name, tensor) for name, tensor in tensors.items())
    return digest_of(
        [HeldTensor(spec=s, box=None, tensor=t) for s, t in zip(specs, tensors.values(), strict=True)], specs
    )


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> CheckpointDigest:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return CheckpointDigest(types.SimpleNamespace(model_config=types.SimpleNamespace(model=str(folder))))


def equals(there: CheckpointDigest, wanted: str) -> bool | None:
    deadline = Deadline(30.0)
    while True:
        try:
            return there.equals(wanted)
        except BusyError:
            deadline.check("read the checkpoint")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_it_is_known_in_the_trainers_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    there = checkpoint(tmp_path, weights())
    cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in weights().items()}
    assert equals(there, digest(cast)) is True
    cast["layer.3.weight"][2, 2] += 1
    assert equals(there, digest(cast)) is False


def test_a_tied_head_is_left_out_and_quantised_ones_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "tied").mkdir()
    (tmp_path / "quantised").mkdir()
    tied = checkpoint(tmp_path / "tied", {**weights(), "lm_head.weight": torch.ones(3)}, tie_word_embeddings=True)
    assert equals(tied, digest(weights())) is True
    odd = checkpoint(tmp_path / "quantised", weights(), quantization_config={"quant_method": "x"})
    assert equals(odd, digest(weights())) is None


def test_a_file_that_the_index_does_not_name_is_none_of_it(tmp_path: Path) -> None:
    """Some releases have the same weights in another form beside it. Seen red: their tensors were summed, too, and
    each adapter was of another base."""
    there = checkpoint(tmp_path, weights())
    save_file({"tok_embeddings.weight": torch.ones(3)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": dict.fromkeys(weights(), "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert equals(there, digest(weights())) is True


def test_one_cast_copy_is_there_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a large model's would not fit beside it."""
    most = []

    def watched(held: Iterable[HeldTensor], specs: TensorTable) -> str:
        def each() -> Iterator[HeldTensor]:
            seen: list[weakref.ref[torch.Tensor]] = []
            for part in held:
                seen.append(weakref.ref(part.tensor))
                alive = [there for one in seen if (there := one()) is not None]
                most.append(sum(one.dtype == torch.float32 for one in alive))
                del alive
                yield part

        return digest_of(each(), specs)

    monkeypatch.setattr(lora_base, "digest_of", watched)
    there = checkpoint(tmp_path, weights())
    cast = {name: t.float() if t.is_floating_point() else t for name, t in weights().items()}
    assert equals(there, digest(cast)) is True
    assert 1 <= max(most) <= 2


def test_a_checkpoint_that_was_read_in_part_refuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest in the trainer's dtype may be the one that is not known."""
    real = lora_base._digest

    def fails(folder: Path, dtype: torch.dtype | None) -> str | None:
        if dtype is torch.float32:
            raise MemoryError("no room for a copy")
        return real(folder, dtype)

    monkeypatch.setattr(lora_base, "_digest", fails)
    there = checkpoint(tmp_path, weights())
    wide = {name: t.float() if t.is_floating_point() else t for name, t in weights().items()}
    assert equals(there, digest(wide)) is None
    assert equals(there, digest(weights())) is True


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_moe"},
        {"model_type": "a_new_one", "text_config": {"model_type": "qwen3_moe"}},
        {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"},
    ],
)
def test_a_model_whose_modules_have_other_names_than_its_files_refuses_nobody(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """Seen red: adapters of every mixture of experts were "of another base", for good."""
    pytest.importorskip("transformers.conversion_mapping", reason="this release of transformers converts nothing")
    there = checkpoint(tmp_path, weights(), **config)
    assert equals(there, "wsd2:" + "1" * 32) is None
    assert equals(there, digest(weights())) is True
    plain = tmp_path / "plain"
    plain.mkdir()
    assert equals(checkpoint(plain, weights(), model_type="llama"), "wsd2:" + "1" * 32) is False
