"""What was seen of a model's tensors when they were checked last, and whether they still are so: in C's loops.

A model of 100,000 tensors is looked at twice a sync, and a microsecond each would be most of what a sync takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter, eq

import torch

from weightsync.many import blocks

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs(Collection[tuple[str, torch.Tensor]]):
    """Names and tensors. A list of 100,000 pairs at every step brings Python's collector to look at the whole model."""

    names: Sequence[str]
    tensors: Sequence[torch.Tensor]

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return zip(self.names, self.tensors, strict=True)

    def __contains__(self, pair: object) -> bool:
        return any(pair == each for each in self)

    @classmethod
    def of(cls, named: Collection[tuple[str, torch.Tensor]]) -> Pairs:
        if isinstance(named, cls):
            return named
        return cls(names=[name for name, _ in named], tensors=[tensor for _, tensor in named])


class Glance:
    """Names, types, dtypes and shapes of tensors that were checked.

    Args:
        engine_names: of each; None where it is left out.
    """

    def __init__(self, named: Pairs, engine_names: Sequence[str | None]) -> None:
        self._names = named.names
        self._types = list(map(type, named.tensors))
        self._dtypes = list(map(_dtype, named.tensors))
        self._shapes = list(map(_shape, named.tensors))
        self._engine_names = engine_names
        self._all_go = None not in engine_names

    def live(
        self, named: Pairs, *, says_all: Callable[[Sequence[torch.Tensor]], bool]
    ) -> dict[str, torch.Tensor] | None:
        """The tensors by their names for the engine; None where one has to be looked at."""
        if named.names is not self._names and list(named.names) != list(self._names):
            return None
        for cut in blocks(len(self._types)):
            some = named.tensors[cut]
            if (
                list(map(type, some)) != self._types[cut]
                or list(map(_dtype, some)) != self._dtypes[cut]
                or not all(map(eq, map(_shape, some), self._shapes[cut]))
                or not says_all(some)
            ):
                return None
        live = zip(self._engine_names, named.tensors, strict=True)
        return dict(live) if self._all_go else {name: tensor for name, tensor in live if name is not None}  # type: ignore[arg-type]
