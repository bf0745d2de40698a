"""VLLMWeightLoader: one vLLM worker's model, loaded by vLLM's own layerwise reload.

Who owns what, and how often each byte is copied: an update borrows the transport's bucket; `load_weights` copies it
once, to staging memory on the host (staged) or to a clone (in place), since vLLM keeps references to what it was given
until a module is complete. vLLM's loaders then copy the worker's part of it into a fresh parameter, repack that, and
copy it into the live one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from weightsync.errors import (
    LoadError,
    ManifestMismatchError,
    StateError,
    UnsupportedError,
    as_weightsync_error,
)
from weightsync.handles.vllm_messages import UNPROVABLE
from weightsync.load.base import WeightLoader
from weightsync.load.live import ShardPatch
from weightsync.load.live_plan import LivePlan
from weightsync.load.live_trace import trace
from weightsync.load.patching import Change
from weightsync.load.patching import kernels as patch_kernels
from weightsync.load.vllm_checkpoint import CheckpointTensors
from weightsync.load.vllm_reload import LayerwiseReload, loading
from weightsync.load.vllm_trust import doubts
from weightsync.load.whole import check_closed, check_complete, check_open, lent, stage, staging_for, whole_tensor
from weightsync.types import Box, Full, HeldTensor, Manifest, Patch, TensorSpec, Update, Version
from weightsync.types.live_layer import LiveLayer, layers_of

_logger = logging.getLogger(__name__)


class VLLMWeightLoader(WeightLoader):
    """Loads checkpoint-named tensors into a vLLM model; each worker is given all of them and keeps its shard.

    Staged (default): `load_weights` copies into host memory, once the size of the model in every worker, allocated at
    the first sync and kept. vLLM generates between chunks. `commit`, while it is paused, reloads all layers from there.
    An abort before commit loses nothing. In place: chunks go straight into vLLM's reload, no staging; vLLM has to be
    paused from the first chunk on, and an abort leaves the model half-loaded (`healthy` is False) until a later commit.

    Staged, each full commit ends with a look at the live tensors: through a `LivePlan`, traced from the model's own
    loader, every live element is compared with what was staged. Where all of them are there as they came, the live
    weights are proved, and a patch is written straight into them, with undo. Where one is repacked, quantised or
    computed, `marked` says why; then there is no proof, and whole versions are loaded.

    Args:
        model: the worker's model, as vLLM built it; None where it comes later (`bind`).
        model_config: vLLM's; its `hf_config` tells what a checkpoint holds, its `dtype` what it is served as.
        vllm_config: vLLM's; current while weights are loaded. None in releases that give a backend none.
        in_place: see above.

    Attributes:
        proved: whether the last full commit found every live element as it was staged.
        marked: why the live elements of a tensor can't be told, by the checkpoint's name; empty where all can.
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"full", "patch"})
    audits_copy: ClassVar[bool] = True

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
        self._plan: LivePlan | None = None  # of the manifest's tensors, as they were traced
        self._planned: frozenset[tuple[str, str, tuple[int, ...]]] = frozenset()
        self._base: Version | None = None  # what the staging holds, where that is what is served
        self._patch: ShardPatch | None = None  # of the bracket that is open
        self._undo: ShardPatch | None = None  # of the last commit
        self._undo_to: Version | None = None
        self._prepared = False
        self._covered = False
        self.proved = False
        self.marked: dict[str, str] = {}
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
        return self._healthy

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
        self._specs = manifest.by_name()
        if not self.writes_live:
            self._trace(manifest)
            self._base = None
            self._staging = staging_for(self._specs, self._staging, pinned=torch.cuda.is_available())
        self._loaded = set()
        self._manifest = manifest

    def begin_patch(self, manifest: Manifest) -> None:
        self._check(manifest)
        if self._reload is not None or not self._healthy:
            raise StateError("what is live is half-loaded: load it in full", version=str(manifest.version))
        self.settle()
        for why in self.marked.values():
            raise UnsupportedError(
                f"this model's live weights can't be patched: {why}", state_left="nothing was changed"
            )
        if self._base is None or self._plan is None or not self.proved:
            raise StateError(
                "what is live is not whole in host memory: a full load was aborted, or none was proved here",
                state_left="nothing was changed: load it in full",
            )
        self._check_moved()
        patch_kernels()
        self._specs = manifest.by_name()
        self._loaded = set()
        self._patch, self._prepared = ShardPatch(self._plan, self._staging), False
        self._manifest = manifest

    def _check(self, manifest: Manifest) -> None:
        check_closed(self._manifest)
        if self._broken is not None:
            raise StateError(f"this engine has to be restarted: {self._broken}", state_left="half-loaded")
        if self._model is None:
            raise UnsupportedError("this release of vLLM has not shown its model yet", state_left="nothing was changed")
        self._expected.check(manifest)

    def load_weights(self, updates: Iterable[Update]) -> None:
        check_open(self._manifest)
        if self._patch is not None:
            self._add(self._patch, updates)
            return
        if not self.writes_live:
            stage(updates, self._specs, self._staging, self._loaded)
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
        for name, why in self.marked.items():
            return (
                f"vLLM fuses and repacks weights: {len(self.marked)} tensors are not live as they come: {name}: {why}"
            )
        return None

    def layers(self) -> tuple[LiveLayer, ...]:
        """How a change enters the tensors of the last full load; empty before the first, and when it was in place."""
        if self._plan is None or self._base is None:
            return ()
        return layers_of({name: self.marked.get(name) for name in self._specs})

    def coverage(self) -> dict[str, list[Box]]:
        """Which parts of each tensor are live in this worker, of the layout of the bracket that is open."""
        return {} if self._plan is None else self._plan.coverage()

    def cover(self, workers: Sequence[Mapping[str, list[Box]]]) -> None:
        """Told, between `verify` and `commit` of a full load, the `coverage` of every worker of the engine: only where
        all of every tensor is live somewhere can its live weights be proved."""
        if self._plan is not None:
            self._plan = self._plan.without(self._plan.uncovered(workers, self._specs.values()))
            self._covered = True

    def verify(self) -> None:
        check_open(self._manifest)
        check_complete(self._specs, self._loaded)

    def prepare_patch(self) -> Iterator[Change]:
        if self._patch is None:
            return super().prepare_patch()
        self._check_moved()
        self._patch.gather()
        self._prepared = True
        return self._patch.changes()

    def live_tensors(self) -> Iterator[HeldTensor]:
        """See the base class; of this worker's parts.

        Raises:
            UnsupportedError: a full load is under way: vLLM's own loader puts it there in the commit. Or the live
                elements of a tensor can't be told; or those of a part of it lie in other workers.
        """
        if (self._manifest is not None and self._patch is None) or self._plan is None or not self.proved:
            raise UnsupportedError(next(iter(self.marked.values()), UNPROVABLE))
        self._check_moved()
        for name, spec in self._specs.items():
            for piece in self._plan.pieces[name]:
                yield HeldTensor(spec=spec, box=None if piece.box.shape == spec.shape else piece.box, tensor=piece.live)

    def audited(self) -> Iterator[HeldTensor]:
        """See the base class: the whole version, from host memory; this worker's live parts are compared with it."""
        if self._plan is None or self._base is None or not self.proved:
            raise UnsupportedError(next(iter(self.marked.values()), UNPROVABLE))
        self._check_moved()
        for name, spec in self._specs.items():
            yield HeldTensor(spec=spec, box=None, tensor=self._staging[name])

    def differs(self, name: str) -> str | None:
        plan = self._plan
        return None if plan is None else plan.compare(self._staging, only=name).get(name)

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
        self._reload = None
        self._manifest = None
        self._compare()
        self._base = None if self.writes_live else version
        self._healthy = True
        if lent(self._staging, self._module):  # then it is live itself: comparing it says nothing
            self._staging, self._base, self.proved = {}, None, False

    def rollback(self) -> None:
        if self._undo is None or self._manifest is not None:
            return super().rollback()
        undo, self._undo = self._undo, None
        self._take_back(undo)
        self._base, self._undo_to = self._undo_to, None
        undo.close()
        return None

    def settle(self) -> None:
        """See the base class: the base follows what is live."""
        if self._undo is None:
            return
        undo, self._undo = self._undo, None
        try:
            undo.follow()
        except Exception as error:
            self._base = None  # the next version comes in full
            _logger.error("the base of the next patch is lost: %s", error)
        finally:
            undo.close()

    def abort(self, reason: str) -> None:
        """See the base class. Where a reload is open vLLM's layers get their tensors back, with mixed content."""
        self._manifest = None
        if self._patch is not None:
            self._patch.close()
            self._patch = None
        if self._reload is not None:
            reload, self._reload = self._reload, None
            try:
                reload.finish()
            except Exception as error:  # a next reload would start from what this one left in vLLM's books
                self._broken = f"vLLM could not close a reload that was aborted ({reason}): {error!r}"
                _logger.warning("%s", self._broken)

    def _add(self, patch: ShardPatch, updates: Iterable[Update]) -> None:
        for update in updates:
            if isinstance(update, Full):
                raise UnsupportedError("the bracket of a patch takes patches alone", parameter=update.name)
            self._add_one(patch, update)

    def _add_one(self, patch: ShardPatch, update: Patch) -> None:
        if update.name not in self._specs:
            raise ManifestMismatchError("this tensor is not in the manifest", parameter=update.name)
        if update.name in self._loaded:
            raise ManifestMismatchError("this tensor came twice", parameter=update.name)
        self._prepared = False
        patch.add(update)
        self._loaded.add(update.name)

    def _commit_patch(self, patch: ShardPatch, manifest: Manifest, version: Version) -> None:
        if manifest.version != version or not self._prepared:
            raise StateError(f"what was prepared is {manifest.version if self._prepared else 'nothing'}, not {version}")
        self._check_moved(in_pause=True)
        patch.check_memory()
        self._prepared = self._healthy = False
        try:
            patch.apply()
        except BaseException as error:
            self._take_back(patch)
            raise as_weightsync_error(error, LoadError, "writing a patch failed; it was undone") from error
        self._healthy = True
        self._undo, self._patch = patch, None
        self._undo_to, self._base = self._base, version
        self._manifest = None

    def _take_back(self, patch: ShardPatch) -> None:
        self._healthy = False
        try:
            patch.undo()
        except BaseException as error:
            raise LoadError(
                f"a patch could not be undone: {error}", state_left="refuses to serve until the next full load"
            ) from error
        self._healthy = True

    def _trace(self, manifest: Manifest) -> None:
        """Once a layout: where the checkpoint's tensors will be live."""
        specs = frozenset((spec.name, spec.dtype, spec.shape) for spec in manifest.tensors)
        if self._plan is not None and specs == self._planned and self._plan.moved(self._module) is None:
            return
        load: Any = getattr(self._module, "load_weights", None)
        names = {spec.name: self._expected.canonical(spec.name) for spec in manifest.tensors}
        self._plan, self._planned, self._covered, self.proved = None, specs, False, False
        if load is not None:
            with loading(self._vllm_config):
                unsure = doubts(self._module)
                self._plan = trace(self._module, load, manifest.tensors, names=names, doubts=unsure)

    def _compare(self) -> None:
        """After a full load: which live elements are those that were staged, to the bit."""
        self.proved = False
        if self.writes_live or self._plan is None:
            return
        if (name := self._plan.moved(self._module)) is not None:
            _logger.info("%s lies elsewhere since it was loaded: the next version finds it there", name)
            self._plan, self.marked = None, {}
            return
        self._plan = self._plan.without(self._plan.compare(self._staging))
        self.marked = dict(self._plan.marked)
        self.proved = self._covered and not self.marked
        if self.marked:
            name, why = next(iter(self.marked.items()))
            _logger.info("%d tensors are not live as they come, e.g. %s: %s", len(self.marked), name, why)

    def _check_moved(self, *, in_pause: bool = False) -> None:
        plan = self._plan
        name = None if plan is None else plan.strayed() if in_pause else plan.moved(self._module)
        if name is not None:
            self._base, self._plan, self.proved = None, None, False
            raise LoadError("the live tensor was moved since it was loaded", parameter=name)

    @property
    def _module(self) -> nn.Module:
        assert self._model is not None  # begin has looked
        return self._model

    def _open_reload(self) -> LayerwiseReload:
        assert self._model is not None  # begin has looked
        return LayerwiseReload(self._model, self._model_config, self._vllm_config)
