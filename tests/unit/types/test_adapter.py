"""Adapter: what travels beside an adapter's tensors, and what is refused of it.

Broken once: without the check of names, the regular expression passes; with a scaling of `alpha / r` alone, rsLoRA's.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from weightsync.errors import InvalidRequestError
from weightsync.types import Adapter, Base, Manifest, TensorSpec, Version
from weightsync.types.adapter import canonical_config

_PLAIN: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
_VERSION = Version(run_id="run", number=3)
_SPEC = TensorSpec(name="base_model.model.q_proj.lora_A.weight", dtype="float32", shape=(8, 4))


def _adapter(base: Base | None = None, **changes: Any) -> Adapter:
    return Adapter(config=canonical_config({**_PLAIN, **changes}), base=base)


def test_ranks_and_scalings_are_pefts() -> None:
    adapter = _adapter(rank_pattern={"layers.1.q_proj": 4}, alpha_pattern={"v_proj": 2})
    assert (adapter.rank, adapter.max_rank) == (8, 8)
    assert adapter.rank_of("model.layers.1.q_proj") == 4
    assert adapter.rank_of("model.layers.11.q_proj") == 8
    assert adapter.scaling_of("model.layers.0.q_proj") == 2.0
    assert adapter.scaling_of("model.layers.0.v_proj") == 0.25
    assert _adapter(r=4, use_rslora=True).scaling_of("q_proj") == 8.0


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "IA3"},
        {"r": 0},
        {"r": True},
        {"r": 1 << 20},
        {"lora_alpha": "16"},
        {"lora_alpha": 1e300},
        {"target_modules": ".*(a+)+b"},
        {"target_modules": ["(a+)+b"]},
        {"target_modules": []},
        {"target_modules": [3]},
        {"rank_pattern": {"(a+)+b": 4}},
        {"rank_pattern": {"q_proj": 0}},
        {"rank_pattern": [4]},
        {"alpha_pattern": {"q_proj": None}},
        {"use_rslora": 1},
    ],
)
def test_what_no_adapter_has_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        _adapter(**changes)


@pytest.mark.parametrize("config", ["", "[]", "{", '{"r": 8}', "[" * 100_000, "{" + " " * (5 << 20) + "}"])
def test_what_is_no_canonical_json_is_refused(config: str) -> None:
    with pytest.raises(InvalidRequestError):
        Adapter(config=config)


def test_a_base_is_named_by_something() -> None:
    with pytest.raises(InvalidRequestError):
        Base(model_id="actor")
    with pytest.raises(InvalidRequestError):
        Base(model_id="actor", model_digest="wsd1:" + "0" * 32)
    with pytest.raises(InvalidRequestError):
        Base(model_id="actor", model_digest="wsd2:../../etc")
    assert "run/3" in str(Base(model_id="actor", version=_VERSION))


def test_a_manifest_has_an_adapter_where_it_is_one() -> None:
    adapter = _adapter(Base(model_id="actor", model_digest="wsd2:" + "0" * 32))
    with pytest.raises(InvalidRequestError):
        Manifest(version=_VERSION, model_id="a", tensors=(_SPEC,), artifact="lora")
    with pytest.raises(InvalidRequestError):
        Manifest(version=_VERSION, model_id="a", tensors=(_SPEC,), adapter=adapter)
    manifest = Manifest(version=_VERSION, model_id="a", tensors=(_SPEC,), artifact="lora", adapter=adapter)
    assert msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest) == manifest
    assert b"adapter" not in msgspec.json.encode(Manifest(version=_VERSION, model_id="a", tensors=(_SPEC,)))
