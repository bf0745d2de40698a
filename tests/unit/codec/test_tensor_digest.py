"""The digests of tensors on a device, whose bytes come to the host a piece at a time: they are those of host memory.

A CPU's tensors stand for a device's: all but the pinning is the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightsync.codec import tensor_digest as module
from weightsync.codec.tensor_digest import bucket_digests, packed_digests, tensor_digest

PIECE_BYTES = 512
few = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every tensor counts as one on a device. Gives the sizes that are read."""
    read: list[int] = []
    monkeypatch.setattr(module, "_is_there", lambda tensor: True)
    monkeypatch.setattr(module, "is_plain", lambda tensor: False)
    monkeypatch.setattr(module, "are_plain", lambda tensors: False)
    monkeypatch.setattr(module, "_DEVICE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(module, "PIECE_BYTES", 3 * PIECE_BYTES // 2)
    monkeypatch.setattr(module, "_staging", module._Staging())
    real = module._read_device

    def noted(part: torch.Tensor) -> Iterator[memoryview]:
        for piece in real(part):
            read.append(len(piece))
            yield piece

    monkeypatch.setattr(module, "_read_device", noted)
    return read


def expected(tensors: list[torch.Tensor]) -> list[bytes]:
    return [xxhash.xxh3_128_digest(tensor.numpy().tobytes()) for tensor in tensors]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


@few
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.sampled_from([torch.int8, torch.float32])),
        max_size=5,
    ),
    st.booleans(),
)
def test_tensors_of_any_shape_and_strides(
    on_a_device: list[int], kinds: list[tuple[list[int], torch.dtype]], turned: bool
) -> None:
    """Red where a piece is read into the memory of the one before, or one is left out."""
    on_a_device.clear()
    tensors = [random_tensor(tuple(shape), dtype, seed) for seed, (shape, dtype) in enumerate(kinds)]
    if turned:
        tensors = [tensor.transpose(0, -1) for tensor in tensors]
    assert packed_digests(tensors) == b"".join(expected(tensors))
    assert sum(on_a_device) == sum(tensor.nbytes for tensor in tensors)
    assert all(size <= PIECE_BYTES for size in on_a_device)


@few
@given(st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 7)), min_size=1, max_size=12))
def test_a_bucket_of_any_sizes_and_gaps(on_a_device: list[int], laid: list[tuple[int, int]]) -> None:
    """Red where a range is read whole that is larger than the memory it comes through."""
    on_a_device.clear()
    offsets, sizes, end = [], [], 0
    for size, gap in laid:
        offsets.append(end + gap)
        sizes.append(size)
        end += gap + size
    bucket = random_tensor((end,), torch.uint8, end)
    parts = [bucket[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
    assert bucket_digests(bucket, offsets, sizes) == expected(parts)
    assert all(size <= PIECE_BYTES for size in on_a_device)


def test_memory_to_read_through_is_the_hosts_whatever_the_default_device(on_a_device: list[int]) -> None:
    """Red where it was made on the thread's default device: a bare TypeError, for as long as the thread lived."""
    tensor = random_tensor((100,), torch.float32, 1)
    with torch.device("meta"):
        found = tensor_digest(tensor)
    assert found == f"xxh3:{expected([tensor])[0].hex()}"


def test_what_is_read_in_inference_mode_may_be_written_again_outside(on_a_device: list[int]) -> None:
    tensor = random_tensor((700,), torch.uint8, 1)
    with torch.inference_mode():
        inside = tensor_digest(tensor)
    assert inside == tensor_digest(tensor)
    assert on_a_device == [512, 188, 512, 188]


def test_small_tensors_with_gaps_are_read_together(on_a_device: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: each was read alone where the gaps of an aligned bucket made a range longer than the memory."""
    monkeypatch.setattr(module, "_RUN_BYTES", PIECE_BYTES)
    offsets, sizes = list(range(0, 6400, 64)), [40] * 100
    bucket = random_tensor((6400,), torch.uint8, 1)
    assert bucket_digests(bucket, offsets, sizes) == expected([bucket[offset : offset + 40] for offset in offsets])
    assert len(on_a_device) == 13


def test_what_a_stream_still_writes_is_waited_for_once_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads read it on streams of their own. Which bytes they see then: tests/gpu/test_cuda_streams.py."""
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: waited.append(device))
    )
    there = [SimpleNamespace(is_cuda=True, device=f"cuda:{index}") for index in (1, 0, 1)]
    module.wait_filled([*there, torch.zeros(1)])  # type: ignore[list-item]
    assert sorted(waited) == ["cuda:0", "cuda:1"]
