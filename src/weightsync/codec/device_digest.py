"""The shard-independent digest's sum where the bytes are: on a GPU, by torch's operations, without a copy to the host.

The definition is design/0002-digests.md; `codec.kernels` has the same for host memory. int64 here is uint64 there: sums
and products wrap alike, and shifts to the right are made logical.
"""

from __future__ import annotations

import functools

import torch

from weightsync.codec.kernels import BLOCK_WORDS, WORD_KEYS_A, WORD_KEYS_B

PIECE_BYTES = 32 << 20
"""What is summed at a time; five times as much memory of the device is used meanwhile."""

_BLOCK_BYTES = 8 * BLOCK_WORDS
_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LOW = (1 << 32) - 1


def run_sum(data: torch.Tensor, place: int, key_1: int, key_2: int) -> tuple[int, int]:
    """Both lanes of one run of bytes, each mod 2^64.

    Args:
        data: uint8, 1-D, contiguous, on any device.
        place: which byte of its whole tensor the first one is.
        key_1, key_2: of the tensor.
    """
    lanes = torch.zeros(2, dtype=torch.int64, device=data.device)
    start = 0
    while start < len(data):
        stop = min(len(data), start + PIECE_BYTES - (place + start) % _BLOCK_BYTES)  # pieces end where blocks do
        lanes += _piece_sum(data[start:stop], place + start, key_1, key_2)
        start = stop
    a, b = (int(lane) % (1 << 64) for lane in lanes.tolist())
    return a, b


def _piece_sum(data: torch.Tensor, place: int, key_1: int, key_2: int) -> torch.Tensor:
    first, inside = divmod(place, _BLOCK_BYTES)
    num_blocks = -(-(inside + len(data)) // _BLOCK_BYTES)
    if inside or len(data) % _BLOCK_BYTES or data.data_ptr() % 8:
        whole = torch.zeros(num_blocks * _BLOCK_BYTES, dtype=torch.uint8, device=data.device)  # zeros add nothing
        whole[inside : inside + len(data)] = data
        data = whole
    words = data.view(torch.int64).view(num_blocks, BLOCK_WORDS)
    low, high = words & _LOW, (words >> 32) & _LOW
    blocks = torch.arange(first, first + num_blocks, device=data.device)
    lanes = [
        ((low * keys_low + high * keys_high).sum(1) * _block_keys(blocks, key)).sum()
        for (keys_low, keys_high), key in zip(_word_keys(data.device), (key_1, key_2), strict=True)
    ]
    return torch.stack(lanes)


@functools.cache
def _word_keys(device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """For both lanes: the keys of a word's low and high digit, by its place in the block."""
    both = [torch.from_numpy(keys.view("int64").copy()).to(device) for keys in (WORD_KEYS_A, WORD_KEYS_B)]
    return tuple((keys & _LOW, (keys >> 32) & _LOW) for keys in both)


def _block_keys(blocks: torch.Tensor, seed: int) -> torch.Tensor:
    x = blocks * _signed(_STEP) + _signed(seed)
    x = (x ^ _shifted(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX_2)
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
