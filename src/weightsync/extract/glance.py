"""What was seen of a model's tensors when they were checked last, and whether they still are so: in C's loops.

A model of 100,000 tensors is looked at twice a sync, and a microsecond each would be most of what a sync takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, eq

import torch

from weightsync.many import blocks

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
_storage, _nbytes = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs(Iterable[tuple[str, torch.Tensor]]):
    """Names and tensors. A list of 100,000 pairs at every step brings Python's collector to look at the whole model."""

    names: Sequence[str]
    tensors: Sequence[torch.Tensor]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return zip(self.names, self.tensors, strict=True)

    @classmethod
    def of(cls, named: Iterable[tuple[str, torch.Tensor]]) -> Pairs:
        if isinstance(named, Pairs):
            return named
        pairs = list(named)
        return cls(names=[name for name, _ in pairs], tensors=[tensor for _, tensor in pairs])


class Glance:
    """Names, types, dtypes and shapes of tensors that were checked. No tensor is kept.

    Args:
        engine_names: of each; None where it is left out.
        sized: whether the sizes of their storages count too; a tensor that is made of others has none.
    """

    def __init__(self, named: Pairs, engine_names: Sequence[str | None], *, sized: bool = False) -> None:
        one_of: dict[torch.Size, torch.Size] = {}  # thousands of tensors have one shape
        self._names = named.names
        self._types = list(map(type, named.tensors))
        self._dtypes = list(map(_dtype, named.tensors))
        self._shapes = [one_of.setdefault(shape, shape) for shape in map(_shape, named.tensors)]
        self._sizes = list(map(_nbytes, map(_storage, named.tensors))) if sized else None
        self._engine_names = engine_names
        self._all_go = None not in engine_names

    def holds(self, named: Pairs, *, says_all: Callable[[Sequence[torch.Tensor]], bool]) -> bool:
        """Whether they still are so; `says_all` looks at some of them, of types that were there before."""
        if named.names is not self._names and list(named.names) != list(self._names):
            return False
        for cut in blocks(len(self._types)):
            some = named.tensors[cut]
            if (
                list(map(type, some)) != self._types[cut]
                or list(map(_dtype, some)) != self._dtypes[cut]
                or not all(map(eq, map(_shape, some), self._shapes[cut]))
                or not says_all(some)
                or (self._sizes is not None and list(map(_nbytes, map(_storage, some))) != self._sizes[cut])
            ):
                return False
        return True

    def live(
        self, named: Pairs, *, says_all: Callable[[Sequence[torch.Tensor]], bool]
    ) -> dict[str, torch.Tensor] | None:
        """The tensors by their names for the engine; None where one has to be looked at."""
        if not self.holds(named, says_all=says_all):
            return None
        live = zip(self._engine_names, named.tensors, strict=True)
        return dict(live) if self._all_go else {name: tensor for name, tensor in live if name is not None}  # type: ignore[arg-type]
