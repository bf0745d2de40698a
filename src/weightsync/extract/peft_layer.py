"""A copy of one PEFT layer with other tensors in it, merged: the layer itself is only read. Imports no peft."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

_OWN = frozenset(vars(torch.nn.Module()))


def merged_copy(layer: Any, adapter: str, gather: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    """The base layer that PEFT's `layer.merge()` would leave, made of gathered copies.

    PEFT merges into the base's memory, and where adapters are bfloat16 on a CPU it puts new tensors into them too; none
    of these is the trainer's here.

    Args:
        gather: gives a tensor whole, in its dtype. Called for the same tensors in the same order on every rank.

    Returns:
        The copy's base layer; the caller's own.
    """
    copied: dict[int, torch.Tensor] = {}

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copied:
            copied[id(tensor)] = torch.nn.Parameter(gather(tensor).detach().clone(), requires_grad=False)
        return copied[id(tensor)]

    with torch.no_grad():
        copy = _standalone(layer, whole, only=adapter)
        copy.merge(safe_merge=False, adapter_names=[adapter])
        base: torch.nn.Module = copy.get_base_layer()
    return base


def _standalone(module: Any, whole: Callable[[torch.Tensor], torch.Tensor], *, only: str) -> Any:
    """A module of the same kind, without hooks, whose tensors are `whole` of its own; of adapters `only` one's."""
    made: Any = object.__new__(type(module))
    kept = {key: list(value) if isinstance(value, list) else value for key, value in vars(module).items()}
    for key in _OWN:
        if isinstance(kept.get(key), dict) and "hook" in key:
            kept[key] = OrderedDict()
    kept["_parameters"] = {
        key: None if tensor is None else whole(tensor)
        for key, tensor in module._parameters.items()
        if _is_kept(module, key, only)
    }
    kept["_buffers"] = {key: None if tensor is None else whole(tensor) for key, tensor in module._buffers.items()}
    kept["_modules"] = {
        key: None if child is None else _standalone(child, whole, only=only)
        for key, child in module._modules.items()
        if _is_kept(module, key, only)
    }
    object.__setattr__(made, "__dict__", kept)
    return made


def _is_kept(holder: Any, key: str, only: str) -> bool:
    return key == only or not isinstance(holder, torch.nn.ModuleDict | torch.nn.ParameterDict)
