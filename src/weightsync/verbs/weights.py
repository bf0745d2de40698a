"""extractor_from: the extractor of whatever a trainer has: a module, however it is sharded, a mapping, an extractor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from weightsync.config import TrainingBackend, WeightSyncConfig, select_grouping
from weightsync.errors import ConfigError
from weightsync.extract.base import WeightExtractor
from weightsync.extract.module import refuse_stretches
from weightsync.extract.named import NamedTensorsExtractor
from weightsync.extract.registry import check_extractor, extractor_for
from weightsync.verbs.settings import with_transfer

TrainerWeights: TypeAlias = torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.Tensor] | WeightExtractor
"""A module (plain, FSDP2, a DeepSpeed engine), Megatron's model chunks, tensors by name, or an extractor."""


def extractor_from(
    weights: TrainerWeights,
    config: WeightSyncConfig,
    *,
    name_map: Callable[[str], str | None] | None = None,
    bridge: Any = None,
) -> WeightExtractor:
    """The extractor of these weights, with the dtypes and chunks of `config`.

    Args:
        weights: see `TrainerWeights`.
        config: its `transfer.training_backend` counts where it is said; else it is seen from the model.
        name_map: from the trainer's name to the engine's; None drops a tensor.
        bridge: of Megatron; see `extractor_for`.

    Raises:
        ConfigError: they are none of these, or an argument or a key of `config` is not read for them.
        WeightSyncError: as for the extractor's constructor.
    """
    if isinstance(weights, WeightExtractor):
        if name_map is not None or bridge is not None:
            raise ConfigError("an extractor has its own names: give name_map= and bridge= to its constructor")
        check_extractor(config, weights)
        return weights
    if isinstance(weights, Mapping):
        if bridge is not None:
            raise ConfigError("bridge= is for Megatron's model chunks, not for tensors by name: leave it out")
        refuse_stretches(weights.values())
        made = NamedTensorsExtractor(
            weights,
            group_by_module=select_grouping(config),
            chunk_bytes=config.extract.chunk_bytes,
            name_map=name_map,
            dtype_overrides=config.extract.dtype_overrides,
        )
        check_extractor(config, made)
        return made
    many = isinstance(weights, Sequence) and not isinstance(weights, (str, bytes))
    if not isinstance(weights, torch.nn.Module) and not (
        many and weights and all(isinstance(each, torch.nn.Module) for each in weights)
    ):
        raise ConfigError(
            "weights are a module, a DeepSpeed engine, Megatron's list of model chunks, a mapping of names to "
            "tensors or "
            f"an extractor, not a {type(weights).__name__}"
        )
    if not isinstance(weights, torch.nn.Module) and bridge is None:
        raise ConfigError(
            "a list of modules is Megatron's model chunks, which needs bridge= (Megatron-Bridge's AutoBridge, or a "
            "MegatronCoreExporter); a module of any other kind is given by itself, not in a list"
        )
    if "training_backend" not in config.transfer.model_fields_set:
        config = with_transfer(config, training_backend=_backend_of(weights, bridge))
    return extractor_for(config, weights, name_map=name_map, bridge=bridge)


def _backend_of(weights: Any, bridge: Any) -> TrainingBackend:
    """What shards them, as they show it themselves."""
    if bridge is not None or not isinstance(weights, torch.nn.Module):
        return "megatron"
    if any(kind.__module__.startswith("deepspeed.") for kind in type(weights).__mro__):
        return "deepspeed"
    if any(hasattr(tensor, "ds_shape") for tensor in weights.parameters()):
        return "deepspeed"
    return "fsdp"  # which reads what nobody has sharded as it lies
