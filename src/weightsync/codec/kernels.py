"""The compiled loops of the shard-independent digest. Importing this module imports numba and compiles.

`codec.digest` imports it at first use. Everything here is serial, releases the GIL and shares nothing, so
`codec.threads` runs several at once. The definition that these loops implement is design/0002-digests.md;
the slow reference in tests/unit/codec is the same in plain Python.

All arithmetic is on uint64 and wraps. (numba turns uint64 with int64 into float64: every literal is cast.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from numba import int64, types, uint64
from numba.extending import intrinsic

from weightsync.compiled import compiled, inlined, read_only

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MIX_3 = np.uint64(0xD6E8FEB86659FD93)
_LOW = np.uint64(0xFFFFFFFF)


_LANES = types.UniTuple(uint64, 2)


def _load_word(typing: Any, data: Any, at: Any) -> Any:
    """Intrinsic: the 8 bytes of `data` at byte `at` as one little-endian uint64; any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.bitcast(builder.gep(array.data, [arguments[1]]), context.get_value_type(uint64).as_pointer())
        word = builder.load(address)
        word.align = 1
        return word

    return uint64(data, at), generate


load_word = cast(Callable[[npt.NDArray[np.uint8], int], Any], intrinsic(_load_word))


@inlined
def _keys(word: Any, seed_1: Any, seed_2: Any) -> Any:
    """The keys (A lo, A hi, B lo, B hi) of word number `word`: 3 multiplies."""
    x = seed_1 + word * _STEP
    x = (x ^ (x >> uint64(30))) * _MIX_1
    x = (x ^ (x >> uint64(27))) * _MIX_2
    p = x ^ (x >> uint64(31))
    y = p + seed_2
    y = (y ^ (y >> uint64(29))) * _MIX_3
    q = y ^ (y >> uint64(32))
    return p, q, ((p << uint64(32)) | (p >> uint64(32))) + q, ((q << uint64(32)) | (q >> uint64(32))) ^ p


@compiled(_LANES(read_only(types.uint8), int64, read_only(int64), uint64, uint64))
def runs_sum(data: Any, run_bytes: Any, offsets: Any, seed_1: Any, seed_2: Any) -> Any:
    """Both lanes of the bytes `data`, which are runs of `run_bytes` that start at global bytes `offsets`.

    A run may start and end anywhere in a word: the parts of a word add up to the word.
    """
    a = uint64(0)
    b = uint64(0)
    for run in range(len(offsets)):
        at = int64(run) * run_bytes
        end = at + run_bytes
        place = offsets[run]
        while at < end:
            first = uint64(place >> 3)
            inside = place & 7
            num_words = (end - at) >> 3
            if inside == 0 and num_words > 0:
                for step in range(num_words):
                    bits = load_word(data, at + 8 * step)
                    lo = bits & _LOW
                    hi = bits >> uint64(32)
                    a_lo, a_hi, b_lo, b_hi = _keys(first + uint64(step), seed_1, seed_2)
                    a += a_lo * lo + a_hi * hi
                    b += b_lo * lo + b_hi * hi
                at += 8 * num_words
                place += 8 * num_words
            else:  # the head or the tail of the run: some bytes of one word
                num_bytes = min(8 - inside, end - at)
                bits = uint64(0)
                for step in range(num_bytes):
                    bits |= uint64(data[at + step]) << uint64(8 * (inside + step))
                lo = bits & _LOW
                hi = bits >> uint64(32)
                a_lo, a_hi, b_lo, b_hi = _keys(first, seed_1, seed_2)
                a += a_lo * lo + a_hi * hi
                b += b_lo * lo + b_hi * hi
                at += num_bytes
                place += num_bytes
    return a, b


def _patch_signature(item: Any) -> Any:
    return _LANES(read_only(int64), read_only(item), read_only(item), int64, uint64, uint64)


@compiled(*(_patch_signature(item) for item in (types.uint8, types.uint16, types.uint32)))
def patch_sum_narrow(positions: Any, old: Any, new: Any, shift: Any, seed_1: Any, seed_2: Any) -> Any:
    """Both lanes of a change of elements of 1, 2 or 4 bytes, of which a word has `1 << shift`."""
    a = uint64(0)
    b = uint64(0)
    last = (int64(1) << shift) - 1
    bits_each = uint64(64 >> shift)
    for index in range(len(positions)):
        position = positions[index]
        bit = uint64(position & last) * bits_each
        change = (uint64(new[index]) - uint64(old[index])) << (bit & uint64(31))
        lo = change if bit < uint64(32) else uint64(0)
        hi = uint64(0) if bit < uint64(32) else change
        a_lo, a_hi, b_lo, b_hi = _keys(uint64(position >> shift), seed_1, seed_2)
        a += a_lo * lo + a_hi * hi
        b += b_lo * lo + b_hi * hi
    return a, b


@compiled(_LANES(read_only(int64), read_only(uint64), read_only(uint64), int64, uint64, uint64))
def patch_sum_wide(positions: Any, old: Any, new: Any, words_each: Any, seed_1: Any, seed_2: Any) -> Any:
    """Both lanes of a change of elements of `words_each` words: `old` and `new` have that many for each position."""
    a = uint64(0)
    b = uint64(0)
    for index in range(len(positions)):
        for part in range(words_each):
            was = old[index * words_each + part]
            now = new[index * words_each + part]
            lo = (now & _LOW) - (was & _LOW)
            hi = (now >> uint64(32)) - (was >> uint64(32))
            a_lo, a_hi, b_lo, b_hi = _keys(uint64(positions[index] * words_each + part), seed_1, seed_2)
            a += a_lo * lo + a_hi * hi
            b += b_lo * lo + b_hi * hi
    return a, b
