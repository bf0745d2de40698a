"""The shard-independent digest's sum where the bytes are: on a GPU, by torch's operations, without a copy to the host.

The definition is design/0002-digests.md; `codec.kernels` has the same for host memory. int64 here is uint64 there: sums
and products wrap alike, and shifts to the right are made logical.

An operation costs some ten microseconds, however little it does. So small runs of bytes are laid side by side and
summed together, and blocks are weighed by their keys many at a time: the device is waited for once in 512 MiB, and
at the end.
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
_ALONE_BYTES = 8 << 20
"""From so many bytes on a run is read where it lies."""
_MAX_BLOCKS = 1 << 18
"""Whose keys are computed at a time."""

_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LOW = (1 << 32) - 1
_Blocks: TypeAlias = tuple[int, int, int, int]
"""Consecutive blocks of a tensor: the first, how many, and the tensor's keys."""


class DeviceSum:
    """The sum of runs of bytes on one device, as they come. One thread at a time.

    Nothing that was added is held: it may be written, and its memory used again, by what is queued behind `add` on the
    same stream.

    Args:
        device: that of all runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lanes = self._zeros(2, dtype=torch.int64)
        self._stage: torch.Tensor | None = None  # zero behind what is laid there
        self._laid: list[_Blocks] = []
        self._num_laid = 0  # blocks of the stage
        self._block_sums: torch.Tensor | None = None  # both lanes of each block, without its keys
        self._summed: list[_Blocks] = []
        self._num_summed = 0

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
        self._weigh()
        a, b = (int(lane) % (1 << 64) for lane in self._lanes.tolist())
        return a, b

    def _zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):  # or it could be written in that mode alone
            return torch.zeros(shape, dtype=dtype, device=self._device)

    def _add_run(self, data: torch.Tensor, place: int, key_1: int, key_2: int) -> None:
        start = 0
        while start < len(data):
            stop = min(len(data), start + PIECE_BYTES - (place + start) % _BLOCK_BYTES)  # pieces end where blocks do
            first, inside = divmod(place + start, _BLOCK_BYTES)
            here = data[start:stop]
            aligned = not (inside or here.data_ptr() % 8 or here.storage_offset() % 8)  # torch asks for the latter
            whole = len(here) // _BLOCK_BYTES if aligned else 0
            if whole * _BLOCK_BYTES >= _ALONE_BYTES:
                stop = start + whole * _BLOCK_BYTES
                self._sum(data[start:stop], [(first, whole, key_1, key_2)])
            else:
                self._room(place + start, len(here), key_1, key_2).copy_(here)
            start = stop

    def _room(self, place: int, num_bytes: int, key_1: int, key_2: int) -> torch.Tensor:
        """Where to lay so many bytes, at most a piece; to be filled at once."""
        first, inside = divmod(place, _BLOCK_BYTES)
        number = -(-(inside + num_bytes) // _BLOCK_BYTES)
        if self._stage is None:
            self._stage = self._zeros(PIECE_BYTES + _BLOCK_BYTES, dtype=torch.uint8)
        if (self._num_laid + number) * _BLOCK_BYTES > len(self._stage):
            self._sum_laid()
        begin = self._num_laid * _BLOCK_BYTES + inside
        self._laid.append((first, number, key_1, key_2))
        self._num_laid += number
        return self._stage[begin : begin + num_bytes]

    def _sum_laid(self) -> None:
        if self._stage is not None and self._laid:
            used = self._stage[: self._num_laid * _BLOCK_BYTES]
            self._sum(used, self._laid)
            used.zero_()
            self._laid, self._num_laid = [], 0

    def _sum(self, data: torch.Tensor, blocks: list[_Blocks]) -> None:
        """Sums each of whole, aligned blocks: uint8, at most a piece and a block more."""
        words = data.view(torch.int64).view(-1, BLOCK_WORDS)
        if self._block_sums is None:
            self._block_sums = self._zeros(2, _MAX_BLOCKS, dtype=torch.int64)
        if self._num_summed + len(words) > _MAX_BLOCKS:
            self._weigh()
        now = slice(self._num_summed, self._num_summed + len(words))
        low, high = words & _LOW, (words >> 32) & _LOW
        for sums, (keys_low, keys_high) in zip(self._block_sums, _word_keys(self._device), strict=True):
            torch.sum((low * keys_low).addcmul_(high, keys_high), 1, out=sums[now])
        self._summed += blocks
        self._num_summed = now.stop

    def _weigh(self) -> None:
        """Adds the blocks that were summed, each times its keys."""
        if self._block_sums is None or not self._summed:
            return
        told = np.array(self._summed, np.uint64).view(np.int64).T  # the rest is computed there: keys are many
        firsts, numbers, *keys = torch.from_numpy(np.ascontiguousarray(told)).to(self._device)
        counts = torch.arange(self._num_summed, device=self._device)
        which = torch.repeat_interleave(numbers, output_size=self._num_summed)
        places = counts + (firsts - numbers.cumsum(0) + numbers)[which]
        seeds = torch.stack(keys)[:, which]
        self._lanes += (self._block_sums[:, : self._num_summed] * _block_keys(places, seeds)).sum(1)
        self._summed, self._num_summed = [], 0


@functools.cache
def _word_keys(device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """For both lanes: the keys of a word's low and high digit, by its place in the block."""
    both: list[npt.NDArray[np.uint64]] = [WORD_KEYS_A, WORD_KEYS_B]
    on_it = [torch.from_numpy(keys.view("int64").copy()).to(device) for keys in both]
    return tuple((keys & _LOW, (keys >> 32) & _LOW) for keys in on_it)


def _block_keys(places: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    x = places * _signed(_STEP) + seeds
    x = (x ^ _shifted(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX_2)
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
