"""Which parameters travel together: pure functions of names and sizes, no torch.

A plan is made from metadata alone, so every rank makes the same one, and the metadata and the stream
are two readings of it: they can't disagree in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from weightsync.plan.buckets import split_by_bytes
from weightsync.types import TensorSpec
from weightsync.types.table import SpecTable

FUSED_PROJECTIONS = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "q", "k", "v", "query", "key", "value", "wq", "wk", "wv"),
        *("gate_proj", "up_proj", "w1", "w3"),
        *("q_a_proj", "kv_a_proj_with_mqa"),
        *("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "in_proj_a", "in_proj_b", "in_proj_ba"),
    }
)
"""Modules that engines fuse with their siblings of this set: these travel with their parent's group."""

EXPERTS = "experts"
"""The module whose children are the experts of one layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedChunk:
    """What one chunk will hold.

    Attributes:
        module_name: the group, None where chunks are not groups or where several groups were merged.
        specs: the whole tensors as they leave the trainer, in stream order.
    """

    module_name: str | None
    specs: SpecTable

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def group_name(name: str) -> str:
    """The group of a parameter: q, k and v (gate and up, ...) share their parent module, all experts of a
    layer share theirs, every other parameter belongs to the module that holds it. "" is the root.
    """
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part == EXPERTS:
            return ".".join(parts[: index + 1])
        if part in FUSED_PROJECTIONS:
            return ".".join(parts[:index])
    return ".".join(parts[:-1])


def order_by_group(names: Sequence[str], group_of: Callable[[str], str]) -> list[str]:
    """The names with each group's members side by side; groups and members in order of first appearance."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_of(name), []).append(name)
    return [name for members in groups.values() for name in members]


def plan_chunks(
    specs: Sequence[TensorSpec], *, group_of: Callable[[str], str] | None, chunk_bytes: int | None
) -> tuple[PlannedChunk, ...]:
    """Cuts the stream into chunks without changing its order.

    Args:
        specs: in stream order; with `group_of`, a group's members are adjacent (`order_by_group`).
        group_of: gives a name's group, which is then never split; None: every tensor stands for itself.
        chunk_bytes: consecutive groups (or tensors) are merged until the next one would exceed it; one that
            is larger by itself travels alone. None: nothing is merged.
    """
    units: list[tuple[str | None, list[TensorSpec]]] = []
    for spec in specs:
        group = None if group_of is None else group_of(spec.name)
        if group is not None and units and units[-1][0] == group:
            units[-1][1].append(spec)
        else:
            units.append((group, [spec]))
    if chunk_bytes is not None:
        merged = split_by_bytes(units, lambda unit: sum(spec.nbytes for spec in unit[1]), chunk_bytes)
        units = [
            several[0] if len(several) == 1 else (None, [spec for _, members in several for spec in members])
            for several in merged
        ]
    return tuple(PlannedChunk(module_name=group, specs=SpecTable(members)) for group, members in units)
