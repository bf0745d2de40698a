"""What may be given to `WeightManager.offload` as weights, and the extractor of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from weightsync.errors import ConfigError
from weightsync.extract.base import WeightExtractor
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.extract.named import NamedTensorsExtractor

Weights = WeightExtractor | torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""An extractor, a module, tensors by name, or a module's named parameters."""


def extractor_of(weights: Weights) -> WeightExtractor:
    """The extractor that reads them.

    Raises:
        ConfigError: they are none of these.
    """
    if isinstance(weights, WeightExtractor):
        return weights
    if isinstance(weights, torch.nn.Module):
        return FSDPWeightExtractor(weights)
    if isinstance(weights, (str, bytes)) or not isinstance(weights, (Iterator, Iterable)):
        raise ConfigError(
            f"weights are a module, tensors by name, named parameters or an extractor, not a {type(weights).__name__}"
        )
    return NamedTensorsExtractor(weights.items() if isinstance(weights, Mapping) else weights)
