"""ModuleWeightLoader: a plain torch module in the engine's process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, ClassVar

import torch

from weightsync.copying import unpack
from weightsync.errors import LoadError, ManifestMismatchError, StateError, UnsupportedError, as_weightsync_error
from weightsync.load.base import WeightLoader
from weightsync.load.patching import Change, LivePatch, check_patchable, kernels
from weightsync.load.spans import overlapping, share_storage
from weightsync.tensors import PackedUpdates, spec_of, torch_dtype
from weightsync.types import Full, HeldTensor, Manifest, Patch, TensorSpec, Update, Version, dtype_name


class ModuleWeightLoader(WeightLoader):
    """Loads into a module's parameters and persistent buffers.

    By default updates are staged in a second set of tensors, and commit swaps the sets: the engine serves
    its old weights meanwhile, the pause is a pointer swap, an abort loses nothing. It costs the model's memory
    once more, and the storages that parameters point to alternate between two (mind captured CUDA graphs).
    With `in_place=True` updates are written into the live weights: no second set, fixed storages, but generation is
    paused for the whole transfer and an abort leaves the engine refusing to serve until the next commit.

    A patch is written straight into the live weights in both modes, in proportion to what changes, and undone where it
    fails. The second set, where there is one, is left behind by it: the next full load overwrites all of it.

    Args:
        module: the engine's model; its dtypes and shapes are what the manifest has to have.
        in_place: see above.
        name_map: from a manifest's name to the module's; None is the identity.
        ignore: names of the manifest that the module has no place for, on purpose.
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"full", "patch"})

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        in_place: bool = False,
        name_map: Callable[[str], str] | None = None,
        ignore: Iterable[str] = (),
    ) -> None:
        self._module = module
        self._in_place = in_place
        self._name_map = name_map or (lambda name: name)
        self._ignore = frozenset(ignore)
        self._healthy = True
        self._manifest: Manifest | None = None
        self._placed: dict[str, torch.Tensor] = {}  # manifest name -> live tensor
        self._specs: Mapping[str, TensorSpec] = {}  # of the same
        self._spare: dict[str, torch.Tensor] = {}  # manifest name -> the other set
        self._loaded: set[str] = set()
        self._ignored: frozenset[str] = frozenset()
        self._verified = False
        self._patch: LivePatch | None = None  # of the bracket that is open
        self._undo: LivePatch | None = None  # of the last commit
        self.writes_live = in_place

    @property
    def healthy(self) -> bool:
        """See the base class."""
        return self._healthy

    def begin(self, manifest: Manifest) -> None:
        """See the base class."""
        modules = _walked(self._module)
        placed = self._match_closed(manifest, modules)
        if not self._in_place:
            _refuse_aliases(modules, placed)
            self._spare = _spares(placed, self._spare)
        self._open(manifest, placed, None)

    def begin_patch(self, manifest: Manifest) -> None:
        """See the base class."""
        placed = self._match_closed(manifest, _walked(self._module))
        if not self._healthy:
            raise StateError("what is live is half-loaded: load it in full", version=str(manifest.version))
        for name, live in placed.items():
            check_patchable(name, live)
        for (name, _), (other, _) in overlapping(placed.items()):
            raise UnsupportedError(f"{name} and {other} share memory: they can't be patched", parameter=name)
        kernels()
        self._open(manifest, placed, LivePatch())

    def load_weights(self, updates: Iterable[Update]) -> None:
        """See the base class."""
        self._open_bracket()
        if isinstance(updates, PackedUpdates) and self._patch is None:
            self._load_packed(updates)
            return
        for update in updates:
            if isinstance(update, Full) and self._patch is None:
                self._load_one(update)
            elif isinstance(update, Patch) and self._patch is not None:
                self._patch_one(self._patch, update)
            else:
                raise UnsupportedError(
                    "a bracket takes whole tensors alone, that of a patch patches alone", parameter=update.name
                )

    def prepare_patch(self) -> Iterator[Change]:
        """See the base class."""
        if self._patch is None:
            return super().prepare_patch()
        self._patch.gather()
        self._verified = True
        return self._patch.changes()

    def verify(self) -> None:
        """See the base class."""
        self._open_bracket()
        if self._patch is not None:
            raise StateError("a patch is prepared, not verified")
        if missing := sorted(self._placed.keys() - self._loaded):
            raise ManifestMismatchError(f"{len(missing)} tensors did not arrive", parameter=missing[0])
        self._verified = True

    def live_tensors(self) -> Iterator[HeldTensor]:
        """See the base class. In the bracket of a patch that which serves now, up to its commit."""
        for name, tensor in self._live().items():
            spec = self._specs.get(name)
            if spec is None or spec.dtype != dtype_name(tensor.dtype) or spec.shape != tensor.shape:
                spec = spec_of(name, tensor)
            yield HeldTensor(spec=spec, box=None, tensor=tensor.detach())

    def live_whole(self) -> Mapping[str, torch.Tensor] | None:
        """See the base class."""
        if type(self).live_tensors is not ModuleWeightLoader.live_tensors:
            return None  # whoever reads them in a way of their own is heard
        return self._live()

    def _live(self) -> Mapping[str, torch.Tensor]:
        """What serves, or between `verify` and `commit` what will."""
        if self._ignored:
            raise UnsupportedError(f"the loader was told to ignore {', '.join(sorted(self._ignored)[:3])}")
        if self._verified and not self._in_place and self._patch is None:
            return {name: self._spare[name] for name in self._placed}
        return self._placed or _named_tensors(_walked(self._module))

    def commit(self, version: Version) -> None:
        """See the base class."""
        manifest = self._open_bracket()
        if manifest.version != version or not self._verified:
            raise StateError(f"what was loaded and verified is {manifest.version}, not {version}")
        if self._patch is not None:
            self._verified = False  # one that fails is not tried again
            self._write_patch(self._patch)
            self._undo, self._patch = self._patch, None
        else:
            self._healthy = False  # until all are swapped
            if not self._in_place:
                for name, live in self._placed.items():
                    live.data, self._spare[name] = self._spare[name], live.data
        self._manifest = None
        self._verified = False
        self._healthy = True

    def abort(self, reason: str) -> None:
        """See the base class."""
        if self._manifest is None:
            return
        self._manifest = None
        self._verified = False
        if self._patch is not None:
            self._patch.close()
            self._patch = None

    def rollback(self) -> None:
        """See the base class."""
        if self._undo is None or self._manifest is not None:
            return super().rollback()
        self._undo_patch(self._undo)
        self.settle()
        return None

    def settle(self) -> None:
        """See the base class."""
        if self._undo is not None:
            self._undo.close()
            self._undo = None

    def _write_patch(self, patch: LivePatch) -> None:
        """All of it, or none of it."""
        patch.check_memory()
        self._healthy = False
        try:
            patch.apply()
        except BaseException as error:
            self._undo_patch(patch)
            raise as_weightsync_error(error, LoadError, "writing a patch failed; it was undone") from error

    def _undo_patch(self, patch: LivePatch) -> None:
        self._healthy = False
        try:
            patch.undo()
        except BaseException as error:
            raise LoadError(
                f"a patch could not be undone: {error}", state_left="refuses to serve until the next full load"
            ) from error
        self._healthy = True

    def _match_closed(self, manifest: Manifest, modules: _Modules) -> dict[str, torch.Tensor]:
        if self._manifest is not None:
            raise StateError("a load is under way: commit or abort it first", version=str(self._manifest.version))
        return self._match(manifest, _named_tensors(modules))

    def _open(self, manifest: Manifest, placed: dict[str, torch.Tensor], patch: LivePatch | None) -> None:
        self.settle()
        self._placed = placed
        self._specs = manifest.by_name()
        self._ignored = self._ignore.intersection(spec.name for spec in manifest.tensors)
        self._loaded = set()
        self._verified = False
        self._patch = patch
        self._manifest = manifest

    def _open_bracket(self) -> Manifest:
        if self._manifest is None:
            raise StateError("no load is under way: begin first", state_left="nothing was changed")
        return self._manifest

    def _target(self, name: str) -> torch.Tensor | None:
        """The live tensor of an update; None where it is to be ignored."""
        if name in self._ignore and name not in self._placed:
            return None
        live = self._placed.get(name)
        if live is None:
            raise ManifestMismatchError("this tensor is not in the manifest", parameter=name)
        if name in self._loaded:
            raise ManifestMismatchError("this tensor came twice", parameter=name)
        return live

    def _patch_one(self, patch: LivePatch, update: Patch) -> None:
        live = self._target(update.name)
        if live is not None:
            self._verified = False
            patch.add(live, update)
            self._loaded.add(update.name)

    def _load_one(self, update: Full) -> None:
        name = update.name
        target = self._checked_target(name, update.tensor.dtype, update.tensor.shape)
        if target is None:
            return
        self._writes((name,))
        try:
            with torch.no_grad():
                target.copy_(update.tensor)
        except RuntimeError as error:
            raise LoadError(f"copying failed: {error}", parameter=name) from error

    def _load_packed(self, updates: PackedUpdates) -> None:
        """As `_load_one` of each, but nothing is written before all of them are checked."""
        kinds = {name: torch_dtype(name) for name in set(updates.dtypes)}
        names: list[str] = []
        targets: list[torch.Tensor] = []
        offsets: list[int] = []
        for name, dtype, shape, offset in zip(
            updates.names, updates.dtypes, updates.shapes, updates.offsets, strict=True
        ):
            target = self._checked_target(name, kinds[dtype], shape)
            if target is not None:
                names.append(name)
                targets.append(target)
                offsets.append(offset)
        if len(set(names)) != len(names):
            raise ManifestMismatchError("a tensor came twice in one chunk", parameter=names[0])
        self._writes(names)
        try:
            unpack(updates.bucket, offsets, targets)
        except RuntimeError as error:
            raise LoadError(f"copying a chunk failed: {error}", parameter=updates.names[0]) from error

    def _checked_target(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Where the bytes of an update belong; None where it is to be ignored."""
        live = self._target(name)
        if live is None:
            return None
        target = live if self._in_place else self._spare[name]
        if dtype is not target.dtype or shape != target.shape:
            raise ManifestMismatchError(
                f"got {dtype} {tuple(shape)}, the model has {target.dtype} {tuple(target.shape)}", parameter=name
            )
        return target

    def _writes(self, names: Iterable[str]) -> None:
        """From here on the targets of these may be half-written."""
        self._loaded.update(names)
        if self._in_place:
            self._healthy = False  # until commit

    def _match(self, manifest: Manifest, live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The live tensor of each name, after every check; tied tensors may come under any of their names."""
        placed: dict[str, torch.Tensor] = {}
        taken: dict[int, str] = {}
        for spec in manifest.tensors:
            if spec.name in self._ignore:
                continue
            tensor = live.get(self._name_map(spec.name))
            if tensor is None:
                raise ManifestMismatchError("the engine's model has no such tensor", parameter=spec.name)
            _check_spec(spec, tensor)
            if (other := taken.setdefault(id(tensor), spec.name)) != spec.name:
                raise ManifestMismatchError(
                    f"this tensor and {other} are one in the engine's model", parameter=spec.name
                )
            placed[spec.name] = tensor
        missing = sorted(name for name, tensor in live.items() if id(tensor) not in taken)
        if missing:
            raise ManifestMismatchError(
                f"the manifest lacks {len(missing)} of the model's tensors, the first is {missing[0]} "
                "(named_parameters() has no buffers: the module or an extractor has)",
                parameter=missing[0],
            )
        return placed


_Modules = tuple[list[str], list[torch.nn.Module]]
"""Modules and every path that leads to them, as `named_modules(remove_duplicate=False)` gives them. No list of pairs:
many new objects bring Python's collector to look at the whole model, which takes longer than a begin."""

_KIND = (attrgetter("dtype"), attrgetter("shape"), attrgetter("device"))

_OWN = frozenset(vars(torch.nn.Module()))
"""What every module has; no tensor among them."""


def _walked(root: torch.nn.Module) -> _Modules:
    """As torch does, without a generator for each level of the model."""
    paths: list[str] = []
    modules: list[torch.nn.Module] = []
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        paths.append(path)
        modules.append(module)
        if module._modules:
            start = f"{path}." if path else ""
            waiting += [(start + name, child) for name, child in reversed(module._modules.items()) if child is not None]
    return paths, modules


def _named_tensors(modules: _Modules) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by every name they have, tied ones under each."""
    found: dict[str, torch.Tensor] = {}
    for path, child in zip(*modules, strict=True):
        start = f"{path}." if path else ""
        for name, parameter in child._parameters.items():
            if parameter is not None:
                found[start + name] = parameter
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                found[start + name] = buffer
    return found


def _refuse_aliases(modules: _Modules, placed: dict[str, torch.Tensor]) -> None:
    """Refuses to swap a tensor whose memory another tensor of the module looks into (q, k, v as views of one fused
    tensor, say): after the swap the other one would go on with the old weights, and no digest would see it.

    Looks at parameters, buffers and tensors kept as plain attributes. A view kept elsewhere is not seen.
    """
    paths: list[str] = []
    holders: list[dict[str, Any]] = []
    for path, child in zip(*modules, strict=True):
        facts = vars(child)
        paths += path, path
        holders += child._parameters, child._buffers
        if len(facts) > len(_OWN) or not _OWN.issuperset(facts):
            paths.append(path)
            holders.append({name: value for name, value in facts.items() if isinstance(value, torch.Tensor)})
    tensors = {id(value): value for held in holders for value in held.values() if value is not None}
    if not share_storage(tensors.values()):
        return
    swapped = {id(tensor) for tensor in placed.values()}
    named = [
        (f"{path}.{name}" if path else name, value)
        for path, held in zip(paths, holders, strict=True)
        for name, value in held.items()
        if value is not None
    ]
    for (name, one), (other_name, other) in overlapping(named):
        if one in swapped or other in swapped:
            raise UnsupportedError(
                f"{name} and {other_name} share memory: swapping one would leave the other on old weights; use "
                "ModuleWeightLoader(..., in_place=True)",
                parameter=name,
            )


def _spares(placed: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tensor of the same kind for each, of those that there are where they fit."""
    if before.keys() == placed.keys():
        lives, spares = list(placed.values()), [before[name] for name in placed]
        kinds = ([list(map(fact, tensors)) for fact in _KIND] for tensors in (lives, spares))
        if next(kinds) == next(kinds) and all(map(torch.Tensor.is_contiguous, spares)):
            return dict(zip(placed, spares, strict=True))
    return {
        name: spare
        if (spare := before.get(name)) is not None and _same_kind(spare, live)
        else torch.empty_like(live, memory_format=torch.contiguous_format)
        for name, live in placed.items()
    }


def _same_kind(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
    return same and one.is_contiguous()  # an expanded live tensor comes back as a spare once: never write into that


def _check_spec(spec: TensorSpec, tensor: torch.Tensor) -> None:
    if spec.box is not None:
        raise ManifestMismatchError("a part of a tensor can't be loaded here", parameter=spec.name)
    if spec.dtype != dtype_name(tensor.dtype) or spec.shape != tensor.shape:
        has = spec_of(spec.name, tensor)
        raise ManifestMismatchError(
            f"the trainer sends {spec.dtype} {spec.shape}, the engine's model has {has.dtype} {has.shape}"
            + (
                "; see dtype of PushSync or WeightManager, and dtype_overrides of the extractor"
                if spec.dtype != has.dtype
                else ""
            ),
            parameter=spec.name,
        )
