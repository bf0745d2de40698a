"""From a config to the extractor of a trainer's model."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weightsync.config import WeightSyncConfig
from weightsync.errors import ConfigError, UnsupportedError
from weightsync.extract.base import WeightExtractor
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.extract.module import ModuleWeightExtractor

_KINDS: dict[str, type[WeightExtractor]] = {"module": ModuleWeightExtractor, "fsdp": FSDPWeightExtractor}


def extractor_for(
    config: WeightSyncConfig, model: torch.nn.Module, *, name_map: Callable[[str], str | None] | None = None
) -> WeightExtractor:
    """The extractor that `config.transfer.training_backend` names, with the grouping and chunks of `config.extract`.

    Raises:
        UnsupportedError: this build has none for that backend.
        WeightSyncError: as for the extractor's constructor.
    """
    if not isinstance(config, WeightSyncConfig):
        raise ConfigError(f"extractor_for takes the config first, then the model; got a {type(config).__name__} first")
    backend = config.transfer.training_backend
    if backend not in _KINDS:
        raise UnsupportedError(f"no extractor for training_backend {backend!r}; there are: {', '.join(_KINDS)}")
    settings = config.extract
    return _KINDS[backend](
        model,
        group_by_module=settings.group_by_module,
        chunk_bytes=settings.chunk_bytes,
        name_map=name_map,
        dtype_overrides=settings.dtype_overrides,
    )
