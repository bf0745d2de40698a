"""Pulled: a version that is here, and what makes it proved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import TracebackType

import torch

from weightsync.codec.digest import ShardSum, model_digest, tensor_digest
from weightsync.plan.boxes import check_partition, whole_box
from weightsync.rollout.agents import Granted
from weightsync.tensors import tensor_from_bytes
from weightsync.types import Box, Manifest, TensorSpec, Version
from weightsync.types.publication import Transport


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
class PulledPatch:
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
class Pulled:
    """A version that is here, proved. A context manager: at its end the memory is given back.

    Attributes:
        manifest: with every tensor's digest and the model's.
        segment: name of the shared memory that it lies in, a safetensors file.
        offsets: first byte of each tensor in it.
        transport: how it came. "shm": it lies in the publisher's own segment, under a lease.
        num_attempts: how often it was begun anew at another version, plus one.
        num_deltas: how many deltas brought it, over all sources; 0: it came in full.
        received_bytes: that were sent for it, in this attempt.
        life: of the trainer that published it; see `AgentVersion`.
        patch: what an engine that serves the version before it can take instead; gone with the staging.
    """

    manifest: Manifest
    segment: str
    offsets: Mapping[str, int]
    transport: Transport
    num_attempts: int
    release: Callable[[], None]
    num_deltas: int = 0
    received_bytes: int = 0
    life: str | None = None
    patch: PulledPatch | None = None

    @property
    def version(self) -> Version:
        """Which one."""
        return self.manifest.version

    def __enter__(self) -> Pulled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def check_whole(manifest: Manifest, parts: tuple[TensorSpec, ...]) -> None:
    """Parts make up every tensor exactly once, before a byte is allocated for them."""
    boxes: dict[str, list[Box]] = {spec.name: [] for spec in manifest.tensors}
    for part in parts:
        boxes[part.name].append(part.box or whole_box(part.shape))
    for spec in manifest.tensors:
        if spec.nbytes:
            check_partition(spec.shape, boxes[spec.name], parameter=spec.name)


def proved_manifest(granted: Mapping[int, Granted], tensor_of: Callable[[TensorSpec], torch.Tensor] | None) -> Manifest:
    """The manifest with digests: of whole parts as their agents say, of tensors in several parts as they arrived.

    The latter is no circle: each of their blocks was compared with its agent's checksum.
    """
    publication = next(iter(granted.values())).grant.publication
    digests: dict[str, str] = {}
    total = ShardSum.zero()
    for index, each in sorted(granted.items()):
        proof = each.grant.proof
        total += ShardSum(lane_a=proof.lane_a, lane_b=proof.lane_b)
        for part, digest in zip(publication.parts_of(index), proof.part_digests, strict=True):
            if part.box is None:
                digests[part.name] = digest
    for spec in publication.manifest.tensors:
        if spec.name not in digests:
            if tensor_of is None:
                empty = tensor_from_bytes(torch.empty(0, dtype=torch.uint8), dtype=spec.dtype, shape=spec.shape)
                digests[spec.name] = tensor_digest(empty)
            else:
                digests[spec.name] = tensor_digest(tensor_of(spec))
    return publication.manifest.with_digests(digests, model_digest(publication.manifest.tensors, total))
