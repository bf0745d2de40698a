"""Loaders of a PEFT model of this process: of one of its adapters, and of its base; each leaves the other alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from weightsync.errors import (
    ConfigError,
    LoadError,
    ManifestMismatchError,
    StateError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.load.module import ModuleWeightLoader
from weightsync.load.patching import Change, LivePatch
from weightsync.load.placing import walked
from weightsync.load.whole import MAX_TOLD, check_closed
from weightsync.module_walk import clean_name, module_tensors
from weightsync.peft_model import adapter_name, adapter_tensors, base_names, lora_layers, peft_model_in
from weightsync.types import Manifest, Version


class _PartLoader(ModuleWeightLoader):
    """Loads a part of a PEFT model, which has to be what the model computes with."""

    part = "the base"

    def __init__(self, model: Any, *, in_place: bool) -> None:
        self._model = model
        self._tensors = self._now()
        super().__init__(_view(self._tensors), in_place=in_place)

    def begin(self, manifest: Manifest) -> None:
        self._check_fits(manifest)
        super().begin(manifest)

    def begin_patch(self, manifest: Manifest) -> None:
        self._check_unmerged(StateError)  # this passes; UnsupportedError says that the model can never be patched
        self._check_fits(manifest)
        super().begin_patch(manifest)

    def prepare_patch(self) -> Iterator[Change]:
        self._check_model()
        return super().prepare_patch()

    def verify(self) -> None:
        super().verify()
        self._check_model()

    def commit(self, version: Version) -> None:
        self._check_unmerged()  # alone: the rest of `_check_model` would take 0.1 s of the pause, and more
        super().commit(version)

    def _unapply(self, patch: LivePatch) -> None:
        self._check_unmerged()
        super()._unapply(patch)

    def _live(self) -> Mapping[str, torch.Tensor]:
        self._check_model()
        return super()._live()

    def _now(self) -> dict[str, torch.Tensor]:
        """The part's tensors, as the model has them."""
        return _base_tensors(self._model)

    def _check_fits(self, manifest: Manifest) -> None:
        """No bracket is open, and the model can take what is announced."""
        check_closed(self._manifest)
        self._check_model()

    def _check_model(self) -> None:
        """What is loaded is what the model computes with.

        Raises:
            LoadError: the part is other tensors: somebody has added or replaced it.
            UnsupportedError: an adapter is merged in place.
        """
        now = self._now()
        if now.keys() != self._tensors.keys() or any(now[name] is not held for name, held in self._tensors.items()):
            raise LoadError(f"{self.part} of the model was replaced since its loader was made: make another loader")
        self._check_unmerged()

    def _check_unmerged(self, kind: type[WeightSyncError] = UnsupportedError) -> None:
        """Raises an error of that kind where an adapter is merged in place."""
        for path, module in zip(*walked(self._model), strict=True):
            # Most are none of PEFT's, and a module is slow to say that it has no such attribute.
            merged = getattr(module, "merged_adapters", None) if hasattr(type(module), "merged_adapters") else None
            if merged:
                raise kind(
                    f"adapter {merged[0]!r} is merged in place: the model computes with no adapter then, nor with its "
                    "own base; unmerge it first",
                    parameter=clean_name(path),
                )


class PeftAdapterLoader(_PartLoader):
    """Loads versions of one adapter into a PEFT model, as `ModuleWeightLoader` does it: staged in a second set of the
    adapter's tensors, proved, swapped; a change is written where it is live, and can be undone.

    The adapter has to be there: of the rank, alpha and modules that are published, as `get_peft_model(model, config)`
    makes it. Its dtype has to be the published one.

    Args:
        model: a PEFT model.
        adapter: which of its adapters; its only one where not given.
        in_place: see `ModuleWeightLoader`.

    Raises:
        ConfigError: it is no PEFT model, or has no such adapter.
        UnsupportedError: the adapter is not LoRA.
    """

    artifacts: ClassVar[frozenset[str]] = frozenset({"lora"})

    def __init__(self, model: torch.nn.Module, *, adapter: str | None = None, in_place: bool = False) -> None:
        found = _peft_model(model, "PeftAdapterLoader")
        self._adapter = adapter_name(found, adapter)
        self.part = f"adapter {self._adapter!r}"
        super().__init__(found, in_place=in_place)

    def base_tensors(self) -> Mapping[str, torch.Tensor]:
        return _base_tensors(self._model)

    def _now(self) -> dict[str, torch.Tensor]:
        return adapter_tensors(self._model, self._adapter) if self._adapter in self._model.peft_config else {}

    def _check_fits(self, manifest: Manifest) -> None:
        """Rank and scaling of every module are those of the model's own slot, too.

        Raises:
            ManifestMismatchError: they are not. Nothing was changed.
        """
        super()._check_fits(manifest)
        if manifest.adapter is None:  # the worker refuses a model
            return
        wrong = []
        for path, layer in lora_layers(self._model, self._adapter):
            rank, scaling = manifest.adapter.rank_of(path), manifest.adapter.scaling_of(path)
            if rank != layer.r[self._adapter]:
                wrong.append(f"{path}: the adapter has rank {rank}, here it has {layer.r[self._adapter]}")
            elif scaling != layer.scaling[self._adapter]:
                wrong.append(f"{path}: its scaling is {scaling:g}, here it is {layer.scaling[self._adapter]:g}")
        if wrong:
            more = len(wrong) - MAX_TOLD
            raise ManifestMismatchError(
                "; ".join(wrong[:MAX_TOLD]) + (f" and {more} more" if more > 0 else ""),
                parameter=wrong[0].partition(":")[0],
                version=str(manifest.version),
                state_left="nothing was changed",
            )


class PeftBaseLoader(_PartLoader):
    """Loads versions of a PEFT model's base, under the names that it has without PEFT; its adapters are not touched.

    Args:
        model: a PEFT model.
        in_place: see `ModuleWeightLoader`.

    Raises:
        ConfigError: it is no PEFT model.
    """

    def __init__(self, model: torch.nn.Module, *, in_place: bool = False) -> None:
        super().__init__(_peft_model(model, "PeftBaseLoader"), in_place=in_place)


def _peft_model(model: torch.nn.Module, loader: str) -> Any:
    found = peft_model_in(model)
    if found is None:
        raise ConfigError(f"{loader} takes a PEFT model, not a {type(model).__name__}")
    return found


def _base_tensors(model: Any) -> dict[str, torch.Tensor]:
    names = base_names(model)
    live = ((names.get(clean_name(key)), tensor) for key, tensor in module_tensors(model))
    return {name: tensor for name, tensor in live if name is not None}


def _view(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module that holds these very tensors under these names."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        holder = root
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, torch.nn.Module())
            holder = holder._modules[part]  # type: ignore[assignment]
        if isinstance(tensor, torch.nn.Parameter):
            holder.register_parameter(last, tensor)
        else:
            holder.register_buffer(last, tensor)
    return root
