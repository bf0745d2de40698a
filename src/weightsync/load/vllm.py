"""VLLMWeightLoader: one vLLM worker's model, loaded by vLLM's own layerwise reload.

Who owns what, and how often each byte is copied: an update borrows the transport's bucket; `load_weights` copies it
once, to staging memory on the host (staged) or to a clone (in place), since vLLM keeps references to what it was given
until a module is complete. vLLM's loaders then copy the worker's part of it into a fresh parameter, repack that, and
copy it into the live one.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from weightsync.errors import LoadError, StateError, UnsupportedError, as_weightsync_error
from weightsync.handles.vllm_messages import UNPROVABLE
from weightsync.load.planned import PlannedLoader
from weightsync.load.vllm_checkpoint import CheckpointTensors
from weightsync.load.vllm_layers import LayerNotes
from weightsync.load.vllm_reload import LayerwiseReload, loading
from weightsync.load.vllm_trust import MAPS, doubts
from weightsync.load.whole import check_closed, check_complete, check_open, lent, staging_for, whole_tensor
from weightsync.types import Manifest, Update, Version

_logger = logging.getLogger(__name__)


class VLLMWeightLoader(PlannedLoader):
    """Loads checkpoint-named tensors into a vLLM model; each worker is given all of them and keeps its shard.

    Staged (default): `load_weights` copies into host memory, once the size of the model in every worker, allocated at
    the first sync and kept. vLLM generates between chunks. `commit`, while it is paused, reloads all layers from there.
    An abort before commit loses nothing. In place: chunks go straight into vLLM's reload, no staging; vLLM has to be
    paused from the first chunk on, and an abort leaves the model half-loaded (`healthy` is False) until a later commit.

    Staged, each full commit ends with a look at the live tensors, see `PlannedLoader`. Where one is repacked, quantised
    or computed, `marked` says why. Then there is no proof, and a patch that changes one reloads the layers that it goes
    to, and those alone, by vLLM's own reload.

    Args:
        model: the worker's model, as vLLM built it; None where it comes later (`bind`).
        model_config: vLLM's; its `hf_config` tells what a checkpoint holds, its `dtype` what it is served as.
        vllm_config: vLLM's; current while weights are loaded. None in releases that give a backend none.
        in_place: see above.
    """

    unprovable_at_load: ClassVar[str] = UNPROVABLE

    def __init__(
        self, model: nn.Module | None, *, model_config: Any, vllm_config: Any = None, in_place: bool = False
    ) -> None:
        super().__init__()
        self._model_config = model_config
        self._vllm_config = vllm_config
        self._reload: LayerwiseReload | None = None  # open: the live model is on the meta device, in part or whole
        self._broken: str | None = None
        self._notes = LayerNotes()  # of the last full load
        self._sources: dict[str, str] = {}  # what vLLM calls a tensor -> the manifest's name
        self._unlayered: str | None = None
        self._derived: str | None = None  # a layer that decodes with what it has computed from its weights
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

    def set_in_place(self, in_place: bool) -> None:
        """Chooses between staging and loading in place, for the next bracket.

        Raises:
            StateError: a bracket is open.
        """
        check_closed(self._manifest)
        self.writes_live = in_place
        if in_place:
            self._staging, self._base, self.proved = {}, None, False

    def begin(self, manifest: Manifest) -> None:
        self._check(manifest)
        self.settle()
        if self._begin_change(manifest):
            return
        with self._beginning():
            self._specs = manifest.by_name()
            if not self.writes_live:
                self._trace(manifest)
                self._base = None
                self._staging = staging_for(self._specs, self._staging, pinned=torch.cuda.is_available())
        self._loaded = set()
        self._manifest = manifest

    def _check(self, manifest: Manifest) -> None:
        check_closed(self._manifest)
        if self._broken is not None:
            raise StateError(f"this engine has to be restarted: {self._broken}", state_left="half-loaded")
        if self._model is None:
            raise UnsupportedError("this release of vLLM has not shown its model yet", state_left="nothing was changed")
        self._expected.check(manifest)

    def _canonical(self, name: str) -> str:
        return self._expected.canonical(name)

    def _loading(self) -> contextlib.AbstractContextManager[Any]:
        return loading(self._vllm_config)

    def _doubts(self) -> Mapping[str, str]:
        return doubts(self._module)

    def _unloaded(self) -> Collection[str]:
        return MAPS

    def load_weights(self, updates: Iterable[Update]) -> None:
        check_open(self._manifest)
        if self._patch is not None and not self._comes_whole:
            self._add(self._patch, updates)
            return
        if not self.writes_live:
            self._take_whole(updates)
            return
        fresh: list[tuple[str, torch.Tensor]] = []
        for update in updates:
            fresh.append(
                (self._expected.canonical(update.name), whole_tensor(update, self._specs, self._loaded).clone())
            )
            self._loaded.add(update.name)
        if self._reload is None:
            self._healthy = self.proved = False
            self._reload = self._open_reload()
        self._reload.load(fresh)

    @property
    def unprovable(self) -> str | None:
        """Why live weights could not be compared, in words; None where they were, or nothing was loaded yet."""
        return f"vLLM fuses and repacks weights: {self.not_as_they_come}" if self.marked else None

    def verify(self) -> None:
        check_open(self._manifest)
        check_complete(self._specs, self._loaded)
        self._prepare_whole()

    def commit(self, version: Version) -> None:
        """See the base class. In full it takes seconds for a large model: every byte is copied to the device and
        repacked. A patch takes the time of its elements.

        Raises:
            LoadError: vLLM could not load, or did not load everything. The model is half-loaded until a later commit.
                A patch that fails is undone.
        """
        manifest = check_open(self._manifest)
        if self._patch is not None:
            self._commit_patch(self._patch, manifest, version)
            return
        if manifest.version != version or self._loaded != self._specs.keys():
            raise StateError(f"what was loaded is {manifest.version}, {len(self._loaded)} tensors, not {version}")
        if self._writes_by_plan:
            self._commit_by_plan(version)
        else:
            self._commit_by_reload(version)
        self.written = None
        self._manifest = None
        self._base = None if self.writes_live else version
        self._healthy = True
        if lent(self._staging, self._module):  # then it is live itself: comparing it says nothing
            self._staging, self._base, self.proved = {}, None, False

    def _commit_by_plan(self, version: Version) -> None:
        """What is live was found as it was staged by the last load: so this one is put there, and compared again."""
        assert self._plan is not None
        self._check_moved(in_pause=True)
        self._healthy = False
        try:
            self._plan.write(self._staging)
            self._compare()
        except Exception as error:
            self.distrust()
            raise as_weightsync_error(
                error, LoadError, "writing failed", version=str(version), state_left="half-loaded: not served"
            ) from error
        if not self.proved:
            why = next(iter(self.marked.values()), "the live tensors lie elsewhere")
            self.distrust()
            self._plan = None
            raise LoadError(f"what was written is not live: {why}", state_left="half-loaded: not served")

    def _commit_by_reload(self, version: Version) -> None:
        """By vLLM's own reload."""
        self._healthy = self.proved = False
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
        self._notes, self._reload = self._reload.notes, None
        self._sources = {self._canonical(name): name for name in self._specs}
        self._compare()
        self._unlayered = self._why_unlayered() if self.marked else None
        layers = self._module.named_modules()
        self._derived = next((path for path, each in layers if hasattr(each, "W_UV") or hasattr(each, "W_UK_T")), None)

    def abort(self, reason: str) -> None:
        """See the base class. Where a reload is open vLLM's layers get their tensors back, with mixed content."""
        self._leave_no_trace()
        self._manifest = None
        self._drop_patch()
        if self._reload is not None:
            reload, self._reload = self._reload, None
            self._close(reload, reason)

    def _close(self, reload: LayerwiseReload, reason: str) -> None:
        try:
            reload.close()
        except Exception as error:  # a next reload would start from what this one left in vLLM's books
            self._broken = f"vLLM could not close a reload that was aborted ({reason}): {error!r}"
            _logger.warning("%s", self._broken)
        reload.put_back()

    def _not_by_layer(self) -> str | None:
        if self._derived is not None:  # MLA: a change of its projection would leave that as it was
            return f"{self._derived} decodes with what it has computed from its weights: such models come in full"
        why = super()._not_by_layer()
        return None if why is None or self._unlayered is None else f"{why}; {self._unlayered}"

    def _why_unlayered(self) -> str | None:
        """Why vLLM can't reload some of its layers, in words; known before it is asked for, in a pause."""
        if getattr(self._module, "_do_torchao_reload", False):
            return "torchao reloads all layers together"
        try:
            self._open_reload(only=()).finish()
        except Exception as error:
            return f"this release of vLLM can't reload some layers alone: {type(error).__name__}: {error}"
        return self._notes.unknown(map(self._canonical, self.marked))

    @property
    def takes_patch(self) -> bool:
        return self._broken is None and super().takes_patch

    def _load_layers(self, names: Sequence[str]) -> None:
        if self._broken is not None:
            raise StateError(f"this engine has to be restarted: {self._broken}")
        layers = self._notes.layers_of(map(self._canonical, names))
        reload = self._open_reload(only=layers)
        try:
            reload.load((name, self._staging[self._sources[name]]) for name in self._notes.names_in(layers))
            reload.check(strict=not self._expected.known)
            reload.finish()
        except Exception as error:
            self._close(reload, repr(error))
            raise

    @property
    def _module(self) -> nn.Module:
        assert self._model is not None  # begin has looked
        return self._model

    def _open_reload(self, only: Collection[str] | None = None) -> LayerwiseReload:
        return LayerwiseReload(self._module, self._model_config, self._vllm_config, only=only)
