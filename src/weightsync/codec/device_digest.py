"""The shard-independent digest's sum where the bytes are: on a GPU, by torch's operations, without a copy to the host.

The definition is design/0002-digests.md; `codec.kernels` has the same for host memory. int64 here is uint64 there: sums
and products wrap alike, and shifts to the right are made logical.

The sums of blocks are one product of matrices of bytes, which a GPU has tensor cores for: a row is a block, a column is
a digit of the keys. A device that can't does it word by word.

An operation costs some ten microseconds, however little it does. So small runs of bytes are laid side by side and
summed together, and blocks are weighed by their keys many at a time.
"""

from __future__ import annotations

import functools
import logging
from typing import TypeAlias

import numpy as np
import torch

from weightsync.codec.kernels import BLOCK_WORDS, WORD_KEYS_A, WORD_KEYS_B

PIECE_BYTES = 64 << 20
"""What is summed at a time; twice as much memory of the device is used meanwhile."""

_BLOCK_BYTES = 8 * BLOCK_WORDS
_ALONE_BYTES = 24 << 20
"""From so many bytes on a run is read where it lies."""
_ROWS = 32
"""The product of bytes is asked for multiples of so many blocks: it wants 17, and odd numbers were wrong once (pytorch
issue 107671)."""
_FIRST_BYTES = 2 << 20
_GROWS = 8
"""The stage, for who has more to lay there: it is zeroed, and the device may have little left."""
_MAX_BLOCKS = 1 << 18
"""Whose keys are computed at a time."""

_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LOW = (1 << 32) - 1
_DIGITS = 8
"""Of a key's product with a byte, each 8 bits, from -128 to 127."""
_logger = logging.getLogger(__name__)
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
        self._stage = self._zeros(0, dtype=torch.uint8)  # zero behind what is laid there
        self._room_bytes = 0  # of the stage
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
            self.add_run(rows.reshape(-1), place, key_1, key_2)
        elif width >= _ALONE_BYTES:
            for index, row in enumerate(rows):
                self.add_run(row, place + index * pitch, key_1, key_2)
        else:
            each = max(1, (PIECE_BYTES - 2 * _BLOCK_BYTES - width) // pitch)  # the gaps are zeros: they add nothing
            for start in range(0, number, each):
                some = rows[start : start + each]
                room = self._room(place + start * pitch, (len(some) - 1) * pitch + width, key_1, key_2)
                room.as_strided(some.shape, (pitch, 1), room.storage_offset()).copy_(some)

    def add_run(self, data: torch.Tensor, place: int, key_1: int, key_2: int) -> None:
        """As `add`, of one run: uint8 [bytes], contiguous."""
        start, end = 0, data.numel()
        while start < end:
            stop = min(end, start + PIECE_BYTES - (place + start) % _BLOCK_BYTES)  # pieces end where blocks do
            first, inside = divmod(place + start, _BLOCK_BYTES)
            here = data[start:stop] if stop - start < end else data
            aligned = not (inside or here.data_ptr() % 8 or here.storage_offset() % 8)  # torch asks for the latter
            whole = (stop - start) // _BLOCK_BYTES // _ROWS * _ROWS if aligned else 0
            if whole * _BLOCK_BYTES >= _ALONE_BYTES:
                stop = start + whole * _BLOCK_BYTES
                self._sum(data[start:stop], [(first, whole, key_1, key_2)])
            else:
                self._room(place + start, stop - start, key_1, key_2).copy_(here)
            start = stop

    def total(self) -> tuple[int, int]:
        """Both lanes of all that was added, each mod 2^64. Waits for the device."""
        self._sum_laid()
        self._weigh()
        a, b = (int(lane) % (1 << 64) for lane in self._lanes.tolist())
        return a, b

    def _zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False):  # or it could be written in that mode alone
            return torch.zeros(shape, dtype=dtype, device=self._device)

    def _room(self, place: int, num_bytes: int, key_1: int, key_2: int) -> torch.Tensor:
        """Where to lay so many bytes, at most a piece; to be filled at once."""
        first, inside = divmod(place, _BLOCK_BYTES)
        number = -(-(inside + num_bytes) // _BLOCK_BYTES)
        if (self._num_laid + number) * _BLOCK_BYTES > self._room_bytes:
            self._sum_laid()
            self._grow(number * _BLOCK_BYTES)
        begin = self._num_laid * _BLOCK_BYTES + inside
        self._laid.append((first, number, key_1, key_2))
        self._num_laid += number
        return self._stage[begin : begin + num_bytes]

    def _grow(self, needed_bytes: int) -> None:
        most_bytes = PIECE_BYTES + _BLOCK_BYTES  # a piece that begins and ends inside blocks
        if self._room_bytes < most_bytes:
            self._room_bytes = min(most_bytes, max(_GROWS * self._room_bytes, _FIRST_BYTES, needed_bytes))
            self._stage = self._zeros(self._room_bytes + _ROWS * _BLOCK_BYTES, dtype=torch.uint8)

    def _sum_laid(self) -> None:
        if self._laid:
            used = self._stage[: -(-self._num_laid // _ROWS) * _ROWS * _BLOCK_BYTES]
            self._sum(used, self._laid)
            used.zero_()
            self._laid, self._num_laid = [], 0

    def _sum(self, data: torch.Tensor, blocks: list[_Blocks]) -> None:
        """Sums each of whole, aligned blocks: uint8, a multiple of `_ROWS` of them; what is behind `blocks` is zero."""
        number = sum(each[1] for each in blocks)
        if self._block_sums is None:
            with torch.inference_mode(False):
                self._block_sums = torch.empty(_MAX_BLOCKS, 2, dtype=torch.int64, device=self._device)
        if self._num_summed + number > _MAX_BLOCKS:
            self._weigh()
        words = data.view(torch.int64).view(-1, BLOCK_WORDS)
        sums = _sums_by_bytes(words) if _multiplies_bytes(self._device) else _sums_by_words(words)
        self._block_sums[self._num_summed : self._num_summed + number] = sums[:number]
        self._summed += blocks
        self._num_summed += number

    def _weigh(self) -> None:
        """Adds the blocks that were summed, each times its keys."""
        if self._block_sums is None or not self._summed:
            return
        summed = np.array(self._summed, np.uint64).view(np.int64).T  # the rest is computed there: keys are many
        firsts, numbers, *keys = torch.from_numpy(np.ascontiguousarray(summed)).to(self._device)
        counts = torch.arange(self._num_summed, device=self._device)
        which = torch.repeat_interleave(numbers, output_size=self._num_summed)
        places = counts + (firsts - numbers.cumsum(0) + numbers)[which]
        seeds = torch.stack(keys)[:, which]
        self._lanes += (self._block_sums[: self._num_summed].t() * _block_keys(places, seeds)).sum(1)
        self._summed, self._num_summed = [], 0


@functools.cache
def _multiplies_bytes(device: torch.device) -> bool:
    """Whether a device multiplies matrices of bytes, and gives the sums that it gives word by word. Tried once.

    Raises:
        torch.OutOfMemoryError: it is tried again the next time.
    """
    if device.type == "cpu":
        return True
    try:
        for number in (_ROWS, 3 * _ROWS, 1024 * _ROWS):
            words = torch.arange(number * BLOCK_WORDS, device=device).view(-1, BLOCK_WORDS) * _signed(_STEP)
            if not torch.equal(_sums_by_bytes(words), _sums_by_words(words)):
                _logger.warning("%s multiplies bytes wrongly: digests are summed word by word, 4 times slower", device)
                return False
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError):  # an old device; a release of torch without it
        return False
    return True


def _sums_by_bytes(words: torch.Tensor) -> torch.Tensor:
    """Both lanes' sums of blocks, without their keys: int64 [blocks, 2]."""
    digits, weights, offset = _byte_keys(words.device)
    low = (words ^ _signed(0x8080808080808080)).view(torch.int8)  # each byte less 128: signed, as the product wants
    # `_int_mm` is exact on a GPU; on some CPUs it saturates.
    products = torch._int_mm(low, digits) if words.is_cuda else low.double() @ digits.double()
    return (products.view(-1, 2, _DIGITS).to(torch.int64) * weights).sum(2).add_(offset)


@functools.cache
def _byte_keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a block's bytes are multiplied by, as digits of lane A, then of lane B: int8 [bytes, 16]; what each digit
    counts; and what is added, for the 128 that every byte was made less: int64 [2]."""
    columns, offsets = [], []
    for keys in (WORD_KEYS_A, WORD_KEYS_B):
        places = np.arange(8, dtype=np.uint64)
        halves = np.stack([keys & np.uint64(_LOW), keys >> np.uint64(32)], 1).repeat(4, 1)
        rest = (halves << (places % np.uint64(4) * np.uint64(8))).reshape(-1)  # of each byte, mod 2^64
        offsets.append(_signed(int(rest.sum()) * 128 % (1 << 64)))
        for _ in range(_DIGITS):
            digit = (rest & np.uint64(255)).astype(np.uint8).view(np.int8)
            columns.append(digit)
            rest = (rest - digit.astype(np.int64).view(np.uint64)) >> np.uint64(8)
    digits = torch.from_numpy(np.stack(columns)).to(device).t()  # column by column, as the product wants
    weights = torch.tensor([1 << 8 * place for place in range(_DIGITS)], device=device)
    return digits, weights, torch.tensor(offsets, device=device)


def _sums_by_words(words: torch.Tensor) -> torch.Tensor:
    """As `_sums_by_bytes`; of temporary memory it takes five times a part's."""
    sums = []
    for part in torch.split(words, PIECE_BYTES // 4 // _BLOCK_BYTES or 1):
        low, high = part & _LOW, (part >> 32) & _LOW
        lanes = [(low * first).addcmul_(high, second).sum(1) for first, second in _word_keys(words.device)]
        sums.append(torch.stack(lanes, 1))
    return torch.cat(sums)


@functools.cache
def _word_keys(device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """For both lanes: the keys of a word's low and high digit, by its place in the block."""
    on_it = [torch.from_numpy(keys.view(np.int64)).to(device) for keys in (WORD_KEYS_A, WORD_KEYS_B)]
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
