"""The compiled loops of the shard-independent digest. Importing this module imports numba and compiles.

`codec.digest` imports it at first use. Everything here is serial, releases the GIL and shares nothing, so
`weightsync.threads` runs several at once. The definition that these loops implement is design/0002-digests.md;
the slow reference in tests/unit/codec is the same in plain Python.

All arithmetic is on uint64 and wraps. (numba turns uint64 with int64 into float64: every literal is cast.) The long
loop is made of products of two 32-bit numbers alone: `vpmuludq`, which AVX2 has as well as AVX-512.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from numba import int64, types, uint64
from numba.extending import intrinsic

from weightsync.compiled import compiled, inlined, prefetch, read_only

BLOCK_WORDS = 256
"""Words of 8 bytes that share a block's keys."""

_BLOCK_BYTES = 8 * BLOCK_WORDS
_LINE_BYTES = 64
_STEP = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_LOW = np.uint64(0xFFFFFFFF)
_LANES = types.UniTuple(uint64, 2)


def _word_keys(first: int) -> npt.NDArray[np.uint64]:
    """Outputs `first` to `first + BLOCK_WORDS - 1` of splitmix64 started at 0, both 32-bit halves made odd."""
    x = np.arange(first + 1, first + 1 + BLOCK_WORDS, dtype=np.uint64) * np.uint64(_STEP)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1 << 32 | 1)


WORD_KEYS_A = _word_keys(0)
WORD_KEYS_B = _word_keys(BLOCK_WORDS)
"""Of each word of a block: the key of its low digit in the low half, that of its high digit in the high half."""


def _load_word(typing: Any, address: Any, index: Any) -> Any:
    """Intrinsic: word `index` of those from a memory address on, as one little-endian uint64; any alignment.

    An address and an index, not their sum: the compiler sees then that the words of a loop lie side by side, and loads
    several at once. Of a sum it sees addresses anywhere, and gathers them word by word.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = builder.inttoptr(arguments[0], context.get_value_type(uint64).as_pointer())
        word = builder.load(builder.gep(words, [arguments[1]]))
        word.align = 1
        return word

    return uint64(int64, int64), generate


def _load_byte(typing: Any, address: Any) -> Any:
    """Intrinsic: the byte at a memory address, as uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = builder.load(builder.inttoptr(arguments[0], context.get_value_type(types.uint8).as_pointer()))
        return builder.zext(byte, context.get_value_type(uint64))

    return uint64(int64), generate


load_word = cast(Callable[[int, int], Any], intrinsic(_load_word))
load_byte = cast(Callable[[int], Any], intrinsic(_load_byte))


@inlined
def _block_key(block: Any, seed: Any) -> Any:
    """A lane's key of block number `block`: splitmix64, made odd."""
    x = seed + uint64(block) * uint64(_STEP)
    x = (x ^ (x >> uint64(30))) * uint64(_MIX_1)
    x = (x ^ (x >> uint64(27))) * uint64(_MIX_2)
    return (x ^ (x >> uint64(31))) | uint64(1)


@inlined
def _part_of_word(address: Any, num_bytes: Any, inside: Any) -> Any:
    """Some bytes of one word as a word: they start `inside` bytes into it."""
    bits = uint64(0)
    for step in range(num_bytes):
        bits |= load_byte(address + step) << uint64(8 * (inside + step))
    return bits


@inlined
def _times(bits: Any, keys: Any) -> Any:
    """What a word adds to the sum of its block: two products of 32-bit numbers."""
    return (bits & _LOW) * (keys & _LOW) + (bits >> uint64(32)) * (keys >> uint64(32))


@compiled(_LANES(int64, int64, int64, uint64, uint64))
def run_sum(address: Any, num_bytes: Any, place: Any, key_1: Any, key_2: Any) -> Any:
    """Both lanes of ONE run: `num_bytes` bytes of memory at `address`, which lie at byte `place` of their tensor.

    For other compiled loops. A run may start and end anywhere in a word: the parts of a word add up to the word.
    Nothing is checked; the memory must stay there until this returns.
    """
    a = uint64(0)
    b = uint64(0)
    end = address + num_bytes
    while address < end:
        stop = min(end, address + (_BLOCK_BYTES - (place & (_BLOCK_BYTES - 1))))
        block = place >> 11
        word = (place >> 3) & (BLOCK_WORDS - 1)
        inside = place & 7
        place += stop - address
        sum_a = uint64(0)
        sum_b = uint64(0)
        if inside != 0:  # the head: some bytes of a word
            head_bytes = min(8 - inside, stop - address)
            bits = _part_of_word(address, head_bytes, inside)
            sum_a += _times(bits, WORD_KEYS_A[word])
            sum_b += _times(bits, WORD_KEYS_B[word])
            address += head_bytes
            word += 1
        num_words = (stop - address) >> 3
        for line in range(stop + _BLOCK_BYTES, min(end, stop + 2 * _BLOCK_BYTES), _LINE_BYTES):
            prefetch(line)  # the block after the next: without this the loop waits for memory half of its time
        first = uint64(word)  # an index without a sign can't mean "from the end": key by key the compiler would look
        for step in range(num_words):
            bits = load_word(address, step)
            sum_a += _times(bits, WORD_KEYS_A[first + uint64(step)])
            sum_b += _times(bits, WORD_KEYS_B[first + uint64(step)])
        address += 8 * num_words
        if address < stop:  # the tail
            bits = _part_of_word(address, stop - address, 0)
            sum_a += _times(bits, WORD_KEYS_A[word + num_words])
            sum_b += _times(bits, WORD_KEYS_B[word + num_words])
            address = stop
        a += sum_a * _block_key(block, key_1)
        b += sum_b * _block_key(block, key_2)
    return a, b


@compiled(_LANES(read_only(types.uint8), int64, read_only(int64), uint64, uint64))
def runs_sum(data: Any, run_bytes: Any, offsets: Any, key_1: Any, key_2: Any) -> Any:
    """Both lanes of the bytes `data`, which are runs of `run_bytes` that start at global bytes `offsets`."""
    a = uint64(0)
    b = uint64(0)
    address = int64(data.ctypes.data)
    for run in range(len(offsets)):
        run_a, run_b = run_sum(address + int64(run) * run_bytes, run_bytes, offsets[run], key_1, key_2)
        a += run_a
        b += run_b
    return a, b


def _patch_signatures(*items: Any) -> list[Any]:
    """Positions are taken as they come: a copy as int64 would be twice the bytes of uint32 ones."""
    return [
        _LANES(read_only(where), read_only(item), read_only(item), int64, uint64, uint64)
        for where in (int64, types.uint32)
        for item in items
    ]


@compiled(*_patch_signatures(types.uint8, types.uint16, types.uint32))
def patch_sum_narrow(positions: Any, old: Any, new: Any, shift: Any, key_1: Any, key_2: Any) -> Any:
    """Both lanes of a change of elements of 1, 2 or 4 bytes, of which a word has `1 << shift`.

    Positions may come in any order; those of one block that follow each other share the making of its keys.
    """
    a = uint64(0)
    b = uint64(0)
    sum_a = uint64(0)
    sum_b = uint64(0)
    last = (int64(1) << shift) - 1
    bits_each = uint64(64 >> shift)
    now = int64(0)
    for index in range(len(positions)):
        position = int64(positions[index])
        word = position >> shift
        block = word >> 8
        if block != now:
            a += sum_a * _block_key(now, key_1)
            b += sum_b * _block_key(now, key_2)
            sum_a = uint64(0)
            sum_b = uint64(0)
            now = block
        bit = uint64(position & last) * bits_each
        change = (uint64(new[index]) - uint64(old[index])) << (bit & uint64(31))
        half = bit & uint64(32)
        sum_a += change * ((WORD_KEYS_A[word & (BLOCK_WORDS - 1)] >> half) & _LOW)
        sum_b += change * ((WORD_KEYS_B[word & (BLOCK_WORDS - 1)] >> half) & _LOW)
    return a + sum_a * _block_key(now, key_1), b + sum_b * _block_key(now, key_2)


@compiled(*_patch_signatures(uint64))
def patch_sum_wide(positions: Any, old: Any, new: Any, words_each: Any, key_1: Any, key_2: Any) -> Any:
    """Both lanes of a change of elements of `words_each` words: `old` and `new` have that many for each position."""
    a = uint64(0)
    b = uint64(0)
    for index in range(len(positions)):
        for part in range(words_each):
            was = old[index * words_each + part]
            now = new[index * words_each + part]
            word = int64(positions[index]) * words_each + part
            block = word >> 8
            at = word & (BLOCK_WORDS - 1)
            a += (_times(now, WORD_KEYS_A[at]) - _times(was, WORD_KEYS_A[at])) * _block_key(block, key_1)
            b += (_times(now, WORD_KEYS_B[at]) - _times(was, WORD_KEYS_B[at])) * _block_key(block, key_2)
    return a, b


@compiled(_LANES(read_only(int64), read_only(int64), read_only(int64), read_only(uint64), read_only(uint64)))
def runs_of_many(addresses: Any, sizes: Any, places: Any, keys_1: Any, keys_2: Any) -> Any:
    """Both lanes of many runs, each of a tensor with keys of its own: `sizes[i]` bytes at `addresses[i]`, which lie at
    byte `places[i]` of their tensor.
    """
    a = uint64(0)
    b = uint64(0)
    for index in range(len(addresses)):
        one_a, one_b = run_sum(addresses[index], sizes[index], places[index], keys_1[index], keys_2[index])
        a += one_a
        b += one_b
    return a, b
