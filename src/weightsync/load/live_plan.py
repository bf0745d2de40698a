"""LivePlan: where each element of a checkpoint lies in a model's live parameters, and whether that is true.

A plan is made by `live_trace`. It is not believed: `LivePlan.compare` says whether the live elements are those that
were loaded, bit for bit, and `LivePlan.uncovered` whether any element of the checkpoint is live nowhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from weightsync.errors import ManifestMismatchError
from weightsync.plan.boxes import check_partition, split_box, whole_box
from weightsync.tensors import cut_out
from weightsync.types import Box, TensorSpec

Held = tuple[str, Mapping[str, torch.Tensor | None], str, torch.Tensor, object]
"""A live tensor's name, the module's mapping that has it and under which key, the tensor, its place."""
_BLOCK_BYTES = 64 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LivePiece:
    """A part of one checkpoint tensor, where it serves.

    Attributes:
        name: of the checkpoint's tensor.
        box: which part of it.
        live: a view of a live tensor, of the box's shape.
        owner: name of that live tensor.
    """

    name: str
    box: Box
    live: torch.Tensor
    owner: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LivePlan:
    """Where a checkpoint's tensors are live in one worker.

    Attributes:
        pieces: by the checkpoint's name; none for a tensor that lives in other workers alone.
        marked: by the checkpoint's name: why its live elements can't be told or written one by one.
    """

    pieces: Mapping[str, tuple[LivePiece, ...]]
    marked: Mapping[str, str]
    _places: Mapping[str, object]
    _held: tuple[Held, ...] = ()

    def moved(self, model: nn.Module) -> str | None:
        """The first live tensor that is not where it was when it was traced; None where all are there."""
        now = places(model)
        return next(
            (name for name in now.keys() | self._places.keys() if now.get(name) != self._places.get(name)), None
        )

    def strayed(self) -> str | None:
        """As `moved`, in a tenth of its time, where no module was put in another's place: for the pause."""
        for name, holder, key, tensor, at in self._held:
            if holder.get(key) is not tensor or place(tensor) != at:
                return name
        return None

    def coverage(self) -> dict[str, list[Box]]:
        """Which parts of each tensor are live in this worker, by its name; without those that are marked."""
        return {name: [piece.box for piece in found] for name, found in self.pieces.items()}

    def uncovered(self, workers: Sequence[Mapping[str, list[Box]]], specs: Iterable[TensorSpec]) -> dict[str, str]:
        """Tensors of which a part is live in no worker, in words.

        Args:
            workers: `coverage` of each worker of the engine; one that has marked a tensor has no entry of it.
            specs: the checkpoint's tensors.
        """
        odd: dict[str, str] = {}
        for spec in specs:
            whole = whole_box(spec.shape)
            boxes = {box for held in workers for box in held.get(spec.name, ())}
            if whole in boxes or spec.name in self.marked:
                continue
            try:
                check_partition(spec.shape, sorted(boxes, key=lambda box: box.offset), parameter=spec.name)
            except ManifestMismatchError:
                odd[spec.name] = "not all of it is live: its loader leaves a part out, or puts it elsewhere"
        return odd

    def compare(self, whole: Mapping[str, torch.Tensor], *, only: str | None = None) -> dict[str, str]:
        """Which tensors' live elements are not those of `whole`, by the checkpoint's name, in words.

        Args:
            whole: what the model's loader was given last, whole tensors by name, on any device.
            only: this tensor alone.
        """
        odd: dict[str, str] = {}
        for name in self.pieces if only is None else (only,):
            for piece in self.pieces.get(name, ()):
                if not _equal(piece, whole[name]):
                    why = "it is repacked, computed from it, or was written by somebody else"
                    odd[name] = f"{piece.owner} does not hold it as it came: {why}"
        return odd

    def glance(self, whole: Mapping[str, torch.Tensor]) -> str | None:
        """A tensor of which the first or the last live element of a piece is not that of `whole`; None where none is.

        Args:
            whole: see `compare`.
        """
        ends: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor, torch.Tensor]]] = {}
        for name, found in self.pieces.items():
            for piece in found:
                if not piece.live.numel():
                    continue
                last = tuple(start + size - 1 for start, size in zip(piece.box.offset, piece.box.shape, strict=True))
                live, there = _bits(piece.live), _bits(whole[name])
                kind = ends.setdefault((live.dtype, live.device), [])
                kind.append((name, live[(0,) * len(last)].reshape(-1), there[piece.box.offset].reshape(-1)))
                kind.append((name, live[(-1,) * len(last)].reshape(-1), there[last].reshape(-1)))
        for (_, device), looked in ends.items():
            _, live_ones, there_ones = zip(*looked, strict=True)  # one question a device
            if not torch.equal(torch.cat(live_ones), torch.cat(there_ones).to(device)):
                return next(name for name, one, other in looked if not torch.equal(one, other.to(device)))
        return None

    def write(self, whole: Mapping[str, torch.Tensor]) -> None:
        """Puts all elements of whole tensors where they are live, without the model's loader.

        Args:
            whole: by name, on any device.
        """
        with torch.no_grad():
            for name, found in self.pieces.items():
                for piece in found:
                    piece.live.copy_(cut_out(whole[name], piece.box))

    def without(self, odd: Mapping[str, str]) -> LivePlan:
        """The plan with these marked besides, for these reasons."""
        pieces = {name: found for name, found in self.pieces.items() if name not in odd}
        return dataclasses.replace(self, pieces=pieces, marked={**self.marked, **odd})


def _equal(piece: LivePiece, whole: torch.Tensor) -> bool:
    """Whether they are the same, to the bit; block by block, so that little of it is copied to a device at a time."""
    elements = max(1, _BLOCK_BYTES // piece.live.element_size())
    for block in split_box(piece.box, elements):
        live = cut_out(piece.live, block, origin=piece.box.offset)
        if not torch.equal(_bits(live), _bits(cut_out(whole, block)).to(live.device)):
            return False
    return True


def places(model: nn.Module) -> dict[str, object]:
    """Where every live tensor is, under each of its names."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: (id(tensor), place(tensor)) for name, tensor in named}


def held(model: nn.Module) -> tuple[Held, ...]:
    """Every live tensor where its module has it, see `LivePlan.strayed`."""
    return tuple(
        (f"{path}.{key}" if path else key, holder, key, tensor, place(tensor))
        for path, module in model.named_modules()
        for holder in (module._parameters, module._buffers)
        for key, tensor in holder.items()
        if tensor is not None
    )


def place(tensor: torch.Tensor) -> object:
    """Where it is, and how it lies there."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return tensor.view(_BITS[tensor.element_size()])
