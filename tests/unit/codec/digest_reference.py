"""The definition of the model digest in slow, plain Python: what the compiled loops are held against.

Written from design/0002-digests.md alone. It shares no code with `weightsync.codec`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import xxhash

MASK = (1 << 64) - 1


def seeds(name: str, dtype: str, shape: Sequence[int]) -> tuple[int, int, int, int]:
    text = f"wsd1\n{dtype}\n{','.join(map(str, shape))}\n{name}".encode()
    keys, term = xxhash.xxh3_128_intdigest(text, seed=0), xxhash.xxh3_128_intdigest(text, seed=1)
    return keys & MASK, keys >> 64, term & MASK, term >> 64


def swap_halves(value: int) -> int:
    return (value >> 32) | ((value << 32) & MASK)


def keys_of_word(index: int, key_1: int, key_2: int) -> tuple[int, int, int, int]:
    x = (key_1 + index * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    p = x ^ (x >> 31)
    y = (p + key_2) & MASK
    y = ((y ^ (y >> 29)) * 0xD6E8FEB86659FD93) & MASK
    q = y ^ (y >> 32)
    return p, q, (swap_halves(p) + q) & MASK, swap_halves(q) ^ p


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
            a_lo, a_hi, b_lo, b_hi = keys_of_word(at // 8, key_1, key_2)
            digit = byte << (8 * (at % 4))
            a += (a_lo if at % 8 < 4 else a_hi) * digit
            b += (b_lo if at % 8 < 4 else b_hi) * digit
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
    return f"wsd1:{a & MASK:016x}{b & MASK:016x}"
