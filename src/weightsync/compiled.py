"""`numba.njit` as every compiled loop here uses it. Importing this module imports numba.

Loops are compiled for given types when their module is imported, release the GIL, and are serial: `codec.threads` says
why numba's own threads are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba import types

Function = TypeVar("Function", bound=Callable[..., Any])


def read_only(item: Any) -> Any:
    """The type of a 1-D array that is only read."""
    return types.Array(item, 1, "C", readonly=True)


def writable(item: Any) -> Any:
    """The type of a 1-D array that is written."""
    return types.Array(item, 1, "C")


def compiled(*signatures: Any) -> Callable[[Function], Function]:
    """`numba.njit` with a type that mypy keeps, cached on disk where some place is writable."""

    def compile_now(function: Function) -> Function:
        try:
            return cast(Function, numba.njit(list(signatures), nogil=True, cache=True)(function))
        except RuntimeError:  # "cannot cache function": no writable place
            return cast(Function, numba.njit(list(signatures), nogil=True)(function))

    return compile_now


def inlined(function: Function) -> Function:
    """A part of a compiled loop."""
    return cast(Function, numba.njit(inline="always")(function))
