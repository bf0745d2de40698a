"""Update requests: headers with wrong lengths, sizes, names or offsets are refused before anything is allocated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.errors import InvalidRequestError
from weightsync.types import (
    BroadcastWeightUpdateRequest,
    CudaIpcWeightUpdateRequest,
    CudaMemoryHandle,
    PackedCudaIpcWeightUpdateRequest,
    PatchWeightUpdateRequest,
    SharedMemoryHandle,
)
from weightsync.types.spec import MAX_NBYTES

GOOD: dict[str, Any] = {
    "session": "s",
    "seq": 0,
    "names": ("a", "b"),
    "dtypes": ("float32", "uint8"),
    "shapes": ((2, 3), (5,)),
    "offsets": (0, 256),
    "bucket_bytes": 512,
}


def broadcast(**changes: Any) -> BroadcastWeightUpdateRequest:
    return BroadcastWeightUpdateRequest(**{**GOOD, **changes})


def test_the_good_one_is_good() -> None:
    assert broadcast().tensor_bytes() == (24, 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"session": ""},
        {"seq": -1},
        {"names": (), "dtypes": (), "shapes": (), "offsets": ()},
        {"names": ("a",)},
        {"names": ("a", "a")},
        {"names": ("a", "")},
        {"names": ("a", "b" * 2000)},
        {"dtypes": ("float32",)},
        {"dtypes": ("float32", "object")},
        {"dtypes": ("float32", "__class__")},
        {"shapes": ((2, 3),)},
        {"shapes": ((2, 3), (5,), (1,))},
        {"shapes": ((2, 3), (-5,))},
        {"shapes": ((2, 3), (-5, -1))},
        {"shapes": ((2, 3), (1 << 60,))},
        {"shapes": ((1,) * 33, (5,))},
        {"offsets": (0,)},
        {"offsets": (0, 256, 400)},
        {"offsets": (-256, 256)},
        {"offsets": (0, 23)},
        {"offsets": (256, 256)},
        {"offsets": (0, 508)},
        {"offsets": (0, 1 << 62)},
        {"bucket_bytes": 260},
        {"bucket_bytes": -1},
        {"bucket_bytes": MAX_NBYTES + 1},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_a_broadcast_header_that_cant_be(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        broadcast(**changes)


def test_a_bucket_is_not_much_larger_than_its_tensors() -> None:
    """A receiver allocates what this says: 29 bytes of tensors must not make it allocate a terabyte."""
    with pytest.raises(InvalidRequestError):
        broadcast(bucket_bytes=1 << 40)


def test_a_tensor_lies_where_a_view_of_its_dtype_can_be_made() -> None:
    """A float32 at byte 2 can't be viewed: that is a bad request, not a failure of the engine's loader."""
    with pytest.raises(InvalidRequestError):
        broadcast(offsets=(2, 256))


@pytest.mark.parametrize("extent", [1 << 70, 1 << 63])
def test_an_empty_tensor_with_an_absurd_extent(extent: int) -> None:
    """0 x 2**70 has no bytes, and yet no tensor library can make it."""
    with pytest.raises(InvalidRequestError):
        broadcast(shapes=((0, extent), (5,)))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(-5, 60), st.integers(0, 20)), min_size=1, max_size=5), st.integers(0, 80))
def test_a_layout_is_taken_only_if_no_byte_belongs_to_two(pairs: list[tuple[int, int]], bucket: int) -> None:
    """Checked against a bitmap: a byte is inside the bucket and belongs to one tensor at most."""
    used: list[int] = []
    for offset, size in pairs:
        used += range(offset, offset + size)
    whole = len(used) == len(set(used)) and all(0 <= byte < bucket for byte in used)
    try:
        BroadcastWeightUpdateRequest(
            session="s",
            seq=0,
            names=tuple(f"t{i}" for i in range(len(pairs))),
            dtypes=("uint8",) * len(pairs),
            shapes=tuple((size,) for _, size in pairs),
            offsets=tuple(offset for offset, _ in pairs),
            bucket_bytes=bucket,
        )
    except InvalidRequestError:
        assert not whole or any(size == 0 for _, size in pairs), "an empty tensor may be refused, a whole layout not"
    else:
        assert whole


HEX = "0f" * 64


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/dev/shm/a",
        "a\\b",
        "a b",
        "a\x00",
        "a\n",
        "naïve",
        "١٢٣",
        "²",
        "%2e%2e",
        "~",
        "x" * 256,
    ],
    ids=repr,
)
def test_a_segments_name_cant_leave_its_folder(name: str) -> None:
    with pytest.raises(InvalidRequestError):
        SharedMemoryHandle(host_nonce="n", name=name, offset_bytes=0, size_bytes=1)


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_name_that_is_taken_is_one_plain_path_component(name: str) -> None:
    try:
        SharedMemoryHandle(host_nonce="n", name=name, offset_bytes=0, size_bytes=1)
    except InvalidRequestError:
        return
    assert name.isascii()
    assert not set(name) & set("/\\\x00\n ")
    assert name not in ("", ".", "..")


@pytest.mark.parametrize(("offset", "size"), [(-1, 4), (0, -4), (0, MAX_NBYTES + 1), (1 << 62, 4)])
def test_a_handle_of_memory_that_cant_be(offset: int, size: int) -> None:
    with pytest.raises(InvalidRequestError):
        SharedMemoryHandle(host_nonce="n", name="a", offset_bytes=offset, size_bytes=size)
    with pytest.raises(InvalidRequestError):
        CudaMemoryHandle(device_uuid="GPU-1", handle=HEX, offset_bytes=offset, size_bytes=size)


@pytest.mark.parametrize(
    ("uuid", "handle"), [("", HEX), ("GPU-1", HEX[:-1]), ("GPU-1", HEX + "00"), ("GPU-1", HEX.upper()), ("GPU-1", "")]
)
def test_a_cuda_handle_is_64_bytes_in_hex(uuid: str, handle: str) -> None:
    with pytest.raises(InvalidRequestError):
        CudaMemoryHandle(device_uuid=uuid, handle=handle, offset_bytes=0, size_bytes=4)


def cuda(size: int) -> CudaMemoryHandle:
    return CudaMemoryHandle(device_uuid="GPU-1", handle=HEX, offset_bytes=0, size_bytes=size)


HEADER = {key: GOOD[key] for key in ("session", "seq", "names", "dtypes", "shapes")}


@pytest.mark.parametrize(
    "handles",
    [(), ((),), ((cuda(24),),), ((cuda(24), cuda(6)),), ((cuda(24), cuda(5)), (cuda(24),))],
    ids=["no device", "no handles", "one of two", "wrong size", "second device short"],
)
def test_an_ipc_header_has_one_handle_of_the_right_size_a_name(handles: Any) -> None:
    with pytest.raises(InvalidRequestError):
        CudaIpcWeightUpdateRequest(**HEADER, handles=handles)


@pytest.mark.parametrize(
    "changes",
    [
        {"sizes": (24, 6)},
        {"sizes": (24,)},
        {"offsets": (0, 20)},
        {"offsets": (0,)},
        {"handles": ()},
        {"handles": (cuda(260),)},
        {"handles": (cuda(512), cuda(100))},
    ],
    ids=str,
)
def test_a_packed_ipc_header_that_cant_be(changes: dict[str, Any]) -> None:
    fields = {"sizes": (24, 5), "offsets": (0, 256), "handles": (cuda(512),)}
    PackedCudaIpcWeightUpdateRequest(**HEADER, **fields)
    with pytest.raises(InvalidRequestError):
        PackedCudaIpcWeightUpdateRequest(**HEADER, **{**fields, **changes})


def shm(size: int, offset: int = 0) -> SharedMemoryHandle:
    return SharedMemoryHandle(host_nonce="n", name="s", offset_bytes=offset, size_bytes=size)


def patch(**changes: Any) -> PatchWeightUpdateRequest:
    fields: dict[str, Any] = {
        "session": "s",
        "seq": 0,
        "names": ("a", "b"),
        "dtypes": ("bfloat16", "int64"),
        "shapes": ((2, 3), ()),
        "counts": (6, 1),
        "positions": (shm(24), shm(4, 24)),
        "values": (shm(12, 28), shm(8, 40)),
    }
    return PatchWeightUpdateRequest(**{**fields, **changes})


def test_a_good_patch_is_good() -> None:
    assert patch().tensor_bytes() == (12, 8)
    patch(counts=(0, 0), positions=(shm(0), shm(0)), values=(shm(0), shm(0)))
    whole = 1 << 32
    patch(shapes=((whole,), ()), counts=(1, 1), positions=(shm(4), shm(4)), values=(shm(2), shm(8)))


@pytest.mark.parametrize(
    "changes",
    [
        {"counts": (6,)},
        {"positions": (shm(24),)},
        {"values": (shm(12), shm(8), shm(0))},
        {"counts": (7, 1), "positions": (shm(28), shm(4)), "values": (shm(14), shm(8))},
        {"counts": (6, 2), "positions": (shm(24), shm(8)), "values": (shm(12), shm(16))},
        {"counts": (-1, 1), "positions": (shm(0), shm(4)), "values": (shm(0), shm(8))},
        {"positions": (shm(48), shm(4))},
        {"positions": (shm(20), shm(4))},
        {"values": (shm(24), shm(8))},
        {"values": (shm(10), shm(8))},
        {"positions": (shm(24, 2), shm(4))},
        {"values": (shm(12, 1), shm(8))},
        {"values": (shm(12), shm(8, 4))},
        {"shapes": (((1 << 32) + 1,), ())},
        {"names": ("a", "a")},
    ],
    ids=str,
)
def test_a_patch_that_cant_be(changes: dict[str, Any]) -> None:
    """More elements than there are, other sizes than they have, or positions that 4 bytes can't name."""
    with pytest.raises(InvalidRequestError):
        patch(**changes)
