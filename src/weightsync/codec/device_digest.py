"""The shard-independent digest's sum where the bytes are: on a GPU, by torch's operations, without a copy to the host.

The definition is design/0002-digests.md; `codec.kernels` has the same for host memory. int64 here is uint64 there: sums
and products wrap alike, and shifts to the right are made logical.

An operation costs a GPU some microseconds however little it does. So small runs of bytes are laid side by side, and
summed many at a time; nothing is waited for before the end.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from weightsync.codec.kernels import BLOCK_WORDS, WORD_KEYS_A, WORD_KEYS_B

PIECE_BYTES = 16 << 20
"""What is summed at a time; six times as much memory of the device is used meanwhile."""

_BLOCK_BYTES = 8 * BLOCK_WORDS
_ALONE_BYTES = 1 << 20
"""From so many bytes on a run is read where it lies."""

_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LOW = (1 << 32) - 1
_Key: TypeAlias = "int | torch.Tensor"


class DeviceSum:
    """The sum of runs of bytes on one device, as they come. One thread at a time.

    Nothing that was added is held: it may be written, and its memory used again, by what is queued behind `add` on the
    same stream.

    Args:
        device: that of all runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes = torch.zeros(2, dtype=torch.int64, device=device)
        self._stage: torch.Tensor | None = None  # zero behind what is laid there
        self._laid: list[tuple[int, int, int, int]] = []  # first block, number of blocks, both keys
        self._filled = 0  # blocks of the stage

    def add(self, rows: torch.Tensor, place: int, pitch: int, key_1: int, key_2: int) -> None:
        """Adds rows that lie evenly apart in their whole tensor.

        Args:
            rows: uint8 [rows, bytes of a row], contiguous.
            place: which byte of the whole tensor the first row begins at.
            pitch: bytes from one row's begin to the next's, there.
            key_1, key_2: of the tensor.
        """
        number, width = rows.shape
        if not rows.numel():
            return
        if number == 1 or pitch == width:
            self._add_run(rows.reshape(-1), place, key_1, key_2)
        elif width >= _ALONE_BYTES:
            for index, row in enumerate(rows):
                self._add_run(row, place + index * pitch, key_1, key_2)
        else:
            each = max(1, (PIECE_BYTES - 2 * _BLOCK_BYTES - width) // pitch)  # the gaps are zeros: they add nothing
            for start in range(0, number, each):
                some = rows[start : start + each]
                room = self._room(place + start * pitch, (len(some) - 1) * pitch + width, key_1, key_2)
                room.as_strided(some.shape, (pitch, 1), room.storage_offset()).copy_(some)

    def total(self) -> tuple[int, int]:
        """Both lanes of all that was added, each mod 2^64. Waits for the device."""
        self._sum_laid()
        a, b = (int(lane) % (1 << 64) for lane in self._lanes.tolist())
        return a, b

    def _add_run(self, data: torch.Tensor, place: int, key_1: int, key_2: int) -> None:
        start = 0
        while start < len(data):
            stop = min(len(data), start + PIECE_BYTES - (place + start) % _BLOCK_BYTES)  # pieces end where blocks do
            first, inside = divmod(place + start, _BLOCK_BYTES)
            whole = 0 if inside or data[start:].data_ptr() % 8 else (stop - start) // _BLOCK_BYTES
            if whole * _BLOCK_BYTES >= _ALONE_BYTES:
                stop = start + whole * _BLOCK_BYTES
                blocks = torch.arange(first, first + whole, device=self._device)
                self._sum(data[start:stop], blocks, key_1, key_2)
            else:
                self._room(place + start, stop - start, key_1, key_2).copy_(data[start:stop])
            start = stop

    def _room(self, place: int, num_bytes: int, key_1: int, key_2: int) -> torch.Tensor:
        """Where to lay so many bytes, at most a piece; to be filled at once."""
        first, inside = divmod(place, _BLOCK_BYTES)
        number = -(-(inside + num_bytes) // _BLOCK_BYTES)
        if self._stage is None:
            self._stage = torch.zeros(PIECE_BYTES + _BLOCK_BYTES, dtype=torch.uint8, device=self._device)
        if (self._filled + number) * _BLOCK_BYTES > len(self._stage):
            self._sum_laid()
        begin = self._filled * _BLOCK_BYTES + inside
        self._laid.append((first, number, key_1, key_2))
        self._filled += number
        return self._stage[begin : begin + num_bytes]

    def _sum_laid(self) -> None:
        if self._stage is None or not self._laid:
            return
        laid, self._laid = self._laid, []
        num_blocks = np.array([number for _, number, _, _ in laid])
        ends = np.cumsum(num_blocks)
        table = np.empty((3, self._filled), np.uint64)
        firsts = np.array([first for first, _, _, _ in laid], np.int64) - (ends - num_blocks)
        table[0] = (np.arange(self._filled) + np.repeat(firsts, num_blocks)).view(np.uint64)
        for lane in (1, 2):
            table[lane] = np.repeat(np.array([each[1 + lane] for each in laid], np.uint64), num_blocks)
        blocks, keys_1, keys_2 = torch.from_numpy(table.view(np.int64)).to(self._device)
        used = self._stage[: self._filled * _BLOCK_BYTES]
        self._filled = 0
        self._sum(used, blocks, keys_1, keys_2)
        used.zero_()

    def _sum(self, data: torch.Tensor, blocks: torch.Tensor, key_1: _Key, key_2: _Key) -> None:
        """Adds whole blocks: uint8, aligned; the number of each within its tensor; keys of all or of each."""
        words = data.view(torch.int64).view(-1, BLOCK_WORDS)
        low, high = words & _LOW, (words >> 32) & _LOW
        for lane, (keys_low, keys_high), key in zip(self._lanes, _word_keys(self._device), (key_1, key_2), strict=True):
            lane += ((low * keys_low).addcmul_(high, keys_high).sum(1) * _block_keys(blocks, key)).sum()


@functools.cache
def _word_keys(device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """For both lanes: the keys of a word's low and high digit, by its place in the block."""
    both: list[npt.NDArray[np.uint64]] = [WORD_KEYS_A, WORD_KEYS_B]
    on_it = [torch.from_numpy(keys.view("int64").copy()).to(device) for keys in both]
    return tuple((keys & _LOW, (keys >> 32) & _LOW) for keys in on_it)


def _block_keys(blocks: torch.Tensor, seed: _Key) -> torch.Tensor:
    x = blocks * _signed(_STEP) + (_signed(seed) if isinstance(seed, int) else seed)
    x = (x ^ _shifted(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX_2)
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
