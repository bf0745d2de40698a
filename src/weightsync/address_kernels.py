"""The compiled loop of `addresses`. Importing this module imports numba and compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from numba import int64, types
from numba.core import cgutils
from numba.extending import intrinsic

from weightsync.compiled import compiled, read_only


def _copy_bytes(typing: Any, target: Any, source: Any, num_bytes: Any) -> Any:
    """Intrinsic: `memcpy` between two addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = context.get_value_type(types.uint8).as_pointer()
        to, come_from = (builder.inttoptr(address, byte) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, come_from, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(int64, int64, int64), generate


copy_bytes = cast(Callable[[int, int, int], None], intrinsic(_copy_bytes))


@compiled(types.void(read_only(int64), read_only(int64), read_only(int64)))
def copy_runs(targets: Any, sources: Any, num_bytes: Any) -> Any:
    for index in range(len(targets)):
        if num_bytes[index] > 0:
            copy_bytes(targets[index], sources[index], num_bytes[index])
