"""StandingWeights: what an offload found, so that the next one has to give each tensor no more than a glance.

Names, dtypes, shapes, placements: all that a plan depends on is compared at each step, and no tensor is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weightsync.extract.base import WeightExtractor, training_rank
from weightsync.extract.module import clean_name, module_tensors, unwrapped
from weightsync.publish.segment_writer import Place
from weightsync.publish.weights import Weights
from weightsync.types import Box, TensorSpec

_PLAIN = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter))
"""Types that say all of themselves. Any other than these and DTensor is looked at by an extractor each time."""

Named = list[tuple[str, torch.Tensor]]


def listed(weights: Weights) -> Named | None:
    """What the extractor of these weights would be made from; None where they are an extractor, or no tensors."""
    if isinstance(weights, torch.nn.Module):
        for module in weights.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return list(module_tensors(unwrapped(weights)))
    if isinstance(weights, (WeightExtractor, str, bytes)) or not hasattr(weights, "__iter__"):
        return None
    return list(weights)


class StandingWeights:
    """What one rank publishes, as of the last plan. One thread."""

    def __init__(self) -> None:
        self.places: tuple[Place, ...] = ()
        self._known: list[tuple[object, ...]] = []
        self._tied: list[tuple[int, int]] = []
        self._positions: list[int] = []
        self._rank = -1

    def forget(self) -> None:
        """Nothing is known."""
        self.places, self._known, self._tied, self._positions, self._rank = (), [], [], [], -1

    def remember(self, named: Named, specs: Sequence[TensorSpec], boxes: Sequence[tuple[int, Box]]) -> None:
        """What was planned from these tensors.

        Args:
            named: in the order in which they come again.
            specs: of the whole tensors.
            boxes: which part of which spec this rank writes.
        """
        self.forget()
        known = [_glance(name, tensor) for name, tensor in named]
        if not all(known):
            return
        first: dict[int, int] = {}
        for position, (_, tensor) in enumerate(named):
            at = first.setdefault(id(tensor), position)
            if at != position:
                self._tied.append((position, at))
        by_name = {clean_name(named[position][0]): position for position in first.values()}
        if any(specs[index].name not in by_name for index, _ in boxes):
            return
        self._positions = [by_name[specs[index].name] for index, _ in boxes]
        self.places = tuple(
            (specs[index].name, None if box.covers(specs[index].shape) else box) for index, box in boxes
        )
        self._known, self._rank = known, training_rank()

    @torch.no_grad()
    def tensors(self, named: Named) -> list[torch.Tensor] | None:
        """The parts of `places`, where all is as it was; None where anything is not, or nothing is known."""
        if not self._known or len(named) != len(self._known) or self._rank != training_rank():
            return None
        try:
            for (name, tensor), known in zip(named, self._known, strict=True):
                if (  # not a tuple of its own: this is most of what a small tensor costs
                    name != known[0]
                    or type(tensor) is not known[1]
                    or tensor.dtype is not known[2]
                    or tensor.shape != known[3]
                    or tensor.layout is not known[4]
                    or tensor.is_meta
                    or (known[5] is not None and _placed(tensor) != known[5])
                ):
                    return None
        except (TypeError, ValueError, AttributeError):  # no pair of a name and a tensor: an extractor says so in words
            return None
        if any(named[position][1] is not named[at][1] for position, at in self._tied):
            return None
        if len({id(tensor) for _, tensor in named}) != len(named) - len(self._tied):
            return None
        return [_local(named[position][1]) for position in self._positions]


def _glance(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    """All that a plan depends on; nothing where an extractor has to look."""
    if type(tensor) not in (*_PLAIN, DTensor) or tensor.is_meta:
        return ()
    return name, type(tensor), tensor.dtype, tensor.shape, tensor.layout, _placed(tensor)


def _placed(tensor: torch.Tensor) -> tuple[object, ...] | None:
    if isinstance(tensor, DTensor):
        return tensor.placements, tensor.device_mesh, tensor.to_local().shape
    return None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
