"""The tensors of a torch module, walked once: after that a reading looks whether the walk still holds, and reads them.

torch's own walk goes through generators as deep as the module, and makes a name for each tensor: seconds for 100,000
parameters. Here the structure is kept: which module has which children, what its parameters and buffers are called. At
every reading all of it is compared with the module as it is, in loops that run in C, a block of modules at a time: what
was read of one is still in the core's cache when it is read again. No module and no tensor is kept, all are read from
the root each time: one that was replaced, or was given other data, is the one that is found.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Path components that torch's wrappers insert (compile, activation checkpointing, FSDP)."""

_WALKS = ("named_modules", "named_parameters", "named_buffers", "modules", "parameters", "buffers", "_named_members")
"""Whoever overrides one of these is walked by it, each time. That a class does is seen at once; that a single module
does, when it is walked; the root is asked each time."""

_BLOCK = 512
"""So many modules are read at a time."""

Kind = type | tuple[type, ...]
"""Of modules: a class, or several."""

_children = attrgetter("_modules")
_parameters = attrgetter("_parameters")
_buffers = attrgetter("_buffers")
_transient = attrgetter("_non_persistent_buffers_set")
_flat = chain.from_iterable
_values: Callable[[dict[str, Any]], Any] = dict.values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """What a module holds at this moment.

    Attributes:
        names: module by module its parameters, then its persistent buffers; a tensor that is held twice comes once,
            under its first name. The same object as long as the structure is the same.
        tensors: one a name, each once.
        modules: all of them, each once; None where their own methods were asked.
    """

    names: tuple[str, ...]
    tensors: Sequence[torch.Tensor]
    modules: Sequence[torch.nn.Module] | None = None


class ModuleTensors:
    """Reads the tensors of a module, again and again. One thread; keeps no module and no tensor alive."""

    def __init__(self) -> None:
        self._walk: _Walk | None = None

    def read(
        self, root: torch.nn.Module, *, kind: Kind | None = None, prepare: Callable[[Any], object] | None = None
    ) -> Held:
        """What `root` holds now.

        Args:
            root: any module.
            kind: of modules that are prepared.
            prepare: called with each module of that kind, before any tensor is read; may be called with it again.
        """
        walk, self._walk = self._walk, None
        held: Held | None = None
        if walk is not None and not _overrides(root) and (kind is None or walk.prepared(root, kind, prepare)):
            held = walk.held(root)
        if held is None:
            if kind is not None and prepare is not None:
                for module in [module for module in root.modules() if isinstance(module, kind)]:
                    prepare(module)
            walk = _walked(root)
            held = _as_it_says(root) if walk is None else walk.held(root)
            assert held is not None
        self._walk = walk
        return held


def _as_it_says(root: torch.nn.Module) -> Held:
    """By the modules' own methods, some of which are not torch's."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, module in root.named_modules():
        # The one attribute that tells persistent buffers apart; state_dict() would run everybody's hooks.
        transient = module._non_persistent_buffers_set
        buffers = [(name, held) for name, held in _own_buffers(module) if name not in transient]
        for name, tensor in [*module.named_parameters(recurse=False), *buffers]:
            found.setdefault(id(tensor), (f"{path}.{name}" if path else name, tensor))
    return Held(names=tuple(name for name, _ in found.values()), tensors=[tensor for _, tensor in found.values()])


def _own_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Under each of their names: under the first alone, one that is transient would hide one that persists."""
    try:
        inspect.signature(module.named_buffers).bind(recurse=False, remove_duplicate=False)
    except (TypeError, ValueError):  # a method of before that argument
        return module.named_buffers(recurse=False)
    return module.named_buffers(recurse=False, remove_duplicate=False)


class _Walk:
    """One walk. It goes level by level, and is kept in blocks: the children that one finds are read by a later one.

    Args:
        paths: of all modules below one, each once, in `named_modules`' order.
    """

    def __init__(self, paths: Sequence[tuple[str, torch.nn.Module]]) -> None:
        modules = [paths[0][1]]
        index_of = {id(modules[0]): 0}
        self._blocks: list[_Block] = []
        found: list[torch.Tensor | None] = []
        parameter_place: dict[int, int] = {}
        buffer_place: dict[int, int] = {}
        start = 0
        while start < len(modules):
            some = modules[start : start + _BLOCK]
            start += len(some)
            block = _Block(some, modules, index_of)
            self._blocks.append(block)
            for place_of, held_of in ((parameter_place, _parameters), (buffer_place, _buffers)):
                for module in some:
                    place_of[id(module)] = len(found)
                    found += held_of(module).values()
        self._types = list(map(type, modules))
        self._kinds: dict[Kind, list[int]] = {}
        self._note_places(paths, found, parameter_place, buffer_place)

    def _note_places(
        self,
        paths: Sequence[tuple[str, torch.nn.Module]],
        found: Sequence[torch.Tensor | None],
        parameter_place: dict[int, int],
        buffer_place: dict[int, int],
    ) -> None:
        """Which of all that the modules hold comes out, and what it is called."""
        names: list[str] = []
        places: list[int] = []
        self._ties: list[tuple[int, int]] = []
        first: dict[int, int] = {}

        def take(path: str, name: str, at: int) -> None:
            tensor = found[at]
            if tensor is None:
                return
            before = first.setdefault(id(tensor), at)
            if before != at:
                self._ties.append((at, before))
                return
            names.append(f"{path}.{name}" if path else name)
            places.append(at)

        for path, module in paths:
            for place, name in enumerate(module._parameters, parameter_place[id(module)]):
                take(path, name, place)
            for place, name in enumerate(module._buffers, buffer_place[id(module)]):
                if name not in module._non_persistent_buffers_set:
                    take(path, name, place)
        self.names = tuple(names)
        self._pick = picker(places, len(found))

    def prepared(self, root: torch.nn.Module, kind: Kind, prepare: Callable[[Any], object] | None) -> bool:
        """Prepares the modules of a kind; False where `root` has other modules than those of the walk."""
        if kind not in self._kinds:
            self._kinds[kind] = [index for index, found in enumerate(self._types) if issubclass(found, kind)]
        if prepare is None or not self._kinds[kind]:
            return True
        modules: list[Any] = [root]
        start = 0
        for block in self._blocks:
            some = modules[start : start + _BLOCK]
            start += len(some)
            if not block.follow(some, modules):
                return False
        for index in self._kinds[kind]:
            prepare(modules[index])
        return True

    def held(self, root: torch.nn.Module) -> Held | None:
        """What its modules hold; None where they are others, or it is called or shared in another way than it was."""
        modules: list[Any] = [root]
        found: list[Any] = []
        start = 0
        for block in self._blocks:
            some = modules[start : start + _BLOCK]
            start += len(some)
            if not block.follow(some, modules) or not block.read(some, found):
                return None
        if any(found[at] is not found[before] for at, before in self._ties):
            return None
        tensors = self._pick(found)
        # A module that is newly at two places shows here too: where it has no tensors it counts for nothing.
        if len(set(map(id, tensors))) != len(tensors):
            return None
        return Held(names=self.names, tensors=tensors, modules=modules)


class _Block:
    """Modules that follow each other in the walk.

    Args:
        some: the modules.
        modules: all that were found so far; their children are added.
        index_of: by identity, where each is; likewise.
    """

    def __init__(self, some: list[Any], modules: list[Any], index_of: dict[int, int]) -> None:
        self._types = list(map(type, some))
        self._children = _Dicts(list(map(_children, some)))
        self._parameters = _Dicts(list(map(_parameters, some)))
        self._buffers = _Dicts(list(map(_buffers, some)))
        self._pick_buffered = picker([index for index, module in enumerate(some) if module._buffers], len(some))
        self._transient = list(map(frozenset, map(_transient, self._pick_buffered(some))))
        self._held_types = [
            type(held) for held_of in (_parameters, _buffers) for module in some for held in held_of(module).values()
        ]
        new: list[int] = []
        self._nones: list[int] = []
        self._ties: list[tuple[int, int]] = []
        children = list(_flat(map(_values, map(_children, some))))
        for place, child in enumerate(children):
            if child is None:
                self._nones.append(place)
            elif id(child) in index_of:
                self._ties.append((place, index_of[id(child)]))
            else:
                index_of[id(child)] = len(modules)
                modules.append(child)
                new.append(place)
        self._pick_new = picker(new, len(children))

    def follow(self, some: list[Any], modules: list[Any]) -> bool:
        """Adds the children of `some` to `modules`; False where they are not where they were."""
        if list(map(type, some)) != self._types:
            return False
        children = self._children.read(list(map(_children, some)))
        if children is None:
            return False
        modules += self._pick_new(children)
        return all(children[place] is None for place in self._nones) and all(
            children[place] is modules[index] for place, index in self._ties
        )

    def read(self, some: list[Any], found: list[Any]) -> bool:
        """Adds what `some` hold: all parameters, then all buffers, None where one is registered as that; False where
        they are called in another way, are of other types, or don't persist as they did.
        """
        parameters = self._parameters.read(list(map(_parameters, some)))
        buffers = self._buffers.read(list(map(_buffers, some)))
        if parameters is None or buffers is None:
            return False
        if self._transient and list(map(_transient, self._pick_buffered(some))) != self._transient:
            return False
        held = parameters + buffers
        found += held
        return list(map(type, held)) == self._held_types


def _walked(root: torch.nn.Module) -> _Walk | None:
    """A new walk; None where what a module has does not follow from what it holds."""
    paths = list(_paths(root))
    modules = [module for _, module in paths]
    if not all(map(_is_ordinary, set(map(type, modules)))) or any(map(_overrides, modules)):
        return None
    holders = {kind for held_of in (_children, _parameters, _buffers) for kind in map(type, map(held_of, modules))}
    if not all(issubclass(kind, dict) for kind in holders):  # a compiled script holds what it has elsewhere
        return None
    return _Walk(paths)


def _paths(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """As `named_modules`, without a generator for each level."""
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        below = [
            (f"{path}.{name}" if path else name, child) for name, child in module._modules.items() if child is not None
        ]
        waiting += reversed(below)


def _is_ordinary(kind: type) -> bool:
    return all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in _WALKS)


def _overrides(module: torch.nn.Module) -> bool:
    return not vars(module).keys().isdisjoint(_WALKS)


class _Dicts:
    """What dicts have as keys: compared with what the same dicts, or those in their places, have later.

    Args:
        dicts: one a module.
    """

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        self._types = list(map(type, dicts))
        self._sizes = list(map(len, dicts))
        full = [index for index, size in enumerate(self._sizes) if size]
        self._full = picker(full, len(dicts))
        self._keys = list(_flat(self._full(dicts)))
        # Most blocks are of one kind: of experts' layers, which hold one tensor each, all under one name.
        alike = len(self._keys) == len(full) and len(set(self._keys)) == 1 and _PLAIN_DICTS.issuperset(self._types)
        self._only: Callable[[Any], Any] | None = itemgetter(self._keys[0]) if alike else None

    def read(self, dicts: Sequence[dict[str, Any]]) -> list[Any] | None:
        """Their values, one dict after the other; None where one is of another type or has other keys, or in another
        order.
        """
        if list(map(len, dicts)) != self._sizes or list(map(type, dicts)) != self._types:
            return None
        if not self._keys:
            return []
        full = self._full(dicts)
        if self._only is not None:
            try:
                return list(map(self._only, full))
            except KeyError:
                return None
        if list(_flat(full)) != self._keys:
            return None
        return list(_flat(map(_values, full)))


_PLAIN_DICTS = frozenset({dict, OrderedDict})
"""Whose items are what they hold. A subclass may do anything when it is asked for one."""


def picker(positions: Sequence[int], num: int) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What takes those at these positions out of `num`, in a loop that runs in C."""
    if list(positions) == list(range(num)):
        return lambda items: items
    return itemgetter(*positions) if len(positions) > 1 else lambda items: [items[position] for position in positions]


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP and torch.compile, in whatever order they were put around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:  # its own: FSDP1 gives what is inside of it, too
            model = cast("torch.nn.Module", model._modules["_orig_mod"])
        else:
            return model


def clean_name(name: str) -> str:
    """A parameter's name without the components that wrappers inserted."""
    if "_orig_mod" not in name and "_wrapped_module" not in name:  # most are clean, and some models have 100,000
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def module_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers, module by module; shared ones once, under their first name."""
    held = ModuleTensors().read(model)
    return zip(held.names, held.tensors, strict=True)
