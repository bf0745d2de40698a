"""The compiled loop over many small tensors of the shard-independent digest. Importing this imports numba."""

from __future__ import annotations

from typing import Any

from numba import int64, types, uint64

from weightsync.codec.kernels import run_sum
from weightsync.compiled import compiled, read_only


@compiled(
    types.UniTuple(uint64, 2)(
        read_only(int64), read_only(int64), read_only(int64), read_only(uint64), read_only(uint64)
    )
)
def many_sum(addresses: Any, num_bytes: Any, places: Any, keys_1: Any, keys_2: Any) -> Any:
    """Both lanes of many runs, each of a tensor of its own: `run_sum` of each, added up."""
    a = uint64(0)
    b = uint64(0)
    for index in range(len(addresses)):
        run_a, run_b = run_sum(addresses[index], num_bytes[index], places[index], keys_1[index], keys_2[index])
        a += run_a
        b += run_b
    return a, b
