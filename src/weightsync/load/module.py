"""ModuleWeightLoader: a plain torch module in the engine's process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch

from weightsync.errors import LoadError, ManifestMismatchError, StateError, UnsupportedError
from weightsync.load.base import WeightLoader
from weightsync.tensors import spec_of
from weightsync.types import Full, HeldTensor, Manifest, TensorSpec, Update, Version


class ModuleWeightLoader(WeightLoader):
    """Loads into a module's parameters and persistent buffers.

    By default updates are staged in a second set of tensors, and commit swaps the sets: the engine serves
    its old weights meanwhile, the pause is a pointer swap, an abort loses nothing. It costs the model's memory
    once more, and the storages that parameters point to alternate between two (mind captured CUDA graphs).
    With `in_place=True` updates are written into the live weights: no second set, fixed storages, but generation is
    paused for the whole transfer and an abort leaves the engine refusing to serve until the next commit.

    Args:
        module: the engine's model; its dtypes and shapes are what the manifest has to have.
        in_place: see above.
        name_map: from a manifest's name to the module's; None is the identity.
        ignore: names of the manifest that the module has no place for, on purpose.
    """

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
        self._spare: dict[str, torch.Tensor] = {}  # manifest name -> the other set
        self._loaded: set[str] = set()
        self._ignored: frozenset[str] = frozenset()
        self._verified = False
        self.writes_live = in_place

    @property
    def healthy(self) -> bool:
        """See the base class."""
        return self._healthy

    def begin(self, manifest: Manifest) -> None:
        """See the base class."""
        if self._manifest is not None:
            raise StateError("a load is under way: commit or abort it first", version=str(self._manifest.version))
        placed = self._match(manifest)
        if not self._in_place:
            _refuse_aliases(self._module, placed)
            self._spare = {
                name: spare
                if (spare := self._spare.get(name)) is not None and _same_kind(spare, live)
                else torch.empty_like(live, memory_format=torch.contiguous_format)
                for name, live in placed.items()
            }
        self._placed = placed
        self._ignored = self._ignore.intersection(spec.name for spec in manifest.tensors)
        self._loaded = set()
        self._verified = False
        self._manifest = manifest

    def load_weights(self, updates: Iterable[Update]) -> None:
        """See the base class."""
        self._open_bracket()
        for update in updates:
            if not isinstance(update, Full):
                raise UnsupportedError("this loader takes whole tensors alone", parameter=update.name)
            self._load_one(update)

    def verify(self) -> None:
        """See the base class."""
        self._open_bracket()
        if missing := sorted(self._placed.keys() - self._loaded):
            raise ManifestMismatchError(f"{len(missing)} tensors did not arrive", parameter=missing[0])
        self._verified = True

    def live_tensors(self) -> Iterator[HeldTensor]:
        """See the base class."""
        if self._ignored:
            raise UnsupportedError(f"the loader was told to ignore {', '.join(sorted(self._ignored)[:3])}")
        staged = self._verified and not self._in_place
        placed = self._placed or _named_tensors(self._module)
        for name, live in placed.items():
            tensor = self._spare[name] if staged else live
            yield HeldTensor(spec=spec_of(name, tensor), box=None, tensor=tensor.detach())

    def commit(self, version: Version) -> None:
        """See the base class."""
        manifest = self._open_bracket()
        if manifest.version != version or not self._verified:
            raise StateError(f"what was loaded and verified is {manifest.version}, not {version}")
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

    def _open_bracket(self) -> Manifest:
        if self._manifest is None:
            raise StateError("no load is under way: begin first", state_left="nothing was changed")
        return self._manifest

    def _load_one(self, update: Full) -> None:
        name = update.name
        if name in self._ignore and name not in self._placed:
            return
        live = self._placed.get(name)
        if live is None:
            raise ManifestMismatchError("this tensor is not in the manifest", parameter=name)
        if name in self._loaded:
            raise ManifestMismatchError("this tensor came twice", parameter=name)
        target = live if self._in_place else self._spare[name]
        if update.tensor.dtype != target.dtype or update.tensor.shape != target.shape:
            raise ManifestMismatchError(
                f"got {update.tensor.dtype} {tuple(update.tensor.shape)}, the model has {target.dtype} "
                f"{tuple(target.shape)}",
                parameter=name,
            )
        self._loaded.add(name)  # from here on the target may be half-written
        if self._in_place:
            self._healthy = False  # until commit
        try:
            with torch.no_grad():
                target.copy_(update.tensor)
        except RuntimeError as error:
            raise LoadError(f"copying failed: {error}", parameter=name) from error

    def _match(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """The live tensor of each name, after every check; tied tensors may come under any of their names."""
        live = _named_tensors(self._module)
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


def _named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by every name they have, tied ones under each."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for path, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def _refuse_aliases(module: torch.nn.Module, placed: dict[str, torch.Tensor]) -> None:
    """Refuses to swap a tensor whose memory another tensor of the module looks into (q, k, v as views of one fused
    tensor, say): after the swap the other one would go on with the old weights, and no digest would see it.

    Looks at parameters, buffers and tensors kept as plain attributes. A view kept elsewhere is not seen.
    """
    swapped = {id(tensor) for tensor in placed.values()}
    others: list[tuple[str, torch.Tensor]] = list(module.named_parameters(remove_duplicate=False))
    others += list(module.named_buffers(remove_duplicate=False))
    for path, child in module.named_modules(remove_duplicate=False):
        others += [(f"{path}.{name}", value) for name, value in vars(child).items() if isinstance(value, torch.Tensor)]
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in others:
        if tensor.numel() and tensor.layout == torch.strided:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for sharing in by_storage.values():
        spans = sorted((_span(tensor), name, id(tensor)) for name, tensor in sharing)
        for ((_, end), name, one), ((start, _), other_name, other) in itertools.pairwise(spans):
            if start < end and one != other and (one in swapped or other in swapped):
                raise UnsupportedError(
                    f"{name} and {other_name} share memory: swapping one would leave the other on old weights; use "
                    "ModuleWeightLoader(..., in_place=True)",
                    parameter=name,
                )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of what a strided tensor touches of its storage."""
    first = int(tensor.storage_offset())
    reach = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (first + reach + 1) * tensor.element_size()


def _same_kind(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
    return same and one.is_contiguous()  # an expanded live tensor comes back as a spare once: never write into that


def _check_spec(spec: TensorSpec, tensor: torch.Tensor) -> None:
    has = spec_of(spec.name, tensor)
    if spec.box is not None:
        raise ManifestMismatchError("a part of a tensor can't be loaded here", parameter=spec.name)
    if (spec.dtype, spec.shape) != (has.dtype, has.shape):
        raise ManifestMismatchError(
            f"the trainer sends {spec.dtype} {spec.shape}, the engine's model has {has.dtype} {has.shape}"
            + (
                "; see dtype of PushSync or WeightManager, and dtype_overrides of the extractor"
                if spec.dtype != has.dtype
                else ""
            ),
            parameter=spec.name,
        )
