"""Where a DTensor's shard lies: arithmetic on torch placements, without communication.

Only `Shard`, `Replicate` and `Partial` are public placements. Everything else (such as the `_StridedShard`
of FSDP2 over tensor parallelism) is recognised by not being one of these, so no private class is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Placement, Shard

from weightsync.types import Box


def is_partial(tensor: DTensor) -> bool:
    """Whether the shards are addends of the value, so that no rank holds any part of it."""
    return any(placement.is_partial() for placement in tensor.placements)


def is_plain(tensor: DTensor) -> bool:
    """Whether every placement is `Shard` or `Replicate`, so that each rank's part is one box."""
    # `type`, not isinstance: older releases derive _StridedShard from Shard, and its part may be many boxes.
    return all(type(placement) is Shard or placement.is_replicate() for placement in tensor.placements)


def coordinate_of(tensor: DTensor) -> tuple[int, ...] | None:
    """This rank's coordinate in the tensor's mesh; None where this rank holds no part of the tensor."""
    coordinate = tensor.device_mesh.get_coordinate()
    return None if coordinate is None else tuple(coordinate)


def is_first_replica(tensor: DTensor) -> bool:
    """Whether this rank's part is the one that counts: of all replicas, the one at coordinate 0."""
    coordinate = coordinate_of(tensor)
    return coordinate is not None and all(
        place == 0 for place, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )


def shard_box(
    shape: Sequence[int], placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> Box:
    """The part of a tensor of `shape` at `coordinate` of a mesh.

    Each `Shard(d)`, in the order of the mesh's dimensions, cuts what the ones before it left along `d`, as
    `torch.chunk` does: parts of ceil(size / n), the last ones smaller or empty (7 rows on 2 ranks: 4 and 3;
    1 row on 2 ranks: 1 and 0).

    Args:
        placements: `Shard` or `Replicate`, one a mesh dimension. Fewer than the mesh has dimensions: the
            part that the ranks along the others hold together.
    """
    offset, extent = [0] * len(shape), [int(size) for size in shape]
    for placement, parts, place in zip(placements, mesh_shape, coordinate, strict=False):
        if isinstance(placement, Shard):
            dim = placement.dim
            most = -(-extent[dim] // parts)
            start = min(most * place, extent[dim])
            offset[dim] += start
            extent[dim] = min(most, extent[dim] - start)
    return Box(offset=tuple(offset), shape=tuple(extent))


def local_box(tensor: DTensor) -> Box:
    """The part that this rank holds. The tensor `is_plain` and this rank is in its mesh."""
    coordinate = coordinate_of(tensor)
    assert coordinate is not None
    return shard_box(tensor.shape, tensor.placements, tensor.device_mesh.shape, coordinate)


def mesh_device(tensor: DTensor) -> torch.device:
    """The device that the tensor's collectives run on: its shard's own, or this thread's current one where
    shards are offloaded to the host."""
    kind, own = tensor.device_mesh.device_type, tensor.to_local().device
    if own.type == kind:
        return own
    return torch.device(kind, torch.get_device_module(kind).current_device())
