"""The requests that announce a staged version to an engine: all of it in chunks, or what has changed alone.

Both name shared memory that the engine maps: an engine needs nothing for the pull path that it has not for the push
path, and proves its bytes in the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import msgspec

from weightsync.errors import ManifestMismatchError
from weightsync.host.staged_version import PatchedTensor, StagedPatch, StagedVersion
from weightsync.memory import host_nonce
from weightsync.plan.buckets import split_by_bytes
from weightsync.types import (
    AnyUpdateRequest,
    EngineReply,
    Manifest,
    PackedCudaIpcWeightUpdateRequest,
    PatchWeightUpdateRequest,
    SharedMemoryHandle,
    TensorTable,
    itemsize_bytes,
)

_POSITION_BYTES = 4
_ALIGNED_BYTES = 64


def patch_that_fits(pulled: StagedVersion, reply: EngineReply) -> StagedPatch | str:
    """The patch, where there is one and the engine says that it takes it on exactly what it serves; else why not."""
    patch = pulled.patch
    if "patch" not in reply.accepts:
        return "it takes whole tensors alone, as far as it has said"
    if reply.unhealthy is not None:
        return reply.unhealthy
    if patch is None:
        return pulled.no_patch_because or "it came in full"
    if (reply.version, reply.model_digest) != (patch.base, patch.base_digest):
        return f"the change is one of {patch.base}, which it does not serve"
    return patch


def patch_requests(
    patch: StagedPatch, manifest: Manifest, session: str, *, max_bytes: int
) -> Iterator[PatchWeightUpdateRequest]:
    """Chunks of at most `max_bytes`; a larger tensor alone. None where nothing has changed.

    Raises:
        ManifestMismatchError: a tensor that the manifest has not.
    """
    specs = manifest.by_name()
    batch: list[PatchedTensor] = []
    size = seq = 0

    def request() -> PatchWeightUpdateRequest:
        nonce = host_nonce()

        def handle(offset: int, size_bytes: int) -> SharedMemoryHandle:
            return SharedMemoryHandle(
                host_nonce=nonce, name=patch.segment, offset_bytes=offset if size_bytes else 0, size_bytes=size_bytes
            )

        dtypes = tuple(specs[each.name].dtype for each in batch)
        return PatchWeightUpdateRequest(
            session=session,
            seq=seq,
            names=tuple(each.name for each in batch),
            dtypes=dtypes,
            shapes=tuple(specs[each.name].shape for each in batch),
            counts=tuple(each.count for each in batch),
            positions=tuple(handle(each.positions_offset, _POSITION_BYTES * each.count) for each in batch),
            values=tuple(
                handle(each.values_offset, itemsize_bytes(dtype) * each.count)
                for each, dtype in zip(batch, dtypes, strict=True)
            ),
        )

    for each in patch.tensors:
        if each.name not in specs:
            raise ManifestMismatchError("a patch changes a tensor that the manifest has not", parameter=each.name)
        num_bytes = each.count * (_POSITION_BYTES + itemsize_bytes(specs[each.name].dtype))
        if batch and size + num_bytes > max_bytes:
            yield request()
            seq += 1
            batch, size = [], 0
        batch.append(each)
        size += num_bytes
    if batch:
        yield request()


def full_request(chunk: PackedCudaIpcWeightUpdateRequest, session: str, seq: int, segment: str) -> AnyUpdateRequest:
    """A chunk of this session. All that it says of tensors was checked when the chunk was made, once a layout."""
    made = copy.copy(chunk)
    handle = msgspec.structs.replace(chunk.handles[0], name=segment)
    for name, value in (("session", session), ("seq", seq), ("handles", (handle,))):
        msgspec.structs.force_setattr(made, name, value)
    return made


def full_chunks(
    tensors: TensorTable, offsets: Mapping[str, int], segment: str, max_bytes: int
) -> tuple[PackedCudaIpcWeightUpdateRequest, ...]:
    """The chunks of a version of a layout, of no session yet: the staging is the bucket.

    Args:
        tensors: of the manifest.
        offsets: first byte of each in the staging.
        segment: name of one that they lie in.
        max_bytes: of a chunk, unless one tensor has more.
    """
    nonce = host_nonce()
    made: list[PackedCudaIpcWeightUpdateRequest] = []
    for specs in split_by_bytes(tensors, lambda spec: spec.nbytes, max_bytes):
        sizes = tuple([spec.nbytes for spec in specs])
        places = [offsets[spec.name] for spec in specs]
        held = [index for index, size in enumerate(sizes) if size]
        start = min([places[index] for index in held], default=0) // _ALIGNED_BYTES * _ALIGNED_BYTES
        end = max([places[index] + sizes[index] for index in held], default=start)
        made.append(
            PackedCudaIpcWeightUpdateRequest(
                session="-",
                seq=0,
                names=tuple([spec.name for spec in specs]),
                dtypes=tuple([spec.dtype for spec in specs]),
                shapes=tuple([spec.shape for spec in specs]),
                sizes=sizes,
                offsets=tuple([place - start if size else 0 for place, size in zip(places, sizes, strict=True)]),
                handles=(
                    SharedMemoryHandle(host_nonce=nonce, name=segment, offset_bytes=start, size_bytes=end - start),
                ),
            )
        )
    return tuple(made)
