"""StagedVersion: a version that is here, and what makes it proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from weightsync.codec.model_digest import ShardSum, model_digest
from weightsync.codec.tensor_digest import packed_digests
from weightsync.host.agent_calls import Granted
from weightsync.host.staging import Staging
from weightsync.memory import Segment
from weightsync.plan.boxes import check_partition, whole_box
from weightsync.tensors import tensor_from_bytes
from weightsync.types import Box, Manifest, TensorSpec, Version
from weightsync.types.publication import Publication
from weightsync.types.table import DIGEST_BYTES, SpecTable, TensorTable
from weightsync.types.transfer_messages import Transport


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchedTensor:
    """Where one tensor's change lies in a patch's segment.

    Attributes:
        name: in the manifest.
        count: changed elements.
        positions_offset: first byte of its positions: uint32, strictly rising, flat indices into the whole tensor.
        values_offset: first byte of its new elements, of its dtype; as many. Aligned to them.
    """

    name: str
    count: int
    positions_offset: int
    values_offset: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedPatch:
    """A version as a change of the one before it, beside the staging that holds all of it.

    Attributes:
        base: what it is a change of.
        base_digest: the model's digest of that.
        segment: name of the shared memory that positions and values lie in.
        tensors: those that have changed, none twice.
    """

    base: Version
    base_digest: str
    segment: str
    tensors: tuple[PatchedTensor, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedVersion:
    """A version that is here, proved. A context manager: at its end the memory is given back.

    Attributes:
        manifest: with every tensor's digest and the model's.
        segment: name of the shared memory that it lies in, a safetensors file.
        offsets: first byte of each tensor in it.
        transport: how it came. "shm": it lies in the publisher's own segment, under a lease.
        num_attempts: how often it was begun anew at another version, plus one.
        num_deltas: how many deltas brought it, over all sources; 0: it came in full.
        received_bytes: that were sent for it, in this attempt.
        received_from: the same by where they came from: "agent", "peer".
        because: why it came so, in words.
        incarnation: of the trainer that published it; see `AgentVersion`.
        leads_to: see `GrantFacts`; None: it is what was wanted.
        patch: what an engine that serves the version before it can take instead; gone with the staging.
        no_patch_because: why there is none, though deltas brought it.
    """

    manifest: Manifest
    segment: str
    offsets: Mapping[str, int]
    transport: Transport
    num_attempts: int
    release: Callable[[], None]
    num_deltas: int = 0
    received_bytes: int = 0
    received_from: Mapping[str, int] = dataclasses.field(default_factory=dict)
    because: str | None = None
    incarnation: str | None = None
    leads_to: int | None = None
    patch: StagedPatch | None = None
    no_patch_because: str | None = None

    @property
    def version(self) -> Version:
        return self.manifest.version

    def __enter__(self) -> StagedVersion:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def release_both(staging: Staging, patch: Segment | None) -> None:
    """Gives a staging back, and what a patch was laid out in."""
    staging.release()
    if patch is not None:
        patch.close()


def all_whole(parts: SpecTable) -> bool:
    """Whether every part is a whole tensor."""
    return all(part.box is None for part in parts)


def first_bytes(parts: SpecTable) -> dict[str, int]:
    """Where each begins."""
    return {part.name: part.offset for part in parts}


def check_whole(publication: Publication) -> None:
    """Parts make up every tensor exactly once, before a byte is allocated for them. Once a layout.

    Raises:
        ManifestMismatchError: they do not.
    """
    publication.table.derive(_check_whole, publication.manifest.table)


def _check_whole(parts: SpecTable, tensors: TensorTable) -> bool:
    boxes: dict[str, list[Box]] = {}  # of tensors that do not lie somewhere once and whole
    whole: set[str] = set()
    for part in parts:
        if part.box is None and part.name not in whole and part.name not in boxes:
            whole.add(part.name)
        else:
            before = [whole_box(part.shape)] if part.name in whole else []
            boxes.setdefault(part.name, before).append(part.box or whole_box(part.shape))
    for spec in tensors:
        if spec.nbytes and (spec.name not in whole or spec.name in boxes):
            check_partition(spec.shape, boxes.get(spec.name, []), parameter=spec.name)
    return True


def proved_manifest(granted: Mapping[int, Granted], tensor_of: Callable[[TensorSpec], torch.Tensor] | None) -> Manifest:
    """The manifest with digests: of whole parts as their agents say, of tensors in several parts as they arrived.

    The latter is no circle: each of their blocks was compared with its agent's checksum.
    """
    publication = next(iter(granted.values())).grant.publication
    total = ShardSum.zero()
    for each in granted.values():
        total += ShardSum(lane_a=each.grant.proof.lane_a, lane_b=each.grant.proof.lane_b)
    table = publication.manifest.table
    if publication.table.derive(_is_the_table, table):
        digests = granted[0].grant.proof.part_digests
    else:
        where = publication.table.derive(_whole_parts, table)
        read = tensor_of or _empty
        packed = packed_digests([read(spec) for spec, place in zip(table, where, strict=True) if place is None])
        in_several = (packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES))
        found: list[bytes] = []
        for place in where:
            if place is None:
                found.append(next(in_several))
            else:
                source, index = place
                part_digests = granted[source].grant.proof.part_digests
                found.append(part_digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)])
        digests = b"".join(found)
    return publication.manifest.with_packed_digests(digests, model_digest(table, total))


def _empty(spec: TensorSpec) -> torch.Tensor:
    return tensor_from_bytes(torch.empty(0, dtype=torch.uint8), dtype=spec.dtype, shape=spec.shape)


def _is_the_table(parts: SpecTable, tensors: TensorTable) -> bool:
    """Whether all tensors lie whole in one source, in their order, as most publications do."""
    return len(parts) == len(tensors) and all(
        part.box is None and part.source == 0 and part.name == spec.name
        for part, spec in zip(parts, tensors, strict=True)
    )


def _whole_parts(parts: SpecTable, tensors: TensorTable) -> list[tuple[int, int] | None]:
    """Of each tensor the source that has all of it, and its place among that source's parts; None where none has."""
    found: dict[str, tuple[int, int]] = {}
    counts: dict[int, int] = {}
    for part in parts:
        index = counts.get(part.source, 0)
        counts[part.source] = index + 1
        if part.box is None:
            found[part.name] = (part.source, index)
    return [found.get(spec.name) for spec in tensors]
