"""WeightChunk: several parameters that travel together."""

from __future__ import annotations

import dataclasses
from operator import attrgetter, eq
from typing import TYPE_CHECKING, Any

from weightsync.errors import InvalidRequestError
from weightsync.types.dtypes import dtype_name
from weightsync.types.spec import check_shape

if TYPE_CHECKING:
    import torch

_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WeightChunk:
    """Parameters that an extractor hands out together: a module's group, or up to a byte threshold.

    All sequences have one entry a parameter, in the stream's order. The dtypes, shapes and the size are
    read off the tensors when they are not given; when they are given they must agree with them.

    Attributes:
        names: parameter names as the engine knows them.
        tensors: whole tensors, already of the engine's dtype, contiguous, on the trainer's device. They
            belong to whoever holds the chunk and may be views of live weights: read, never write.
        dtypes: e.g. "bfloat16".
        shapes: global shapes.
        module_name: the group, e.g. "layers.0.self_attn"; None where chunks are not groups.
        total_size_bytes: sum of the tensors' bytes.

    Raises:
        InvalidRequestError: the sequences differ in length, or what was declared is not what is there.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    module_name: str | None = None
    total_size_bytes: int = -1

    def __post_init__(self) -> None:
        if not self.names:
            raise InvalidRequestError("a chunk has at least one parameter")
        if len(set(self.names)) != len(self.names):
            raise InvalidRequestError(f"a chunk names every parameter once: {list(self.names)}")
        if len(self.names) != len(self.tensors):
            raise InvalidRequestError(f"a chunk has {len(self.names)} names and {len(self.tensors)} tensors")
        # Of 100,000 tensors each look costs: what repeats is checked once. And tuples that are kept for a while bring
        # Python's collector to look at the whole model, so none are.
        kinds = list(map(_dtype, self.tensors))
        known = {kind: dtype_name(kind) for kind in set(kinds)}
        dtypes = tuple(map(known.__getitem__, kinds))
        self._settle("dtypes", tuple(self.dtypes), dtypes)
        if len(self.shapes) == len(self.tensors) and all(map(eq, map(_shape, self.tensors), self.shapes)):
            object.__setattr__(self, "shapes", tuple(self.shapes))
        else:
            shapes = tuple([tuple(tensor.shape) for tensor in self.tensors])
            self._settle("shapes", tuple(map(tuple, self.shapes)), shapes)
        sizes: dict[Any, int] = {}
        total = 0
        for name, kind in zip(self.names, zip(self.shapes, dtypes, strict=True), strict=True):
            if kind not in sizes:
                sizes[kind] = check_shape(kind[0], dtype=kind[1], name=name)
            total += sizes[kind]
        if self.total_size_bytes not in (-1, total):
            raise InvalidRequestError(f"total_size_bytes says {self.total_size_bytes}, the tensors have {total}")
        object.__setattr__(self, "total_size_bytes", total)

    def _settle(self, field: str, declared: tuple[object, ...], actual: tuple[object, ...]) -> None:
        if declared and declared != actual:
            if len(declared) != len(actual):
                raise InvalidRequestError(f"a chunk of {len(actual)} parameters has {len(declared)} {field}")
            name, claimed, found = next(
                (name, claimed, found)
                for name, claimed, found in zip(self.names, declared, actual, strict=True)
                if claimed != found
            )
            raise InvalidRequestError(f"{field} says {claimed}, the tensor has {found}", parameter=name)
        object.__setattr__(self, field, actual)
