"""The requests of a patch: which engine may be given one, and in which chunks."""

from __future__ import annotations

from collections.abc import Iterator

from weightsync.errors import ManifestMismatchError
from weightsync.memory import host_nonce
from weightsync.rollout.pulled import PatchedTensor, Pulled, PulledPatch
from weightsync.types import EngineReply, Manifest, PatchWeightUpdateRequest, SharedMemoryHandle, itemsize_bytes

_POSITION_BYTES = 4


def patch_that_fits(pulled: Pulled, reply: EngineReply) -> PulledPatch | None:
    """The patch, where there is one and the engine says that it takes it on exactly what it serves."""
    patch = pulled.patch
    if patch is None or "patch" not in reply.accepts or reply.unhealthy is not None:
        return None
    return patch if (reply.version, reply.model_digest) == (patch.base, patch.base_digest) else None


def patch_requests(
    patch: PulledPatch, manifest: Manifest, session: str, *, max_bytes: int
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
