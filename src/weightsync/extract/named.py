"""Extractors of tensors by name, where nobody hands a model over: of `model.named_parameters()`, and of a mapping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from weightsync.errors import ConfigError
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.module_walk import clean_name


class NamedTensorsExtractor(FSDPWeightExtractor):
    """Extracts from named tensors, DTensors among them, as `FSDPWeightExtractor` does from a module.

    Names lose what torch's wrappers put into them. A tensor that comes twice (tied weights) counts once, under its
    first name. Parameters that a forward pass left unsharded can't be resharded here: give the module's extractor
    for that.

    Args:
        named: e.g. `model.named_parameters()`; used up. Buffers are not among these: chain `named_buffers()`, or
            give an extractor of the module.
        name_map, dtype_overrides: see `WeightExtractor`.

    Raises:
        ConfigError: it is no iterable of names and tensors.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        *,
        name_map: Callable[[str], str | None] | None = None,
        dtype_overrides: Mapping[str, str] | None = None,
    ) -> None:
        self._named: list[tuple[str, torch.Tensor]] = []
        seen: set[int] = set()
        try:
            for name, tensor in named:
                if not (isinstance(name, str) and isinstance(tensor, torch.Tensor)):
                    raise TypeError(f"{type(name).__name__}, {type(tensor).__name__}")
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    self._named.append((clean_name(name), tensor))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"named tensors are pairs of a name and a tensor, as model.named_parameters() gives them: {error}"
            ) from error
        super().__init__(torch.nn.Module(), name_map=name_map, dtype_overrides=dtype_overrides)

    def _prepare(self) -> None:
        return

    def _named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return self._named


class MappingWeightExtractor(FSDPWeightExtractor):
    """Extracts from a mapping of names to tensors, DTensors among them, as it is at each step.

    A trainer may replace its tensors by others of the same dtype and shape. A tensor that is there twice (tied
    weights) counts once, under its first name.

    Args:
        tensors: by the trainer's names; read between two steps, never changed.
        group_by_module, chunk_bytes, name_map, dtype_overrides: see `WeightExtractor`.

    Raises:
        ConfigError: something in it is no tensor, or has no name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], **settings: Any) -> None:
        self._tensors = tensors
        super().__init__(torch.nn.Module(), **settings)

    def _prepare(self) -> None:
        return

    def _named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        named: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in self._tensors.items():
            if not (isinstance(name, str) and isinstance(tensor, torch.Tensor)):
                raise ConfigError(f"the mapping has names and tensors, and not {name!r:.80}: {type(tensor).__name__}")
            named.setdefault(id(tensor), (clean_name(name), tensor))
        return list(named.values())
