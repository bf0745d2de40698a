"""OffloadPlanCache: what an offload found, so that the next one has to give each tensor no more than a glance.

Names, dtypes, shapes, placements: all that a plan depends on is compared at each step, and no tensor is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TypeAlias

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from weightsync.errors import ConfigError
from weightsync.extract.base import WeightExtractor, training_rank
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.extract.glance import Glance, Pairs
from weightsync.extract.module import PLAIN, refuse_fsdp1, refuse_stretches
from weightsync.extract.named import NamedTensorsExtractor
from weightsync.module_walk import ModuleTensors, clean_name, picker, unwrapped
from weightsync.trainer.segment_writer import Place
from weightsync.types import Box, TensorSpec

_layout, _is_meta = attrgetter("layout"), attrgetter("is_meta")
_STRIDED = frozenset({torch.strided})
_SHARDED = (FSDPModule, FullyShardedDataParallel)
_Sharded: TypeAlias = FSDPModule | FullyShardedDataParallel

Weights = WeightExtractor | torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""An extractor, a module, tensors by name, or a module's named parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named(Pairs):
    """What an extractor is made from, in the order in which it comes.

    Attributes:
        names, tensors: as many; the same object for `names` as at the last time says that no name has changed.
        are_apart: whether it was found already that no tensor comes twice.
    """

    are_apart: bool = False


class OffloadPlanCache:
    """What one rank publishes, as of the last plan. One thread."""

    def __init__(self) -> None:
        self.places: tuple[Place, ...] = ()
        self._module = ModuleTensors()
        self._glance: Glance | None = None
        self._placed: list[tuple[int, object]] = []
        self._tied: list[tuple[int, int]] = []
        self._pick = picker((), 0)
        self._rank = -1

    def listed(self, weights: Weights) -> Named | None:
        """What the extractor of these weights would be made from; None where they are an extractor, or no tensors."""
        if isinstance(weights, torch.nn.Module):
            met: list[_Sharded] = []
            held = self._module.read(unwrapped(weights), kind=_SHARDED, prepare=lambda each: met.append(_ready(each)))
            refuse_stretches(held.tensors, [each for each in met if isinstance(each, FullyShardedDataParallel)])
            return Named(names=held.names, tensors=held.tensors, are_apart=True)
        if isinstance(weights, (WeightExtractor, str, bytes)) or not hasattr(weights, "__iter__"):
            return None
        pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
        try:
            names = [name for name, _ in pairs]
            tensors = [tensor for _, tensor in pairs]
        except (TypeError, ValueError):  # no pair of a name and a tensor: an extractor says so in words
            extractor_of(pairs)
            raise
        refuse_stretches(tensors)
        return Named(names=names, tensors=tensors)

    def forget(self) -> None:
        self.places, self._glance, self._placed, self._tied = (), None, [], []
        self._pick, self._rank = picker((), 0), -1

    def remember(self, named: Named, specs: Sequence[TensorSpec], boxes: Sequence[tuple[int, Box]]) -> None:
        """What was planned from these tensors.

        Args:
            named: in the order in which they come again.
            specs: of the whole tensors.
            boxes: which part of which spec this rank writes.
        """
        self.forget()
        kinds = set(map(type, named.tensors))
        if not kinds or kinds - {*PLAIN, DTensor} or any(map(_is_meta, named.tensors)):
            return
        first: dict[int, int] = {}
        for position, tensor in enumerate(named.tensors):
            at = first.setdefault(id(tensor), position)
            if at != position:
                self._tied.append((position, at))
        by_name = {clean_name(named.names[position]): position for position in first.values()}
        if any(specs[index].name not in by_name for index, _ in boxes):
            return
        positions = [by_name[specs[index].name] for index, _ in boxes]
        for position, (_, box) in zip(positions, boxes, strict=True):
            if _local(named.tensors[position]).shape != box.shape:  # an extractor says it in words
                return
        self._pick = picker(positions, len(named.tensors))
        self.places = tuple(
            (specs[index].name, None if box.covers(specs[index].shape) else box) for index, box in boxes
        )
        self._placed = [
            (position, _placed(tensor)) for position, tensor in enumerate(named.tensors) if isinstance(tensor, DTensor)
        ]
        self._glance, self._rank = Glance(named, named.names), training_rank()

    @torch.no_grad()
    def tensors(self, named: Named) -> list[torch.Tensor] | None:
        """The parts of `places`, where all is as it was; None where anything is not, or nothing is known."""
        if self._glance is None or self._rank != training_rank():
            return None
        if not self._glance.holds(named, says_all=_have_data):
            return None
        if any(_placed(named.tensors[position]) != known for position, known in self._placed):
            return None
        if any(named.tensors[position] is not named.tensors[at] for position, at in self._tied):
            return None
        if not named.are_apart and len(set(map(id, named.tensors))) != len(named.tensors) - len(self._tied):
            return None
        parts = self._pick(named.tensors)
        return list(map(_local, parts)) if self._placed else list(parts)


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


def _ready(module: _Sharded) -> _Sharded:
    if isinstance(module, FSDPModule):
        module.reshard()
    else:
        refuse_fsdp1(module)
    return module


def _have_data(tensors: Sequence[torch.Tensor]) -> bool:
    return _STRIDED.issuperset(map(_layout, tensors)) and not any(map(_is_meta, tensors))


def _placed(tensor: torch.Tensor) -> tuple[object, ...] | None:
    if isinstance(tensor, DTensor):
        return tensor.placements, tensor.device_mesh, tensor.to_local().shape
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
