"""What loaders of whole tensors ask of each step: is a bracket open, does an update fit, did everything come."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from weightsync.errors import ManifestMismatchError, StateError, UnsupportedError
from weightsync.plan.names import closest
from weightsync.tensors import host_empty, torch_dtype
from weightsync.types import Full, Manifest, TensorSpec, Update, Version, dtype_name

MAX_TOLD = 10
"""Of a manifest that does not fit, so many reasons are told; all tensors are counted."""

_MAX_NAMED = 3
"""Of one reason's tensors."""

TIED = "tied weights travel once: leave one out, e.g. name_map=lambda name: None if name == 'lm_head.weight' else name"


SENDS_ONCE = (
    "a model whose embeddings are tied sends them once: push model.state_dict(), which has both names, or start the "
    "engine with tied ones (tie_word_embeddings)"
)
OUTPUT_LAYER = "lm_head.weight"
"""How the name of what is often tied to the embeddings ends."""


class Differences:
    """What of a manifest does not fit an engine's model, gathered before a byte moves, and said all at once."""

    def __init__(self) -> None:
        self._told: dict[str, list[str]] = {}
        self._hints: dict[str, None] = {}
        self._first: str | None = None
        self._count = 0
        self._num_missing = 0
        self._strange: list[str] = []
        self._known: Collection[str] = ()

    def add(self, name: str, why: str, *, hint: str = "") -> None:
        """One tensor.

        Args:
            name: the manifest's.
            why: it does not fit; said once, with the names of all that have it.
            hint: what to do about it; said once, however many have it.
        """
        self._count += 1
        self._first = name if self._first is None else self._first
        if why in self._told or len(self._told) < MAX_TOLD:
            self._told.setdefault(why, []).append(name)
            self._hints |= {hint: None} if hint else {}

    def add_strange(self, name: str, known: Collection[str]) -> None:
        """One that is none of the model's names, which are `known`."""
        self._strange.append(name)
        self._known = known
        compared = known if len(self._strange) <= MAX_TOLD else ()  # it takes time, which few tensors are worth
        self.add(name, no_such_tensor(name, compared), hint="name_map= on the trainer's side gives tensors other names")

    def add_missing(self, names: Iterable[str], *, hint: str = "") -> None:
        """The model's tensors that the manifest has not."""
        missing = sorted(names)
        if not self._strange and all(name.endswith(OUTPUT_LAYER) for name in missing):
            hint = SENDS_ONCE
        why = f"the trainer does not send {'it' if len(missing) == 1 else 'them'}"
        for name in missing:
            self._num_missing += 1
            self.add(name, why, hint=hint)

    def refuse(self, names: Callable[[], Collection[str]] = tuple) -> None:
        """Returns where there was none.

        Args:
            names: all of the manifest's, where they are to be the model's own; asked for where they are needed.

        Raises:
            ManifestMismatchError: says each reason, how many tensors have it, and the first three; `parameter` is the
                first.
        """
        if self._first is None:
            return
        if (prefix := self._prefix(names())) is not None:
            what = f"{len(self._strange)} tensors differ: {prefix} on the trainer's side"
            raise ManifestMismatchError(what, parameter=self._strange[0])
        if self._num_missing == self._count:
            missing = list(itertools.chain.from_iterable(self._told.values()))
            what = f"the trainer does not send {self._count} of the model's tensors: {_listed(missing)}"
        elif self._count == 1:
            what = next(iter(self._told))
        else:
            what = f"{self._count} tensors differ: " + "; ".join(
                f"{_listed(those)}: {why}" for why, those in self._told.items()
            )
        more = self._count - sum(map(len, self._told.values()))
        what += f"; and {more} more" if more else ""
        raise ManifestMismatchError("; ".join([what, *self._hints]), parameter=self._first)

    def _prefix(self, names: Collection[str]) -> str | None:
        """Where the remedy makes all names the model's: with something before the strange ones, or without it."""
        if not self._strange or len(self._strange) + self._num_missing < self._count:
            return None
        first, known = self._strange[0], self._known
        cut = next((at for at, char in enumerate(first, 1) if char == "." and first[at:] in known), 0)
        before = first[:cut]
        if cut and names and all(name.removeprefix(before) in known for name in names):
            return (
                f"the engine's names are these without {before!r}: name_map=lambda name: name.removeprefix({before!r})"
            )
        before = next((each.removesuffix(first) for each in known if each.endswith(f".{first}")), "")
        if before and names and all(before + name in known for name in names):
            return f"the engine's names are these with {before!r} before: name_map=lambda name: {before!r} + name"
        return None


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def is_of(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether the tensor has the dtype and the shape that were announced."""
    return tensor.shape == spec.shape and dtype_name(tensor.dtype) == spec.dtype


def no_such_tensor(name: str, known: Iterable[str]) -> str:
    """What to say of a name that the engine's model has not."""
    meant = closest(name, known)
    return "the engine's model has no such tensor" + (
        "" if meant is None else f"; the closest that it has is {meant!r}"
    )


def whole_tensor(update: Update, specs: Mapping[str, TensorSpec], came: Collection[str]) -> torch.Tensor:
    """The tensor of an update, where it is one that was announced and is still missing.

    Args:
        update: what came.
        specs: what was announced, by name.
        came: names that came before.

    Raises:
        UnsupportedError: it is a patch.
        ManifestMismatchError: it was not announced, or not so, or came before.
    """
    if not isinstance(update, Full):
        raise UnsupportedError("this loader takes whole tensors alone", parameter=update.name)
    spec = specs.get(update.name)
    if spec is None:
        raise ManifestMismatchError("this tensor is not in the manifest", parameter=update.name)
    if update.name in came:
        raise ManifestMismatchError("this tensor came twice", parameter=update.name)
    if not is_of(update.tensor, spec):
        raise ManifestMismatchError(
            f"got {update.tensor.dtype} {tuple(update.tensor.shape)}, announced was {spec.dtype} {spec.shape}",
            parameter=update.name,
        )
    return update.tensor.detach()


def check_closed(manifest: Manifest | None) -> None:
    """Before a bracket begins: `manifest` is that of the one that is open, None where none is.

    Raises:
        StateError: one is open. Nothing was changed.
    """
    if manifest is not None:
        raise StateError("a load is under way: commit or abort it first", version=str(manifest.version))


def check_open(manifest: Manifest | None) -> Manifest:
    """The manifest of the bracket that is open.

    Raises:
        StateError: none is. Nothing was changed.
    """
    if manifest is None:
        raise StateError("no load is under way: begin first", state_left="nothing was changed")
    return manifest


def check_verified(manifest: Manifest | None, version: Version, *, verified: bool) -> None:
    """Before a commit.

    Raises:
        StateError: no bracket is open, nothing was verified in it, or it is of another version. Nothing was changed.
    """
    there = check_open(manifest).version
    if there != version or not verified:
        raise StateError(f"what was loaded and verified is {there if verified else 'nothing'}, not {version}")


def check_complete(announced: Iterable[str], came: Collection[str]) -> None:
    """After the last update.

    Raises:
        ManifestMismatchError: names that were announced did not come; it names the first of them.
    """
    if missing := sorted(set(announced).difference(came)):
        raise ManifestMismatchError(f"{len(missing)} tensors did not arrive", parameter=missing[0])


def staging_for(
    specs: Mapping[str, TensorSpec], before: Mapping[str, torch.Tensor], *, pinned: bool = False
) -> dict[str, torch.Tensor]:
    """A tensor in host memory for each spec: that of the last bracket where it still fits, else a new one."""
    return {
        name: spare
        if (spare := before.get(name)) is not None and is_of(spare, spec)
        else host_empty(spec.shape, torch_dtype(spec.dtype), pinned=pinned)
        for name, spec in specs.items()
    }


def gpu_of(model: nn.Module) -> int | None:
    """The index of the GPU that a model's first parameter on one is on; None where there is none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None  # at once: a model may have 100,000 parameters
    return next((parameter.device.index for parameter in model.parameters() if parameter.is_cuda), None)


def lent(staging: Mapping[str, torch.Tensor], model: nn.Module) -> set[str]:
    """Which staging tensors a model serves from: its own loader took them as they are (`param.data = tensor`, or
    `load_state_dict(assign=True)`). They are the model's from then on, and never written again.

    Args:
        staging: by name.
        model: whose parameters and buffers are looked at, under every name.

    Returns:
        The names in `staging`, which are not those of the model.
    """
    spans = sorted((*span, name) for name, tensor in staging.items() if (span := _span(tensor)) is not None)
    starts, ends = [start for start, _, _ in spans], [end for _, end, _ in spans]
    found: set[str] = set()
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if (span := _span(tensor)) is not None:
            start, end = span
            touched = spans[bisect.bisect_right(ends, start) : bisect.bisect_left(starts, end)]
            found.update(name for _, _, name in touched)
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First address of the tensor's storage, and the one behind it; None where it has none (empty, meta, sparse)."""
    try:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
    return (start, start + storage.nbytes()) if start else None


def stage(
    updates: Iterable[Update], specs: Mapping[str, TensorSpec], staging: Mapping[str, torch.Tensor], came: set[str]
) -> None:
    """Copies updates that fit into their staging and adds their names to `came`.

    Raises:
        UnsupportedError, ManifestMismatchError: as `whole_tensor`, for the first that does not fit.
    """
    for update in updates:
        tensor = whole_tensor(update, specs, came)
        staging[update.name].copy_(tensor)
        came.add(update.name)
