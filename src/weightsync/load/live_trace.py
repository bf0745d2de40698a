"""Makes a `LivePlan` by a model's own loader.

The loader is run once on tensors without memory. A dispatch mode sees every operation that it does: of a copy the
source's storage offset and strides say which part of which checkpoint tensor was copied, the target's which part of
which live tensor is meant. Nothing is written. What the loader computes, converts or cannot place is marked, with the
reason.
"""

from __future__ import annotations

import collections
import itertools
import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightsync.load.live_plan import LivePiece, LivePlan, held, place, places
from weightsync.load.spans import storage_id
from weightsync.plan.boxes import overlap, strides_of
from weightsync.tensors import torch_dtype
from weightsync.types import Box, TensorSpec

_logger = logging.getLogger(__name__)

_MAX_FAILURES = 4096
Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""A model's loader: takes pairs of a checkpoint's name and tensor."""


def trace(
    model: nn.Module,
    load: Load,
    specs: Iterable[TensorSpec],
    *,
    names: Mapping[str, str],
    doubts: Mapping[str, str] | None = None,
    unloaded: Collection[str] = (),
) -> LivePlan:
    """Runs `load` on tensors without memory and notes what it would write. The model is not changed.

    Args:
        model: whose parameters and buffers are written.
        load: its own loader.
        specs: the checkpoint's tensors.
        names: what `load` calls a tensor, where that is another name than its spec's.
        doubts: live tensors that must not be written element by element, with the reason.
        unloaded: last parts of the names of tensors that hold nothing of a checkpoint, and do not depend on any.
    """
    specs = list(specs)
    tracer = _Tracer(model, doubts or {}, unloaded)
    before = _Holders(model)
    waiting = collections.deque(specs)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        while waiting:
            spec = waiting.popleft()
            yield names.get(spec.name, spec.name), tracer.source(spec)

    while waiting:
        num_waiting = len(waiting)
        try:
            with torch.no_grad(), tracer:
                load(tensors())
            break
        except Exception as error:  # whatever a model's loader raises at what it can't take
            why = _untraced(error, model, doubts or {})
            tracer.mark(why)
            if len(waiting) == num_waiting or len(tracer.marked) > _MAX_FAILURES:  # it would go on like this
                tracer.marked.update((spec.name, why) for spec in waiting)
                break
    if before.restore():
        for spec in specs:
            tracer.marked[spec.name] = "its loader puts other tensors in the places of parameters"
    return tracer.plan()


def _untraced(error: Exception, model: nn.Module, doubts: Mapping[str, str]) -> str:
    """Why a tensor is marked that the loader raised at, and what to do: the loader's words are of no help where the
    engine has put parameters into another form."""
    packed = sum(not parameter.numel() for parameter in model.parameters())
    advice = "proved only where the engine keeps its parameters as they are loaded (docs/proofs.md)"
    if packed:
        what = f"the engine keeps {packed} parameters in another form, packed or quantised"
    elif doubts:
        what = ": ".join(next(iter(doubts.items())))
    else:
        at = traceback.extract_tb(error.__traceback__)[-1]
        what = f"it raised {type(error).__name__} in {at.name} ({Path(at.filename).name}:{at.lineno}): {error!s:.200}"
        advice = "not: please report it, with the model's name and the engine's release"
    _logger.info("the loader could not be traced (%s): %r", what, error)
    return (
        f"its loader can't be followed to where it puts it: {what}. What arrives is proved all the same, what is live "
        f"is {advice}"
    )


class UntraceableError(Exception):
    """What the loader does with a source is no copy of a part of it. Raised within the loader, which may swallow it: it
    is noted before."""


class _Holders:
    """Which tensor every name stands for, and where its memory is; to be put back."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (kept, key, tensor, tensor.data if tensor is not None else None)
            for module in model.modules()
            for kept in (module._parameters, module._buffers)
            for key, tensor in kept.items()
        ]
        self._model = model
        self._names = places(model)

    def restore(self) -> bool:
        """Puts everything back; whether anything was elsewhere."""
        if places(self._model) == self._names:
            return False
        for kept, key, tensor, data in self._held:
            kept[key] = tensor  # type: ignore[assignment]
            if tensor is not None and data is not None and place(tensor) != place(data):
                tensor.data = data
        return True


class _Tracer(TorchDispatchMode):
    """Sees every operation of a loader; runs those that touch no live tensor."""

    def __init__(self, model: nn.Module, doubts: Mapping[str, str], unloaded: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marked: dict[str, str] = {}
        self._model = model
        self._doubts = doubts
        self._unloaded = unloaded
        self._live = _live_tensors(model)
        self._owners: dict[int, str] = {}
        self._touched: set[str] = set()
        self._specs: dict[int, TensorSpec] = {}
        self._kept: list[torch.Tensor] = []  # so that no storage's id is used again
        self._pieces: dict[str, list[LivePiece]] = {}
        self._current: str | None = None
        self._spoilt: dict[str, str] = {}  # live tensors that something else is written into
        for name, tensor in self._live.items():
            if tensor.numel() and (other := self._owners.setdefault(storage_id(tensor), name)) != name:
                self._spoilt[name] = self._spoilt[other] = f"{other} and {name} share memory"

    def source(self, spec: TensorSpec) -> torch.Tensor:
        """A tensor without memory that stands for one of the checkpoint; what follows is of it."""
        self._current = spec.name
        self._pieces.setdefault(spec.name, [])
        with torch.utils._python_dispatch._disable_current_modes():
            made = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        self._kept.append(made)
        self._specs[storage_id(made)] = spec
        return made

    def mark(self, why: str) -> None:
        """What was given last can't be planned."""
        if self._current is not None:
            self.marked.setdefault(self._current, why)

    def plan(self) -> LivePlan:
        """What was seen."""
        self._mark_overwritten()
        self._spoil_besides()
        for name, found in self._pieces.items():
            for piece in found:
                why = self._spoilt.get(piece.owner) or self._doubts.get(piece.owner)
                if why is not None:
                    is_named = piece.owner == name or piece.owner.startswith(f"{why.partition(' ')[0]}.")
                    self.marked.setdefault(name, why if is_named else f"{piece.owner}: {why}")
        pieces = {name: tuple(found) for name, found in self._pieces.items() if name not in self.marked}
        return LivePlan(pieces=pieces, marked=dict(self.marked), _places=places(self._model), _held=held(self._model))

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [each for each in _written(func, args, kwargs) if storage_id(each) in self._owners]
        sources = [each for each in _tensors((args, kwargs)) if storage_id(each) in self._specs]
        name = func.overloadpacket.__name__
        if name == "copy_" and not any(each.numel() for each in _tensors(args)):
            return args[0]  # an empty tensor, or an empty part of one
        if written:
            return self._write(name, written, sources, args)
        if not sources:
            return func(*args, **kwargs)
        if name in ("clone", "_to_copy", "contiguous", "lift_fresh"):
            if kwargs.get("dtype") not in (None, sources[0].dtype):
                raise self._untraceable(sources, f"it is converted to {kwargs['dtype']}")
            return sources[0].detach()  # nobody writes into it: see below
        if _written(func, args, kwargs) or name == "_local_scalar_dense":
            raise self._untraceable(sources, f"it is used by {name}")
        made = func(*args, **kwargs)
        if any(storage_id(each) not in self._specs for each in _tensors(made)):
            raise self._untraceable(sources, f"it is computed by {name}")
        return made

    def _untraceable(self, sources: Iterable[torch.Tensor], why: str) -> UntraceableError:
        for each in sources:
            self.marked.setdefault(self._specs[storage_id(each)].name, why)
        return UntraceableError(why)

    def _write(self, name: str, written: list[torch.Tensor], sources: list[torch.Tensor], args: Any) -> torch.Tensor:
        """What would be written into live tensors; it is not done."""
        live = written[0]
        owner = self._owners[storage_id(live)]
        self._touched.add(owner)
        alone = len(written) == 1 and args and args[0] is live
        if alone and name in ("fill_", "zero_", "detach_"):
            return live  # padding
        if not alone or name != "copy_" or len(sources) != 1:
            for each in written:
                self._spoilt[self._owners[storage_id(each)]] = (
                    f"its loader writes by {name} what is no part of a checkpoint's tensor"
                )
            raise self._untraceable(sources, f"it is written by {name}")
        (source,) = sources
        spec = self._specs[storage_id(source)]
        if source.dtype != live.dtype:
            raise self._untraceable(sources, f"it is converted from {source.dtype} to {live.dtype}")
        try:
            box, view = _placed(spec, source.expand(live.shape), live)
        except UntraceableError as error:
            raise self._untraceable(sources, str(error)) from None
        self._pieces[spec.name].append(LivePiece(name=spec.name, box=box, live=view, owner=owner))
        return live

    def _spoil_besides(self) -> None:
        """A layer that has more than the checkpoint gives it (scales, copies) may compute with that."""
        for path, module in self._model.named_modules():
            own = (*module.named_parameters(path, recurse=False), *module.named_buffers(path, recurse=False))
            own = tuple((name, tensor) for name, tensor in own if name.rpartition(".")[2] not in self._unloaded)
            names = {name for name, tensor in own if tensor.numel() > 1 and name in self._live}
            for name in names & self._touched if names - self._touched else ():
                besides = min(names - self._touched)
                self._spoilt.setdefault(name, f"its layer has {besides} besides, which no checkpoint's tensor fills")

    def _mark_overwritten(self) -> None:
        """Of two pieces in one place the second one stays: a tensor that is there in part is none to be read back."""
        by_owner: dict[str, list[tuple[LivePiece, Box | None]]] = {}
        for found in self._pieces.values():
            for piece in found:
                by_owner.setdefault(piece.owner, []).append((piece, _box_within(self._live[piece.owner], piece.live)))
        for pieces in by_owner.values():
            for index, (one, box) in enumerate(pieces):
                for other, other_box in pieces[:index] if len(pieces) <= 1024 else ():
                    apart = box is not None and other_box is not None and overlap(box, other_box) is None
                    if not apart:
                        for each in {one.name, other.name}:
                            self.marked.setdefault(each, f"several tensors are loaded into one place of {one.owner}")
            if len(pieces) > 1024:
                self._mark_crowded(pieces)

    def _mark_crowded(self, pieces: Sequence[tuple[LivePiece, Box | None]]) -> None:
        """As above, of many pieces (experts): in the order of their first element, each against the next one, and
        against how far those before it reach."""
        spans = sorted(((_span(piece.live), piece) for piece, _ in pieces), key=lambda each: each[0])
        reach = 0
        for ((_, end), one), ((start, _), other) in itertools.pairwise(spans):
            reach = max(reach, end)
            for piece, crowded in ((one, start < end), (other, start < reach)):
                if crowded:
                    self.marked.setdefault(piece.name, f"several tensors may be loaded into one place of {piece.owner}")


def _placed(spec: TensorSpec, source: torch.Tensor, live: torch.Tensor) -> tuple[Box, torch.Tensor]:
    """The box of a tensor that `source` is a view of, and `live` in the box's shape.

    Raises:
        UntraceableError: it is none: every second row, say, or dimensions are mixed.
    """
    dims = [
        (size, step, place)
        for size, step, place in zip(source.shape, source.stride(), live.stride(), strict=True)
        if size > 1
    ]
    if any(step <= 0 for _, step, _ in dims):
        raise UntraceableError("one element is loaded into several places")
    if (box := _box_of(source, 0, spec.shape)) is None:
        raise UntraceableError("what is loaded is no box of the tensor")
    places = _strides_in(box.shape, strides_of(spec.shape), sorted(dims, key=lambda dim: dim[1]))
    return box, live.as_strided(box.shape, places, live.storage_offset())


def _strides_in(shape: tuple[int, ...], steps: tuple[int, ...], dims: list[tuple[int, int, int]]) -> tuple[int, ...]:
    """The target's stride of each dimension of a box.

    Args:
        shape: of the box.
        steps: strides of the tensor that it is a box of.
        dims: (size, stride in the source, stride in the target) of the copy, smallest source stride first.
    """
    places = [1] * len(shape)
    rest = list(reversed(dims))  # a stack: the innermost on top
    for axis in reversed(range(len(shape))):
        extent, step = shape[axis], steps[axis]
        if extent == 1:
            continue
        if not rest or rest[-1][1] != step:
            raise UntraceableError("its dimensions are mixed")
        size, _, place = rest.pop()
        while size < extent and rest and rest[-1][1] == size * step and rest[-1][2] == size * place:
            size *= rest.pop()[0]
        if size % extent:
            raise UntraceableError("its dimensions are mixed")
        if size > extent:
            rest.append((size // extent, step * extent, place * extent))
        places[axis] = place
    if rest:
        raise UntraceableError("its dimensions are mixed")
    return tuple(places)


def _box_within(live: torch.Tensor, view: torch.Tensor) -> Box | None:
    """Which box of a live tensor a view of it is; None where it is none."""
    if not live.is_contiguous():
        return None
    return _box_of(view, int(live.storage_offset()), tuple(live.shape))


def _box_of(view: torch.Tensor, begin: int, shape: tuple[int, ...]) -> Box | None:
    """Which box a view is of a contiguous tensor of that shape, whose first element is number `begin` of the storage;
    None where it is none."""
    start, end = (at - begin for at in _span(view))
    first, last = _unravel(start, shape), _unravel(end - 1, shape)
    extents = tuple(stop - start + 1 for start, stop in zip(first, last, strict=True))
    box = Box(offset=first, shape=extents) if all(extent > 0 for extent in extents) else None
    return box if box is not None and box.numel == view.numel() else None


def _live_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, each under its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes into, by its schema."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


def _tensors(value: object) -> list[torch.Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


def _span(view: torch.Tensor) -> tuple[int, int]:
    start = int(view.storage_offset())
    return start, start + 1 + sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for step, size in zip(strides_of(shape), shape, strict=True):
        found.append(flat // step % max(1, size))
    return tuple(found)
