"""Which layers of a vLLM model a checkpoint's tensors go to, and those layers as a model of their own.

vLLM's layerwise reload calls a loader of its own for each tensor; it is watched there in a full load. A later change of
a few tensors then reloads the layers that have a part of them, with all that goes into those layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from weightsync.load.spans import storage_id

_LOADER = "online_process_loader"
"""vLLM's own name of the loader that its layerwise reload puts around a parameter's: it is told and taken off by it."""
_INNER = "weightsync_inner"
"""Under this attribute our loader has vLLM's, which may keep it from one reload to the next (0.32 does)."""


class LayerNotes:
    """What goes into which layer, noted while a reload loads.

    Attributes:
        odd: why it is not known, in words; None while it is.
    """

    def __init__(self) -> None:
        self.odd: str | None = None
        self._layers: dict[str, set[str]] = {}
        self._names: dict[str, dict[str, None]] = {}
        self._given: dict[int, tuple[str, torch.Tensor]] = {}  # the tensor too, so that no address is used again
        self._watches = False

    def watch(self, model: nn.Module) -> None:
        """Puts itself around every loader of a reload that is open, in the place of the notes before, until `done`."""
        self._watches = True
        for path, layer in model.named_modules():
            for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                loader: Any = getattr(tensor, "weight_loader", None)
                if getattr(loader, "__name__", None) == _LOADER:
                    tensor.weight_loader = self._watched(getattr(loader, _INNER, loader), path)

    def giving(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same; what is loaded from them is known by its memory."""
        for name, tensor in weights:
            if tensor.numel():
                self._given[storage_id(tensor)] = name, tensor
            yield name, tensor

    def done(self) -> None:
        """Nothing more is given: what is loaded from here on is not noted."""
        self._given, self._watches = {}, False

    def layers_of(self, names: Iterable[str]) -> set[str]:
        """The layers that have a part of these tensors, by their paths; and of all else that goes into these: a tensor
        that is given to the model reaches all of its layers, and each has to be open."""
        paths: set[str] = set()
        found = {path for name in names for path in self._layers.get(name, ())}
        while found - paths:
            paths |= found
            found = {path for name in self.names_in(paths) for path in self._layers.get(name, ())}
        return paths

    def names_in(self, paths: Collection[str]) -> list[str]:
        """All tensors that go into these layers, once each, layer by layer."""
        return list(dict.fromkeys(name for path in sorted(paths) for name in self._names.get(path, ())))

    def unknown(self, names: Iterable[str]) -> str | None:
        """Why the layers of one of these tensors are not known, in words; None where all are."""
        if self.odd is not None:
            return self.odd
        return next((f"{name} goes into none of its layers" for name in names if name not in self._layers), None)

    def _watched(self, loader: Callable[..., Any], path: str) -> Callable[..., Any]:
        @functools.wraps(loader)
        def noted(*args: Any, **options: Any) -> Any:
            if self._watches:
                self._note(path, [*args[1:], *options.values()])
            return loader(*args, **options)

        noted.__name__ = _LOADER
        setattr(noted, _INNER, loader)
        return noted

    def _note(self, path: str, values: Iterable[object]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.numel() and not value.is_meta:
                name, _ = self._given.get(storage_id(value), (None, None))
                if name is None:
                    self.odd = f"{path or 'the model'} is loaded with what is computed from the checkpoint's tensors"
                    return
                self._layers.setdefault(name, set()).add(path)
                self._names.setdefault(path, {})[name] = None


class SomeLayers:
    """Some layers of a model, for vLLM's reload: what it asks of a model that has no layers besides.

    A layer without parameters that works on those of its neighbours (attention, e.g.) goes with them.

    Args:
        model: it is not changed.
        paths: of the layers.
    """

    def __init__(self, model: nn.Module, paths: Collection[str]) -> None:
        parents = tuple(f"{parent}." for path in paths if (parent := path.rpartition(".")[0]))
        self._some = {
            path: layer
            for path, layer in model.named_modules()
            if path in paths or (_works_on_others(layer) and path.startswith(parents))
        }

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The layers, by their paths in the model; nothing that lies in them."""
        yield from self._some.items()

    def modules(self) -> Iterator[nn.Module]:
        """Likewise."""
        yield from self._some.values()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The layers' own, by their names in the model."""
        for path, layer in self._some.items():
            yield from layer.named_parameters(prefix=path, recurse=False)


def _works_on_others(layer: nn.Module) -> bool:
    own = next(layer.parameters(), None)
    return own is None and hasattr(layer, "process_weights_after_loading")
