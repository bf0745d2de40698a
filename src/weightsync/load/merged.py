"""MergedAdapterLoader: an adapter merged into a plain torch module; the base's own tensors are kept, and come back."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from weightsync.errors import LoadError, StateError, UnsupportedError
from weightsync.load.base import WeightLoader
from weightsync.load.placing import refuse_aliases, walked
from weightsync.load.whole import (
    Differences,
    check_closed,
    check_complete,
    check_open,
    check_verified,
    gpu_of,
    no_such_tensor,
    stage,
    staging_for,
)
from weightsync.module_walk import clean_name, module_tensors, unwrapped
from weightsync.plan.peft_config import PREFIX
from weightsync.tensors import write_counter
from weightsync.types import Adapter, HeldTensor, Manifest, TensorSpec, Update, Version

_HALVES = {".lora_A.weight": 0, ".lora_B.weight": 1, ".lora_embedding_A": 0, ".lora_embedding_B": 1}
_NOT_MERGED = ("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora", "alora_invocation_tokens", "modules_to_save",
               "trainable_token_indices", "arrow_config", "use_bdlora", "velora_config", "kasa_config")  # fmt: skip
_OTHERWISE = "load the adapter into a PEFT model, or untie them"


@dataclasses.dataclass(kw_only=True)
class _Target:
    """A module that an adapter changes.

    Attributes:
        module: the engine's.
        halves: names in the manifest: A, then B.
        is_embedding: whether the product is used transposed, as PEFT does of embeddings.
        scaling: of the product.
    """

    module: Any
    halves: tuple[str, str]
    is_embedding: bool
    scaling: float


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A module's weight as it was seen.

    Attributes:
        module: the engine's.
        data: the memory of its weight; kept, so that nothing else comes to lie there.
        counter: torch's, of writes. Memory alone says too little: a base that is swapped twice lies where it lay.
    """

    module: Any
    data: torch.Tensor
    counter: int | None

    @classmethod
    def of(cls, module: Any) -> _Seen:
        """As it is now."""
        return cls(module, module.weight.data, write_counter(module.weight))

    @property
    def is_other(self) -> bool:
        """Whether somebody has written or replaced it since."""
        weight = self.module.weight
        return weight.data_ptr() != self.data.data_ptr() or write_counter(weight) != self.counter


class MergedAdapterLoader(WeightLoader):
    """Loads versions of one adapter into a module without PEFT: each is merged anew into the base's own weights.

    The merged tensors are made beside the live ones, and swapped in at commit; the base's tensors are put aside, not
    changed, so that the next version starts from the very same bytes, and `unmerge` puts these back. That costs the
    targeted weights twice more. What is merged equals PEFT's own `merge_and_unload` to the bit, on the same device.

    Bytes of the adapter are proved as they arrive. The merged weights are nobody's publication, so the engine reports
    its live bytes as unprovable, in words.

    Nobody else may load the base meanwhile. Whoever writes or replaces a weight that an adapter is merged into is seen,
    unless torch does not count it (`weight.data.copy_`, a module that was made in inference mode); from then on no
    version is merged. A base that is followed as well needs a PEFT model.

    Args:
        module: the engine's model: the base, with its own names.
        name_map: from a module's name in the trainer's base to the name here; the identity where not given.
    """

    artifacts: ClassVar[frozenset[str]] = frozenset({"lora"})

    def __init__(self, module: torch.nn.Module, *, name_map: Callable[[str], str] | None = None) -> None:
        self._module = unwrapped(module)
        self._name_map = name_map or (lambda name: name)
        self._manifest: Manifest | None = None
        self._targets: dict[str, _Target] = {}
        self._specs: Mapping[str, TensorSpec] = {}
        self._staging: dict[str, torch.Tensor] = {}
        self._came: set[str] = set()
        self._verified = False
        self._healthy = True
        self._coming: dict[str, torch.Tensor] = {}  # path -> what commit will serve
        self._base: dict[str, torch.Tensor] = {}  # path -> the base's own memory, of weights that are merged now
        self._put: dict[str, _Seen] = {}  # path -> what commit has put in its place
        self._found: dict[str, _Seen] = {}  # path -> what `verify` found there

    @property
    def healthy(self) -> bool:
        return self._healthy

    @property
    def device_index(self) -> int | None:
        return gpu_of(self._module)

    @property
    def merged(self) -> tuple[str, ...]:
        """Modules whose weights are merged now."""
        return tuple(self._put)

    def begin(self, manifest: Manifest) -> None:
        check_closed(self._manifest)
        assert manifest.adapter is not None
        targets = self._fitting(manifest, manifest.adapter)
        self._check_untouched()
        self._specs = manifest.by_name()
        self._staging = staging_for(self._specs, self._staging)
        self._targets, self._came, self._verified = targets, set(), False
        self._manifest = manifest

    def load_weights(self, updates: Iterable[Update]) -> None:
        check_open(self._manifest)
        stage(updates, self._specs, self._staging, self._came)

    def verify(self) -> None:
        check_open(self._manifest)
        check_complete(self._specs, self._came)
        self._check_untouched()
        self._found = {path: _Seen.of(target.module) for path, target in self._targets.items()}
        with torch.no_grad():
            self._coming = {path: self._merge(path, target) for path, target in self._targets.items()}
        self._verified = True

    def live_tensors(self) -> Iterator[HeldTensor]:
        raise UnsupportedError(
            "the adapter is merged into the base: its bytes were proved as they arrived, the sums made of them are no "
            "publication's"
        )

    def base_tensors(self) -> Mapping[str, torch.Tensor]:
        aside = {id(self._put[path].module.weight): tensor for path, tensor in self._base.items()}
        return {clean_name(name): aside.get(id(tensor), tensor) for name, tensor in module_tensors(self._module)}

    def commit(self, version: Version) -> None:
        check_verified(self._manifest, version, verified=self._verified)
        self._check_untouched()
        for path, seen in self._found.items():
            if seen.is_other:
                raise LoadError(
                    "somebody else has written or replaced this weight since the adapter was merged with what it was: "
                    "load the adapter again",
                    parameter=path,
                    state_left="nothing was changed",
                )
        self._healthy = False
        holders = {path: seen.module for path, seen in (self._put | self._found).items()}
        before = {path: holder.weight.data for path, holder in holders.items()}
        try:
            for path in self._put.keys() - self._coming.keys():
                holders[path].weight.data = self._base[path]
            for path, merged in self._coming.items():
                holders[path].weight.data = merged
        except BaseException:
            for path, data in before.items():
                holders[path].weight.data = data
            self._healthy = True
            raise
        self._base = {path: self._base.get(path, before[path]) for path in self._coming}
        self._put = {path: _Seen.of(holders[path]) for path in self._coming}
        self._close()
        self._healthy = True

    def abort(self, reason: str) -> None:
        if self._manifest is not None:
            self._close()

    def unmerge(self) -> None:
        """Puts the base's own tensors back: the very memory that lay there, so every bit of it.

        Raises:
            StateError: a version is being loaded.
            LoadError: somebody else has written or replaced a merged weight. Nothing was changed.
        """
        if self._manifest is not None:
            raise StateError("a version is being loaded: unmerge after it")
        self._check_untouched()
        for path, tensor in self._base.items():
            self._put[path].module.weight.data = tensor
        self._base, self._put = {}, {}

    def _close(self) -> None:
        self._manifest, self._verified = None, False
        self._coming, self._found, self._targets = {}, {}, {}

    def _check_untouched(self) -> None:
        """What is merged is what the last commit has put there.

        Raises:
            LoadError: somebody else has written or replaced it: nobody knows the base then.
        """
        for path, seen in self._put.items():
            if seen.is_other:
                raise LoadError(
                    "a merged weight was written or replaced by somebody else: what its base is is not known any more; "
                    "load a whole base there, and make another loader",
                    parameter=path,
                    state_left="the engine serves what was put there",
                )

    def _merge(self, path: str, target: _Target) -> torch.Tensor:
        """The base's weight plus the adapter's product, as PEFT adds them."""
        weight: torch.Tensor = self._base.get(path, target.module.weight.data)
        down, up = (self._staging[name].to(weight.device) for name in target.halves)
        dtype = up.dtype
        widen = weight.device.type == "cpu" and dtype in (torch.float16, torch.bfloat16)  # by way of float32, as there
        if widen:
            down, up = down.float(), up.float()
        delta = ((up @ down).T if target.is_embedding else up @ down) * target.scaling
        if widen:
            delta = delta.to(dtype)
        if target.is_embedding:  # of these alone it rounds before it adds
            delta = delta.to(weight.dtype)
        merged = weight.clone()
        merged += delta
        return merged

    def _fitting(self, manifest: Manifest, adapter: Adapter) -> dict[str, _Target]:
        config, differences = adapter.config_dict, Differences()
        odd = [key for key in _NOT_MERGED if config.get(key)]
        odd += ["bias"] if config.get("bias", "none") != "none" else []
        if odd:
            raise UnsupportedError(
                f"an adapter with {', '.join(odd)} can't be merged here: load it into a PEFT model",
                state_left="nothing was changed",
            )
        modules = {clean_name(name): module for name, module in self._module.named_modules()}
        halves: dict[str, dict[int, str]] = {}
        for name in manifest.table.names:
            kind = next((end for end in _HALVES if name.endswith(end)), None)
            if kind is None or not name.startswith(PREFIX):
                differences.add(name, "no part of an adapter that can be merged")
                continue
            path = name[len(PREFIX) : -len(kind)]
            if self._name_map(path) not in modules:
                differences.add(name, no_such_tensor(path, modules))
                continue
            halves.setdefault(path, {})[_HALVES[kind]] = name
        found: dict[str, _Target] = {}
        for path, pair in halves.items():
            if len(pair) != 2:
                differences.add(next(iter(pair.values())), "the other half of its product is missing")
                continue
            target = _Target(
                module=modules[self._name_map(path)],
                halves=(pair[0], pair[1]),
                is_embedding="lora_embedding_" in pair[0],
                scaling=adapter.scaling_of(path),
            )
            why = self._why_not(target, manifest.by_name(), adapter.rank_of(path))
            if why is not None:
                differences.add(pair[0], why)
            found[path] = target
        differences.refuse()
        if len({id(target.module.weight) for target in found.values()}) != len(found):
            raise UnsupportedError("two of the adapter's modules share one weight here: it can't be merged twice")
        owners: Counter[int] = Counter()
        for module in self._module.modules():
            owners.update(map(id, module._parameters.values()))
            owners.update(map(id, module._modules.values()))
        for path, target in found.items():
            if owners[id(target.module)] > 1 or owners[id(target.module.weight)] > 1:
                raise UnsupportedError(
                    f"here its weight is also at another place, which would get the adapter with it: {_OTHERWISE}",
                    parameter=path,
                    state_left="nothing was changed",
                )
        weights = (target.module.weight for target in found.values())
        refuse_aliases(walked(self._module), weights, advice=_OTHERWISE)
        return found

    def _why_not(self, target: _Target, specs: Mapping[str, TensorSpec], rank: int) -> str | None:
        kind = torch.nn.Embedding if target.is_embedding else torch.nn.Linear
        if not isinstance(target.module, kind):
            return f"here it is a {type(target.module).__name__}, and adapters are merged into {kind.__name__} alone"
        down, up = (specs[name].shape for name in target.halves)
        out, width = target.module.weight.shape[::-1] if target.is_embedding else target.module.weight.shape
        if down != (rank, width) or up != (out, rank):
            return f"of rank {rank} it is {(rank, width)} and {(out, rank)} here, it came as {down} and {up}"
        return None
