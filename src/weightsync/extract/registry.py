"""From a config to the extractor of a trainer's model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weightsync.config import WeightSyncConfig, select_grouping
from weightsync.errors import ConfigError
from weightsync.extract.base import WeightExtractor
from weightsync.extract.deepspeed import DeepSpeedWeightExtractor
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.extract.megatron import MegatronWeightExtractor
from weightsync.extract.module import ModuleWeightExtractor

_OF_CHUNKS = ("chunk_bytes", "group_by_module", "dtype_overrides")
_KINDS: dict[str, type[WeightExtractor]] = {
    "module": ModuleWeightExtractor,
    "fsdp": FSDPWeightExtractor,
    "deepspeed": DeepSpeedWeightExtractor,
    "megatron": MegatronWeightExtractor,
}


def extractor_for(
    config: WeightSyncConfig,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    *,
    name_map: Callable[[str], str | None] | None = None,
    bridge: Any = None,
) -> WeightExtractor:
    """The extractor that `config.transfer.training_backend` names, with the grouping and chunks of `config.extract`.

    Args:
        model: as that extractor takes it: an engine for DeepSpeed, the list of model chunks for Megatron.
        name_map: from the trainer's name to the engine's.
        bridge: Megatron alone, and needed there: what exports the model under Hugging Face's names.

    Raises:
        ConfigError: arguments in the wrong order, or a bridge that is missing or that nobody reads.
        WeightSyncError: as for the extractor's constructor.
    """
    if not isinstance(config, WeightSyncConfig):
        raise ConfigError(f"extractor_for takes the config first, then the model; got a {type(config).__name__} first")
    backend, settings = config.transfer.training_backend, config.extract
    options: dict[str, Any] = {}
    if backend == "megatron":
        if bridge is None:
            raise ConfigError(
                "training_backend 'megatron' needs bridge=: Megatron-Bridge's AutoBridge, or a MegatronCoreExporter"
            )
        options["bridge"] = bridge
    elif bridge is not None:
        raise ConfigError(f"bridge= is for training_backend 'megatron', this one is {backend!r}: leave it out")
    made: Callable[..., WeightExtractor] = _KINDS[backend]
    return made(
        model,
        group_by_module=select_grouping(config),
        chunk_bytes=settings.chunk_bytes,
        name_map=name_map,
        dtype_overrides=settings.dtype_overrides,
        **options,
    )


def check_extractor(config: WeightSyncConfig, extractor: WeightExtractor) -> None:
    """What the config says of an extractor is this one's own: nobody would read it otherwise.

    Raises:
        ConfigError: the extractor was made with something else; names the key.
    """
    given, made, backend = config.extract, extractor.settings, config.transfer.training_backend
    if backend != "module" and not isinstance(extractor, _KINDS[backend]):
        raise ConfigError(
            f"transfer.training_backend is {backend!r}, and this is a {type(extractor).__name__}: leave it out",
            keys=["transfer.training_backend"],
        )
    wrong = [key for key in _OF_CHUNKS if key in given.model_fields_set and _differ(getattr(given, key), made[key])]
    if wrong:
        text = ", ".join(f"extract.{key} is {getattr(given, key)!r}, and it has {made[key]!r}" for key in wrong)
        raise ConfigError(
            f"the extractor was made with other settings than the configuration has: {text}. Make it with "
            "extractor_for(config, model), or leave them out",
            keys=[f"extract.{key}" for key in wrong],
        )


def _differ(given: Any, made: Any) -> bool:
    return given is not None and given != made if isinstance(made, bool) else given != made
