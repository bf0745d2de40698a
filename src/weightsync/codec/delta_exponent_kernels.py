"""The compiled loops of the delta codec's small mode; see `codec.delta_kernels` for what holds for all of them.

Elements belong to classes, by the top bits of the old element's magnitude; neighbouring classes share a model. Of
each model gaps and steps are symbols with static frequencies, in one rANS stream (12-bit frequencies, 32-bit state,
16-bit words); what is below a symbol's precision follows as plain bits. Over 400 lines: writers and readers of one
format.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import int64, types, uint8, uint16, uint32, uint64

from weightsync.codec.delta_intrinsics import (
    WORDS,
    highest_bit,
    load,
    store,
)
from weightsync.codec.delta_kernels import BAD, ones, peek
from weightsync.compiled import compiled, inlined, read_only, writable

MAX_MODELS = 64
SCALE = 4096
"""Frequencies of a table add up to this."""

_TABLE_BITS = 350.0
_NO_CHANGE_BITS = 24.0
_NEVER = int64(1) << int64(62)
_0 = uint64(0)
_1 = uint64(1)
_LOWEST = uint64(1 << 16)
_BYTES = read_only(uint8)


@inlined
def _symbol(value: Any) -> Any:
    """(symbol, plain bits that follow) of a value: exact below 8, then four symbols for each power of two."""
    if value < uint64(8):
        return int64(value), int64(0)
    high = highest_bit(value)
    return int64(8) + (high - 3) * 4 + int64((value >> uint64(high - 2)) & uint64(3)), high - 2


@compiled(*(types.void(_BYTES, read_only(uint32), uint64, uint64, read_only(word), writable(uint8)) for word in WORDS))
def classes_at(old: Any, positions: Any, shift: Any, mask: Any, like: Any, classes: Any) -> None:
    """The class of the old element at each position; positions are known to lie in `old`."""
    width = int64(like.itemsize)
    for index in range(len(positions)):
        classes[index] = uint8((load(old, int64(positions[index]) * width, like) >> shift) & mask)


@compiled(*(types.void(_BYTES, int64, uint64, uint64, read_only(word), writable(int64)) for word in WORDS))
def count_classes(old: Any, stride: Any, shift: Any, mask: Any, like: Any, counts: Any) -> None:
    """Adds `stride` to the count of the class of every `stride`th element."""
    width = int64(like.itemsize)
    for index in range(0, int64(len(old)) // width, stride):
        counts[int64((load(old, index * width, like) >> shift) & mask)] += stride


@inlined
def _group_bits(changed: Any, total: Any) -> Any:
    if changed == 0:
        return _NO_CHANGE_BITS
    bits = _TABLE_BITS
    if changed < total:
        bits += changed * math.log2(total / changed) + (total - changed) * math.log2(total / (total - changed))
    return bits


@compiled(int64(read_only(int64), read_only(int64), writable(uint8)))
def group_classes(changed: Any, totals: Any, model_of_class: Any) -> Any:
    """Cuts the 256 classes into runs that share a model, so that bits and tables together are fewest.

    Returns:
        The number of models, at most `MAX_MODELS`.
    """
    used = np.zeros(256, np.int64)
    number = 0
    for which in range(256):
        if changed[which] > 0 or totals[which] > 0:
            used[number] = which
            number += 1
    best = np.zeros(257)
    start = np.zeros(257, np.int64)
    fine = 0.0
    while True:
        for end in range(1, number + 1):
            best[end] = 1e300
            num_changed = int64(0)
            total = int64(0)
            for first in range(end - 1, -1, -1):
                num_changed += changed[used[first]]
                total += max(totals[used[first]], changed[used[first]])
                cost = best[first] + fine + _group_bits(num_changed, total)
                if cost < best[end]:
                    best[end] = cost
                    start[end] = first
        models = 0
        end = number
        while end > 0:
            models += 1
            end = start[end]
        if models <= MAX_MODELS:
            break
        fine = 2.0 * fine + _TABLE_BITS  # too many: a model costs more
    model_of_class[:] = uint8(0)
    model = models - 1
    end = number
    while end > 0:
        first = start[end]
        low = used[first] if first > 0 else 0
        high = used[end] if end < number else 256
        for which in range(low, high):
            model_of_class[which] = uint8(model)
        model -= 1
        end = first
    return int64(max(models, 1))


@compiled(
    *(
        types.void(_BYTES, read_only(uint32), uint64, uint64, read_only(word), _BYTES, writable(uint32))
        for word in WORDS
    )
)
def model_gaps(old: Any, positions: Any, shift: Any, mask: Any, like: Any, model_of_class: Any, gaps: Any) -> None:
    """For each change how many elements of its model lie between it and that model's change before it."""
    width = int64(like.itemsize)
    seen = np.zeros(256, np.int64)
    at = int64(0)
    for index in range(len(positions)):
        end = int64(positions[index]) * width
        while at < end:
            seen[model_of_class[int64((load(old, at, like) >> shift) & mask)]] += 1
            at += width
        model = int64(model_of_class[int64((load(old, at, like) >> shift) & mask)])
        gaps[index] = seen[model]
        seen[model] = 0
        at += width


@inlined
def _put_bits(out: Any, at: Any, held: Any, num_held: Any, value: Any, number: Any) -> Any:
    """Appends `number` (up to 32) bits of `value`."""
    held |= value << num_held
    num_held += uint64(number)
    if num_held >= uint64(32):
        store(out, at, uint32(held))
        held >>= uint64(32)
        num_held -= uint64(32)
        at += 4
    return at, held, num_held


@inlined
def _put_value(out: Any, at: Any, held: Any, num_held: Any, value: Any, number: Any) -> Any:
    """Appends the low `number` (up to 61) bits of `value`."""
    value &= (_1 << uint64(number)) - _1
    if number > 32:
        at, held, num_held = _put_bits(out, at, held, num_held, value & uint64(0xFFFFFFFF), 32)
        value >>= uint64(32)
        number -= 32
    return _put_bits(out, at, held, num_held, value, number)


@compiled(
    *(
        types.UniTuple(int64, 2)(
            _BYTES, read_only(uint32), read_only(word), int64, writable(uint16), writable(int64), writable(uint8)
        )
        for word in WORDS
    )
)
def to_symbols(models: Any, gaps: Any, steps: Any, num_models: Any, codes: Any, counts: Any, plain: Any) -> Any:
    """Turns changes into symbols, in the order in which a reader needs them.

    First the gap of each model's first change, by model; then for each change its step, and the gap of its model's
    next change where there is one.

    Args:
        models: each change's model; `gaps`: as `model_gaps` gives them; `steps`: not 0.
        num_models: how many models there are.
        codes: room for twice as many: table * 256 + symbol, where a model has tables 2 m (gaps) and 2 m + 1 (steps).
        counts: zeros, 512 for each model: how often each code occurs.
        plain: room for the plain bits.

    Returns:
        (number of codes, bytes of plain bits)
    """
    number = len(models)
    following = np.empty(number, np.int64)
    first = np.full(num_models, -1, np.int64)
    for index in range(number - 1, -1, -1):
        following[index] = first[models[index]]
        first[models[index]] = index
    count = int64(0)
    at = int64(0)
    held = _0
    num_held = _0
    for model in range(num_models):
        if first[model] >= 0:
            value = uint64(gaps[first[model]])
            symbol, extra = _symbol(value)
            at, held, num_held = _put_value(plain, at, held, num_held, value, extra)
            code = int64(model) * 512 + symbol
            codes[count] = code
            counts[code] += 1
            count += 1
    for index in range(number):
        base = int64(models[index]) * 512
        value = uint64(steps[index]) - _1
        symbol, extra = _symbol(value)
        at, held, num_held = _put_value(plain, at, held, num_held, value, extra)
        code = base + 256 + symbol
        codes[count] = code
        counts[code] += 1
        count += 1
        if following[index] >= 0:
            value = uint64(gaps[following[index]])
            symbol, extra = _symbol(value)
            at, held, num_held = _put_value(plain, at, held, num_held, value, extra)
            codes[count] = base + symbol
            counts[base + symbol] += 1
            count += 1
    store(plain, at, uint32(held))
    return count, at + int64((num_held + uint64(7)) >> uint64(3))


@compiled(types.void(read_only(int64), writable(uint16)))
def to_frequencies(counts: Any, frequencies: Any) -> None:
    """For each table of 256 counts frequencies that add up to `SCALE`; none is 0 where its count is not."""
    for table in range(len(counts) // 256):
        base = table * 256
        total = int64(0)
        for symbol in range(256):
            total += counts[base + symbol]
        if total == 0:
            frequencies[base : base + 256] = uint16(0)
            continue
        given = int64(0)
        for symbol in range(256):
            share = int64(0)
            if counts[base + symbol] > 0:
                share = max(int64(1), (counts[base + symbol] * SCALE + total // 2) // total)
            frequencies[base + symbol] = share
            given += share
        while given != SCALE:
            largest = int64(0)
            for symbol in range(1, 256):
                if frequencies[base + symbol] > frequencies[base + largest]:
                    largest = symbol
            change = max(SCALE - given, 1 - max(int64(frequencies[base + largest]) // 4, int64(2)))
            frequencies[base + largest] = int64(frequencies[base + largest]) + change
            given += change


@compiled(int64(read_only(uint16), read_only(uint16), writable(uint16)))
def write_rans(codes: Any, frequencies: Any, words: Any) -> Any:
    """Codes as rANS words, written backwards: they end where `words` (room for codes + 2) ends.

    Returns:
        How many there are.
    """
    starts = np.zeros(len(frequencies), np.uint16)
    for table in range(len(frequencies) // 256):
        given = int64(0)
        for symbol in range(256):
            starts[table * 256 + symbol] = given
            given += int64(frequencies[table * 256 + symbol])
    at = int64(len(words))
    state = _LOWEST
    for index in range(len(codes) - 1, -1, -1):
        share = uint64(frequencies[codes[index]])
        if state >= (share << uint64(20)):
            at -= 1
            words[at] = uint16(state & uint64(0xFFFF))
            state >>= uint64(16)
        quotient = uint64(uint32(state) // uint32(share))
        state = (quotient << uint64(12)) + (state - quotient * share) + uint64(starts[codes[index]])
    at -= 2
    words[at] = uint16(state >> uint64(16))
    words[at + 1] = uint16(state & uint64(0xFFFF))
    return int64(len(words)) - at


@compiled(types.void(read_only(uint16), writable(uint32)))
def to_slots(frequencies: Any, slots: Any) -> None:
    """For each table whose frequencies add up to `SCALE` that many slots: symbol, offset in it, frequency - 1."""
    for table in range(len(frequencies) // 256):
        slot = int64(table) * SCALE
        for symbol in range(256):
            share = uint64(frequencies[table * 256 + symbol])
            for offset in range(share):
                slots[slot] = uint32(uint64(symbol) | (uint64(offset) << uint64(8)) | ((share - _1) << uint64(20)))
                slot += 1


@inlined
def _next_value(
    slots: Any, table: Any, state: Any, words: Any, at: Any, plain: Any, bit: Any, two: Any, eight: Any
) -> Any:
    """(value, state, word, bit): the next symbol of `table` and its plain bits; the word is `BAD` behind the end."""
    slot = slots[(table << 12) | int64(state & uint64(0xFFF))]
    symbol = int64(slot & uint32(255))
    state = (uint64(slot >> uint32(20)) + _1) * (state >> uint64(12)) + ((uint64(slot) >> uint64(8)) & uint64(0xFFF))
    if state < _LOWEST:
        if 2 * at + 2 > len(words):
            at = int64(BAD)
        else:
            state = (state << uint64(16)) | load(words, 2 * at, two)
            at += 1
    value = uint64(symbol)
    if symbol >= 8:
        extra = ((symbol - 8) >> 2) + 1
        value = uint64(4 | (symbol & 3)) << uint64(min(extra, 61))
        if extra > 32:
            value |= peek(plain, bit, eight) & uint64(0xFFFFFFFF)
            bit += 32
            extra -= 32
            value |= (peek(plain, bit, eight) & ((_1 << uint64(extra)) - _1)) << uint64(32)
        else:
            value |= peek(plain, bit, eight) & ((_1 << uint64(extra)) - _1)
        bit += extra
    return value, state, at, bit


@compiled(
    *(
        int64(
            _BYTES, uint64, uint64, _BYTES, writable(int64), read_only(uint32), _BYTES, _BYTES,
            writable(uint32), writable(word), uint64, read_only(uint16), read_only(uint64),
        )
        for word in WORDS
    )
)  # fmt: skip
def read_changes(
    old: Any, shift: Any, mask: Any, model_of_class: Any, left: Any, slots: Any, words: Any, plain: Any,
    positions: Any, steps: Any, bits: Any, two: Any, eight: Any,
) -> Any:  # fmt: skip
    """Walks the old elements and finds which of them change, and by which steps.

    Args:
        old: the unit's bytes.
        shift: where an element's class lies; `mask`: its bits.
        model_of_class: 256 models, each below `len(left)`.
        left: how many changes each model has; they add up to the room in `positions`. It is used up.
        slots: 2 * SCALE for each model, as `to_slots` gives them.
        words: the rANS words' bytes; `plain`: the plain bits.
        positions: room for the changes; `steps`: likewise.
        bits: an element's width.
        two: any array of uint16; `eight`: of uint64.

    Returns:
        0, or `BAD`: the changes do not end where elements, words and bits do. What was written then is of no use.
    """
    width = int64(bits >> uint64(3))
    num_elements = int64(len(old)) // width
    number = int64(len(positions))
    if len(words) < 4 or len(steps) < number:
        return int64(BAD)
    most = ones(bits)
    state = (load(words, int64(0), two) << uint64(16)) | load(words, int64(2), two)
    if state < _LOWEST:
        return int64(BAD)
    at = int64(2)
    bit = int64(0)
    until = np.full(256, _NEVER, np.int64)
    for model in range(len(left)):
        if left[model] > 0:
            value, state, at, bit = _next_value(slots, int64(2) * model, state, words, at, plain, bit, two, eight)
            if at < 0 or value >= uint64(num_elements):
                return int64(BAD)
            until[model] = int64(value)
    count = int64(0)
    index = int64(0)
    while count < number and index < num_elements:
        model = int64(model_of_class[int64((load(old, index * width, steps) >> shift) & mask)])
        rest = until[model] - 1
        until[model] = rest
        if rest < 0:
            value, state, at, bit = _next_value(slots, 2 * model + 1, state, words, at, plain, bit, two, eight)
            if at < 0 or value >= most:
                return int64(BAD)
            positions[count] = index
            steps[count] = value + _1
            count += 1
            left[model] -= 1
            until[model] = _NEVER
            if left[model] > 0:
                value, state, at, bit = _next_value(slots, 2 * model, state, words, at, plain, bit, two, eight)
                if at < 0 or value >= uint64(num_elements):
                    return int64(BAD)
                until[model] = int64(value)
        index += 1
    if count != number or 2 * at != len(words) or state != _LOWEST or (bit + 7) >> 3 != len(plain):
        return int64(BAD)
    return int64(0)
