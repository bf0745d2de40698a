"""verl's `delta_flush`: a version as changed elements, in the form that verl's rollouts take from its own delta engine.

A flush is three tensors: a JSON manifest, positions (int32, flat, as bytes) and new values of one dtype. Where the
receiving rollout has not exactly the version that a change is made from, a version comes as "dense" flushes: values
alone, of whole parameters. The form is that of verl 0.9 (`verl.checkpoint_engine.delta_sync.encode`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from verl.checkpoint_engine.delta_sync.encode import DeltaParam, checksum

from weightsync.adapters.checkpoint_engine import whole_tensors, worker_device
from weightsync.host.staged_version import StagedPatch, StagedVersion
from weightsync.memory import MappedSegment
from weightsync.plan.buckets import split_by_bytes
from weightsync.tensors import tensor_from_bytes
from weightsync.types import Manifest, TensorSpec, itemsize_bytes

Flush: TypeAlias = tuple[list[tuple[str, torch.Tensor]], bool]
"""The named tensors of one, and whether it is the last."""

_POSITION_BYTES = 4
_MOST_ELEMENTS = (1 << 31) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Of one parameter.

    Attributes:
        spec: the parameter's.
        positions: int32, flat; None: all of it, in order.
        values: at these positions, flat.
    """

    spec: TensorSpec
    positions: torch.Tensor | None
    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)


def changed(patch: StagedPatch, manifest: Manifest, segment: MappedSegment, *, most_bytes: int) -> Iterator[Piece]:
    """What a patch changes, in pieces of at most so many bytes; true while its segment is mapped."""
    specs = {spec.name: spec for spec in manifest.tensors}
    memory = torch.frombuffer(segment.memory, dtype=torch.uint8)
    for tensor in patch.tensors:
        spec = specs[tensor.name]
        size = itemsize_bytes(spec.dtype)
        positions = memory[tensor.positions_offset : tensor.positions_offset + _POSITION_BYTES * tensor.count]
        data = memory[tensor.values_offset : tensor.values_offset + size * tensor.count]
        values = tensor_from_bytes(data, dtype=spec.dtype, shape=(tensor.count,))
        at_once = max(1, most_bytes // (_POSITION_BYTES + size))
        for start in range(0, tensor.count, at_once):
            part = slice(start, start + at_once)
            yield Piece(spec=spec, positions=positions.view(torch.int32)[part], values=values[part])


def whole(staged: StagedVersion, segment: MappedSegment) -> Iterator[Piece]:
    """All of a version; true while its segment is mapped."""
    specs = {spec.name: spec for spec in staged.manifest.tensors}
    for name, tensor in whole_tensors(staged, segment):
        yield Piece(spec=specs[name], positions=None, values=tensor.reshape(-1))


def needs_whole(pieces: Iterable[Piece]) -> bool:
    """Whether verl's loaders can't take these changes: to them a NaN says that an element stays as it was, so no new
    value may be one, and none may be of a dtype that has none. Positions are int32, and verl's own engine takes no
    parameter with more elements."""
    return any(
        math.prod(piece.spec.shape) > _MOST_ELEMENTS
        or not piece.values.is_floating_point()
        or bool(piece.values.isnan().any())
        for piece in pieces
    )


def flushes(pieces: Iterable[Piece], *, most_bytes: int) -> Iterator[Flush]:
    """Flushes of about so many bytes each, one dtype each; the last one says that it is."""
    pending: Flush | None = None
    for _, alike in itertools.groupby(pieces, key=lambda piece: piece.spec.dtype):
        for taken in split_by_bytes(alike, attrgetter("nbytes"), most_bytes):
            if pending is not None:
                yield pending
            pending = (_named(taken), False)
    if pending is not None:
        yield pending[0], True


def _named(pieces: list[Piece]) -> list[tuple[str, torch.Tensor]]:
    device = worker_device()
    params: list[dict[str, Any]] = []
    positions_end = values_end = 0
    for piece in pieces:
        count = piece.values.numel()
        width = 0 if piece.positions is None else _POSITION_BYTES
        param = DeltaParam(
            name=piece.spec.name, dtype=piece.spec.dtype, shape=list(piece.spec.shape), pos_start=positions_end,
            pos_end=positions_end + width * count, pos_width=_POSITION_BYTES, val_start=values_end,
            val_end=values_end + count,
        )  # fmt: skip
        positions_end, values_end = param.pos_end, param.val_end
        params.append(vars(param))
    values = torch.cat([piece.values for piece in pieces])
    flat = [piece.positions for piece in pieces if piece.positions is not None]
    positions = torch.cat(flat).view(torch.uint8) if flat else torch.empty(0, dtype=torch.uint8)
    spec = {"encoding": "indices" if flat else "dense", "params": params, "checksum": checksum(positions, values)}
    spec_bytes = torch.frombuffer(bytearray(json.dumps(spec).encode()), dtype=torch.uint8)
    named = [("__delta_spec__", spec_bytes), ("__values__", values)]
    if flat:
        named.append(("__positions__", positions))
    return [(name, tensor.to(device)) for name, tensor in named]
