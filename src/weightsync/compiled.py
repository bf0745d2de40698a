"""`numba.njit` as every compiled loop here uses it. Importing this module imports numba.

Loops are compiled for given types when their module is imported, release the GIL, and are serial: `weightsync.threads`
says why numba's own threads are not used.

What was compiled is kept on disk. numba looks at the file of a loop alone to know whether it is still the one that was
compiled; but a loop has in it what it calls from other files. So its name there has a digest of all of them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba import int64, types
from numba.extending import intrinsic

_logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

_TAKES_FROM = re.compile(rf"^(?:from|import) ({__name__.partition('.')[0]}[.\w]*)", re.MULTILINE)


def read_only(item: Any) -> Any:
    """The type of a 1-D array that is only read."""
    return types.Array(item, 1, "C", readonly=True)


def writable(item: Any) -> Any:
    """The type of a 1-D array that is written."""
    return types.Array(item, 1, "C")


def compiled(*signatures: Any) -> Callable[[Function], Function]:
    """`numba.njit` with a type that mypy keeps, cached on disk where some place is writable, and nothing is damaged."""

    def compile_now(function: Function) -> Function:
        function.__qualname__ += f"_{sources_digest(function.__module__)}"  # numba's name for it on disk
        try:
            return cast(Function, numba.njit(list(signatures), nogil=True, cache=True)(function))
        except Exception as error:  # no writable place, a full disk, or whatever pickle says of a file that was cut off
            made = cast(Function, numba.njit(list(signatures), nogil=True)(function))  # or raises again
            if not isinstance(error, RuntimeError):  # "cannot cache function": no writable place
                _say_once(_folder_of(function), f"{type(error).__name__} {error}".strip())
            return made

    return compile_now


def _folder_of(function: Callable[..., Any]) -> str:
    try:
        from numba.core.caching import FunctionCache

        return str(FunctionCache(function).cache_path)
    except Exception:  # it is about to be named in a warning, and no more
        return "numba's cache"


@functools.cache
def _say_once(folder: str, why: str) -> None:
    """Of each folder and cause: a process has dozens of loops."""
    _logger.warning("compiled loops can't be kept in %s, so each process compiles them anew: %s", folder, why)


@functools.cache
def sources_digest(module: str) -> str:
    """Digest of a module's source and of all that it imports from this package, directly or not.

    Args:
        module: its full name; it is being imported, or was.
    """
    sources: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if name in sources or spec is None:
            continue
        sources[name] = getattr(spec.loader, "get_source", lambda _: None)(name) or ""
        waiting += _TAKES_FROM.findall(sources[name])
    text = "".join(f"{name}\n{source}\n" for name, source in sorted(sources.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def inlined(function: Function) -> Function:
    """A part of a compiled loop. What runs for each element takes no array: numba 0.68 counts references to it each
    time, which costs four times what the loop does. What runs for few of them may."""
    return cast(Function, numba.njit(inline="always")(function))


def _prefetch(typing: Any, address: Any) -> Any:
    """Intrinsic: asks for the cache line at a memory address, which may be anything: it is not read.

    Into a core's second cache: asking for the first one is half as fast on AMD (its first cache waits for few lines at
    once), and takes nothing from what is read there.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        asks = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        to_read, second_cache, of_data = number(0), number(2), number(1)
        builder.call(asks, [builder.inttoptr(arguments[0], pointer), to_read, second_cache, of_data])
        return context.get_dummy_value()

    return types.void(int64), generate


prefetch = cast(Callable[[int], None], intrinsic(_prefetch))
