"""Digests of single tensors: xxh3 of their bytes, on all cores."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from weightsync.addresses import view_of_runs
from weightsync.many import addresses, are_plain, sizes_bytes
from weightsync.plan.boxes import split_box, whole_box
from weightsync.tensors import byte_array, byte_view, cut_out, host_empty
from weightsync.threads import PIECE_BYTES, SMALL_BYTES, batches, map_all
from weightsync.types.table import DIGEST_BYTES, packed_digest, written_digest

_RUN_BYTES = 4 << 20
"""What one thread takes at a time of a bucket."""

_DEVICE_BYTES = 4 << 20
"""What one thread reads at a time of a GPU's tensor, into pinned memory that it keeps."""


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's bytes in row-major order, whatever its strides and device, on the caller's thread.

    Name, dtype and shape are not part of it. It reads memory at its own speed and releases the GIL; a tensor
    that is not contiguous host memory is copied in pieces of `PIECE_BYTES`, one on a GPU in pieces of 4 MiB.

    Returns:
        "xxh3:" and the 32 hex digits of XXH3-128 with seed 0.
    """
    if is_plain(tensor):
        return f"xxh3:{xxhash.xxh3_128_hexdigest(byte_array(tensor).data)}"
    state = xxhash.xxh3_128()
    for piece in _pieces(tensor):
        state.update(piece)
    return f"xxh3:{state.hexdigest()}"


def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """`tensor_digest` of each, by name, in the mapping's order, on all cores."""
    packed = packed_digests(list(tensors.values()))
    return {name: written_digest(packed, index) for index, name in enumerate(tensors)}


def packed_digests(tensors: Sequence[torch.Tensor]) -> bytes:
    """The 16 bytes of `tensor_digest` of each, one behind the other, on all cores."""
    wait_filled(tensors)
    large = [index for index, tensor in enumerate(tensors) if tensor.nbytes > SMALL_BYTES]
    if not large:
        return b"".join(map_all(_digests_of_small, _batches(tensors)))
    found = {
        index: packed_digest(digest)
        for index, digest in zip(
            sorted(large, key=lambda index: -tensors[index].nbytes),
            map_all(tensor_digest, sorted((tensors[index] for index in large), key=lambda tensor: -tensor.nbytes)),
            strict=True,
        )
    }
    small = [index for index in range(len(tensors)) if index not in found]
    packed = b"".join(map_all(_digests_of_small, _batches([tensors[index] for index in small])))
    for place, index in enumerate(small):
        found[index] = packed[DIGEST_BYTES * place : DIGEST_BYTES * (place + 1)]
    return b"".join([found[index] for index in range(len(tensors))])


def bucket_digests(bucket: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
    """`tensor_digest` of each, as 16 bytes, on all cores.

    Args:
        bucket: 1-D uint8, contiguous, on any device.
        offsets, sizes: bytes, one a tensor; the ranges lie in the bucket.
    """
    wait_filled([bucket])
    whole_bytes = _DEVICE_BYTES if _is_there(bucket) else PIECE_BYTES

    def run(cut: slice) -> list[bytes]:
        first, end = min(offsets[cut]), max(map(sum, zip(offsets[cut], sizes[cut], strict=True)))
        if end - first > whole_bytes:
            return [
                packed_digest(tensor_digest(bucket[offset : offset + size]))
                for offset, size in zip(offsets[cut], sizes[cut], strict=True)
            ]
        data = next(_pieces(bucket[first:end]), memoryview(b""))
        digest = xxhash.xxh3_128_digest
        return [
            digest(data[offset - first : offset - first + size])
            for offset, size in zip(offsets[cut], sizes[cut], strict=True)
        ]

    apart = [next_one - offset for offset, next_one in itertools.pairwise(offsets)]  # with what lies between them
    spans = list(map(max, sizes, [*apart, 0]))
    return list(itertools.chain.from_iterable(map_all(run, batches(spans, _RUN_BYTES))))


def wait_filled(tensors: Sequence[torch.Tensor]) -> None:
    """Waits for what the caller's streams still write: other threads read it next, each in a stream of its own."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()


def _batches(tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    """Consecutive ones, of so many bytes together that a thread is worth it."""
    return [tensors[cut] for cut in batches([tensor.nbytes for tensor in tensors], SMALL_BYTES)]


def _digests_of_small(tensors: Sequence[torch.Tensor]) -> bytes:
    """`packed_digests` on the caller's thread: plain ones through one view of memory, so that none needs its own."""
    if not are_plain(tensors):
        return b"".join([packed_digest(tensor_digest(tensor)) for tensor in tensors])
    memory, starts, ends = view_of_runs(addresses(tensors), sizes_bytes(tensors))
    digest = xxhash.xxh3_128_digest
    return b"".join([digest(memory[start:end]) for start, end in zip(starts, ends, strict=True)])


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def host_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A tensor's bytes in row-major order; a copy only where it is not plain already."""
    if not is_plain(tensor):
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return byte_array(tensor)


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes in row-major order, a piece at a time; each is good until the next."""
    for block in split_box(whole_box(tuple(tensor.shape)), PIECE_BYTES // tensor.element_size()):
        part = cut_out(tensor, block)
        if _is_there(tensor):
            yield from _read_device(part.resolve_conj().resolve_neg().contiguous())
        else:
            yield host_bytes(part).data


def _is_there(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


class _Staging(threading.local):
    """Each thread's own memory for what it reads from a GPU, pinned: into other memory the driver copies twice, at a
    fraction of the bus's rate."""

    memory: torch.Tensor | None = None


_staging = _Staging()


def _read_device(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A contiguous tensor of a GPU, `_DEVICE_BYTES` at a time."""
    if _staging.memory is None:
        with torch.inference_mode(False):  # or it could be written in that mode alone
            _staging.memory = host_empty((_DEVICE_BYTES,), torch.uint8, pinned=tensor.is_cuda)
    memory, there = _staging.memory, byte_view(tensor)
    read, stream = memory.numpy().data, torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
    for start in range(0, len(there), len(memory)):
        piece = there[start : start + len(memory)]
        memory[: len(piece)].copy_(piece, non_blocking=True)
        if stream is not None:
            stream.record_event().synchronize()  # not the stream: others' copies are queued there too
        yield read[: len(piece)]
