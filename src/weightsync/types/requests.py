"""Weight update requests: the header that announces a chunk before its bytes move.

Headers serialise to JSON; tensors never do. Every field is checked when a request is made and again
when it is read, so a receiver allocates nothing on an unchecked size.
"""

from __future__ import annotations

import itertools
from operator import add, le, mod

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types.dtypes import itemsize_bytes
from weightsync.types.spec import MAX_NBYTES, check_names, check_shape

MAX_TENSORS_A_CHUNK = 1 << 20
MAX_PATCHED_ELEMENTS = 1 << 32
"""Elements of a tensor that a patch's positions, of 4 bytes, can name."""

_MAX_PADDING_BYTES = 4096
_POSITION_BYTES = 4


class WeightUpdateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """What every strategy announces for one chunk.

    Attributes:
        session: the sync this chunk belongs to; a chunk of another session is refused.
        seq: number of the chunk in its session, from 0, without gaps.
        names: parameter names, in the stream's order.
        dtypes: one a name, e.g. "bfloat16".
        shapes: one a name.

    Raises:
        InvalidRequestError: lengths differ, a name comes twice, a dtype or shape can't be.
    """

    session: str
    seq: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.seq < 0 or not self.session:
            raise InvalidRequestError("a request has a session and a seq that is not negative")
        if not 1 <= len(self.names) <= MAX_TENSORS_A_CHUNK:
            raise InvalidRequestError(f"a request announces 1 to {MAX_TENSORS_A_CHUNK} tensors, not {len(self.names)}")
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise InvalidRequestError(
                f"{len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes do not match"
            )
        if len(set(self.names)) != len(self.names):
            raise InvalidRequestError("a request names every tensor once")
        check_names(self.names)
        self.check_parts(self.tensor_bytes())

    def tensor_bytes(self) -> tuple[int, ...]:
        """Bytes of each tensor."""
        sizes: dict[tuple[tuple[int, ...], str], int] = {}
        for name, kind in zip(self.names, zip(map(tuple, self.shapes), self.dtypes, strict=True), strict=True):
            if kind not in sizes:  # of a model's many tensors few differ in these
                sizes[kind] = check_shape(kind[0], dtype=kind[1], name=name)
        return tuple(map(sizes.__getitem__, zip(map(tuple, self.shapes), self.dtypes, strict=True)))

    def check_parts(self, sizes: tuple[int, ...]) -> None:
        """Checks what a strategy's own request has besides.

        Args:
            sizes: `tensor_bytes`.
        """


class BroadcastWeightUpdateRequest(WeightUpdateRequest, frozen=True, kw_only=True, tag="broadcast"):
    """A chunk packed into one bucket that is broadcast by the transfer group.

    Attributes:
        offsets: first byte of each tensor in the bucket; tensors do not overlap.
        bucket_bytes: size of the bucket that every member broadcasts.
    """

    offsets: tuple[int, ...]
    bucket_bytes: int

    def check_parts(self, sizes: tuple[int, ...]) -> None:
        _check_layout(self.offsets, sizes, self.bucket_bytes)
        _check_alignment(self.offsets, self.dtypes)


class CudaMemoryHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cuda"):
    """A piece of CUDA memory of another process on the same device.

    Attributes:
        device_uuid: the GPU, as the driver names it; indices differ between processes.
        handle: the driver's 64-byte IPC memory handle, in hex.
        offset_bytes: first byte within the allocation that the handle names.
        size_bytes: bytes that may be read.
    """

    device_uuid: str
    handle: str
    offset_bytes: int
    size_bytes: int

    def __post_init__(self) -> None:
        if not self.device_uuid or len(self.handle) != 128 or set(self.handle) - set("0123456789abcdef"):
            raise InvalidRequestError("a CUDA handle has a device_uuid and 64 bytes in lower-case hex")
        _check_extent(self.offset_bytes, self.size_bytes)


class SharedMemoryHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="shm"):
    """A piece of named shared memory on the same host.

    Attributes:
        host_nonce: proves that both processes see the same shared memory; a host name would not.
        name: the segment's name: letters, digits, ".", "_" and "-" alone, so it can't leave its folder.
        offset_bytes: first byte within the segment.
        size_bytes: bytes that may be read.
    """

    host_nonce: str
    name: str
    offset_bytes: int
    size_bytes: int

    def __post_init__(self) -> None:
        plain = self.name.replace(".", "").replace("_", "").replace("-", "")
        if not plain.isalnum() or not plain.isascii() or len(self.name) > 255:
            raise InvalidRequestError(f"a segment's name has letters, digits, '.', '_' and '-' alone: {self.name!r}")
        _check_extent(self.offset_bytes, self.size_bytes)


MemoryHandle = CudaMemoryHandle | SharedMemoryHandle


class CudaIpcWeightUpdateRequest(WeightUpdateRequest, frozen=True, kw_only=True, tag="cuda_ipc"):
    """A chunk whose tensors are opened one by one, in place.

    Attributes:
        handles: one list a training rank's device; in each one handle a name. A worker takes the list
            of its own device.
    """

    handles: tuple[tuple[MemoryHandle, ...], ...]

    def check_parts(self, sizes: tuple[int, ...]) -> None:
        if not self.handles:
            raise InvalidRequestError("a cuda_ipc request has the handles of at least one device")
        for per_device in self.handles:
            if len(per_device) != len(self.names):
                raise InvalidRequestError(f"{len(self.names)} names have {len(per_device)} handles")
            for name, handle, nbytes in zip(self.names, per_device, sizes, strict=True):
                if handle.size_bytes != nbytes:
                    raise InvalidRequestError(
                        f"the handle has {handle.size_bytes} bytes, the tensor {nbytes}", parameter=name
                    )


class PackedCudaIpcWeightUpdateRequest(WeightUpdateRequest, frozen=True, kw_only=True, tag="packed_cuda_ipc"):
    """A chunk packed into one bucket that is opened by one handle.

    Attributes:
        sizes: bytes of each tensor.
        offsets: first byte of each tensor in the bucket.
        handles: the bucket's handle, one a training rank's device.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    handles: tuple[MemoryHandle, ...]

    def check_parts(self, sizes: tuple[int, ...]) -> None:
        if self.sizes != sizes:
            raise InvalidRequestError(f"sizes {self.sizes} are not the tensors' bytes {sizes}")
        if not self.handles:
            raise InvalidRequestError("a packed_cuda_ipc request has at least one handle")
        for handle in self.handles:
            _check_layout(self.offsets, self.sizes, handle.size_bytes)
        _check_alignment(self.offsets, self.dtypes)


class PatchWeightUpdateRequest(WeightUpdateRequest, frozen=True, kw_only=True, tag="patch"):
    """Some elements of some tensors: where they are, and what they become. Only in a session that has a base.

    `names`, `dtypes` and `shapes` are those of the whole tensors, which are not in here.

    Attributes:
        counts: changed elements, one a name.
        positions: uint32, strictly rising: flat indices into the contiguous whole tensor; one handle a name.
        values: the new elements, of the tensor's dtype, as many as positions; one handle a name.
    """

    counts: tuple[int, ...]
    positions: tuple[SharedMemoryHandle, ...]
    values: tuple[SharedMemoryHandle, ...]

    def check_parts(self, sizes: tuple[int, ...]) -> None:
        if not len(self.names) == len(self.counts) == len(self.positions) == len(self.values):
            raise InvalidRequestError(
                f"{len(self.names)} names have {len(self.counts)} counts, {len(self.positions)} handles of positions "
                f"and {len(self.values)} of values"
            )
        for name, dtype, nbytes, count, positions, values in zip(
            self.names, self.dtypes, sizes, self.counts, self.positions, self.values, strict=True
        ):
            each = itemsize_bytes(dtype)
            if not 0 <= count <= nbytes // each <= MAX_PATCHED_ELEMENTS:
                raise InvalidRequestError(
                    f"{count} of {nbytes // each} elements can't be patched; a tensor has at most "
                    f"{MAX_PATCHED_ELEMENTS}, and none twice",
                    parameter=name,
                )
            if positions.size_bytes != _POSITION_BYTES * count or values.size_bytes != each * count:
                raise InvalidRequestError(
                    f"{count} elements have {positions.size_bytes} bytes of positions and {values.size_bytes} of "
                    f"values, not {_POSITION_BYTES * count} and {each * count}",
                    parameter=name,
                )
            if positions.offset_bytes % _POSITION_BYTES or values.offset_bytes % each:
                raise InvalidRequestError("positions and values are aligned to their elements", parameter=name)


AnyUpdateRequest = (
    BroadcastWeightUpdateRequest
    | CudaIpcWeightUpdateRequest
    | PackedCudaIpcWeightUpdateRequest
    | PatchWeightUpdateRequest
)


def _check_extent(offset_bytes: int, size_bytes: int) -> None:
    if offset_bytes < 0 or size_bytes < 0 or offset_bytes + size_bytes > MAX_NBYTES:
        raise InvalidRequestError(f"offset_bytes {offset_bytes} and size_bytes {size_bytes} can't be")


def _check_alignment(offsets: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    each = {dtype: itemsize_bytes(dtype) for dtype in set(dtypes)}
    if not any(map(mod, offsets, itertools.repeat(max(each.values())))):  # all are powers of 2
        return
    for offset, dtype in zip(offsets, dtypes, strict=True):
        if offset % each[dtype]:
            raise InvalidRequestError(f"a {dtype} at byte {offset} is not aligned: no view of it can be made")


def _check_layout(offsets: tuple[int, ...], sizes: tuple[int, ...], bucket_bytes: int) -> None:
    if len(offsets) != len(sizes):
        raise InvalidRequestError(f"{len(sizes)} tensors have {len(offsets)} offsets")
    if not 0 <= bucket_bytes <= MAX_NBYTES:
        raise InvalidRequestError(f"a bucket of {bucket_bytes} bytes can't be")
    if offsets and offsets[0] >= 0 and all(map(le, map(add, offsets, sizes), offsets[1:])):  # as senders lay them
        end = offsets[-1] + sizes[-1]
    else:
        end = 0
        for offset, size in sorted(zip(offsets, sizes, strict=True)):
            if offset < end:
                raise InvalidRequestError(f"tensors overlap in the bucket, or lie before it: offset {offset} < {end}")
            end = offset + size
    if not end <= bucket_bytes <= end + _MAX_PADDING_BYTES * (len(sizes) + 1):
        raise InvalidRequestError(f"the tensors end at byte {end}, the bucket at {bucket_bytes}")
