"""FSDPWeightExtractor: modules under FSDP2's `fully_shard`, and other DTensor modules."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from weightsync.errors import ExtractError, UnsupportedError
from weightsync.extract import placements as layout
from weightsync.extract.base import WeightExtractor
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.types import Box

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13

_CARRIERS = {1: torch.uint8, 2: torch.bfloat16, 4: torch.int32, 8: torch.int64}
"""For each itemsize, a dtype that every backend moves: gloo refuses the 8-bit floats and uint16."""


class FSDPWeightExtractor(ModuleWeightExtractor):
    """Extracts from DTensor parameters: `Shard` of any dimension, `Replicate`, and meshes of both (HSDP).

    Shards are converted to the engine's dtype before they are gathered, parameter by parameter, so communication
    and memory are in the engine's dtype. Parameters that are not DTensors, and plain buffers, count as equal on
    all ranks, as they are under FSDP2.

    Parameters that a forward pass left unsharded (`reshard_after_forward=False`) are resharded by the constructor,
    `extract_weights` and `local_shards`; that is why all ranks call these, at the same point. An optimizer that
    holds the sharded parameters notices nothing.

    FSDP2 over tensor parallelism (a `_StridedShard` placement) can be gathered but not sharded locally. Gathering
    it, and anything sharded over several mesh dimensions, takes a further temporary of up to the parameter's size.

    Raises:
        UnsupportedError: besides the base's reasons, a `Partial` placement, or a rank outside the mesh.
    """

    def _prepare(self) -> None:
        self._read(kind=FSDPModule, prepare=FSDPModule.reshard)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, DTensor):
            super()._check(name, tensor)
            return
        WeightExtractor._check(self, name, tensor)
        if layout.is_partial(tensor):
            raise UnsupportedError(
                f"placements {tensor.placements}: no rank holds the value of a Partial, reduce it first", parameter=name
            )
        if layout.coordinate_of(tensor) is None:
            raise UnsupportedError(f"this rank is not in the mesh {tensor.device_mesh}", parameter=name)

    def _gather(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return super()._gather(tensor, dtype)
        if not layout.is_plain(tensor):
            return _gather_by_torch(tensor, dtype)
        part = tensor.to_local().detach()
        box = layout.local_box(tensor)
        if tuple(part.shape) != box.shape:
            raise ExtractError(f"this rank holds {tuple(part.shape)} where {box} was computed")
        # From the last mesh dimension to the first: each step undoes the cut that was made last.
        for mesh_dim in reversed(range(tensor.device_mesh.ndim)):
            if isinstance(tensor.placements[mesh_dim], Shard) and tensor.device_mesh.size(mesh_dim) > 1:
                part = _gather_along(tensor, mesh_dim, part, dtype)
        return part.to(layout.mesh_device(tensor), dtype).contiguous()

    def _can_shard(self, tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, DTensor):
            return True
        # A mesh of only some ranks has replicas elsewhere, of which nothing is known here.
        world = dist.get_world_size() if dist.is_initialized() else 1
        return layout.is_plain(tensor) and tensor.device_mesh.size() == world

    def _local_part(self, tensor: torch.Tensor) -> tuple[Box, torch.Tensor] | None:
        if not isinstance(tensor, DTensor):
            return super()._local_part(tensor)
        if not layout.is_first_replica(tensor):
            return None
        box = layout.local_box(tensor)
        if box.numel == 0 and (tensor.numel() > 0 or any(layout.coordinate_of(tensor) or ())):
            return None
        return box, tensor.to_local()


def _gather_along(tensor: DTensor, mesh_dim: int, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the ranks along one mesh dimension hold together, in `dtype`, from this rank's `part` of it.

    One all-gather of bytes, in place: each rank's slot is as long as the longest part. Where the slots happen to
    be the result (even parts of the first dimension) nothing is copied.
    """
    mesh, coordinate = tensor.device_mesh, layout.coordinate_of(tensor)
    assert coordinate is not None
    parts, place = mesh.size(mesh_dim), coordinate[mesh_dim]

    def box_of(*inner: int) -> Box:
        at = (*coordinate[:mesh_dim], *inner)
        return layout.shard_box(tensor.shape, tensor.placements[: len(at)], mesh.shape, at)

    whole, boxes = box_of(), [box_of(peer) for peer in range(parts)]
    slot = max(box.numel for box in boxes)
    device = layout.mesh_device(tensor)
    if slot == 0:
        return torch.empty(whole.shape, dtype=dtype, device=device)
    slots = torch.empty(parts * slot, dtype=dtype, device=device)
    slots[place * slot : place * slot + part.numel()].view(part.shape).copy_(part)
    raw = slots.view(torch.uint8)
    own_bytes = slot * slots.element_size()
    _all_gather(raw, raw[place * own_bytes : (place + 1) * own_bytes], group=mesh.get_group(mesh_dim))
    placement = cast(Shard, tensor.placements[mesh_dim])
    if placement.dim == 0 and slot * parts == whole.numel:
        return slots.view(whole.shape)
    gathered = torch.empty(whole.shape, dtype=dtype, device=device)
    for peer, box in enumerate(boxes):
        start = box.offset[placement.dim] - whole.offset[placement.dim]
        target = gathered.narrow(placement.dim, start, box.shape[placement.dim])
        target.copy_(slots[peer * slot : peer * slot + box.numel].view(box.shape))
    return gathered


def _gather_by_torch(tensor: DTensor, dtype: torch.dtype) -> torch.Tensor:
    """The same by torch's own redistribution, which knows every placement, on a carrier dtype."""
    local = tensor.to_local().detach().to(layout.mesh_device(tensor), dtype).contiguous()
    carrier = _CARRIERS.get(local.element_size(), dtype)
    whole = DTensor.from_local(
        local.view(carrier),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=torch.empty(tensor.shape, device="meta").stride(),
    )
    replicated = whole.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return replicated.to_local().contiguous().view(dtype)
