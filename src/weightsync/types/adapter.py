"""Adapter: what a publication of kind "lora" says beside its tensors: PEFT's configuration, and the base it belongs to.

From the network nothing of it is believed unread: sizes are bounded, and what PEFT would take for a regular expression
(`target_modules` as text, the keys of the two patterns) is a plain module's name here, or refused.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types.spec import MAX_NAME_LENGTH, check_id
from weightsync.types.version import Version, check_model_digest

MAX_RANK = 4096
_MAX_CONFIG_BYTES = 4 << 20
_MAX_MODULES = 1 << 16
_MODULE = re.compile(r"[A-Za-z0-9_.\-]+")
_DIGEST = re.compile(r"wsd[0-9]+:[0-9a-f]{32}")


class Base(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The weights that an adapter was trained on.

    Attributes:
        model_id: under which they are published, or would be.
        version: their publication; None where they are not one.
        model_digest: the shard-independent digest of them (`codec.digest`); None where only the publication is known.
            One of the two is there.
    """

    model_id: str
    version: Version | None = None
    model_digest: str | None = None

    def __post_init__(self) -> None:
        check_id("model_id", self.model_id)
        check_model_digest(self.model_digest)
        if self.model_digest is not None and not _DIGEST.fullmatch(self.model_digest):
            raise InvalidRequestError("a base's digest is wsd2: and 32 hex digits")
        if self.version is None and self.model_digest is None:
            raise InvalidRequestError("a base is named by its version, by its digest, or by both")

    def __str__(self) -> str:
        names = [str(self.version)] if self.version is not None else []
        names += [self.model_digest] if self.model_digest is not None else []
        return f"{self.model_id} {' '.join(names)}"


class Adapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An adapter without its tensors.

    Attributes:
        config: PEFT's `adapter_config.json` as canonical JSON (`canonical_config`): sorted keys, no spaces, no path of
            the trainer's machine. Written beside the tensors' file it makes a folder that PEFT and vLLM load.
        base: what it was trained on; None: its trainer does not say, and no receiver can check.
    """

    config: str
    base: Base | None = None

    def __post_init__(self) -> None:
        _read(self.config)

    def __str__(self) -> str:
        """For status and page."""
        return f"rank {self.max_rank}, " + ("bound to no base" if self.base is None else f"on {self.base}")

    @property
    def config_dict(self) -> dict[str, Any]:
        """`config`, read; the caller's own."""
        found: dict[str, Any] = json.loads(self.config)
        return found

    @property
    def rank(self) -> int:
        """The rank of every module that no pattern names: PEFT's `r`."""
        return int(_read(self.config)["r"])

    @property
    def max_rank(self) -> int:
        """The largest rank of any module."""
        facts = _read(self.config)
        return max(int(rank) for rank in (facts["r"], *facts.get("rank_pattern", {}).values()))

    def rank_of(self, module: str) -> int:
        """The rank of one module, by its name within the base model."""
        facts = _read(self.config)
        return int(_by_pattern(facts.get("rank_pattern", {}), module, facts["r"]))

    def scaling_of(self, module: str) -> float:
        """What PEFT multiplies `B @ A` of one module with: alpha over the rank, or over its root (rsLoRA)."""
        facts = _read(self.config)
        rank = self.rank_of(module)
        alpha = _by_pattern(facts.get("alpha_pattern", {}), module, facts["lora_alpha"])
        return float(alpha / math.sqrt(rank) if facts.get("use_rslora") else alpha / rank)


def canonical_config(config: Mapping[str, Any]) -> str:
    """A configuration as `Adapter.config` has it.

    Args:
        config: JSON-able; lists keep their order.

    Raises:
        InvalidRequestError: JSON can't say it.
    """
    try:
        return json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"an adapter's configuration is not JSON: {error}") from None


@functools.lru_cache(maxsize=64)
def _read(config: str) -> Mapping[str, Any]:
    if len(config) > _MAX_CONFIG_BYTES:
        raise InvalidRequestError(f"an adapter's configuration has at most {_MAX_CONFIG_BYTES} bytes")
    try:
        facts = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"an adapter's configuration is not JSON: {error}") from None
    if not isinstance(facts, dict) or canonical_config(facts) != config:
        raise InvalidRequestError("an adapter's configuration is a JSON object, in canonical form: sorted, no spaces")
    if facts.get("peft_type") != "LORA":
        raise InvalidRequestError(f"an adapter's peft_type is LORA, not {str(facts.get('peft_type'))[:40]!r}")
    _check_rank("r", facts.get("r"))
    _check_number("lora_alpha", facts.get("lora_alpha"))
    _check_modules("target_modules", facts.get("target_modules"))
    for name, check in (("rank_pattern", _check_rank), ("alpha_pattern", _check_number)):
        pattern = facts.get(name)
        if pattern is None:
            facts.pop(name, None)
            continue
        if not isinstance(pattern, dict):
            raise InvalidRequestError(f"an adapter's {name} has a value for each module")
        _check_modules(name, list(pattern), empty=True)
        for key, value in pattern.items():
            check(f"{name} of {key[:100]}", value)
    if type(facts.get("use_rslora", False)) is not bool:
        raise InvalidRequestError("an adapter's use_rslora is true or false")
    return MappingProxyType(facts)


def _by_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """As PEFT does, of keys that are plain names: the first that is the module's name, or its end from a dot on."""
    for key, value in pattern.items():
        if module == key or module.endswith(f".{key}"):
            return value
    return default


def _check_rank(what: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise InvalidRequestError(f"an adapter's {what} is a rank from 1 to {MAX_RANK}, not {str(value)[:40]}")


def _check_number(what: str, value: object) -> None:
    if type(value) not in (int, float) or not abs(value) <= 1e9:  # type: ignore[arg-type]
        raise InvalidRequestError(f"an adapter's {what} is a number, not {str(value)[:40]}")


def _check_modules(what: str, value: object, *, empty: bool = False) -> None:
    if not isinstance(value, list) or len(value) > _MAX_MODULES or not (value or empty):
        raise InvalidRequestError(f"an adapter's {what} is a list of 1 to {_MAX_MODULES} names of modules")
    for name in value:
        if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or not _MODULE.fullmatch(name):
            raise InvalidRequestError(f"an adapter's {what} names modules, not {str(name)[:100]!r}")
