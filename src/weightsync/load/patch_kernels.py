"""The compiled loops of a patch. Importing this module imports numba and compiles.

`load.patching` imports it at first use. Every loop is serial, releases the GIL and shares nothing, so several run at
once. Elements are bits: unsigned integers of their width. A position outside the tensor is never followed, whoever
checked it before: it counts as a difference.
"""

from __future__ import annotations

from typing import Any

from numba import int64, types, uint32, uint64

from weightsync.compiled import compiled, prefetch, read_only, writable

_AHEAD = 256
"""How many elements before its turn one is asked for: a core waits for memory, and waits for many lines at once."""
_BLOCK = 256
"""Elements that are asked for, then written, then read again: their lines fit into a core's own caches.

Each has a loop of its own. A core that waits for an element looks at a few hundred instructions behind it, and the less
else is among them, the more elements it waits for at once.
"""
_WIDTHS = (types.uint8, types.uint16, types.uint32, types.uint64)
_POSITIONS = read_only(types.uint32)


@compiled(*(int64(read_only(item), _POSITIONS, writable(item)) for item in _WIDTHS))
def gather(live: Any, positions: Any, old: Any) -> Any:
    """Copies the elements at `positions` to `old`. Returns how many positions lie outside."""
    outside = int64(0)
    address, width = int64(live.ctypes.data), int64(live.itemsize)
    count = len(positions)
    for index in range(count):
        if index + _AHEAD < count:
            prefetch(address + int64(positions[index + _AHEAD]) * width)
        position = int64(positions[index])
        if position < len(live):
            old[index] = live[position]
        else:
            outside += 1
    return outside


@compiled(*(types.UniTuple(int64, 2)(writable(item), _POSITIONS, read_only(item), read_only(item)) for item in _WIDTHS))
def exchange(live: Any, positions: Any, expected: Any, new: Any) -> Any:
    """Writes `new` to `positions`, and reads them again, block by block, while they lie in the core's own cache.

    Returns:
        How many elements were not the `expected` ones before, and how many are not the `new` ones after.
    """
    address, width = int64(live.ctypes.data), int64(live.itemsize)
    before = uint64(0)
    after = uint64(0)
    count = uint64(len(positions))
    size = uint64(len(live))
    last = count - uint64(1)
    start = uint64(0)
    while start < count:
        end = min(start + uint64(_BLOCK), count)
        index = start
        while index < end:
            prefetch(address + int64(positions[min(index + uint64(_BLOCK), last)]) * width)
            index += uint64(1)
        index = start
        while index < end:
            position = uint64(positions[index])
            if position < size:
                before += uint64(live[position] != expected[index])
                live[position] = new[index]
            else:
                before += uint64(1)
            index += uint64(1)
        index = start
        while index < end:
            position = uint64(positions[index])
            if position < size:
                after += uint64(live[position] != new[index])
            else:
                after += uint64(1)
            index += uint64(1)
        start = end
    return int64(before), int64(after)


@compiled(int64(read_only(types.uint64), read_only(types.uint64), writable(types.uint32)))
def differing(one: Any, other: Any, where: Any) -> Any:
    """Which words differ: fills `where`, which has a place for each of them, from its begin. Returns how many.

    Each word is written down, and counted where it differs: no branch, as nobody could predict it.
    """
    found = uint64(0)
    for index in range(len(one)):
        where[found] = uint32(index)
        found += uint64(one[index] != other[index])
    return int64(found)
