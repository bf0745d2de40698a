"""VLLMWeightLoader: one vLLM worker's model, loaded by vLLM's own layerwise reload.

Who owns what, and how often each byte is copied: an update borrows the transport's bucket; `load_weights` copies it
once, to staging memory on the host (staged) or to a clone (in place), since vLLM keeps references to what it was given
until a module is complete. vLLM's loaders then copy the worker's part of it into a fresh parameter, repack that, and
copy it into the live one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from weightsync.clients.vllm_messages import UNPROVABLE
from weightsync.errors import (
    LoadError,
    ManifestMismatchError,
    StateError,
    UnsupportedError,
    as_weightsync_error,
)
from weightsync.load.base import WeightLoader
from weightsync.load.vllm_checkpoint import CheckpointTensors
from weightsync.load.vllm_reload import LayerwiseReload
from weightsync.load.whole import is_of, whole_tensor
from weightsync.tensors import torch_dtype
from weightsync.types import HeldTensor, Manifest, TensorSpec, Update, Version

_logger = logging.getLogger(__name__)


class VLLMWeightLoader(WeightLoader):
    """Loads checkpoint-named tensors into a vLLM model; each worker is given all of them and keeps its shard.

    Staged (default): `load_weights` copies into host memory, once the size of the model in every worker, allocated at
    the first sync and kept. vLLM generates between chunks. `commit`, while it is paused, reloads all layers from there.
    An abort before commit loses nothing. In place: chunks go straight into vLLM's reload, no staging; vLLM has to be
    paused from the first chunk on, and an abort leaves the model half-loaded (`healthy` is False) until a later commit.

    Args:
        model: the worker's model, as vLLM built it; None where it comes later (`bind`).
        model_config: vLLM's; its `hf_config` tells what a checkpoint holds, its `dtype` what it is served as.
        vllm_config: vLLM's; current while weights are loaded. None in releases that give a backend none.
        in_place: see above.
    """

    def __init__(
        self, model: nn.Module | None, *, model_config: Any, vllm_config: Any = None, in_place: bool = False
    ) -> None:
        self._model_config = model_config
        self._vllm_config = vllm_config
        self._manifest: Manifest | None = None
        self._specs: dict[str, TensorSpec] = {}
        self._staging: dict[str, torch.Tensor] = {}
        self._loaded: set[str] = set()
        self._healthy = True
        self._reload: LayerwiseReload | None = None  # open: the live model is on the meta device, in part or whole
        self._broken: str | None = None
        self.writes_live = in_place
        self._model: nn.Module | None = None
        if model is not None:
            self.bind(model)

    def bind(self, model: nn.Module) -> None:
        """Takes the model, where the constructor had none. Idempotent.

        Without vLLM's own model config what is known of it is taken from the model.
        """
        if self._model is model:
            return
        self._model = model
        if self._model_config is None:
            dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
            self._model_config = SimpleNamespace(hf_config=getattr(model, "config", None), dtype=dtype)
        self._expected = CheckpointTensors(model, self._model_config)

    @property
    def healthy(self) -> bool:
        """See the base class."""
        return self._healthy

    def set_in_place(self, in_place: bool) -> None:
        """Chooses between staging and loading in place, for the next bracket.

        Raises:
            StateError: a bracket is open.
        """
        if self._manifest is not None:
            raise StateError("a load is under way: commit or abort it first", version=str(self._manifest.version))
        self.writes_live = in_place
        if in_place:
            self._staging = {}

    def begin(self, manifest: Manifest) -> None:
        """See the base class."""
        if self._manifest is not None:
            raise StateError("a load is under way: commit or abort it first", version=str(self._manifest.version))
        if self._broken is not None:
            raise StateError(f"this engine has to be restarted: {self._broken}", state_left="half-loaded")
        if self._model is None:
            raise UnsupportedError("this release of vLLM has not shown its model yet", state_left="nothing was changed")
        self._expected.check(manifest)
        self._specs = manifest.by_name()
        if not self.writes_live:
            pinned = torch.cuda.is_available()
            self._staging = {
                name: spare
                if (spare := self._staging.get(name)) is not None and is_of(spare, spec)
                else torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="cpu", pin_memory=pinned)
                for name, spec in self._specs.items()
            }
        self._loaded = set()
        self._manifest = manifest

    def load_weights(self, updates: Iterable[Update]) -> None:
        """See the base class."""
        self._open_bracket()
        if not self.writes_live:
            for update in updates:
                tensor = whole_tensor(update, self._specs, self._loaded)
                self._staging[update.name].copy_(tensor)
                self._loaded.add(update.name)
            return
        fresh: list[tuple[str, torch.Tensor]] = []
        for update in updates:
            fresh.append(
                (self._expected.canonical(update.name), whole_tensor(update, self._specs, self._loaded).clone())
            )
            self._loaded.add(update.name)
        if self._reload is None:
            self._healthy = False
            self._reload = self._open_reload()
        self._reload.load(fresh)

    def verify(self) -> None:
        """See the base class."""
        self._open_bracket()
        if missing := sorted(self._specs.keys() - self._loaded):
            raise ManifestMismatchError(f"{len(missing)} tensors did not arrive", parameter=missing[0])

    def live_tensors(self) -> Iterator[HeldTensor]:
        """See the base class.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(UNPROVABLE)

    def commit(self, version: Version) -> None:
        """See the base class. Seconds for a large model: every byte is copied to the device and repacked.

        Raises:
            LoadError: vLLM could not load, or did not load everything. The model is half-loaded until a later commit.
        """
        manifest = self._open_bracket()
        if manifest.version != version or self._loaded != self._specs.keys():
            raise StateError(f"what was loaded is {manifest.version}, {len(self._loaded)} tensors, not {version}")
        self._healthy = False
        try:
            if self._reload is None:
                self._reload = self._open_reload()
                self._reload.load((self._expected.canonical(name), self._staging[name]) for name in self._specs)
            self._reload.check(strict=not self._expected.known)
            self._reload.finish()
        except Exception as error:
            raise as_weightsync_error(
                error, LoadError, "vLLM failed to load", version=str(version), state_left="half-loaded: not served"
            ) from error
        self._reload = None
        self._manifest = None
        self._healthy = True

    def abort(self, reason: str) -> None:
        """See the base class. Where a reload is open vLLM's layers get their tensors back, with mixed content."""
        self._manifest = None
        if self._reload is not None:
            reload, self._reload = self._reload, None
            try:
                reload.finish()
            except Exception as error:  # a next reload would start from what this one left in vLLM's books
                self._broken = f"vLLM could not close a reload that was aborted ({reason}): {error!r}"
                _logger.warning("%s", self._broken)

    def _open_bracket(self) -> Manifest:
        if self._manifest is None:
            raise StateError("no load is under way: begin first", state_left="nothing was changed")
        return self._manifest

    def _open_reload(self) -> LayerwiseReload:
        assert self._model is not None  # begin has looked
        return LayerwiseReload(self._model, self._model_config, self._vllm_config)
