"""OffloadPlanCache: what an offload found, so that the next one has to give each tensor no more than a glance.

Names, dtypes, shapes, placements: all that a plan depends on is compared at each step, and no tensor is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weightsync.extract.base import WeightExtractor, training_rank
from weightsync.many import blocks
from weightsync.module_walk import ModuleTensors, clean_name, unwrapped
from weightsync.trainer.segment_writer import Place, picker
from weightsync.trainer.weights import Weights, extractor_of
from weightsync.types import Box, TensorSpec

_PLAIN = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter))
"""Types that say all of themselves. Any other than these and DTensor is looked at by an extractor each time."""

_dtype, _shape, _layout = attrgetter("dtype"), attrgetter("shape"), attrgetter("layout")
_is_meta = attrgetter("is_meta")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named:
    """What an extractor is made from, in the order in which it comes.

    Attributes:
        names, tensors: as many; the same object for `names` as at the last time says that no name has changed.
        are_apart: whether it was found already that no tensor comes twice.
    """

    names: Sequence[str]
    tensors: Sequence[torch.Tensor]
    are_apart: bool = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return zip(self.names, self.tensors, strict=True)


class OffloadPlanCache:
    """What one rank publishes, as of the last plan. One thread."""

    def __init__(self) -> None:
        self.places: tuple[Place, ...] = ()
        self._module = ModuleTensors()
        self._names: Sequence[str] = ()
        self._known: list[_Glance] = []
        self._placed: list[tuple[int, object]] = []
        self._tied: list[tuple[int, int]] = []
        self._pick = picker((), 0)
        self._rank = -1

    def listed(self, weights: Weights) -> Named | None:
        """What the extractor of these weights would be made from; None where they are an extractor, or no tensors."""
        if isinstance(weights, torch.nn.Module):
            held = self._module.read(unwrapped(weights), kind=FSDPModule, prepare=_reshard)
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
        return Named(names=names, tensors=tensors)

    def forget(self) -> None:
        """Nothing is known."""
        self.places, self._names, self._known, self._placed, self._tied = (), (), [], [], []
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
        if not kinds or kinds - {*_PLAIN, DTensor} or any(map(_is_meta, named.tensors)):
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
        one_of: dict[object, object] = {}  # thousands of tensors have one shape
        for cut in blocks(len(named.tensors)):
            kinds_of, dtypes, shapes, layouts = _glance(named.tensors[cut])
            self._known.append((kinds_of, dtypes, [one_of.setdefault(shape, shape) for shape in shapes], layouts))
        self._names, self._rank = named.names, training_rank()

    @torch.no_grad()
    def tensors(self, named: Named) -> list[torch.Tensor] | None:
        """The parts of `places`, where all is as it was; None where anything is not, or nothing is known."""
        if not self._known or len(named.tensors) != len(self._names) or self._rank != training_rank():
            return None
        if named.names is not self._names and list(named.names) != list(self._names):
            return None
        for cut, known in zip(blocks(len(named.tensors)), self._known, strict=True):
            some = named.tensors[cut]
            # types first: of these alone the rest is known to be what it says
            if list(map(type, some)) != known[0] or _glance(some) != known or any(map(_is_meta, some)):
                return None
        if any(_placed(named.tensors[position]) != known for position, known in self._placed):
            return None
        if any(named.tensors[position] is not named.tensors[at] for position, at in self._tied):
            return None
        if not named.are_apart and len(set(map(id, named.tensors))) != len(named.tensors) - len(self._tied):
            return None
        parts = self._pick(named.tensors)
        return list(map(_local, parts)) if self._placed else list(parts)


_Glance = tuple[list[object], list[object], list[object], list[object]]


def _glance(tensors: Sequence[torch.Tensor]) -> _Glance:
    """All that a plan depends on besides names and placements, in loops that run in C."""
    return list(map(type, tensors)), list(map(_dtype, tensors)), list(map(_shape, tensors)), list(map(_layout, tensors))


def _placed(tensor: torch.Tensor) -> tuple[object, ...] | None:
    if isinstance(tensor, DTensor):
        return tensor.placements, tensor.device_mesh, tensor.to_local().shape
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _reshard(module: FSDPModule) -> None:
    module.reshard()
