"""The delta part of a pull: blobs into memory of their own, then onto the staging, then laid out for engines.

The staging is not touched before every blob is here, so that a pull that is cut off leaves it what it was.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from weightsync.codec.delta_units import ElementKind
from weightsync.errors import SharedMemoryError, TransferError
from weightsync.host.agent_calls import Agents, Granted, delta_content
from weightsync.host.delta_apply import Changed, DeltaApplier, Places, united
from weightsync.host.relay import BlockShare
from weightsync.host.staged_version import PatchedTensor, StagedPatch
from weightsync.host.staging import Held, Target, TargetMap
from weightsync.memory import Segment
from weightsync.transfer.source import Arrived, Destination, RangedSource
from weightsync.types import TensorSpec, itemsize_bytes
from weightsync.types.publication import DeltaLink
from weightsync.types.requests import MAX_PATCHED_ELEMENTS
from weightsync.types.transfer_messages import Transport

Read = Callable[[RangedSource, list[int], Destination, Arrived], None]
"""`RangedSource.read` of a source, with a deadline."""

_POSITION_BYTES = 4
_ALIGNMENT = 16


def num_bytes(granted: Mapping[int, Granted]) -> int:
    """How much has to come: of each source its deltas, or all of it."""
    total = 0
    for index, each in granted.items():
        delta = each.grant.delta
        pieces = [each.grant.publication.sources[index]] if delta is None else [link.blob for link in delta]
        total += sum(piece.data_end - piece.data_start for piece in pieces)
    return total


def fetch_blobs(agents: Agents, granted: Granted, read: Read, arrived: Callable[[int], None]) -> list[memoryview]:
    """The deltas of a grant, whole, in order; each block's checksum was right.

    Args:
        agents: the conversation that the grant is of.
        granted: a grant with deltas.
        read: reads a source.
        arrived: told of bytes as they come.

    Raises:
        TransferError: they say that they have more bytes than what they are to save.
        WeightSyncError: see `RangedSource.read`.
    """
    grant = granted.grant
    assert grant.delta is not None
    whole = grant.publication.sources[grant.source]
    size_bytes = sum(link.blob.data_end - link.blob.data_start for link in grant.delta)
    if size_bytes > whole.data_end - whole.data_start:
        raise TransferError(f"deltas of {size_bytes} bytes are none", peer=granted.endpoint)
    return [_fetch(agents, granted, link, read, arrived) for link in grant.delta]


def _fetch(agents: Agents, granted: Granted, link: DeltaLink, read: Read, arrived: Callable[[int], None]) -> memoryview:
    start, end = link.blob.data_start, link.blob.data_end
    memory = np.empty(end - start, np.uint8).data  # a block is shared, and all of it returned, when it was right

    def bytes_of(offset: int, length: int) -> memoryview:
        return memory[offset - start : offset - start + length]

    share = BlockShare(link.blob, bytes_of)

    def came(block: int, data: memoryview) -> None:
        share.note(block)
        arrived(len(data))

    if agents.shelf is not None and granted.grant.transport is Transport.TCP:
        agents.shelf.put(granted.endpoint, delta_content(granted, link), share, staged=False)
    with contextlib.closing(agents.blob(granted, link)) as source:
        read(source, list(range(link.blob.num_blocks)), bytes_of, came)
    return memory


def places_to_keep(tensors: Sequence[TensorSpec], limit_bytes: int, num_deltas: int) -> int:
    """How many places of what so many deltas change may be kept for a patch of so many bytes.

    One delta names a place once: more than fit into the patch are kept for nothing. Several may name the same ones:
    their places take no more bytes than the patch may.
    """
    if num_deltas > 1:
        return limit_bytes // _POSITION_BYTES
    sizes = {itemsize_bytes(dtype): ElementKind.of_dtype(dtype).width_bytes for dtype in {x.dtype for x in tensors}}
    return limit_bytes // min((_POSITION_BYTES + size) * width // size for size, width in sizes.items())


def apply_blobs(
    granted: Granted, blobs: Sequence[memoryview], target: Target, held: Held, *, keep_at_most: int
) -> list[Changed] | None:
    """Brings one source's part of the staging to the granted version; its dirt is the caller's business.

    Returns:
        What was changed; None where it was more than `keep_at_most` elements.

    Raises:
        DeltaFormatError: a blob is none.
        DigestMismatchError: what came out is not what was published.
    """
    grant = granted.grant
    index = grant.source
    source, parts = grant.publication.sources[index], grant.publication.parts_of(index)
    applier = DeltaApplier(
        source, parts, TargetMap(target, source, parts), held.digests[index], keep_at_most=keep_at_most
    )
    assert grant.delta is not None
    for link, blob in zip(grant.delta, blobs, strict=True):
        applier.apply(blob, link)
    applier.check_result(grant.proof.digest)
    for block in range(source.num_blocks):
        target.note(grant.publication.manifest.version, index, block)
    return applier.changed


def lay_out_patch(
    changes: Sequence[Changed], target: Target, held: Held, limit_bytes: int
) -> tuple[StagedPatch, Segment] | None:
    """Positions and new values in a segment of their own, the caller's to close; None where there is no use or no room.

    Args:
        changes: of all sources.
        target: the staging, with the new version.
        held: what it had before.
        limit_bytes: the largest that is wanted.
    """
    by_name: dict[str, list[Changed]] = {}
    for change in changes:
        by_name.setdefault(change.spec.name, []).append(change)
    wanted: list[tuple[Changed, Places]] = []
    tensors: list[PatchedTensor] = []
    end = 0
    for name, pieces in by_name.items():
        spec = pieces[0].spec
        size_bytes = itemsize_bytes(spec.dtype)
        each = size_bytes // pieces[0].width_bytes
        places = pieces[0].places if len(pieces) == 1 else united([piece.places for piece in pieces])
        if each > 1:
            places = _elements(places, each)
        if math.prod(spec.shape) > MAX_PATCHED_ELEMENTS:  # of all of it: of a part, places are in the whole
            return None
        positions_offset, values_offset = end, _aligned(end + _POSITION_BYTES * len(places))
        end = _aligned(values_offset + size_bytes * len(places))
        if end > limit_bytes:
            return None
        wanted.append((pieces[0], places))
        tensors.append(
            PatchedTensor(name=name, count=len(places), positions_offset=positions_offset, values_offset=values_offset)
        )
    try:
        segment = Segment(max(1, end))
    except SharedMemoryError:  # engines load the whole
        return None
    try:
        _fill(segment, tensors, wanted, target)
    except BaseException:
        segment.close()
        raise
    patch = StagedPatch(base=held.version, base_digest=held.model_digest, segment=segment.name, tensors=tuple(tensors))
    return patch, segment


def _fill(
    segment: Segment, tensors: Sequence[PatchedTensor], wanted: Sequence[tuple[Changed, Places]], target: Target
) -> None:
    """Writes positions and values to where `tensors` says."""
    for tensor, (piece, places) in zip(tensors, wanted, strict=True):
        place, size_bytes = target.place(tensor.name), itemsize_bytes(piece.spec.dtype)
        np.frombuffer(segment.memory, np.uint32, tensor.count, tensor.positions_offset)[:] = places
        word = np.dtype(f"u{size_bytes}")  # 8 bytes at most, and aligned: the staging is a safetensors file
        now = np.frombuffer(target.segment.memory, word, place.nbytes // size_bytes, place.offset)
        values = np.frombuffer(segment.memory, word, tensor.count, tensor.values_offset)
        if (places[-1:] >= len(now)).any():  # and so are all within: they rise
            raise AssertionError(f"{tensor.name} has a change outside of it")
        now.take(places, out=values, mode="clip")  # nothing is clipped; "raise" would write to a copy first


def _elements(places: Places, each: int) -> Places:
    """Rising places of parts, of which an element has `each`, as places of elements: rising, none twice."""
    places = places // each
    is_new = np.ones(len(places), bool)
    np.not_equal(places[1:], places[:-1], out=is_new[1:])
    return np.asarray(places[is_new], places.dtype)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
