"""NamedTensorsExtractor: of tensors by name, where nobody hands a model over: a mapping, `model.named_parameters()`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        named: a mapping, read between two steps as it is then, and never changed: a trainer may replace its tensors by
            others of the same dtype and shape. Or pairs, `model.named_parameters()` say, used up; buffers are not
            among these: chain `named_buffers()`, or give an extractor of the module.
        settings: see `WeightExtractor`.

    Raises:
        ConfigError: something in it is no tensor, or has no name.
    """

    def __init__(self, named: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], **settings: Any) -> None:
        self._mapping = named if isinstance(named, Mapping) else None
        self._pairs = [] if isinstance(named, Mapping) else _checked(named)
        super().__init__(torch.nn.Module(), **settings)

    def _prepare(self) -> None:
        return

    def _named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self._pairs if self._mapping is None else _checked(self._mapping.items())


def _checked(pairs: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    found: dict[int, tuple[str, torch.Tensor]] = {}
    try:
        for name, tensor in pairs:
            if not (isinstance(name, str) and isinstance(tensor, torch.Tensor)):
                raise TypeError(f"{name!r:.80}: {type(tensor).__name__}")
            if id(tensor) not in found:
                found[id(tensor)] = clean_name(name), tensor
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "tensors by name are names and tensors, in pairs, as a mapping or model.named_parameters() has them, and "
            f"not {error}"
        ) from error
    return list(found.values())
