"""The tensors of a torch module, walked once: after that a reading looks whether the walk still holds, and reads them.

torch's own walk goes through generators as deep as the module, and makes a name for each tensor: seconds for 100,000
parameters. Here the structure is kept: which module has which children, what its parameters and buffers are called. At
every reading all of it is compared with the module as it is, in loops that run in C. Tensors are not kept, they are
read from the modules each time: one that was replaced, or was given other data, is the one that is found.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch

_WALKS = ("named_modules", "named_parameters", "named_buffers", "modules", "parameters", "buffers", "_named_members")
"""Whoever overrides one of these is walked by it, each time."""

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
        tensors: one a name.
    """

    names: tuple[str, ...]
    tensors: Sequence[torch.Tensor]


class ModuleTensors:
    """Reads the tensors of a module, again and again. One thread; keeps no module and no tensor alive."""

    def __init__(self) -> None:
        self._walk: _Walk | None = None

    def read(
        self, root: torch.nn.Module, *, kind: type | None = None, prepare: Callable[[Any], object] | None = None
    ) -> Held:
        """What `root` holds now.

        Args:
            root: any module.
            kind: of modules that are prepared.
            prepare: called with each module of that kind, before any tensor is read.
        """
        walk = self._walk
        modules = None if walk is None else walk.modules(root)
        if walk is None or modules is None:
            walk, modules = _walked(root)
        self._walk = walk
        if walk is None:
            return _as_it_says(root, kind, prepare)
        if kind is not None and prepare is not None:
            for index in walk.of_kind(kind):
                prepare(modules[index])
        held = walk.held(modules)
        if held is None:  # the modules are the same, and what they hold is called or shared in another way
            walk, modules = _walked(root)
            self._walk = walk
            if walk is None:
                return _as_it_says(root, None, None)
            held = walk.held(modules)
            assert held is not None
        return held


def _as_it_says(root: torch.nn.Module, kind: type | None, prepare: Callable[[Any], object] | None) -> Held:
    """By the modules' own methods, some of which are not torch's."""
    if kind is not None and prepare is not None:
        for module in root.modules():
            if isinstance(module, kind):
                prepare(module)
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, module in root.named_modules():
        # The one attribute that tells persistent buffers apart; state_dict() would run everybody's hooks.
        transient = module._non_persistent_buffers_set
        buffers = [(name, held) for name, held in module.named_buffers(recurse=False) if name not in transient]
        for name, tensor in [*module.named_parameters(recurse=False), *buffers]:
            found.setdefault(id(tensor), (f"{path}.{name}" if path else name, tensor))
    return Held(names=tuple(name for name, _ in found.values()), tensors=[tensor for _, tensor in found.values()])


class _Walk:
    """One walk.

    Args:
        paths: of all modules below one, each once, in `named_modules`' order.
    """

    def __init__(self, paths: Sequence[tuple[str, torch.nn.Module]]) -> None:
        modules = [module for _, module in paths]
        self._refs = [weakref.ref(module) for module in modules]
        self._types = list(map(type, modules))
        self._kinds: dict[type, list[int]] = {}
        index_of = {id(module): index for index, module in enumerate(modules)}
        index_of[id(None)] = len(modules)
        self._children = _Names(list(map(_children, modules)))
        self._child_ids = _picker(
            [index_of[id(child)] for child in self._children.values(list(map(_children, modules)))]
        )
        self._parameters = _Names(list(map(_parameters, modules)))
        self._buffers = _Names(list(map(_buffers, modules)))
        transient = list(map(_transient, modules))
        self._num_transient = list(map(len, transient))
        self._transient = [(index, frozenset(names)) for index, names in enumerate(transient) if names]
        found = self._held(modules)
        assert found is not None
        self._held_types = list(map(type, found))
        self._note_places(paths, found)

    def _note_places(self, paths: Sequence[tuple[str, torch.nn.Module]], found: Sequence[torch.Tensor | None]) -> None:
        """Which of all that the modules hold comes out, and what it is called."""
        names: list[str] = []
        places: list[int] = []
        self._ties: list[tuple[int, int]] = []
        first: dict[int, int] = {}
        place = 0
        buffer_place = sum(len(module._parameters) for _, module in paths)

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
            for name in module._parameters:
                take(path, name, place)
                place += 1
            for name in module._buffers:
                if name not in module._non_persistent_buffers_set:
                    take(path, name, buffer_place)
                buffer_place += 1
        self.names = tuple(names)
        self._pick = _picker(places)

    def modules(self, root: torch.nn.Module) -> list[torch.nn.Module] | None:
        """The modules, where `root` has those of the walk, each where it was; None where it has not."""
        modules: list[Any] = [ref() for ref in self._refs]
        ids = [*map(id, modules), id(None)]
        if modules[0] is not root or ids.index(id(None)) != len(modules) or list(map(type, modules)) != self._types:
            return None
        children = list(map(_children, modules))
        if not self._children.are_of(children):
            return None
        if tuple(map(id, self._children.values(children))) != tuple(self._child_ids(ids)):
            return None
        return modules

    def _held(self, modules: Sequence[torch.nn.Module]) -> list[Any] | None:
        """All parameters, then all buffers, of every module in turn, None where one is registered as that; None where
        they are called in another way.
        """
        parameters, buffers = list(map(_parameters, modules)), list(map(_buffers, modules))
        if not self._parameters.are_of(parameters) or not self._buffers.are_of(buffers):
            return None
        return self._parameters.values(parameters) + self._buffers.values(buffers)

    def of_kind(self, kind: type) -> list[int]:
        """Which of the modules are of a kind."""
        if kind not in self._kinds:
            self._kinds[kind] = [index for index, found in enumerate(self._types) if issubclass(found, kind)]
        return self._kinds[kind]

    def held(self, modules: list[torch.nn.Module]) -> Held | None:
        """What they hold; None where it is called or shared in another way than it was."""
        transient = list(map(_transient, modules))
        if list(map(len, transient)) != self._num_transient:
            return None
        if any(transient[index] != names for index, names in self._transient):
            return None
        found = self._held(modules)
        if found is None or list(map(type, found)) != self._held_types:
            return None
        if any(found[at] is not found[before] for at, before in self._ties):
            return None
        tensors = self._pick(found)
        if len(set(map(id, tensors))) != len(tensors):
            return None
        return Held(names=self.names, tensors=tensors)


def _walked(root: torch.nn.Module) -> tuple[_Walk | None, list[torch.nn.Module]]:
    """A new walk, and the modules in its order; no walk where what a module has does not follow from what it holds."""
    paths = list(_paths(root))
    modules = [module for _, module in paths]
    ordinary = all(map(_is_ordinary, set(map(type, modules)))) and not any(
        name in vars(module) for module in modules for name in _WALKS
    )
    return (_Walk(paths) if ordinary else None), modules


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


class _Names:
    """What dicts have as keys: compared with what the same dicts, or those in their places, have later.

    Args:
        dicts: one a module.
    """

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        self._sizes = list(map(len, dicts))
        full = [index for index, size in enumerate(self._sizes) if size]
        self._full: Callable[[Sequence[Any]], Sequence[Any]] = list if len(full) == len(dicts) else _picker(full)
        self._keys = list(_flat(self._full(dicts)))

    def are_of(self, dicts: Sequence[dict[str, Any]]) -> bool:
        """Whether each has the keys that it had, in their order."""
        return list(map(len, dicts)) == self._sizes and list(_flat(self._full(dicts))) == self._keys

    def values(self, dicts: Sequence[dict[str, Any]]) -> list[Any]:
        """Their values, one dict after the other."""
        return list(_flat(map(_values, self._full(dicts))))


def _picker(indexes: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """`itemgetter` of any number of indexes, none and one too."""
    return itemgetter(*indexes) if len(indexes) > 1 else lambda items: [items[index] for index in indexes]
