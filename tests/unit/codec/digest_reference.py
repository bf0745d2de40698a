"""The definition of the model digest in slow, plain Python: what the compiled loops are held against.

Written from design/0002-digests.md alone. It shares no code with `weightsync.codec`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import xxhash

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15


def seeds(name: str, dtype: str, shape: Sequence[int]) -> tuple[int, int, int, int]:
    text = f"wsd2\n{dtype}\n{','.join(map(str, shape))}\n{name}".encode()
    keys, term = xxhash.xxh3_128_intdigest(text, seed=0), xxhash.xxh3_128_intdigest(text, seed=1)
    return keys & MASK, keys >> 64, term & MASK, term >> 64


def mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def word_key(number: int) -> int:
    """Output `number` of splitmix64 started at 0, both halves odd."""
    return mixed(((number + 1) * STEP) & MASK) | 0x1_0000_0001


def block_key(block: int, seed: int) -> int:
    return mixed((seed + block * STEP) & MASK) | 1


def keys_of_digit(digit: int, key_1: int, key_2: int) -> tuple[int, int]:
    """The factors (lane A, lane B) of 32-bit digit number `digit` of a tensor."""
    block, inside = divmod(digit, 512)
    low = inside % 2 == 0
    a, b = word_key(inside // 2), word_key(256 + inside // 2)
    small_a, small_b = (a & 0xFFFFFFFF, b & 0xFFFFFFFF) if low else (a >> 32, b >> 32)
    return block_key(block, key_1) * small_a & MASK, block_key(block, key_2) * small_b & MASK


def element_bytes(tensor: torch.Tensor) -> list[bytes]:
    flat = tensor.contiguous().reshape(-1)
    raw = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
    size = tensor.element_size()
    return [raw[at : at + size] for at in range(0, len(raw), size)]


def sum_of_elements(
    name: str, dtype: str, shape: Sequence[int], elements: Iterable[tuple[int, bytes]]
) -> tuple[int, int]:
    """Lanes of elements given as (flat global index, bytes): byte by byte, as the map is linear."""
    key_1, key_2, _, _ = seeds(name, dtype, shape)
    a = b = 0
    for position, value in elements:
        for step, byte in enumerate(value):
            at = position * len(value) + step
            key_a, key_b = keys_of_digit(at // 4, key_1, key_2)
            digit = byte << (8 * (at % 4))
            a += key_a * digit
            b += key_b * digit
    return a & MASK, b & MASK


def sum_of_part(
    name: str, dtype: str, shape: Sequence[int], offset: Sequence[int], tensor: torch.Tensor
) -> tuple[int, int]:
    """Lanes of the part of a tensor that starts at `offset`."""
    positions = []
    for index in itertools.product(*(range(extent) for extent in tensor.shape)):
        flat = 0
        for size, start, step in zip(shape, offset, index, strict=True):
            flat = flat * size + start + step
        positions.append(flat)
    return sum_of_elements(name, dtype, shape, zip(positions, element_bytes(tensor), strict=True))


def digest_of_model(tensors: dict[str, tuple[str, torch.Tensor]]) -> str:
    """Digest of whole tensors, given as name -> (dtype, tensor)."""
    a = b = 0
    for name, (dtype, tensor) in tensors.items():
        part = sum_of_part(name, dtype, tensor.shape, [0] * tensor.dim(), tensor)
        _, _, term_a, term_b = seeds(name, dtype, tensor.shape)
        a, b = a + part[0] + term_a, b + part[1] + term_b
    return f"wsd2:{a & MASK:016x}{b & MASK:016x}"
