"""Dtypes as strings: this package knows no torch, and what travels is text.

The names are torch's own without the prefix ("bfloat16", "float8_e4m3fn").
"""

from __future__ import annotations

import functools

from weightsync.errors import InvalidRequestError

ITEMSIZE_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

CASTABLE = frozenset({"float16", "bfloat16", "float32", "float64"})
"""The dtypes that an extractor converts to the engine's dtype. All others (integers, bool, the
quantised 8-bit floats) mean something exact and pass through as they are."""


def itemsize_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`.

    Raises:
        InvalidRequestError: `dtype` is not a name this library knows.
    """
    try:
        return ITEMSIZE_BYTES[dtype]
    except KeyError:
        raise InvalidRequestError(f"unknown dtype {dtype!r}; known are {', '.join(ITEMSIZE_BYTES)}") from None


@functools.lru_cache(maxsize=256)  # asked of each of 100,000 tensors; what names none is not kept
def dtype_name(dtype: object) -> str:
    """`torch.bfloat16`, "torch.bfloat16" or "bfloat16" as "bfloat16"; unknown ones are refused."""
    name = str(dtype).removeprefix("torch.")
    itemsize_bytes(name)
    return name


def target_dtype(dtype: str, wanted: str | None) -> str:
    """The dtype a tensor of `dtype` has after extraction for an engine that wants `wanted`."""
    if wanted is None or dtype not in CASTABLE:
        return dtype
    return dtype_name(wanted)
