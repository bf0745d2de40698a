"""ModuleWeightLoader: a plain torch module in the engine's process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter, eq
from typing import ClassVar, cast

import torch
from torch.autograd.graph import increment_version

from weightsync.copying import unpack
from weightsync.errors import LoadError, ManifestMismatchError, StateError, UnsupportedError
from weightsync.load.patch_bracket import PatchingLoader
from weightsync.load.patching import LivePatch, check_patchable, kernels
from weightsync.load.placing import Placing
from weightsync.load.spans import overlapping
from weightsync.load.whole import check_closed, check_complete, check_open, check_verified, gpu_of
from weightsync.tensors import PackedUpdates, gpus_of, spec_of, torch_dtype, wait_idle, write_counter
from weightsync.types import Full, HeldTensor, Manifest, Patch, TensorSpec, Update, Version, dtype_name


class ModuleWeightLoader(PatchingLoader[LivePatch]):
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
        super().__init__()
        self._engine_module = module
        self._in_place = in_place
        self._ignore = frozenset(ignore)
        self._placing = Placing(module, name_map=name_map or (lambda name: name), ignore=self._ignore)
        self._placed: dict[str, torch.Tensor] = {}  # manifest name -> live tensor
        self._specs: Mapping[str, TensorSpec] = {}  # of the same
        self._spare: dict[str, torch.Tensor] = {}  # manifest name -> the other set
        self._loaded: set[str] = set()
        self._ignored: frozenset[str] = frozenset()
        self._verified = False
        self._look_again: Callable[[], None] | None = None  # in a bracket, from `verify` on
        self.writes_live = in_place

    @property
    def device_index(self) -> int | None:
        return gpu_of(self._engine_module)

    def begin(self, manifest: Manifest) -> None:
        check_closed(self._manifest)
        placed = self._placing.place(manifest, swapped=not self._in_place)
        if not self._in_place:
            self._spare = _spares(placed, self._spare)
        self._open(manifest, placed, None)

    def begin_patch(self, manifest: Manifest) -> None:
        check_closed(self._manifest)
        placed = self._placing.place(manifest, swapped=False)
        if not self._healthy:
            raise StateError("what is live is half-loaded: load it in full", version=str(manifest.version))
        for name, live in placed.items():
            check_patchable(name, live)
        for (name, _), (other, _) in overlapping(placed.items()):
            raise UnsupportedError(f"{name} and {other} share memory: they can't be patched", parameter=name)
        kernels()
        self._open(manifest, placed, LivePatch())

    def load_weights(self, updates: Iterable[Update]) -> None:
        check_open(self._manifest)
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

    def verify(self) -> None:
        check_open(self._manifest)
        if self._patch is not None:
            raise StateError("a patch is prepared, not verified")
        check_complete(self._placed, self._loaded)
        self._check_live()
        self._verified = True

    def live_tensors(self) -> Iterator[HeldTensor]:
        """See the base class. In the bracket of a patch that which serves now, up to its commit."""
        for name, tensor in self._live().items():
            spec = self._specs.get(name)
            if spec is None or spec.dtype != dtype_name(tensor.dtype) or spec.shape != tensor.shape:
                spec = spec_of(name, tensor)
            yield HeldTensor(spec=spec, box=None, tensor=tensor.detach())

    def live_whole(self) -> Mapping[str, torch.Tensor] | None:
        if type(self).live_tensors is not ModuleWeightLoader.live_tensors:
            return None  # whoever reads them in a way of their own is heard
        return self._live()

    def _live(self) -> Mapping[str, torch.Tensor]:
        """What serves, or between `verify` and `commit` what will."""
        if self._ignored:
            raise UnsupportedError(f"the loader was told to ignore {', '.join(sorted(self._ignored)[:3])}")
        if self._verified:
            self._check_again()
        elif self._placed:
            self._placing.check(self._placed)
        if self._verified and not self._in_place and self._patch is None:
            return {name: self._spare[name] for name in self._placed}
        return self._placed or self._placing.live()

    def commit(self, version: Version) -> None:
        check_verified(self._manifest, version, verified=self._verified if self._patch is None else self._prepared)
        self._check_again()
        if self._patch is not None:
            self._write(self._patch)
        else:
            self._healthy = False  # until all are swapped
            if not self._in_place:
                for name, live in self._placed.items():
                    live.data, self._spare[name] = self._spare[name], live.data
        self._manifest = None
        self._verified, self._look_again = False, None
        self._healthy = True
        self._mark_written()

    def rollback(self) -> None:
        super().rollback()
        self._mark_written()

    def _mark_written(self) -> None:
        """Patches and swaps go past torch: whoever keeps a digest of the tensors has to see that they are others."""
        increment_version([tensor for tensor in self._placed.values() if write_counter(tensor) is not None])

    def abort(self, reason: str) -> None:
        if self._manifest is None:
            return
        self._manifest = None
        self._verified, self._look_again = False, None
        self._drop_patch()

    def _check_live(self) -> None:
        """The model holds what it held at begin; where not, nobody knows what it would serve."""
        try:
            self._look_again = self._placing.check(self._placed)
        except LoadError:
            self._healthy = False
            raise

    def _check_again(self) -> None:
        assert self._look_again is not None
        try:
            self._look_again()
        except LoadError:
            self._verified = self._prepared = self._healthy = False
            raise

    def _open(self, manifest: Manifest, placed: dict[str, torch.Tensor], patch: LivePatch | None) -> None:
        self.settle()
        self._placed = placed
        self._specs = manifest.by_name()
        self._ignored = self._ignore.intersection(manifest.table.names)
        self._loaded = set()
        self._verified = self._prepared = False
        self._patch = patch
        self._manifest = manifest

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
            self._prepared = False
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
        names, offsets = list(updates.names), list(updates.offsets)
        targets = self._targets_at_a_glance(updates, kinds)
        if targets is None:
            looked_at = [
                (name, offset, self._checked_target(name, kinds[dtype], shape))
                for name, dtype, shape, offset in zip(names, updates.dtypes, updates.shapes, offsets, strict=True)
            ]
            names = [name for name, _, target in looked_at if target is not None]
            offsets = [offset for _, offset, target in looked_at if target is not None]
            targets = [target for _, _, target in looked_at if target is not None]
        if len(set(names)) != len(names):
            raise ManifestMismatchError("a tensor came twice in one chunk", parameter=names[0])
        self._writes(names)
        try:
            unpack(updates.bucket, offsets, targets)
        except RuntimeError as error:
            raise LoadError(f"copying a chunk failed: {error}", parameter=updates.names[0]) from error

    def _targets_at_a_glance(
        self, updates: PackedUpdates, kinds: Mapping[str, torch.dtype]
    ) -> list[torch.Tensor] | None:
        """`_checked_target` of each, by loops that run in C; None where one has to be looked at."""
        if not self._loaded.isdisjoint(updates.names):
            return None
        found = list(map((self._placed if self._in_place else self._spare).get, updates.names))
        if not self._placed.keys() >= set(updates.names):
            return None
        targets = cast("list[torch.Tensor]", found)
        same = list(map(_dtype, targets)) == list(map(kinds.__getitem__, updates.dtypes))
        return targets if same and all(map(eq, map(_shape, targets), updates.shapes)) else None

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
        if self._in_place:
            if not self._loaded:
                wait_idle(gpus_of(self._placed.values()))
            self._healthy = False  # until commit
        self._loaded.update(names)


_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_KIND = (_dtype, _shape, attrgetter("device"))


def _spares(placed: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tensor of the same kind for each, of those that there are where they fit."""
    if before.keys() == placed.keys():
        lives, spares = list(placed.values()), [before[name] for name in placed]
        same = all(all(map(eq, map(fact, lives), map(fact, spares))) for fact in _KIND)
        if same and all(map(torch.Tensor.is_contiguous, spares)):
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
