"""SGLang: its custom weight loader, and a loader with a bracket for the model of one of its workers.

SGLang (0.5.23) imports the function that `--custom-weight-loader weightsync.load.sglang.load_weights` names, and calls
it with the model and (name, tensor) pairs where `load_format` of an update from tensors names it too. Nothing here
imports SGLang: a model is a torch module whose `load_weights` takes such pairs. What that passes over it passes over
silently, and what has another dtype it converts: so names, shapes and dtypes are checked before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from weightsync.errors import LoadError, ManifestMismatchError, UnsupportedError, WeightSyncError, as_weightsync_error
from weightsync.load.live_plan import LivePiece, LivePlan, held, places
from weightsync.load.planned import PlannedLoader
from weightsync.load.vllm_trust import doubts
from weightsync.load.whole import (
    OUTPUT_LAYER,
    SENDS_ONCE,
    TIED,
    check_closed,
    check_complete,
    check_open,
    check_verified,
    lent,
    staging_for,
)
from weightsync.plan.boxes import whole_box
from weightsync.tensors import byte_view, spec_of, torch_dtype
from weightsync.types import HeldTensor, Manifest, TensorSpec, Update, Version

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""SGLang's fused modules and the checkpoint's parts of them, in the order of their rows."""
_HALF = "half-loaded: not served until a later commit"


def load_weights(model: nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader: the model's own, with checks before and after it.

    Called in every worker with tensors of the whole checkpoint's shapes; the model's loader takes its shard of each.
    The live model is written: pause it first.

    Args:
        model: the worker's.
        named_tensors: checkpoint names; some of the model's tensors, or all.

    Raises:
        UnsupportedError: the model has no `load_weights`, or is quantised. Nothing was changed.
        ManifestMismatchError: nothing to load, a name twice or one that the model has no place for, another dtype, or a
            shape that can't be. Nothing was changed.
        LoadError: the model's own loader failed, or did not load everything. It is half-loaded.
    """
    pairs = list(named_tensors)
    places = Places(model)
    specs = [spec_of(name, tensor) for name, tensor in pairs]
    if not specs:
        raise ManifestMismatchError("there is nothing to load", state_left="nothing was changed")
    if len({spec.name for spec in specs}) != len(specs):
        raise ManifestMismatchError("a tensor comes twice", state_left="nothing was changed")
    targets = {places.check(spec).name for spec in specs}
    call: Callable[..., Any] = model.load_weights  # type: ignore[assignment]
    try:
        with torch.no_grad():
            loaded = call(pairs)
    except Exception as error:
        raise as_weightsync_error(error, LoadError, "SGLang's loader failed", state_left=_HALF) from error
    if isinstance(loaded, (set, frozenset)) and (left := sorted(targets - loaded)):
        raise LoadError(f"SGLang's loader passed over {len(left)} tensors", parameter=left[0], state_left=_HALF)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a checkpoint's tensor goes.

    Attributes:
        name: of the model's tensor.
        part: which of the fused ones it is; None where it is the whole.
    """

    name: str
    part: int | None


class Places:
    """Which of a model's parameters a checkpoint's names go to.

    Args:
        model: with `load_weights`.
        tp_size: 1: every parameter is whole, so shapes are checked to the row. Else the worker has a shard of each, and
            only the number of dimensions can be checked.

    Raises:
        UnsupportedError: no `load_weights`, or quantised: SGLang would repack what is loaded.
    """

    def __init__(self, model: nn.Module, *, tp_size: int | None = None) -> None:
        if not callable(getattr(model, "load_weights", None)):
            raise UnsupportedError(f"{type(model).__name__} has no load_weights", state_left="nothing was changed")
        if getattr(model, "quant_config", None) is not None:
            raise UnsupportedError("SGLang's quantised models are not loaded here", state_left="nothing was changed")
        self.tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self._whole = tp_size == 1

    def check(self, spec: TensorSpec) -> Place:
        """Where it goes.

        Raises:
            ManifestMismatchError: nowhere, or it can't be that.
        """
        place = self.place(spec.name)
        if place is None:
            raise ManifestMismatchError("the engine's model has no such tensor", parameter=spec.name)
        own = self.tensors[place.name]
        if spec.box is not None:
            raise ManifestMismatchError("a part of a tensor can't be loaded here", parameter=spec.name)
        if torch_dtype(spec.dtype) != own.dtype:
            raise ManifestMismatchError(
                f"the trainer sends {spec.dtype}, the engine's model has {own.dtype} and would convert",
                parameter=spec.name,
            )
        shape = tuple(own.shape)
        fits = len(spec.shape) == len(shape)
        if fits and place.part is not None:
            fits = spec.shape[1:] == shape[1:]
        elif fits and not hasattr(own, "weight_loader"):  # copied as it is
            fits = spec.shape == shape
        elif fits and self._whole:  # SGLang pads vocabularies
            fits = not shape or (spec.shape[1:] == shape[1:] and spec.shape[0] <= shape[0])
        if not fits:
            raise ManifestMismatchError(
                f"the trainer sends {spec.shape}, the engine's model has {shape}", parameter=spec.name
            )
        return place

    def place(self, name: str) -> Place | None:
        """Where a name goes; None: nowhere."""
        if name in self.tensors:
            return Place(name=name, part=None)
        path = name.split(".")
        for fused, parts in FUSED.items():
            if len(path) > 1 and path[-2] in parts:
                target = ".".join((*path[:-2], fused, path[-1]))
                if target in self.tensors:
                    return Place(name=target, part=parts.index(path[-2]))
        return None

    def rows(self, specs: Iterable[TensorSpec]) -> dict[str, tuple[str, int]]:
        """The place of each name, and its first row there.

        Raises:
            ManifestMismatchError: a tensor that can't be loaded; one that comes twice, under two names; one of the
                model's that does not come, or not with all its parts.
        """
        taken: dict[tuple[int, int | None], TensorSpec] = {}
        placed: dict[str, Place] = {}
        for spec in specs:
            place = placed[spec.name] = self.check(spec)
            other = taken.setdefault((id(self.tensors[place.name]), place.part), spec)
            if other is not spec:
                raise ManifestMismatchError(
                    f"this tensor and {other.name} are one in the engine's model: {TIED}", parameter=spec.name
                )
        for name, tensor in self.tensors.items():
            self._check_complete(name, tensor, taken)
        found: dict[str, tuple[str, int]] = {}
        for name, place in placed.items():
            before = (taken[id(self.tensors[place.name]), part].shape for part in range(place.part or 0))
            found[name] = (place.name, sum(shape[0] for shape in before))
        return found

    def _check_complete(self, name: str, tensor: torch.Tensor, taken: dict[tuple[int, int | None], TensorSpec]) -> None:
        if (id(tensor), None) in taken:
            return
        path = name.split(".")
        parts = FUSED.get(path[-2], ()) if len(path) > 1 else ()
        specs = [taken.get((id(tensor), part)) for part in range(len(parts))]
        if not specs or None in specs:
            lacks = name if not any(specs) else ".".join((*path[:-2], parts[specs.index(None)], path[-1]))
            hint = f"; {SENDS_ONCE}" if lacks.endswith(OUTPUT_LAYER) else ""
            raise ManifestMismatchError(f"the trainer does not send {lacks}{hint}", parameter=lacks)
        if self._whole and sum(spec.shape[0] for spec in specs if spec is not None) != tensor.shape[0]:
            first = specs[0]
            assert first is not None
            raise ManifestMismatchError(
                f"the parts of {name} do not have its {tensor.shape[0]} rows together", parameter=first.name
            )


class SGLangWeightLoader(PlannedLoader):
    """Loads checkpoint-named tensors into the model of one SGLang worker, in the worker's own process.

    `load_weights` copies into host memory, once the size of the checkpoint, and commit, while the worker is paused,
    gives all of it to the model's own loader, whole fused modules at once. With `tp_size=1` commit reads every byte
    again where it lies in the live model, and a patch is written there, see `PlannedLoader`; a sharded worker is
    unprovable, and takes whole versions. An abort before commit loses nothing; a commit that fails leaves the model
    half-loaded, and `healthy` False, until a later one. Host memory that the model takes for its own is the model's
    from then on: the next version is staged elsewhere.

    Args:
        model: a torch module with `load_weights`, not quantised.
        tp_size: how many workers share a tensor.
    """

    unprovable_at_load: ClassVar[str] = "nothing was loaded here yet: the checkpoint's names are not known"

    def __init__(self, model: nn.Module, *, tp_size: int = 1) -> None:
        super().__init__()
        self._model = model
        self._tp_size = tp_size
        self._verified = False
        self._rows: dict[str, tuple[str, int]] = {}
        self._live: dict[str, tuple[TensorSpec, str, int]] = {}  # of the last full commit

    @property
    def _module(self) -> nn.Module:
        return self._model

    def _check(self, manifest: Manifest) -> None:
        check_closed(self._manifest)
        self._rows = Places(self._model, tp_size=self._tp_size).rows(manifest.tensors)

    def _doubts(self) -> Mapping[str, str]:
        return doubts(self._model, home="sglang")

    def _trace(self, manifest: Manifest) -> None:
        """Where each tensor goes is known: `Places`. So the model's loader is called for real bytes alone."""
        unsure, tensors = self._doubts(), Places(self._model).tensors
        self._covered = self.proved = False
        self._plan = LivePlan(
            pieces={
                spec.name: (self._piece(spec, tensors),)
                for spec in manifest.tensors
                if self._rows[spec.name][0] not in unsure
            },
            marked={name: unsure[target] for name, (target, _) in self._rows.items() if target in unsure},
            _places=places(self._model),
            _held=held(self._model),
        )

    def _piece(self, spec: TensorSpec, tensors: Mapping[str, torch.Tensor]) -> LivePiece:
        target, row = self._rows[spec.name]
        live = _part(tensors[target], spec, row)
        return LivePiece(name=spec.name, box=whole_box(spec.shape), live=live, owner=target)

    def begin(self, manifest: Manifest) -> None:
        """See the base class.

        Raises:
            UnsupportedError: the model has no `load_weights`, or is quantised. Nothing was changed.
        """
        self._check(manifest)
        self.settle()
        with self._beginning():
            self._specs = manifest.by_name()
            if self._tp_size == 1:
                self._trace(manifest)
            self._base = None
            self._staging = staging_for(self._specs, self._staging)
        self._loaded, self._verified = set(), False
        self._manifest = manifest

    def load_weights(self, updates: Iterable[Update]) -> None:
        check_open(self._manifest)
        if self._patch is not None:
            self._add(self._patch, updates)
        else:
            self._stage(updates)

    def verify(self) -> None:
        check_open(self._manifest)
        check_complete(self._specs, self._loaded)
        self._verified = True
        self.cover([self.coverage()])

    def live_tensors(self) -> Iterator[HeldTensor]:
        """See the base class. Between verify and commit what will be loaded, which commit reads again after it.

        Raises:
            UnsupportedError: sharded, so that commit reads nothing again; or nothing was loaded here yet.
        """
        if self._tp_size != 1:
            raise UnsupportedError(f"each of {self._tp_size} workers has a shard that SGLang chose")
        if self._verified:
            for name, spec in self._specs.items():
                yield HeldTensor(spec=spec, box=None, tensor=self._staging[name])
            return
        if not self._live:
            raise self._untold()
        tensors = Places(self._model).tensors
        for spec, target, row in self._live.values():
            bare = TensorSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape)
            yield HeldTensor(spec=bare, box=None, tensor=_part(tensors[target], spec, row))

    def audited(self) -> Iterator[HeldTensor]:
        """See the base class. Where the staging is no copy of what is live: what is live."""
        return super().audited() if self.proved and self._base is not None else self.live_tensors()

    def differs(self, name: str) -> str | None:
        return super().differs(name) if self.proved and self._base is not None else None

    def moved(self) -> str | None:
        return super().moved() if self.proved and self._base is not None else None

    def commit(self, version: Version) -> None:
        """See the base class. Every byte is copied to the model, and with `tp_size=1` read again.

        Raises:
            LoadError: the model's own loader failed, or the live bytes are not those. Half-loaded until a later commit.
                A patch that fails is undone.
        """
        if self._patch is not None:
            self._commit_patch(self._patch, check_open(self._manifest), version)
            return
        check_verified(self._manifest, version, verified=self._verified)
        self._healthy = self.proved = False
        self._verified = False  # one that fails is not tried again
        taken: set[str] = set()
        try:
            try:
                load_weights(self._model, self._staging.items())
                self._read_again()
            finally:
                for name in lent(self._staging, self._model):
                    taken.add(name)
                    del self._staging[name]
        except WeightSyncError as error:
            error.state_left = _HALF
            raise
        self._live = {name: (spec, *self._rows[name]) for name, spec in self._specs.items()}
        self._manifest = None
        if taken:  # what is left of the staging is no whole version
            self._plan = None
        else:
            self._compare(are_equal=True)  # `_read_again` has looked, in the pause: once is enough
            self._base = version
        self._healthy = True

    def abort(self, reason: str) -> None:
        self._leave_no_trace()
        self._manifest = None
        self._verified = False
        self._drop_patch()

    def _read_again(self) -> None:
        if self._tp_size != 1:
            return
        tensors = Places(self._model).tensors
        for name, (target, row) in self._rows.items():
            live = _part(tensors[target], self._specs[name], row).contiguous().cpu()
            if not torch.equal(byte_view(live), byte_view(self._staging[name])):
                raise LoadError(f"the live bytes in {target} are not those that were loaded", parameter=name)


def _part(tensor: torch.Tensor, spec: TensorSpec, row: int) -> torch.Tensor:
    """The rows of a live tensor that are the checkpoint's."""
    live = tensor.detach()
    return live[row : row + spec.shape[0]] if spec.shape else live
