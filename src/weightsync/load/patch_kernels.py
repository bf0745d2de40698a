"""The compiled loops of a patch. Importing this module imports numba and compiles.

`load.patching` imports it at first use. Every loop is serial, releases the GIL and shares nothing, so several run at
once. Elements are bits: unsigned integers of their width. A position outside the tensor is never followed, whoever
checked it before: it counts as a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import int64, types
from numba.extending import intrinsic

from weightsync.compiled import compiled, read_only, writable

_AHEAD = 256
"""How many elements before its turn one is asked for: a core waits for memory, and waits for many lines at once."""
_BLOCK = 256
"""Elements that are written before they are read again: their lines fit into a core's first cache."""
_WIDTHS = (types.uint8, types.uint16, types.uint32, types.uint64)
_POSITIONS = read_only(types.uint32)


def _fetch(typing: Any, data: Any, at: Any) -> Any:
    """Intrinsic: asks for the cache line of `data[at]`, which may lie anywhere: it is not read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(array.data, [arguments[1]]), pointer)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        to_read, into_second_cache, of_data = (ir.Constant(number, value) for value in (0, 1, 1))
        builder.call(prefetch, [address, to_read, into_second_cache, of_data])
        return context.get_dummy_value()

    return types.none(data, at), generate


fetch = cast(Callable[[npt.NDArray[np.uint8], int], None], intrinsic(_fetch))


@compiled(*(int64(read_only(item), _POSITIONS, writable(item)) for item in _WIDTHS))
def gather(live: Any, positions: Any, old: Any) -> Any:
    """Copies the elements at `positions` to `old`. Returns how many positions lie outside."""
    outside = int64(0)
    count = len(positions)
    for index in range(count):
        if index + _AHEAD < count:
            fetch(live, int64(positions[index + _AHEAD]))
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
    before = int64(0)
    after = int64(0)
    count = len(positions)
    for start in range(0, count, _BLOCK):
        end = min(start + _BLOCK, count)
        for index in range(start, end):
            if index + _AHEAD < count:
                fetch(live, int64(positions[index + _AHEAD]))
            position = int64(positions[index])
            if position < len(live):
                before += int64(live[position] != expected[index])
                live[position] = new[index]
            else:
                before += 1
        for index in range(start, end):
            position = int64(positions[index])
            if position < len(live):
                after += int64(live[position] != new[index])
            else:
                after += 1
    return before, after
