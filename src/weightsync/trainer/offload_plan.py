"""HostPlan: which rank writes which part where, on every trainer host. Made once, from what the ranks hold."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.plan.boxes import check_partition
from weightsync.plan.safetensors import Layout, plan_layout
from weightsync.types import Box, Manifest, TensorSpec, Version
from weightsync.types.adapter import Adapter
from weightsync.types.canary import Canary
from weightsync.types.publication import Publication, Source, fitting_block_bytes
from weightsync.types.table import SpecTable, TensorTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostPlan:
    """The same on every rank.

    Attributes:
        hosts: names of the host groups that hold something, in the order of their first ranks.
        leaders: the first rank of each: it owns the segments and the agent.
        layouts: one a host; their parts carry the host's index as `source`.
    """

    hosts: tuple[str, ...]
    leaders: tuple[int, ...]
    layouts: tuple[Layout, ...]

    @functools.cached_property
    def parts(self) -> SpecTable:
        if len(self.layouts) == 1:
            return self.layouts[0].parts
        return SpecTable(part for layout in self.layouts for part in layout.parts)

    def publication(
        self,
        version: Version,
        model_id: str,
        specs: Sequence[TensorSpec],
        *,
        endpoints: Sequence[str | None],
        segments: Mapping[str, str],
        block_bytes: int,
        adapter: Adapter | None = None,
        canary: Canary | None = None,
    ) -> Publication:
        """What is said of a version that lies there.

        Args:
            specs: of the whole tensors, as for `plan_hosts`.
            endpoints: the agents' URLs, by rank.
            segments: names of the segments that it was written to, by host.
            block_bytes: what one checksum covers, at most.
            adapter: of a publication of kind "lora".
            canary: see `Manifest`.
        """
        sources = tuple(
            Source(
                endpoint=endpoints[leader] or "",
                segment=segments[host],
                data_start=layout.data_start,
                data_end=layout.total_bytes,
                block_bytes=fitting_block_bytes(layout.total_bytes - layout.data_start, at_most=block_bytes),
            )
            for host, leader, layout in zip(self.hosts, self.leaders, self.layouts, strict=True)
        )
        # tables that were checked together once are not checked again
        manifest = Manifest(
            version=version,
            model_id=model_id,
            tensors=TensorTable.of(specs),
            artifact="model" if adapter is None else "lora",
            adapter=adapter,
            canary=canary,
        )
        return Publication(manifest=manifest, parts=self.parts, sources=sources)


def plan_hosts(specs: Sequence[TensorSpec], replies: Sequence[dict[str, Any]]) -> HostPlan:
    """Lays each host's parts out. A tensor that the ranks of a host hold between them lies whole in its segment.

    Args:
        specs: of the whole tensors, in the stream's order.
        replies: of each rank, in order: {"host": its host group, "boxes": [[index of spec, offset, shape], ...]}.

    Raises:
        ManifestMismatchError: the ranks' parts do not make up every tensor exactly once.
    """
    hosts: list[str] = []
    leaders: list[int] = []
    held: list[list[list[Box]]] = []
    for rank, what in enumerate(replies):
        if what["host"] not in hosts:
            hosts.append(what["host"])
            leaders.append(rank)
            held.append([[] for _ in specs])
        of_host = held[hosts.index(what["host"])]
        for index, offset, shape in what["boxes"]:
            of_host[index].append(Box(offset=tuple(offset), shape=tuple(shape)))
    for index, spec in enumerate(specs):
        boxes = [box for of_host in held for box in of_host[index]]
        if len(boxes) != 1 or not boxes[0].covers(spec.shape):
            check_partition(spec.shape, boxes, parameter=spec.name)
    kept = [number for number, of_host in enumerate(held) if any(of_host)]
    layouts = [plan_layout(_parts_of(specs, held[number]), source=source) for source, number in enumerate(kept)]
    return HostPlan(
        hosts=tuple(hosts[number] for number in kept),
        leaders=tuple(leaders[number] for number in kept),
        layouts=tuple(layouts),
    )


def _parts_of(specs: Sequence[TensorSpec], held: Sequence[Sequence[Box]]) -> list[TensorSpec]:
    parts: list[TensorSpec] = []
    for spec, boxes in zip(specs, held, strict=True):
        if boxes and (boxes[0].covers(spec.shape) or sum(box.numel for box in boxes) == math.prod(spec.shape)):
            parts.append(spec)
        else:
            parts += [
                TensorSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape, box=box) for box in boxes if box.numel
            ]
    return parts
