"""Extractors of a PEFT model: of an adapter, of its base, and of both together.

Whatever shards it (nothing, FSDP2, DeepSpeed):

    adapter_extractor   an adapter's tensors, under the names of PEFT's own file, with its configuration and its base
    base_extractor      the base's tensors, under the names that they have without PEFT
    merged_extractor    the same, with an adapter merged into them on their way out; the trainer's are only read
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Set
from typing import Any

import torch
from msgspec.structs import replace

from weightsync.errors import ConfigError, UnsupportedError
from weightsync.extract.base import WeightExtractor
from weightsync.extract.deepspeed import DeepSpeedWeightExtractor
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.peft_model import adapter_name, adapter_names, base_names, lora_layers, peft_model_in, saved_copies
from weightsync.plan.peft_config import published_adapter
from weightsync.types import Adapter, Base

_OWN = frozenset(vars(torch.nn.Module()))
_TIED = (
    "the adapter changes one of two tied weights, which an engine has as one: publish the adapter itself, or untie them"
)


def adapter_of(model: Any, name: str) -> Adapter:
    """An adapter's configuration, as it is published; bound to nothing.

    Raises:
        UnsupportedError: a module's scaling is not what the configuration says: somebody has set it by hand.
        InvalidRequestError: it has what no adapter has.
    """
    layers = dict(lora_layers(model, name))
    ranks = {path: (layer.r[name], layer.lora_alpha[name]) for path, layer in layers.items()}
    adapter = published_adapter(model.peft_config[name].to_dict(), ranks, None)
    for path, layer in layers.items():
        same = math.isclose(adapter.scaling_of(path), layer.scaling[name], rel_tol=1e-6)  # scaled, and scaled back
        if not same or adapter.rank_of(path) != layer.r[name]:
            raise UnsupportedError(
                f"its scaling is {layer.scaling[name]:g}, its configuration says {adapter.scaling_of(path):g}: what "
                "was set by hand is not in PEFT's file, and is not published",
                parameter=path,
            )
    return adapter


class _AdapterReader:
    """`adapter_of`, again and again: where nothing was set since the last time, that costs a look at each layer."""

    def __init__(self, model: Any, name: str, tensors: Set[str]) -> None:
        self._model, self._name, self._tensors = model, name, tensors
        self._layers = [layer for _, layer in lora_layers(model, name)]
        self._seen: object = None

    def __call__(self) -> Adapter:
        name = self._name
        set_now = [(layer.r.get(name), layer.lora_alpha.get(name), layer.scaling.get(name)) for layer in self._layers]
        seen = self._model.peft_config[name].to_dict(), set_now
        if seen != self._seen:
            if adapter_names(self._model, name).keys() != self._tensors:  # it was made anew, and those are extracted
                raise ConfigError(f"adapter {name!r} has other tensors than it had: make a new publisher, or push")
            self._adapter = adapter_of(self._model, name)
            self._seen = seen
        return self._adapter


class _Merging:
    """Merges an adapter into each of the base's tensors as it is gathered. All ranks gather the same ones in one order.

    A tensor's adapter is gathered with it; PEFT's own `merge` runs on a copy of that layer, which is gone behind it.
    """

    model: torch.nn.Module
    merged: str
    _layer_of: dict[int, tuple[Any, str]]

    def _prepare(self) -> None:
        super()._prepare()  # type: ignore[misc]
        self._layer_of = {}
        modules = self.model.modules()
        owners = Counter(id(tensor) for module in modules for tensor in module._parameters.values())
        gathered = {id(tensor) for _, tensor in self._named_tensors()}  # type: ignore[attr-defined]
        for path, layer in lora_layers(peft_model_in(self.model), self.merged):
            if self.merged in layer.merged_adapters:
                raise UnsupportedError("this adapter is merged in place: unmerge it first", parameter=path)
            if layer.merged_adapters:
                others = ", ".join(layer.merged_adapters)
                raise UnsupportedError(f"another adapter is merged in place here: {others}", parameter=path)
            changed = ["weight", "bias"] if getattr(layer, "lora_bias", {}).get(self.merged) else ["weight"]
            base = layer.get_base_layer()
            for name in changed:
                tensor = getattr(base, name, None)
                if tensor is None and name == "bias":
                    continue
                if id(tensor) not in gathered:
                    raise UnsupportedError(
                        f"its base, a {type(base).__name__}, has no {name} of its own that the adapter could be merged "
                        "into, as where it is quantized: publish the adapter itself",
                        parameter=path,
                    )
                if owners[id(tensor)] > 1:
                    raise UnsupportedError(_TIED, parameter=path)
                self._layer_of[id(tensor)] = layer, name
        saved = list(saved_copies(peft_model_in(self.model), self.merged))
        for path, tensor, copy in saved:
            same = [each for _, tied, each in saved if tied is tensor]
            if len(same) != owners[id(tensor)] or any(each is not copy for each in same):
                raise UnsupportedError(f"{_TIED}, or train both as one (ensure_weight_tying=True)", parameter=path)

    def _gather(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        gather: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = super()._gather  # type: ignore[misc]
        found = self._layer_of.get(id(tensor))
        if found is None:
            return gather(tensor, dtype)
        layer, name = found
        merged = merged_copy(layer, self.merged, lambda each: gather(each, each.dtype))
        return getattr(merged, name).detach().to(dtype).contiguous()  # type: ignore[no-any-return]

    def _gathered(self, tensors: Any) -> Any:
        ours = [pair for pair in tensors if id(pair[0]) not in self._layer_of]
        return super()._gathered(ours)  # type: ignore[misc]

    def _can_shard(self, tensor: torch.Tensor) -> bool:
        return False  # what is merged is made tensor by tensor


def adapter_extractor(
    weights: torch.nn.Module, *, adapter: str | None = None, base: Base | None = None, **settings: Any
) -> WeightExtractor:
    """The extractor of an adapter: `PEFT's file`, tensor by tensor.

    Args:
        weights: a PEFT model, as the trainer has wrapped it.
        adapter: which; its only one where not given.
        base: what it is bound to; None: to nothing.
        settings: of `WeightExtractor`.

    Raises:
        ConfigError, UnsupportedError: see `adapter_name` and `adapter_of`.
    """
    model = _peft(weights)
    name = adapter_name(model, adapter)
    names = adapter_names(model, name)
    made = _extractor(weights, model, names.get, **settings)
    made.read_adapter = _AdapterReader(model, name, names.keys())
    made.adapter = replace(made.read_adapter(), base=base)
    return made


def base_extractor(weights: torch.nn.Module, **settings: Any) -> WeightExtractor:
    """The extractor of a PEFT model's base, under its own names; for its publication, and its digest."""
    model = _peft(weights)
    return _extractor(weights, model, base_names(model).get, **settings)


def merged_extractor(
    weights: torch.nn.Module,
    *,
    adapter: str | None = None,
    name_map: Callable[[str], str | None] | None = None,
    **settings: Any,
) -> WeightExtractor:
    """The extractor of a PEFT model's base with an adapter merged into it, under the base's own names.

    The trainer's weights are read and never written, so there is nothing to unmerge: each tensor is merged on its way
    out, by PEFT's own code, in a copy of its layer.

    Args:
        weights: a PEFT model, as the trainer has wrapped it.
        adapter: which; its only one where not given.
        name_map: from the base's name to the engine's.
        settings: of `WeightExtractor`.

    Raises:
        ConfigError, UnsupportedError: see `adapter_name`; or an adapter is merged in place.
    """
    model = _peft(weights)
    name = adapter_name(model, adapter)
    base = base_names(model, merged=name)

    def named(key: str) -> str | None:
        found = base.get(key)
        return found if found is None or name_map is None else name_map(found)

    return _extractor(weights, model, named, merged=name, **settings)


def _peft(weights: torch.nn.Module) -> Any:
    model = peft_model_in(weights)
    if model is None:
        raise ConfigError(f"adapter= and merge= are for a PEFT model, and this is a {type(weights).__name__}")
    return model


def _extractor(
    weights: torch.nn.Module,
    model: torch.nn.Module,
    name_map: Callable[[str], str | None],
    *,
    merged: str | None = None,
    **settings: Any,
) -> WeightExtractor:
    """Of the PEFT model in `weights`, or of `weights` where that is a DeepSpeed engine, which says more."""
    engine = any(kind.__module__.startswith("deepspeed.") for kind in type(weights).__mro__)
    is_deepspeed = engine or any(hasattr(tensor, "ds_shape") for tensor in weights.parameters())
    kind: Any = DeepSpeedWeightExtractor if is_deepspeed else FSDPWeightExtractor
    if merged is not None:
        kind = type(f"Merged{kind.__name__}", (_Merging, kind), {"merged": merged})
    made: WeightExtractor = kind(weights if is_deepspeed else model, name_map=name_map, **settings)
    return made


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
