"""The compiled loops of a patch. Importing this module imports numba and compiles.

`load.patching` imports it at first use. Every loop is serial, releases the GIL and shares nothing, so several run at
once. Elements are bits: unsigned integers of their width. A position outside the tensor is never followed, whoever
checked it before: it counts as a difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import int64, types

Function = TypeVar("Function", bound=Callable[..., Any])

_WIDTHS = (types.uint8, types.uint16, types.uint32, types.uint64)
_POSITIONS = types.Array(types.uint32, 1, "C", readonly=True)


def _read(item: Any) -> Any:
    return types.Array(item, 1, "C", readonly=True)


def _written(item: Any) -> Any:
    return types.Array(item, 1, "C")


def _compiled(signature: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """`numba.njit` for every width, with a type that mypy keeps, cached on disk where some place is writable."""
    signatures = [signature(item) for item in _WIDTHS]

    def compile_now(function: Function) -> Function:
        try:
            return cast(Function, numba.njit(signatures, nogil=True, cache=True)(function))
        except RuntimeError:  # "cannot cache function": no writable place
            return cast(Function, numba.njit(signatures, nogil=True)(function))

    return compile_now


@_compiled(lambda item: int64(_read(item), _POSITIONS, _written(item)))
def gather(live: Any, positions: Any, old: Any) -> Any:
    """Copies the elements at `positions` to `old`. Returns how many positions lie outside."""
    outside = int64(0)
    for index in range(len(positions)):
        position = int64(positions[index])
        if position < len(live):
            old[index] = live[position]
        else:
            outside += 1
    return outside


@_compiled(lambda item: int64(_written(item), _POSITIONS, _read(item), _read(item)))
def exchange(live: Any, positions: Any, expected: Any, new: Any) -> Any:
    """Writes `new` to `positions`. Returns how many elements there were not the `expected` ones."""
    different = int64(0)
    for index in range(len(positions)):
        position = int64(positions[index])
        if position < len(live):
            different += int64(live[position] != expected[index])
            live[position] = new[index]
        else:
            different += 1
    return different


@_compiled(lambda item: int64(_read(item), _POSITIONS, _read(item)))
def compare(live: Any, positions: Any, expected: Any) -> Any:
    """Returns how many elements at `positions` are not the `expected` ones."""
    different = int64(0)
    for index in range(len(positions)):
        position = int64(positions[index])
        if position < len(live):
            different += int64(live[position] != expected[index])
        else:
            different += 1
    return different
