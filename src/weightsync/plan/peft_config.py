"""From PEFT's `adapter_config.json` to what is published of it: no path of the trainer's, no regular expression."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from weightsync.errors import InvalidRequestError
from weightsync.types.adapter import Adapter, Base, canonical_config
from weightsync.types.spec import TensorSpec

PREFIX = "base_model.model."
"""What PEFT puts before the name of each of the base's modules."""

_TRAINERS_OWN: dict[str, Any] = {
    "base_model_name_or_path": None, "revision": None, "auto_mapping": None, "eva_config": None, "corda_config": None,
    "lora_ga_config": None, "loftq_config": {}, "megatron_config": None, "init_lora_weights": True,
    "inference_mode": True,
}  # fmt: skip
"""How the adapter was begun, and where on that machine; nothing that a receiver computes with."""
_SELECT = ("exclude_modules", "layers_to_transform", "layers_pattern")
_DOWN = (".lora_A.weight", ".lora_embedding_A")


def published_adapter(config: Mapping[str, Any], layers: Mapping[str, tuple[int, float]], base: Base | None) -> Adapter:
    """An adapter as it is published.

    Args:
        config: PEFT's.
        layers: rank and alpha of each module that it changes, by names within the base.

    Raises:
        InvalidRequestError: it has what no adapter has.
    """
    facts = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    facts |= {key: value for key, value in _TRAINERS_OWN.items() if key in facts}
    for key in ("peft_type", "task_type"):
        facts[key] = getattr(facts.get(key), "value", facts.get(key))
    targets = facts.get("target_modules")
    if isinstance(targets, list) and not any(facts.get(key) for key in _SELECT):
        facts["target_modules"] = sorted(targets)
    else:
        facts["target_modules"] = sorted(layers)
        facts |= {key: None for key in _SELECT if key in facts}
    # PEFT reads keys of patterns as regular expressions; here each is the name of a module
    facts["rank_pattern"] = {path: rank for path, (rank, _) in layers.items() if rank != facts.get("r")}
    facts["alpha_pattern"] = {path: alpha for path, (_, alpha) in layers.items() if alpha != facts.get("lora_alpha")}
    return Adapter(config=canonical_config(facts), base=base)


def adapter_in_folder(raw: bytes, specs: Iterable[TensorSpec]) -> Adapter:
    """The adapter of a folder that PEFT has written: this user's own, so its patterns are read as PEFT reads them.

    Raises:
        InvalidRequestError: it is none.
    """
    try:
        config = json.loads(raw)
        patterns = config.get("alpha_pattern") or {}
        alphas = [(re.compile(rf"(.*\.)?({key})$"), alpha) for key, alpha in patterns.items()]
    except (ValueError, AttributeError, RecursionError, re.error) as error:
        raise InvalidRequestError(f"this adapter_config.json can't be read: {error}") from None
    layers: dict[str, tuple[int, float]] = {}
    for spec in specs:
        end = next((each for each in _DOWN if spec.name.endswith(each)), None)
        if end is not None and spec.shape:
            path = spec.name.removeprefix(PREFIX).removesuffix(end)
            alpha = next((each for pattern, each in alphas if pattern.match(path)), config.get("lora_alpha"))
            layers[path] = spec.shape[0], alpha
    return published_adapter(config, layers, None)
