"""ModuleWeightExtractor: plain torch modules, also under DDP and torch.compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from weightsync.copying import cast_together
from weightsync.errors import UnsupportedError
from weightsync.extract.base import WeightExtractor, training_rank
from weightsync.extract.glance import Pairs
from weightsync.module_walk import Held, Kind, ModuleTensors, clean_name, unwrapped
from weightsync.plan.boxes import whole_box
from weightsync.types import Box, TensorTable

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter)})
"""Types that say all of themselves; any other is looked at each time."""

_FSDP1_MARK = "_fsdp_flattened"
_layout, _is_meta = attrgetter("layout"), attrgetter("is_meta")
_STRIDED = frozenset({torch.strided})
_FSDP1 = (
    "FSDP1's flat parameters can't be extracted: use fully_shard; or give FSDP1's own module, and begin and step "
    "inside FullyShardedDataParallel.summon_full_params(module)"
)


def refuse_fsdp1(module: FullyShardedDataParallel) -> None:
    """Where its parameters are stretches of a flat one, as with `use_orig_params=True`: their names are the model's.
    Inside `summon_full_params` they are whole.
    """
    handle = module._handle
    if handle is None or not handle.uses_sharded_strategy:
        return
    if handle.is_sharded(handle.flat_param) or handle._training_state.name != "SUMMON_FULL_PARAMS":
        raise UnsupportedError(_FSDP1)


def refuse_stretches(tensors: Iterable[torch.Tensor], met: Sequence[FullyShardedDataParallel] = ()) -> None:
    """Where FSDP1 has marked a tensor, and none of the modules that were met has said that it is whole.

    Args:
        met: went by `refuse_fsdp1`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    marked = [tensor for tensor in tensors if hasattr(tensor, _FSDP1_MARK)]
    handles = [module._handle for module in met if marked and module._handle is not None]
    told = {id(tensor) for handle in handles for tensor in handle.flat_param._params or ()}
    told |= {id(tensor) for handle in handles for tensor in handle.flat_param._shared_params or ()}
    if any(id(tensor) not in told for tensor in marked):
        raise UnsupportedError(_FSDP1)


class ModuleWeightExtractor(WeightExtractor):
    """Extracts from a module whose ranks each hold all of it. Its `extract_weights` communicates nothing.

    A module under `DistributedDataParallel`, `torch.compile` or activation checkpointing keeps the names that it
    has without them.
    """

    _walk: ModuleTensors | None = None
    _names_of: tuple[str, ...] | None = None
    _clean_names: Sequence[str] = ()

    def _named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        met: list[FullyShardedDataParallel] = []
        held = self._read(kind=FullyShardedDataParallel, prepare=met.append)
        for module in met:
            refuse_fsdp1(module)
        refuse_stretches(held.tensors, met)
        if held.names is not self._names_of:
            self._names_of, self._clean_names = held.names, list(map(clean_name, held.names))
        return Pairs(names=self._clean_names, tensors=held.tensors)

    def _read(self, *, kind: Kind | None = None, prepare: Callable[[Any], object] | None = None) -> Held:
        """What the model holds now; see `ModuleTensors.read`."""
        if self._walk is None:
            self._walk = ModuleTensors()
        return self._walk.read(unwrapped(self.model), kind=kind, prepare=prepare)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        super()._check(name, tensor)
        if isinstance(tensor, DTensor):
            raise UnsupportedError("this parameter is sharded (a DTensor): use FSDPWeightExtractor", parameter=name)
        if hasattr(tensor, "ds_shape"):
            raise UnsupportedError("this parameter is sharded by ZeRO-3: use DeepSpeedWeightExtractor", parameter=name)
        if name.endswith("_flat_param"):
            raise UnsupportedError(_FSDP1, parameter=name)

    def _at_a_glance(self, tensors: Sequence[torch.Tensor]) -> bool:
        return (
            PLAIN.issuperset(map(type, tensors))
            and _STRIDED.issuperset(map(_layout, tensors))
            and not any(map(_is_meta, tensors))
            and not any(map(hasattr, tensors, itertools.repeat("ds_shape")))
        )

    def _gather(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        whole = tensor.detach() if tensor.dtype is dtype else tensor.to(dtype)
        return whole if whole.is_contiguous() else whole.contiguous()

    def _gather_together(
        self, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor] | None:
        plain = type(self)._gather is ModuleWeightExtractor._gather  # whoever gathers in another way is asked
        return cast_together(tensors, dtypes) if plain else None

    def local_whole(self, dtype: str | None = None) -> tuple[TensorTable, list[torch.Tensor]] | None:
        if type(self)._local_part is not ModuleWeightExtractor._local_part or not self._hands_out():
            return None
        specs, live = self._shardable(dtype)
        if self._glance is None:
            return None
        return specs, list(map(live.__getitem__, specs.names))

    def _can_shard(self, tensor: torch.Tensor) -> bool:
        return True

    def _local_part(self, tensor: torch.Tensor) -> tuple[Box, torch.Tensor] | None:
        if not self._hands_out():
            return None
        return whole_box(tuple(tensor.shape)), tensor

    def _hands_out(self) -> bool:
        return self.alone or training_rank() == 0
