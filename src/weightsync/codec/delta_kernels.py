"""The compiled loops of the delta codec. Importing this module imports numba and compiles.

Everything here is serial, releases the GIL and shares nothing, so `weightsync.threads` runs several at once. The format
that these loops write and read is docs/delta-format.md.

Elements are the bits of `old` and `new`, bytes of any alignment; `bits` is an element's width (8, 16, 32, 64) and
`flips` says whether the rank map is used: all ones for floats, 0 for integers. All arithmetic is on uint64.
(numba turns uint64 with int64 into float64: every literal is cast.)

Readers trust nothing: every index is checked before it is used, and what does not fit ends with `BAD`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import int64, types, uint8, uint32, uint64

from weightsync.codec.delta_intrinsics import WORDS, differing, load, lowest_bit, store
from weightsync.compiled import compiled, inlined, prefetch, read_only, writable

BAD = -1
"""What a reader returns for content that is not of the format."""

TOO_MANY = -1
"""What `find_changes` returns when there are more changes than room."""

GAP_ESCAPE = 31
STEP_ESCAPE = 7
MAX_GAP_BITS = 8

_BLOCKS = 128
_AHEAD = 128
_GAP_ESCAPE = uint64(GAP_ESCAPE)
_STEP_ESCAPE = uint64(STEP_ESCAPE)
_0 = uint64(0)
_1 = uint64(1)
_ALL = uint64(0xFFFFFFFFFFFFFFFF)
_STEP = uint64(0x9E3779B97F4A7C15)
_MIX_1 = uint64(0xBF58476D1CE4E5B9)
_MIX_2 = uint64(0x94D049BB133111EB)
_BYTES = read_only(uint8)
_OUT = writable(uint8)


@inlined
def ones(bits: Any) -> Any:
    """`bits` ones: the largest value of an element."""
    return _ALL >> (uint64(64) - uint64(bits))


@inlined
def step_between(was: Any, now: Any, bits: Any, flips: Any) -> Any:
    """The zigzag of the difference of two elements' ranks, mod 2^bits."""
    top = uint64(bits) - _1
    most = ones(bits)
    sign = _1 << top
    rank_was = was ^ ((((_0 - (was >> top)) & most) | sign) & flips)
    rank_now = now ^ ((((_0 - (now >> top)) & most) | sign) & flips)
    change = (rank_now - rank_was) & most
    return ((change << _1) & most) ^ ((_0 - (change >> top)) & most)


@inlined
def stepped(was: Any, step: Any, bits: Any, flips: Any) -> Any:
    """The element whose `step_between` from `was` is `step`."""
    top = uint64(bits) - _1
    most = ones(bits)
    sign = _1 << top
    rank = was ^ ((((_0 - (was >> top)) & most) | sign) & flips)
    rank = (rank + ((step >> _1) ^ (_0 - (step & _1)))) & most
    return rank ^ (((((rank >> top) - _1) & most) | sign) & flips)


@inlined
def _mixed(value: Any, position: Any) -> Any:
    x = value + position * _STEP
    x = (x ^ (x >> uint64(30))) * _MIX_1
    x = (x ^ (x >> uint64(27))) * _MIX_2
    return x ^ (x >> uint64(31))


@compiled(
    *(
        int64(_BYTES, _BYTES, writable(word), writable(uint32), uint64, uint64, writable(uint64))
        for word in WORDS
    )
)  # fmt: skip
def find_changes(old: Any, new: Any, steps: Any, positions: Any, bits: Any, flips: Any, total: Any) -> Any:
    """Writes position and step of each element that differs.

    Args:
        old: the unit's bytes before; `new`: as many, after.
        steps: room for the steps; its type is the element's.
        positions: as much room. When that is not enough it is `TOO_MANY`.
        total: room for one: `sum_values` of what differs, as it is in `new`.

    Returns:
        How many there are.
    """
    room = min(len(positions), len(steps))
    width = int64(bits >> uint64(3))
    shift = lowest_bit(uint64(width))  # 1, 2, 4 or 8: its only one
    count = int64(0)
    at = int64(0)
    masks = np.empty(_BLOCKS, np.uint64)
    starts = np.empty(_BLOCKS, np.int64)
    was = np.empty(64 * _BLOCKS, np.uint64)
    now = np.empty(64 * _BLOCKS, np.uint64)
    counted = int64(0)
    found_sum = _0
    num_blocks = int64(len(old)) >> 6
    block = int64(0)
    while block < num_blocks:
        number = int64(0)  # where in these blocks something differs: no branch, as nobody could predict it
        for _ in range(min(num_blocks - block, int64(_BLOCKS))):
            found = differing(old, new, at, steps)
            masks[number] = found
            starts[number] = at
            number += int64(found != _0)
            at += 64
        block += int64(_BLOCKS)
        for which in range(number):
            found = masks[which]
            while found != _0:
                lane = lowest_bit(found)
                found &= found - _1
                if count >= room:
                    return int64(TOO_MANY)
                place = starts[which] + lane * width
                was[count - counted] = load(old, place, steps)
                now[count - counted] = load(new, place, steps)
                positions[count] = place >> shift
                count += 1
        for index in range(count - counted):  # vectors, unlike the loop above
            steps[counted + index] = step_between(was[index], now[index], bits, flips)
            found_sum += _mixed(now[index], uint64(positions[counted + index]))
        counted = count
    first = at >> shift
    while at + width <= len(old):
        was = load(old, at, steps)
        now = load(new, at, steps)
        if was != now:
            if count >= room:
                return int64(TOO_MANY)
            steps[count] = step_between(was, now, bits, flips)
            positions[count] = first
            found_sum += _mixed(now, uint64(first))
            count += 1
        at += width
        first += 1
    total[0] = found_sum
    return count


@inlined
def _entropy_bits(counts: Any, total: Any) -> Any:
    """Bits a symbol, and what a table of the symbols that occur costs on top."""
    found = 0.0
    distinct = 0
    for symbol in range(len(counts)):
        if counts[symbol] > 0:
            distinct += 1
            found += counts[symbol] * math.log2(total / counts[symbol])
    return found / total, 5.0 * distinct


@inlined
def _escape_bits(excess: Any) -> Any:
    return 8.0 * (1.0 + math.floor(math.log2(float(excess) + 1.0) / 7.0))


@compiled(types.UniTuple(int64, 2)(read_only(uint64), read_only(uint64), int64, int64))
def choose_split(gaps: Any, steps: Any, number: Any, most_step_bits: Any) -> Any:
    """How many low bits of gaps and of steps are best written as they are: (gap bits, step bits).

    What is left of both is one symbol, whose entropy is taken.

    Args:
        gaps: of a sample of the changes, at least one; `steps`: theirs, not 0.
        number: how many changes there are in all, which share a table.
        most_step_bits: the most step bits that an element allows.
    """
    total = len(gaps)
    counts = np.zeros(256, np.int64)
    best_step_bits = int64(0)
    best = 1e30
    for step_bits in range(most_step_bits + 1):
        counts[:8] = 0
        escaped = 0.0
        for index in range(total):
            high = (steps[index] - _1) >> uint64(step_bits)
            if high >= _STEP_ESCAPE:
                escaped += _escape_bits(high - _STEP_ESCAPE)
                high = _STEP_ESCAPE
            counts[int64(high)] += 1
        entropy, _ = _entropy_bits(counts[:8], total)
        cost = entropy + step_bits + escaped / total
        if cost < best:
            best = cost
            best_step_bits = int64(step_bits)
    best_gap_bits = int64(0)
    best = 1e30
    for gap_bits in range(MAX_GAP_BITS + 1):
        counts[:] = 0
        escaped = 0.0
        for index in range(total):
            high = gaps[index] >> uint64(gap_bits)
            if high >= _GAP_ESCAPE:
                escaped += _escape_bits(high - _GAP_ESCAPE)
                high = _GAP_ESCAPE
            step = min((steps[index] - _1) >> uint64(best_step_bits), _STEP_ESCAPE)
            counts[int64((high << uint64(3)) | step)] += 1
        entropy, table = _entropy_bits(counts, total)
        cost = entropy + gap_bits + escaped / total + table / number
        if cost < best:
            best = cost
            best_gap_bits = int64(gap_bits)
    return best_gap_bits, best_step_bits


@inlined
def _write_varint(out: Any, at: Any, value: Any) -> Any:
    while value >= uint64(128):
        out[at] = uint8((value & uint64(127)) | uint64(128))
        value >>= uint64(7)
        at += 1
    out[at] = uint8(value)
    return at + 1


@compiled(
    *(
        types.UniTuple(int64, 2)(read_only(uint32), read_only(word), int64, int64, _OUT, _OUT, _OUT, _OUT)
        for word in WORDS
    )
)
def write_planes(
    positions: Any, steps: Any, gap_bits: Any, step_bits: Any, low: Any, joint: Any, gaps: Any, rest: Any
) -> Any:
    """Writes n changes as planes.

    Args:
        positions: rising; `steps`: not 0.
        gap_bits: 0 to `MAX_GAP_BITS`; `step_bits`: 0 to 24.
        low: room for n * (gap_bits + step_bits) bits and 8 bytes more.
        joint: room for n bytes.
        gaps: room for the escaped gaps: 5 n bytes.
        rest: room for the escaped steps: n times the bytes of an element's varint.

    Returns:
        The bytes written to `gaps` and to `rest`.
    """
    held = _0
    num_held = uint64(0)
    at_low = int64(0)
    at_gaps = int64(0)
    at_rest = int64(0)
    next_position = int64(0)
    gap_shift = uint64(gap_bits)
    step_shift = uint64(step_bits)
    gap_mask = (_1 << gap_shift) - _1
    step_mask = (_1 << step_shift) - _1
    num_low = gap_shift + step_shift
    for index in range(len(positions)):
        gap = uint64(int64(positions[index]) - next_position)
        next_position = int64(positions[index]) + 1
        step = uint64(steps[index]) - _1
        held |= ((gap & gap_mask) | ((step & step_mask) << gap_shift)) << num_held
        num_held += num_low
        if num_held >= uint64(32):
            store(low, at_low, uint32(held))
            held >>= uint64(32)
            num_held -= uint64(32)
            at_low += 4
        gap >>= gap_shift
        step >>= step_shift
        if gap >= _GAP_ESCAPE:
            at_gaps = _write_varint(gaps, at_gaps, gap - _GAP_ESCAPE)
            gap = _GAP_ESCAPE
        if step >= _STEP_ESCAPE:
            at_rest = _write_varint(rest, at_rest, step - _STEP_ESCAPE)
            step = _STEP_ESCAPE
        joint[index] = uint8((gap << uint64(3)) | step)
    store(low, at_low, uint32(held))
    return at_gaps, at_rest


@inlined
def _read_varint(data: Any, at: Any) -> Any:
    """(value, the byte behind it); `BAD` for the latter where it does not end or has more than 63 bits and one."""
    value = _0
    shift = _0
    while True:
        if at >= len(data) or shift > uint64(63):
            at = int64(BAD)
            break
        piece = uint64(data[at])
        at += 1
        if shift == uint64(63) and piece > _1:
            at = int64(BAD)
            break
        value |= (piece & uint64(127)) << shift
        shift += uint64(7)
        if piece < uint64(128):
            break
    return value, at


@compiled(
    *(
        int64(
            *(_BYTES,) * 4, int64, int64, int64, uint64, writable(uint32), writable(word), read_only(uint64)
        )
        for word in WORDS
    )
)  # fmt: skip
def read_planes(
    low: Any, joint: Any, gaps: Any, rest: Any, gap_bits: Any, step_bits: Any, num_elements: Any, bits: Any,
    positions: Any, steps: Any, eight: Any,
) -> Any:  # fmt: skip
    """Reads what `write_planes` wrote: positions and steps, for which there is as much room as `joint` is long.

    Returns:
        0, or `BAD`: a position that is not below `num_elements`, a step that no element has, an escape too many or
        too few. What was written then is of no use.
    """
    number = len(joint)
    if len(positions) < number or len(steps) < number:
        return int64(BAD)
    at_gaps = int64(0)
    at_rest = int64(0)
    position = int64(-1)
    bit = int64(0)
    gap_shift = uint64(gap_bits)
    step_shift = uint64(step_bits)
    gap_mask = (_1 << gap_shift) - _1
    step_mask = (_1 << step_shift) - _1
    most = ones(bits)
    most_high = most >> step_shift
    last = int64(len(low)) - 8
    for index in range(number):
        pair = uint64(joint[index])
        gap = pair >> uint64(3)
        step = pair & uint64(7)
        at = bit >> 3
        if at <= last:
            low_bits = load(low, at, eight)
        else:
            low_bits = _0  # zeros behind its end
            for step_bytes in range(len(low) - at):
                low_bits |= uint64(low[at + step_bytes]) << uint64(8 * step_bytes)
        low_bits >>= uint64(bit & 7)  # at least 57 bits of `low`, lowest first
        bit += gap_bits + step_bits
        if gap == _GAP_ESCAPE:
            more, at_gaps = _read_varint(gaps, at_gaps)
            if at_gaps < 0 or more > uint64(num_elements):
                return int64(BAD)
            gap += more
        if step == _STEP_ESCAPE:
            more, at_rest = _read_varint(rest, at_rest)
            if at_rest < 0 or more > most_high - _STEP_ESCAPE:
                return int64(BAD)
            step += more
        position += 1 + int64((gap << gap_shift) | (low_bits & gap_mask))
        step = (step << step_shift) | ((low_bits >> gap_shift) & step_mask)
        if position >= num_elements or step >= most:
            return int64(BAD)
        positions[index] = position
        steps[index] = step + _1
    if at_gaps != len(gaps) or at_rest != len(rest):
        return int64(BAD)
    return int64(0)


@compiled(*(int64(_BYTES, read_only(uint32), writable(word), writable(word), uint64, uint64, _OUT) for word in WORDS))
def take_steps(old: Any, positions: Any, values: Any, was: Any, bits: Any, flips: Any, target: Any) -> Any:
    """From steps to elements: `was` becomes the old ones, `values` (the steps) the new ones. 0, or `BAD`.

    The new ones are written into `target` as well, at once: where that is the memory of `old`, their cache line is here
    then. An empty one stands for none.
    """
    width = int64(bits >> uint64(3))
    num_elements = int64(len(old)) // width
    write = len(target) > 0
    address = int64(old.ctypes.data)
    if len(values) < len(positions) or len(was) < len(positions) or (write and len(target) != len(old)):
        return int64(BAD)
    for index in range(len(positions)):
        place = int64(positions[index])
        if place >= num_elements:
            return int64(BAD)
        if index + _AHEAD < len(positions):
            prefetch(address + int64(positions[index + _AHEAD]) * width)
        before = load(old, place * width, was)
        was[index] = before
        values[index] = stepped(before, uint64(values[index]), bits, flips)
        if write:
            store(target, place * width, values[index])
    return int64(0)


@compiled(*(uint64(read_only(uint32), read_only(word)) for word in WORDS))
def sum_values(positions: Any, values: Any) -> Any:
    """A sum of elements and their positions, in any order, that tells other elements apart."""
    total = _0
    for index in range(min(len(positions), len(values))):
        total += _mixed(uint64(values[index]), uint64(positions[index]))
    return total


@compiled(*(int64(_OUT, read_only(uint32), read_only(word), int64) for word in WORDS))
def put_elements(memory: Any, positions: Any, values: Any, width: Any) -> Any:
    """Writes elements of `width` bytes at their positions. 0, or `BAD` at the first one outside of `memory`."""
    num_elements = int64(len(memory)) // width
    if len(values) < len(positions):
        return int64(BAD)
    for index in range(len(positions)):
        place = int64(positions[index])
        if place >= num_elements:
            return int64(BAD)
        store(memory, place * width, values[index])
    return int64(0)


@compiled(types.void(_BYTES, _OUT, int64))
def split_bytes(data: Any, out: Any, width: Any) -> Any:
    """Byte planes: first byte 0 of each element, then byte 1 of each, and so on; `out` is as long as `data`."""
    number = int64(len(data)) // width
    for byte in range(width):
        base = byte * number
        for index in range(number):
            out[base + index] = data[index * width + byte]


@compiled(types.void(_BYTES, _OUT, int64))
def join_bytes(data: Any, out: Any, width: Any) -> Any:
    """The inverse of `split_bytes`."""
    number = int64(len(data)) // width
    for byte in range(width):
        base = byte * number
        for index in range(number):
            out[index * width + byte] = data[base + index]
