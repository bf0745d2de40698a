"""NamedTensorsExtractor: what `model.named_parameters()` gives, where nobody hands the model itself over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from weightsync.errors import ConfigError
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.extract.module import clean_name


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
