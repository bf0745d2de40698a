"""Where the tensors of a manifest lie in an engine's module: found with every check, then seen at a glance.

What a begin of 100,000 tensors costs is looks at each of them. Where manifest, module and tensors are of the kinds that
they were, loops that run in C say so. No tensor is kept, all are read from the module each time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, eq, is_
from typing import Any

import torch

from weightsync.errors import LoadError, UnsupportedError
from weightsync.load.spans import overlapping, share_storage
from weightsync.load.whole import TIED, Differences
from weightsync.module_walk import Held, ModuleTensors
from weightsync.tensors import spec_of
from weightsync.types import Manifest, TensorSpec, TensorTable, dtype_name

_CAST = "see dtype of publish, push or WeightManager, and dtype_overrides of the extractor"
_IN_PLACE = "use ModuleWeightLoader(..., in_place=True)"
_BUFFERS = "named_parameters() has no buffers: the module or an extractor has"

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_parameters, _buffers = attrgetter("_parameters"), attrgetter("_buffers")

_OWN = frozenset(vars(torch.nn.Module()))
"""What every module has; no tensor among them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Seen:
    """What was found out last.

    Attributes:
        table: of the manifest.
        held: names of what the module held.
        names: of the manifest's tensors that are loaded.
        places: where in what the module holds each of them is.
        dtypes, shapes: of each.
    """

    table: TensorTable
    held: tuple[str, ...]
    names: list[str]
    places: list[int]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]


class Placing:
    """Of one module. One thread at a time.

    Args:
        module: the engine's.
        name_map: from a manifest's name to the module's.
        ignore: names of a manifest that it has no place for, on purpose.
    """

    def __init__(self, module: torch.nn.Module, *, name_map: Callable[[str], str], ignore: frozenset[str]) -> None:
        self._module = module
        self._name_map = name_map
        self._ignore = ignore
        self._walk = ModuleTensors()
        self._seen: _Seen | None = None

    def live(self) -> dict[str, torch.Tensor]:
        """Parameters and persistent buffers by every name they have."""
        return named_tensors(self._module)

    def place(self, manifest: Manifest, *, swapped: bool) -> dict[str, torch.Tensor]:
        """The live tensor of each name; tied tensors may come under any of their names.

        Args:
            manifest: to be loaded.
            swapped: whether tensors will be given other memory.

        Raises:
            ManifestMismatchError: the manifest does not fit; says all that differs.
            UnsupportedError: it would be swapped, and something else looks into its memory.
        """
        held = self._walk.read(self._module)
        placed = self._at_a_glance(manifest.table, held)
        if placed is None:
            placed = self._looked_at(manifest, self.live())
            self._seen = _seen(manifest.table, held, placed)
        if swapped and (held.modules is None or share_storage(_all_tensors(held.modules))):
            refuse_aliases(walked(self._module), placed.values())
        return placed

    def check(self, placed: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Sees that the module still holds the tensors that `place` found, and no others.

        Returns:
            Looks again, and not as closely: whether each is where it was. A module that was replaced is not seen. It
            keeps tensors and is for one bracket.

        Raises:
            LoadError: one was replaced; so does what is returned.
        """
        held, seen = self._walk.read(self._module), self._seen
        known = seen is not None and seen.held is held.names and seen.names == list(placed)
        if seen is None or not known or not all(map(is_, map(held.tensors.__getitem__, seen.places), placed.values())):
            self._check_by_name(placed)
        if held.modules is None:
            return functools.partial(self._check_by_name, placed)
        return functools.partial(self._check_places, *_places_of(held.modules, placed), placed)

    def _check_places(
        self,
        holders: list[dict[str, Any]],
        names: list[str],
        tensors: list[torch.Tensor],
        placed: Mapping[str, torch.Tensor],
    ) -> None:
        if not all(map(is_, map(dict.get, holders, names), tensors)):
            self._check_by_name(placed)

    def _check_by_name(self, placed: Mapping[str, torch.Tensor]) -> None:
        live = self.live()
        replaced = [name for name, tensor in placed.items() if live.get(self._name_map(name)) is not tensor]
        if not replaced:
            known = set(map(id, placed.values()))
            replaced = [name for name, tensor in live.items() if id(tensor) not in known]
        if replaced:
            raise LoadError(
                f"the engine's model holds another tensor there than when its weights were placed ({len(replaced)} "
                "such; load_state_dict(assign=True), say): what was loaded is not what it holds; load it in full",
                parameter=replaced[0],
            )

    def _at_a_glance(self, table: TensorTable, held: Held) -> dict[str, torch.Tensor] | None:
        seen = self._seen
        if seen is None or seen.table is not table or seen.held is not held.names:
            return None
        found = list(map(held.tensors.__getitem__, seen.places))
        if list(map(_dtype, found)) != seen.dtypes or not all(map(eq, map(_shape, found), seen.shapes)):
            return None
        return dict(zip(seen.names, found, strict=True))

    def _looked_at(self, manifest: Manifest, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensor by tensor, with every check."""
        placed: dict[str, torch.Tensor] = {}
        taken: dict[int, str] = {}
        differences = Differences()
        for spec in manifest.tensors:
            if spec.name in self._ignore:
                continue
            tensor = live.get(self._name_map(spec.name))
            if tensor is None:
                differences.add_strange(spec.name, live)
                continue
            if (other := taken.setdefault(id(tensor), spec.name)) != spec.name:
                differences.add(spec.name, f"this tensor and {other} are one in the engine's model", hint=TIED)
            elif (why := _misfit(spec, tensor)) is not None:
                differences.add(spec.name, why, hint=_CAST if spec.dtype != dtype_name(tensor.dtype) else "")
            placed[spec.name] = tensor
        missing = {name: id(tensor) for name, tensor in live.items() if id(tensor) not in taken}
        buffers = set(map(id, self._module.buffers())) if missing else set()
        differences.add_missing(missing, hint="" if buffers.isdisjoint(missing.values()) else _BUFFERS)
        differences.refuse(lambda: self._own_names(manifest))
        return placed

    def _own_names(self, manifest: Manifest) -> list[str]:
        """Those of the manifest, where they are looked for as they are; else none."""
        names = [name for name in manifest.table.names if name not in self._ignore]
        return names if all(self._name_map(name) == name for name in names) else []


def _seen(table: TensorTable, held: Held, placed: Mapping[str, torch.Tensor]) -> _Seen | None:
    """What is kept of it; None where a tensor is not among those that the module is said to hold."""
    place_of = {id(tensor): place for place, tensor in enumerate(held.tensors)}
    if held.modules is None or not place_of.keys() >= set(map(id, placed.values())):
        return None
    return _Seen(
        table=table,
        held=held.names,
        names=list(placed),
        places=[place_of[id(tensor)] for tensor in placed.values()],
        dtypes=list(map(_dtype, placed.values())),
        shapes=list(map(_shape, placed.values())),
    )


def _places_of(
    modules: Sequence[torch.nn.Module], placed: Mapping[str, torch.Tensor]
) -> tuple[list[dict[str, Any]], list[str], list[torch.Tensor]]:
    """The dict that holds each tensor, its key there, and the tensor; a tied one comes once for each of its places."""
    each = [*map(_parameters, modules), *map(_buffers, modules)]
    tensors: list[Any] = list(itertools.chain.from_iterable(map(dict.values, each)))
    names = itertools.chain.from_iterable(each)
    holders = itertools.chain.from_iterable(map(itertools.repeat, each, map(len, each)))
    placed_ones = list(map(set(map(id, placed.values())).__contains__, map(id, tensors)))
    return (
        list(itertools.compress(holders, placed_ones)),
        list(itertools.compress(names, placed_ones)),
        list(itertools.compress(tensors, placed_ones)),
    )


def _all_tensors(modules: Sequence[torch.nn.Module]) -> Sequence[torch.Tensor]:
    """Parameters, buffers and plain attributes, each once."""
    more = itertools.filterfalse(_OWN.issuperset, map(vars, modules))
    groups = itertools.chain(map(_parameters, modules), map(_buffers, modules))
    held: list[Any] = list(itertools.chain.from_iterable(map(dict.values, groups)))
    held += [value for facts in more for value in facts.values() if isinstance(value, torch.Tensor)]
    each = dict(zip(map(id, held), held, strict=True))
    each.pop(id(None), None)
    return list(each.values())


_Modules = tuple[list[str], list[torch.nn.Module]]
"""Modules and every path that leads to them, as `named_modules(remove_duplicate=False)` gives them. No list of pairs:
many new objects bring Python's collector to look at the whole model, which takes longer than a begin."""


def walked(root: torch.nn.Module) -> _Modules:
    """As torch does, without a generator for each level of the model."""
    paths: list[str] = []
    modules: list[torch.nn.Module] = []
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        paths.append(path)
        modules.append(module)
        if module._modules:
            start = f"{path}." if path else ""
            waiting += [(start + name, child) for name, child in reversed(module._modules.items()) if child is not None]
    return paths, modules


def named_tensors(root: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by every name they have, tied ones under each."""
    found: dict[str, torch.Tensor] = {}
    for path, child in zip(*walked(root), strict=True):
        start = f"{path}." if path else ""
        for name, parameter in child._parameters.items():
            if parameter is not None:
                found[start + name] = parameter
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                found[start + name] = buffer
    return found


def refuse_aliases(modules: _Modules, swapped: Iterable[torch.Tensor], *, advice: str = _IN_PLACE) -> None:
    """Refuses to swap a tensor whose memory another tensor of the module looks into (q, k, v as views of one fused
    tensor, say): after the swap the other one would go on with the old weights, and no digest would see it.

    Looks at parameters, buffers and tensors kept as plain attributes. A view kept elsewhere is not seen.
    """
    paths: list[str] = []
    holders: list[dict[str, Any]] = []
    for path, child in zip(*modules, strict=True):
        facts = vars(child)
        paths += path, path
        holders += child._parameters, child._buffers
        if len(facts) > len(_OWN) or not _OWN.issuperset(facts):
            paths.append(path)
            holders.append({name: value for name, value in facts.items() if isinstance(value, torch.Tensor)})
    tensors = {id(value): value for held in holders for value in held.values() if value is not None}
    if not share_storage(tensors.values()):
        return
    taken = set(map(id, swapped))
    named = [
        (f"{path}.{name}" if path else name, value)
        for path, held in zip(paths, holders, strict=True)
        for name, value in held.items()
        if value is not None
    ]
    for (name, one), (other_name, other) in overlapping(named):
        if one in taken or other in taken:
            raise UnsupportedError(
                f"{name} and {other_name} share memory: swapping one would leave the other on old weights; {advice}",
                parameter=name,
            )


def _misfit(spec: TensorSpec, tensor: torch.Tensor) -> str | None:
    """Why a tensor of the manifest can't be loaded there; None where it can."""
    if spec.box is not None:
        return "a part of a tensor can't be loaded here"
    if spec.dtype == dtype_name(tensor.dtype) and spec.shape == tensor.shape:
        return None
    has = spec_of(spec.name, tensor)
    if spec.shape == has.shape:
        return f"the trainer sends {spec.dtype}, the engine's model has {has.dtype}"
    return f"the trainer sends {spec.dtype} {spec.shape}, the engine's model has {has.dtype} {has.shape}"
