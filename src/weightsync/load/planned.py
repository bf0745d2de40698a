"""PlannedLoader: what loaders share that keep the served version in host memory and write changes where they are live.

A full load goes through the engine's own loader, as ever. A `LivePlan`, traced from that loader, says where each
element of the checkpoint is live; behind the load every live element is compared with what was staged. Where all are
there as they came, live weights are proved, and a patch is written straight into them, with undo. Tensors of which they
are not are marked; a patch of one enters with the layers that it goes to, where an engine can load those alone.

A whole version that comes while the one before it is proved is taken as a change of that: what differs is written.
Where more differs than a patch may have, all of it is written where the plan says, without the engine's own loader.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from weightsync.errors import LoadError, ManifestMismatchError, MissingDependencyError, StateError, UnsupportedError
from weightsync.load.difference import difference
from weightsync.load.live import ShardPatch
from weightsync.load.live_plan import LivePlan
from weightsync.load.live_trace import trace
from weightsync.load.patch_bracket import PatchingLoader
from weightsync.load.patching import kernels as patch_kernels
from weightsync.load.whole import stage, whole_tensor
from weightsync.types import Box, Full, HeldTensor, Manifest, Patch, TensorSpec, Update, Version
from weightsync.types.live_layer import LiveLayer, layers_of
from weightsync.types.scarcity import is_passing

_logger = logging.getLogger(__name__)

_MOVED = "the live tensors are others than those that were loaded"
_MOST_CHANGED = 0.5
"""Of a model's bytes, changed elements with their positions may have so much: of bf16 one element in six. Beyond it, to
write all of them takes no longer: an element at a time was 2.2 memcpys of the model where 16 % change, 1.1 at 10 %, 0.6
at 1 %; a copy of all is one, and reading it again another."""
_POSITION_BYTES = 4
_MOST_ELEMENTS = 1 << 32  # that a patch's positions reach
_OF_THE_LAST_LOAD = ("_specs", "_staging", "_plan", "_planned", "_covered", "_base", "proved")


class PlannedLoader(PatchingLoader[ShardPatch]):
    """See the module. A subclass stages and commits whole versions: `_trace` at the begin of one, `_compare` behind it.

    Attributes:
        proved: whether the last full commit found every live element as it was staged.
        marked: why the live elements of a tensor can't be told, by the checkpoint's name; empty where all can.
        written: how many elements of the checkpoint the last commit has written; None where that was all of it.
        unprovable_at_load: what to say of live weights while none of them was compared, in words.
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"full", "patch"})
    audits_copy: ClassVar[bool] = True
    unprovable_at_load: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self._specs: dict[str, TensorSpec] = {}
        self._staging: dict[str, torch.Tensor] = {}
        self._loaded: set[str] = set()
        self._plan: LivePlan | None = None  # of the manifest's tensors, as they were traced
        self._planned: frozenset[tuple[str, str, tuple[int, ...]]] = frozenset()
        self._base: Version | None = None  # what the staging holds, where that is what is served
        self._before: dict[str, Any] | None = None  # `_OF_THE_LAST_LOAD`, while no byte of the open bracket came
        self._undo_to: Version | None = None
        self._comes_whole = False  # what the open patch is made of
        self._room_bytes = 0  # that such a one may have yet
        self._covered = False
        self._compared = False  # the last full load, whatever came of it
        self.proved = False
        self.marked: dict[str, str] = {}
        self.written: int | None = None

    # --- what an engine adds ---

    @property
    @abc.abstractmethod
    def _module(self) -> nn.Module: ...

    @abc.abstractmethod
    def _check(self, manifest: Manifest) -> None:
        """Refuses a bracket for this manifest: one is open, the model has other tensors, or it can't be loaded."""

    @abc.abstractmethod
    def _doubts(self) -> Mapping[str, str]:
        """Parameters that must not be written element by element, with the reason."""

    def _canonical(self, name: str) -> str:
        """What the model's own loader calls a tensor."""
        return name

    def _unloaded(self) -> Collection[str]:
        """See `trace`."""
        return ()

    def _loading(self) -> contextlib.AbstractContextManager[Any]:
        """What has to be around a call of the model's own loader."""
        return contextlib.nullcontext()

    def _not_by_layer(self) -> str | None:
        """Why the layers of the tensors that are marked can't be loaded alone, in words; None where they can."""
        return next(iter(self.marked.values()), None)

    def _load_layers(self, names: Sequence[str]) -> None:
        """Loads the layers that these tensors go to from `_staging`. Generation is paused."""
        raise UnsupportedError(f"a layer can't be loaded alone: {self._not_by_layer()}")

    # --- the bracket of a patch ---

    @property
    def takes_patch(self) -> bool:
        return self._healthy and self._compared and self._base is not None and self._not_by_layer() is None

    def distrust(self) -> None:
        self.settle()
        self._base, self.proved, self._compared = None, False, False

    def begin_patch(self, manifest: Manifest) -> None:
        self._check(manifest)
        if not self._healthy:
            raise StateError("what is live is half-loaded: load it in full", version=str(manifest.version))
        self.settle()
        if (why := self._not_by_layer()) is not None:
            raise UnsupportedError(
                f"this model's live weights can't be patched: {why}", state_left="nothing was changed"
            )
        if self._base is None or self._plan is None or not self._compared:
            raise StateError(
                "what is live is not whole in host memory: a full load was aborted, or none was proved here",
                state_left="nothing was changed: load it in full",
            )
        self._check_moved()
        self._check_layout(manifest.by_name())
        patch_kernels()
        self._open_patch(self._plan, manifest, comes_whole=False)

    def _open_patch(self, plan: LivePlan, manifest: Manifest, *, comes_whole: bool) -> None:
        self._specs, self._before = manifest.by_name(), None
        self._loaded = set()
        self._patch, self._prepared, self._comes_whole = ShardPatch(plan, self._staging), False, comes_whole
        self._manifest = manifest

    def _check_layout(self, specs: Mapping[str, TensorSpec]) -> None:
        """A patch is one of tensors that are live."""
        for name in self._specs.keys() ^ specs.keys():
            raise ManifestMismatchError("only one of this version and the one that is live has it", parameter=name)
        for name, spec in specs.items():
            live = self._specs[name]
            if (spec.dtype, spec.shape) != (live.dtype, live.shape):
                why = f"it is {spec.dtype} {spec.shape}, what is live {live.dtype} {live.shape}"
                raise ManifestMismatchError(why, parameter=name)

    def _check_live(self) -> None:
        self._check_moved()

    def _undone(self) -> None:
        self._base, self._undo_to = self._undo_to, None

    def _stays(self, patch: ShardPatch) -> None:
        """The base follows what is live."""
        try:
            if not patch.followed:
                patch.follow()
        except Exception as error:
            self._base = None  # the next version comes in full
            if threading.main_thread().is_alive():  # or Python ends, and takes no work any more
                _logger.error("the base of the next patch is lost: %s", error)

    def _not_undone(self) -> None:
        self._base = None

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
        try:
            self._write(patch)
        except BaseException:
            if self._comes_whole:  # it is tried again: then all of it is written
                self.distrust()
            raise
        self._undo_to, self._base = self._base, version
        self._manifest = None
        self.written = patch.num_elements
        if patch.marked and self._plan is not None and (name := self._plan.moved(self._module)) is not None:
            _logger.info("%s lies elsewhere since its layer was loaded: the next version comes in full", name)
            self._plan, self._base, self._undo_to = None, None, None

    def _apply(self, patch: ShardPatch) -> None:
        patch.apply()
        if patch.marked:
            patch.follow()
            self._load_layers(patch.marked)

    def _unapply(self, patch: ShardPatch) -> None:
        followed = patch.followed
        patch.undo()
        if followed:
            self._load_layers(patch.marked)

    # --- the bracket of a whole version ---

    def _stage(self, updates: Iterable[Update]) -> None:
        self._before = None
        stage(updates, self._specs, self._staging, self._loaded)

    @contextlib.contextmanager
    def _beginning(self) -> Iterator[None]:
        """A bracket of whole tensors begins in the body; one that can't leaves all as it was. Until a byte comes, what
        was loaded last can be patched yet."""
        kept = _OF_THE_LAST_LOAD if self._base is not None else ()
        self._before = {name: getattr(self, name) for name in kept}
        try:
            yield
        except BaseException:
            self._restore()
            raise

    def _leave_no_trace(self) -> None:
        """A bracket is aborted: where no byte came, e.g. in a check, all is as it was before."""
        if self._manifest is not None:
            self._restore()

    def _restore(self) -> None:
        before, self._before = self._before, None
        vars(self).update(before or {})

    # --- the same, where the version before it is here ---

    def _begin_change(self, manifest: Manifest) -> bool:
        """Opens a bracket of whole tensors, of which what differs is written; False, and nothing done: it can't be."""
        plan, specs = self._plan, manifest.by_name()
        if plan is None or self._base is None or not self._writes_by_plan or plan.moved(self._module) is not None:
            return False
        try:
            self._check_layout(specs)
            patch_kernels()
        except (ManifestMismatchError, MissingDependencyError):
            return False
        self._room_bytes = int(_MOST_CHANGED * manifest.total_bytes)
        self._open_patch(plan, manifest, comes_whole=True)
        return True

    def _take_whole(self, updates: Iterable[Update]) -> None:
        """Whole tensors: what differs from the base, as long as that is little; else the base takes all."""
        for update in updates:
            patch = self._patch
            if patch is None:
                self._stage((update,))
                continue
            tensor, base = whole_tensor(update, self._specs, self._loaded), self._staging[update.name]
            found = difference(update.name, base, tensor)
            self._room_bytes -= found.positions.numel() * (_POSITION_BYTES + base.element_size())
            if self._room_bytes < 0 or (base.numel() > _MOST_ELEMENTS and found.positions.numel()):
                self._write_all("more differs than is written element by element")
                base.copy_(tensor)
            elif found.positions.numel():
                try:
                    patch.add(found)
                except Exception as error:
                    if not is_passing(error):
                        raise
                    self._write_all(f"a change can't be made ready: {error}")
                    base.copy_(tensor)
            self._loaded.add(update.name)

    def _prepare_whole(self) -> None:
        """All tensors are there: gathers what is live where they differ."""
        if self._patch is None:
            return
        try:
            self.prepare_patch()
        except Exception as error:
            if not isinstance(error, LoadError) and not is_passing(error):
                raise
            self._write_all(f"a change can't be made ready: {error}")

    def _write_all(self, why: str) -> None:
        """The open bracket goes on as one of a version that is loaded in full."""
        assert self._patch is not None
        _logger.info("all of a version is written: %s", why)
        self._base, self._comes_whole = None, False  # first: half-written it is of no version either
        self._patch.into_base()
        self._drop_patch()

    @property
    def _writes_by_plan(self) -> bool:
        """Whether all that is live was found as it was staged: it can be written without the model's own loader."""
        return self.proved and self._healthy and not self.writes_live and self._not_by_layer() is None

    # --- what is live ---

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

    def live_tensors(self) -> Iterator[HeldTensor]:
        """See the base class; of this worker's parts.

        Raises:
            UnsupportedError: a full load is under way: the engine's own loader puts it there in the commit. Or the live
                elements of a tensor can't be told; or those of a part of it lie in other workers.
        """
        in_full = self._manifest is not None and (self._patch is None or self._comes_whole)
        if in_full or self._plan is None or not self.proved:
            raise self._untold()
        self._check_moved()
        for name, spec in self._specs.items():
            for piece in self._plan.pieces[name]:
                yield HeldTensor(spec=spec, box=None if piece.box.shape == spec.shape else piece.box, tensor=piece.live)

    def audited(self) -> Iterator[HeldTensor]:
        """See the base class: the whole version, from host memory; this worker's live parts are compared with it, but
        for those that are marked."""
        if self._plan is None or self._base is None or not self._compared:
            raise self._untold()
        self._check_moved()
        for name, spec in self._specs.items():
            yield HeldTensor(spec=spec, box=None, tensor=self._staging[name])

    def differs(self, name: str) -> str | None:
        plan = self._plan
        return _MOVED if plan is None else plan.compare(self._staging, only=name).get(name)

    def moved(self) -> str | None:
        name = "" if self._plan is None else self._plan.moved(self._module)
        return None if name is None else f"{_MOVED} {name}".strip()

    def _untold(self) -> UnsupportedError:
        return UnsupportedError(self.not_as_they_come or self.unprovable_at_load)

    @property
    def not_as_they_come(self) -> str | None:
        """How many tensors are marked, and why the first one is; None where none is."""
        for name, why in self.marked.items():
            return f"{len(self.marked)} tensors are not live as they come, e.g. {name}: {why}"
        return None

    def _trace(self, manifest: Manifest) -> None:
        """Once a layout: where the checkpoint's tensors will be live."""
        specs = frozenset((spec.name, spec.dtype, spec.shape) for spec in manifest.tensors)
        if self._plan is not None and specs == self._planned and self._plan.moved(self._module) is None:
            return
        load: Callable[..., Any] | None = getattr(self._module, "load_weights", None)
        names = {spec.name: self._canonical(spec.name) for spec in manifest.tensors}
        self._plan, self._planned, self._covered, self.proved = None, specs, False, False
        if load is not None:
            with self._loading():
                unsure = self._doubts()
                self._plan = trace(
                    self._module, load, manifest.tensors, names=names, doubts=unsure, unloaded=self._unloaded()
                )

    def _compare(self, *, are_equal: bool = False) -> None:
        """After a full load: which live elements are those that were staged, to the bit; `are_equal`: it was looked,
        and all are."""
        self.proved = self._compared = False
        if self.writes_live or self._plan is None:
            return
        if (name := self._plan.moved(self._module)) is not None:
            _logger.info("%s lies elsewhere since it was loaded: the next version finds it there", name)
            self._plan, self.marked = None, {}
            return
        self._plan = self._plan.without({} if are_equal else self._plan.compare(self._staging))
        self.marked = dict(self._plan.marked)
        self._compared = self._covered
        self.proved = self._covered and not self.marked
        if self.marked:
            _logger.info("%s", self.not_as_they_come)

    def _check_moved(self, *, in_pause: bool = False) -> None:
        plan = self._plan
        name = None if plan is None else plan.strayed() if in_pause else plan.moved(self._module)
        if name is not None:
            self._base, self._plan, self.proved, self._compared = None, None, False, False
            raise LoadError("the live tensor was moved since it was loaded", parameter=name)
