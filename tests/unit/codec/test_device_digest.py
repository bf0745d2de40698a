"""The digest's sum in torch's operations, as a GPU runs them, is the compiled loop's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weightsync.codec import device_digest
from weightsync.codec import digest as module
from weightsync.codec.device_digest import DeviceSum
from weightsync.codec.digest import PartSums, digest_of, shard_sums
from weightsync.codec.kernels import runs_sum
from weightsync.codec.model_digest import ShardSum
from weightsync.types import Box, HeldTensor, TensorSpec

KEYS = st.integers(0, 2**64 - 1)
CPU = torch.device("cpu")
MASK = 2**64 - 1
few = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


def compiled(data: torch.Tensor, places: list[int], width: int, key_1: int, key_2: int) -> tuple[int, int]:
    offsets = np.array(places, np.int64)
    a, b = runs_sum(data.numpy().reshape(-1), width, offsets, np.uint64(key_1), np.uint64(key_2))
    return int(a), int(b)


def there(rows: torch.Tensor, place: int, pitch: int, key_1: int, key_2: int) -> tuple[int, int]:
    found = DeviceSum(CPU)
    found.add(rows, place, pitch, key_1, key_2)
    return found.total()


def random_bytes(num_bytes: int, seed: int, misaligned: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes + misaligned,), dtype=torch.uint8, generator=generator)[misaligned:]


@pytest.fixture(
    params=[(8192, 1 << 20, 32, True), (8192, 4096, 1, True), (8192, 4096, 2, False), (1 << 20, 65536, 32, True)],
    ids=str,
)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces: runs are laid side by side, read where they lie, cut into several; summed by bytes, by words."""
    piece_bytes, alone_bytes, rows, by_bytes = request.param
    monkeypatch.setattr(device_digest, "_multiplies_bytes", lambda device: by_bytes)
    monkeypatch.setattr(device_digest, "_ROWS", rows)
    monkeypatch.setattr(device_digest, "_FIRST_BYTES", 2048)
    monkeypatch.setattr(device_digest, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(device_digest, "_ALONE_BYTES", alone_bytes)
    monkeypatch.setattr(device_digest, "_MAX_BLOCKS", piece_bytes // 2048 + 1)
    real = device_digest._sums_by_bytes

    def checked(words: torch.Tensor) -> torch.Tensor:
        assert len(words) % rows == 0, "as the product wants it"
        return real(words)

    monkeypatch.setattr(device_digest, "_sums_by_bytes", checked)


@pytest.mark.parametrize("byte", [0, 1, 127, 128, 255, None])
def test_by_bytes_is_by_words(byte: int | None) -> None:
    """Red with a digit that is not signed, or without the 128 that every byte is made less."""
    num_bytes = 40 * 2048
    data = random_bytes(num_bytes, 3) if byte is None else torch.full((num_bytes,), byte, dtype=torch.uint8)
    words = data.view(torch.int64).view(-1, 256)
    assert torch.equal(device_digest._sums_by_bytes(words), device_digest._sums_by_words(words))


@few
@given(
    st.integers(0, 30_000) | st.integers(65_000, 140_000),
    st.integers(0, 1 << 40),
    st.integers(0, 9),
    KEYS,
    KEYS,
    st.integers(0, 2**31),
)
def test_a_run_of_any_length_at_any_place(
    small: None, num_bytes: int, place: int, misaligned: int, key_1: int, key_2: int, seed: int
) -> None:
    """Red with a shift that is not logical."""
    data = random_bytes(num_bytes, seed, misaligned)
    assert there(data[None], place, num_bytes, key_1, key_2) == compiled(data, [place], num_bytes, key_1, key_2)


@few
@given(
    st.integers(1, 40), st.integers(1, 5000), st.integers(0, 6000), st.integers(0, 1 << 40), KEYS, KEYS,
    st.integers(0, 2**31),
)  # fmt: skip
def test_rows_that_lie_evenly_apart(
    small: None, number: int, width: int, gap: int, place: int, key_1: int, key_2: int, seed: int
) -> None:
    """Red where the stage is not emptied behind a sum."""
    rows = random_bytes(number * width, seed).view(number, width)
    places = [place + index * (width + gap) for index in range(number)]
    assert there(rows, place, width + gap, key_1, key_2) == compiled(rows, places, width, key_1, key_2)


@few
@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 1 << 20), KEYS, KEYS), max_size=12), st.integers(0, 99))
def test_many_runs_add_up_and_may_be_written_again_at_once(
    small: None, runs: list[tuple[int, int, int, int]], seed: int
) -> None:
    found, wanted = DeviceSum(CPU), [0, 0]
    for index, (num_bytes, place, key_1, key_2) in enumerate(runs):
        data = random_bytes(num_bytes, seed + index)
        lanes = compiled(data, [place], num_bytes, key_1, key_2)
        wanted = [(was + lane) & MASK for was, lane in zip(wanted, lanes, strict=True)]
        found.add(data[None], place, num_bytes, key_1, key_2)
        data.fill_(7)
    assert found.total() == tuple(wanted)
    assert found.total() == tuple(wanted)


# --- and so are parts of tensors ---


@pytest.fixture
def summed_there(monkeypatch: pytest.MonkeyPatch, small: None) -> list[str]:
    """Host tensors count as a device's; what the host summed all the same."""
    on_host: list[str] = []

    def noted(data: object, spec: TensorSpec, block: Box) -> tuple[int, int]:
        on_host.append(spec.name)
        return block_lanes(data, spec, block)

    block_lanes = module.block_lanes
    monkeypatch.setattr(module, "_sums_itself", lambda tensor: True)
    monkeypatch.setattr(module, "block_lanes", noted)
    return on_host


PARTS = [
    ((), None), ((0, 4), None), ((700,), None), ((700,), Box(offset=(3,), shape=(600,))),
    ((64, 96), Box(offset=(16, 0), shape=(32, 96))), ((64, 96), Box(offset=(0, 24), shape=(64, 24))),
    ((5, 40, 30), Box(offset=(0, 10, 0), shape=(5, 20, 30))), ((5, 40, 30), Box(offset=(1, 0, 7), shape=(3, 40, 11))),
    ((64, 96), Box(offset=(9, 9), shape=(0, 9))),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize(("shape", "box"), PARTS, ids=str)
def test_a_part_of_any_tensor(
    summed_there: list[str], shape: tuple[int, ...], box: Box | None, dtype: torch.dtype
) -> None:
    """Those that were cut along one dimension never come to the host."""
    held = part(shape, box, dtype)
    sums = PartSums()
    sums.add(held)
    assert sums.total() == on_host(held)
    assert summed_there == []


def test_what_was_cut_along_two_dimensions_is_summed_on_the_host(summed_there: list[str]) -> None:
    held = part((5, 40, 30), Box(offset=(0, 10, 10), shape=(5, 20, 9)), torch.float32)
    sums = PartSums()
    sums.add(held)
    assert sums.total() == on_host(held)
    assert set(summed_there) == {"w"}


def test_a_narrow_shard_is_summed_on_the_host(summed_there: list[str]) -> None:
    """Its device would sum the whole tensor for it."""
    held = part((64, 96), Box(offset=(0, 8), shape=(64, 4)), torch.float32)
    sums = PartSums()
    sums.add(held)
    assert sums.total() == on_host(held)
    assert set(summed_there) == {"w"}


def test_what_is_not_contiguous_is_copied_a_piece_at_a_time(
    summed_there: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    laid: list[int] = []
    add = DeviceSum.add
    monkeypatch.setattr(DeviceSum, "add", lambda self, rows, *args: (laid.append(rows.nbytes), add(self, rows, *args)))
    held = whole("w", torch.randn(100, 70).t())
    assert shard_sums([held]) == on_host(held)
    assert sum(laid) == held.tensor.nbytes
    assert max(laid) <= 4096


def test_parts_that_come_in_inference_mode(summed_there: list[str]) -> None:
    tensors = [torch.randn(40, 40) for _ in range(6)]

    def held() -> Iterator[HeldTensor]:
        for index, tensor in enumerate(tensors):
            with torch.inference_mode():
                yield whole(f"w{index}", tensor)

    wanted = sum((on_host(whole(f"w{index}", tensor)) for index, tensor in enumerate(tensors)), ShardSum.zero())
    assert shard_sums(held()) == wanted


def test_an_aligned_run_in_a_storage_that_begins_at_an_odd_byte() -> None:
    """As memory of another library's may: torch views no words there."""
    memory = np.zeros((10 << 20) + 16, np.uint8)
    begin = -memory.ctypes.data % 8 + 3
    data = torch.from_numpy(memory[begin:])[5 : 5 + (9 << 20)]
    data.copy_(random_bytes(len(data), 1))
    assert data.data_ptr() % 8 == 0
    assert there(data[None], 0, len(data), 3, 4) == compiled(data, [0], len(data), 3, 4)


@pytest.mark.parametrize("strided", [False, True])
def test_a_whole_model(summed_there: list[str], strided: bool) -> None:
    tensors = {
        f"w{index}": torch.randn(30 + index, 17).t() if strided else torch.randn(30, index) for index in range(9)
    }
    held = [whole(name, tensor) for name, tensor in tensors.items()]
    wanted = sum(map(on_host, held), ShardSum.zero())
    assert shard_sums(held) == shard_sums(iter(held), together=True) == wanted
    specs = [each.spec for each in held]
    digest = digest_of(held, specs)
    assert digest_of(iter(held), specs) == digest
    assert summed_there == []


def part(shape: tuple[int, ...], box: Box | None, dtype: torch.dtype) -> HeldTensor:
    spec = TensorSpec(name="w", dtype=str(dtype).removeprefix("torch."), shape=shape)
    own = shape if box is None else box.shape
    words = torch.randint(0, 2, own, generator=torch.Generator().manual_seed(3))
    return HeldTensor(spec=spec, box=box, tensor=words.to(dtype))


def whole(name: str, tensor: torch.Tensor) -> HeldTensor:
    return HeldTensor(spec=TensorSpec(name=name, dtype="float32", shape=tuple(tensor.shape)), box=None, tensor=tensor)


def on_host(held: HeldTensor) -> ShardSum:
    """By the compiled loops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_sums_itself", lambda tensor: False)
        patch.setattr(module, "block_lanes", model_digest_lanes)
        return module.shard_sum(held)


model_digest_lanes = module.block_lanes
