"""What the model digest must see: accidents of every kind; what its keys promise; what it is compiled to."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from weightsync.codec import kernels
from weightsync.codec.digest import patch_sum, shard_sum
from weightsync.codec.model_digest import ShardSum, patched_digest
from weightsync.codec.tensor_digest import tensor_digest
from weightsync.errors import InvalidRequestError
from weightsync.types import HeldTensor, Manifest, PatchBase, TensorSpec, Version

Bytes = npt.NDArray[np.uint8]
Random = np.random.Generator
BLOCK_BYTES = 8 * kernels.BLOCK_WORDS
LOW = np.uint64(0xFFFFFFFF)


def sum_of(data: Bytes, name: str = "w") -> ShardSum:
    spec = TensorSpec(name=name, dtype="uint8", shape=data.shape)
    return shard_sum(HeldTensor(spec=spec, box=None, tensor=torch.from_numpy(data)))


def weights(random: Random) -> Bytes:
    """Two to five blocks and a piece of one: of what models are made."""
    size = int(random.integers(2 * BLOCK_BYTES, 5 * BLOCK_BYTES))
    kind = random.integers(6)
    if kind == 0:  # one value, zero or not
        return np.full(size, random.integers(256), np.uint8)
    if kind == 1:  # counting: neighbours differ by a constant
        return np.arange(size // 8 + 1, dtype=np.uint64).view(np.uint8)[:size].copy()
    if kind == 2:  # a short pattern again and again
        return np.resize(random.integers(256, size=int(random.integers(1, 70))).astype(np.uint8), size)
    if kind == 3:  # nearly all zero
        data = np.zeros(size, np.uint8)
        data[random.integers(size, size=20)] = random.integers(1, 256, size=20)
        return data
    if kind == 4:  # whole blocks repeat
        return np.resize(random.integers(256, size=BLOCK_BYTES).astype(np.uint8), size)
    values = torch.from_numpy(random.normal(0, 0.02, size // 2 + 1)).bfloat16()
    return values.view(torch.uint8).numpy()[:size].copy()


def flip_a_bit(data: Bytes, random: Random) -> None:
    data[random.integers(len(data))] ^= np.uint8(1 << random.integers(8))


def flip_equal_bits(data: Bytes, random: Random) -> None:
    """The sign, or any one bit, of several elements that lie alike."""
    step = int(random.choice([2, 4, 8, BLOCK_BYTES]))
    data[int(random.integers(step)) :: step][: int(random.integers(1, 9))] ^= np.uint8(1 << random.integers(8))


def swap_ranges(data: Bytes, random: Random) -> None:
    """Exchanges two elements, words or blocks."""
    size = int(random.choice([1, 2, 4, 8, 64, BLOCK_BYTES]))
    first, second = random.integers(len(data) // size, size=2) * size
    kept = data[first : first + size].copy()
    data[first : first + size] = data[second : second + size]
    data[second : second + size] = kept


def zero_a_range(data: Bytes, random: Random) -> None:
    begin, end = np.sort(random.integers(len(data) + 1, size=2))
    data[begin:end] = 0


def shift(data: Bytes, random: Random) -> None:
    """Everything, or a range, lies some places off."""
    begin = int(random.integers(len(data) // 2))
    data[begin:] = np.roll(data[begin:], int(random.choice([1, 2, 4, 8, -8, 64, BLOCK_BYTES])))


def repeat_a_range(data: Bytes, random: Random) -> None:
    """A range was written a second time, over its neighbour."""
    size = int(random.integers(1, len(data) // 2))
    begin = int(random.integers(len(data) - 2 * size + 1))
    data[begin + size : begin + 2 * size] = data[begin : begin + size]


def turn_words(data: Bytes, random: Random) -> None:
    """The bytes of some words come in another order."""
    whole = data[: len(data) // 8 * 8].reshape(-1, 8)
    whole[: int(random.integers(1, len(whole)))] = whole[: int(random.integers(1, 2)), ::-1]


def mix_places(data: Bytes, random: Random) -> None:
    """The words of some blocks are permuted alike: rows that a loader laid out in another order."""
    blocks = data[: len(data) // BLOCK_BYTES * BLOCK_BYTES].reshape(-1, kernels.BLOCK_WORDS, 8)
    blocks[:] = blocks[:, random.permutation(kernels.BLOCK_WORDS)]


def add_everywhere(data: Bytes, random: Random) -> None:
    data[int(random.integers(8)) :: 8] += np.uint8(random.integers(1, 256))


ACCIDENTS: list[Callable[[Bytes, Random], None]] = [
    flip_a_bit, flip_equal_bits, swap_ranges, zero_a_range, shift, repeat_a_range, turn_words, mix_places,
    add_everywhere,
]  # fmt: skip


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_no_accident_leaves_the_sum_as_it_was(accident: Callable[[Bytes, Random], None]) -> None:
    random, num_changed = np.random.default_rng(ACCIDENTS.index(accident)), 0
    for _ in range(1000):
        data = weights(random)
        before, was = sum_of(data), data.copy()
        accident(data, random)
        after = sum_of(data)
        changed = not np.array_equal(was, data)
        num_changed += changed
        assert (before.lane_a != after.lane_a) == changed, "lane A"
        assert (before.lane_b != after.lane_b) == changed, "lane B"
    assert num_changed > 200


def test_every_bit_of_every_byte_counts_and_each_differently() -> None:
    data = np.random.default_rng(1).integers(256, size=BLOCK_BYTES + 45).astype(np.uint8)
    spec = TensorSpec(name="w", dtype="uint8", shape=data.shape)
    seen_a, seen_b = set(), set()
    for at in range(len(data)):
        for bit in range(8):
            old, place = torch.from_numpy(data[at : at + 1]), torch.tensor([at])
            change = patch_sum(spec, place, old, old ^ (1 << bit))
            seen_a.add(change.lane_a)
            seen_b.add(change.lane_b)
    assert 0 not in seen_a | seen_b
    assert len(seen_a) == len(seen_b) == 8 * len(data)


def test_tensors_of_one_shape_that_change_places_are_seen() -> None:
    random = np.random.default_rng(2)
    for _ in range(300):
        size = int(random.integers(1, 3000))
        one, two = (random.integers(256, size=size).astype(np.uint8) for _ in range(2))
        two[:-1] = one[:-1] if random.integers(2) else two[:-1]
        two[-1] = one[-1] ^ 1
        right = sum_of(one, "a") + sum_of(two, "b")
        wrong = sum_of(two, "a") + sum_of(one, "b")
        assert right.lane_a != wrong.lane_a
        assert right.lane_b != wrong.lane_b


# --- what the keys promise (design/0002-digests.md) -----------------------------------------------------------------


def digit_keys() -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Of the 512 digits of a block: their 32-bit keys in lane A and B."""
    a, b = (
        np.stack([keys & LOW, keys >> np.uint64(32)], 1).ravel() for keys in (kernels.WORD_KEYS_A, kernels.WORD_KEYS_B)
    )
    return a, b


def test_a_single_digit_that_differs_is_always_seen() -> None:
    for keys in digit_keys():
        assert len(set(keys.tolist())) == 2 * kernels.BLOCK_WORDS
        assert all(keys & np.uint64(1))


def test_two_digits_of_a_block_that_differ_are_always_seen() -> None:
    """Both sums of a block are zero for two differences below 2^32 only if 2^33 divides the keys' determinant."""
    a, b = digit_keys()
    determinant = a[:, None] * b[None, :] - a[None, :] * b[:, None]  # mod 2^64: zero there means zero
    upper = determinant[np.triu_indices(len(a), 1)]
    assert len(upper) == 512 * 511 // 2
    assert not (upper & np.uint64((1 << 33) - 1) == 0).any()


def test_no_two_places_share_a_factor() -> None:
    """Of 2^20 words in blocks of two tensors: an exchange of any two would be seen in each lane."""
    seeds = np.random.default_rng(3).integers(1 << 63, size=2).astype(np.uint64)
    step, first, second = (np.uint64(key) for key in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
    x = (seeds[:, None] + np.arange(2048, dtype=np.uint64) * step).ravel()
    x = (x ^ (x >> np.uint64(30))) * first
    x = (x ^ (x >> np.uint64(27))) * second
    block_keys = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    for keys in digit_keys():
        factors = np.multiply.outer(block_keys, keys[::2]).ravel()
        assert len(factors) == 1 << 20
        assert len(np.unique(factors)) == len(factors)


# --- other releases and other processors ----------------------------------------------------------------------------


def test_a_digest_of_an_older_release_is_refused_in_words() -> None:
    spec = TensorSpec(name="w", dtype="uint8", shape=(1,))
    version, old = Version(run_id="run", number=1), "wsd1:" + "0" * 32
    manifest = Manifest(version=version, model_id="m", tensors=(spec,))
    refusals: list[Callable[[], object]] = [
        lambda: patched_digest(old, ShardSum.zero()),
        lambda: PatchBase(version=version, model_digest=old),
        lambda: manifest.with_digests({"w": tensor_digest(torch.zeros(1, dtype=torch.uint8))}, old),
        lambda: msgspec.json.decode(
            msgspec.json.encode({**msgspec.to_builtins(manifest), "model_digest": old}), type=Manifest
        ),
    ]
    for refusal in refusals:
        with pytest.raises(InvalidRequestError, match="wsd1: is one of another weightsync release"):
            refusal()


_CHILD = """
import re, sys
import numpy as np
from weightsync.codec import kernels

assembly = "".join(kernels.run_sum.inspect_asm().values())
data = np.arange(100_003, dtype=np.uint32).view(np.uint8)
wide = bool(re.search("vpmuludq.*%[yz]mm", assembly)) and "gather" not in assembly
num_hits = sum(kernels.run_sum.stats.cache_hits.values())
print(*kernels.run_sum(data.ctypes.data + 3, len(data) - 7, 12345, 1, 2), wide, num_hits)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an x86-64 processor")
def test_a_processor_without_avx512_gets_vector_code_and_the_same_sum(tmp_path: Path) -> None:
    """Words side by side are loaded together, not gathered one by one, which takes twice as long.

    Both find one folder of compiled code: neither may be given the other's.
    """
    found = {}
    unlimited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_CPU_")}
    for name, limits in {"this one": {}, "avx2": {"NUMBA_CPU_NAME": "znver3", "NUMBA_CPU_FEATURES": ""}}.items():
        environment = {**unlimited, "NUMBA_CACHE_DIR": str(tmp_path), **limits}
        done = subprocess.run(
            [sys.executable, "-c", _CHILD], env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        found[name] = done.stdout.split()
    assert found["avx2"][2:] == ["True", "0"]
    assert found["this one"][2] == "True"
    assert found["avx2"][:2] == found["this one"][:2]
