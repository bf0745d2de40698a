"""The compiled loop over many runs of bytes of the shard-independent digest. Importing this module imports numba."""

from __future__ import annotations

from typing import Any

from numba import int64, types, uint64

from weightsync.codec.kernels import run_sum
from weightsync.compiled import compiled, read_only


@compiled(
    types.UniTuple(uint64, 2)(
        read_only(int64), read_only(int64), read_only(int64), read_only(uint64), read_only(uint64)
    ),
)
def runs_of_many(addresses: Any, sizes: Any, places: Any, keys_1: Any, keys_2: Any) -> Any:
    """Both lanes of many runs, each of a tensor with keys of its own: `sizes[i]` bytes at `addresses[i]`, which lie at
    byte `places[i]` of their tensor.
    """
    a = uint64(0)
    b = uint64(0)
    for index in range(len(addresses)):
        one_a, one_b = run_sum(addresses[index], sizes[index], places[index], keys_1[index], keys_2[index])
        a += one_a
        b += one_b
    return a, b
