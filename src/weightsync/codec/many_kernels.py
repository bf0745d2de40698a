"""The compiled loop of `codec.digest.shard_sums`. Importing this module imports numba and compiles."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, int64, types, uint64
from numba.extending import intrinsic

from weightsync.codec.kernels import runs_sum
from weightsync.compiled import compiled, read_only


def _as_bytes(typing: Any, address: Any) -> Any:
    """Intrinsic: a memory address as a pointer to bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint8)(int64), generate


_bytes_at: Any = intrinsic(_as_bytes)


@compiled(
    types.UniTuple(uint64, 2)(read_only(int64), read_only(int64), read_only(uint64), read_only(uint64)),
)
def whole_sums(addresses: Any, sizes: Any, keys_1: Any, keys_2: Any) -> Any:
    """Both lanes of many whole tensors: `sizes[i]` bytes at `addresses[i]`, with that tensor's keys."""
    start = np.zeros(1, np.int64)
    a = uint64(0)
    b = uint64(0)
    for index in range(len(addresses)):
        size = sizes[index]
        if size > 0:
            data = carray(_bytes_at(addresses[index]), size)
            one_a, one_b = runs_sum(data, size, start, keys_1[index], keys_2[index])
            a += one_a
            b += one_b
    return a, b
