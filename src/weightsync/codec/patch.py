"""PatchDecoder: the receiving half of a session on a base. Its values are plain; the proof is the model's digest.

A patch comes as one update, or as two whole tensors, one right behind the other: `NAME#positions` (uint32, 1-D,
strictly rising) and `NAME#values` (of the tensor's dtype, as many). In such a session every name is one or the
other, so a parameter may be called whatever it likes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from weightsync.codec.base import Decoder
from weightsync.errors import InvalidRequestError, ManifestMismatchError
from weightsync.types import AnyUpdateRequest, Full, Manifest, Patch, PatchWeightUpdateRequest, TensorTable, Update
from weightsync.types.requests import MAX_PATCHED_ELEMENTS

POSITIONS, VALUES = "#positions", "#values"


class PatchDecoder(Decoder):
    """Passes patches through and makes them of pairs, each tensor's once at most."""

    def __init__(self) -> None:
        self._received: set[str] = set()

    def check_announced(self, request: AnyUpdateRequest, expected: TensorTable) -> None:
        """See `Decoder.check_announced`.

        Raises:
            InvalidRequestError: whole tensors that are no pairs of positions and values.
        """
        if isinstance(request, PatchWeightUpdateRequest):
            super().check_announced(request, expected)
            return
        tensors = list(zip(request.names, request.dtypes, request.shapes, strict=True))
        if len(tensors) % 2:
            raise InvalidRequestError("a session on a base takes patches alone: positions and values come in pairs")
        for (where, where_dtype, where_shape), (what, dtype, shape) in zip(tensors[::2], tensors[1::2], strict=True):
            spec = expected.by_name.get(where.removesuffix(POSITIONS))
            if not where.endswith(POSITIONS) or what != where.removesuffix(POSITIONS) + VALUES:
                raise InvalidRequestError("a session on a base takes patches alone, this is none", parameter=where)
            if spec is None:
                raise ManifestMismatchError("a patch changes a tensor that the manifest has not", parameter=where)
            most = min(math.prod(spec.shape), MAX_PATCHED_ELEMENTS)
            fits = len(shape) == 1 and shape == where_shape and 1 <= shape[0] <= most
            if not fits or (where_dtype, dtype) != ("uint32", spec.dtype):
                raise ManifestMismatchError(
                    f"a patch has {where_dtype} {where_shape} and {dtype} {shape} for elements of a {spec.dtype} "
                    f"{spec.shape}",
                    parameter=spec.name,
                )

    def decode(self, updates: Iterable[Update]) -> Iterator[Update]:
        """See `Decoder.decode`.

        Raises:
            InvalidRequestError: a tensor came twice, or half of a pair. Updates before it were handed on.
        """
        waiting: tuple[str, torch.Tensor] | None = None
        for update in updates:
            if isinstance(update, Full):
                name, _, part = update.name.rpartition("#")
                if waiting is None and part == POSITIONS[1:]:
                    waiting = name, update.tensor
                    continue
                if waiting is None or waiting[0] != name or part != VALUES[1:]:
                    raise InvalidRequestError("values come right behind their positions", parameter=update.name)
                update, waiting = Patch(name=name, positions=waiting[1], values=update.tensor), None
            elif waiting is not None:
                raise InvalidRequestError("values come right behind their positions", parameter=update.name)
            if update.name in self._received:
                raise InvalidRequestError("the tensor was patched twice", parameter=update.name)
            self._received.add(update.name)
            yield update
        if waiting is not None:
            raise InvalidRequestError("positions came without values", parameter=waiting[0])

    def check(self, manifest: Manifest) -> None:
        """Nothing by itself: what did not come has not changed, or base + change is not the published digest."""
