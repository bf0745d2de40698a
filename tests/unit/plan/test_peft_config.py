"""What is published of PEFT's configuration; a folder that PEFT wrote is read as PEFT reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weightsync.errors import InvalidRequestError
from weightsync.plan.peft_config import adapter_in_folder, published_adapter
from weightsync.types import TensorSpec

_CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"],
    "base_model_name_or_path": "/home/somebody/model", "init_lora_weights": "pissa",
}  # fmt: skip


def specs(**ranks: int) -> list[TensorSpec]:
    names = {path.replace("__", "."): rank for path, rank in ranks.items()}
    return [
        TensorSpec(name=f"base_model.model.{path}.lora_{half}.weight", dtype="float32", shape=shape)
        for path, rank in names.items()
        for half, shape in (("A", (rank, 4)), ("B", (4, rank)))
    ]


def test_nothing_of_the_trainers_machine_is_left() -> None:
    adapter = published_adapter(_CONFIG, {"layers.0.q_proj": (8, 16)}, None)
    assert "/home" not in adapter.config
    assert "pissa" not in adapter.config
    assert adapter.config_dict["target_modules"] == ["q_proj", "v_proj"]
    assert "bound to no base" in str(adapter)


def test_a_folders_patterns_become_names() -> None:
    config = {**_CONFIG, "target_modules": r".*\.(q|v)_proj", "alpha_pattern": {r"layers\.1.*q_proj": 3}}
    found = adapter_in_folder(json.dumps(config).encode(), specs(layers__0__q_proj=8, layers__1__q_proj=4))
    assert found.config_dict["target_modules"] == ["layers.0.q_proj", "layers.1.q_proj"]
    assert (found.rank_of("layers.1.q_proj"), found.scaling_of("layers.1.q_proj")) == (4, 0.75)
    assert (found.rank_of("layers.0.q_proj"), found.scaling_of("layers.0.q_proj")) == (8, 2.0)
    assert found.max_rank == 8


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"alpha_pattern": {"(": 3}}', b"\xff"])
def test_what_is_no_configuration_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        adapter_in_folder(raw, specs(q_proj=8))
