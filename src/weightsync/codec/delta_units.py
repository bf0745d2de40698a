"""What a delta is cut into: units, runs of a source's bytes whose elements have one width and kind.

Nothing here imports numba or torch. Both ends plan the same units from the same layout, and a blob's table repeats
them, so that a delta of another layout is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightsync.errors import InvalidRequestError
from weightsync.types.dtypes import itemsize_bytes

UNIT_BYTES = 16 << 20
"""Bytes of a unit, at most, where the caller names no other number."""

MAX_UNIT_BYTES = 1 << 30
"""No unit is larger: positions have 32 bits, and a decoder's memory is bounded by its unit."""

_CUT_BYTES = 64
"""Units of one run end on multiples of this from the run's first byte: whole elements, whole vectors."""


class ElementKind(enum.StrEnum):
    """How a unit's elements are read: as an unsigned integer of some width, with or without the rank map.

    Floats of sign and magnitude have neighbouring ranks where their values are neighbours; see `docs/delta-format.md`.
    """

    FLOAT8 = "float8"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"

    @property
    def width_bytes(self) -> int:
        """Bytes of an element: 1, 2, 4 or 8."""
        return _WIDTHS[self]

    @property
    def is_float(self) -> bool:
        """Whether elements are compared by their rank among the reals."""
        return self.value.startswith("float")

    @property
    def word(self) -> np.dtype[np.unsignedinteger[npt.NBitBase]]:
        """The little-endian unsigned integer of an element's bits."""
        return np.dtype(f"<u{_WIDTHS[self]}")

    @property
    def code(self) -> int:
        """The number of this kind in a blob's table: 0 to 7, in the order above."""
        return _CODES[self]

    @classmethod
    def of_dtype(cls, dtype: str) -> ElementKind:
        """The kind of the elements of `dtype` (a name of `types.dtypes`); of a complex one its two parts.

        Raises:
            InvalidRequestError: `dtype` is not a name this library knows.
        """
        width = itemsize_bytes(dtype)
        if dtype.startswith("complex"):
            return cls(f"float{width * 4}")
        has_sign = dtype.startswith(("float", "bfloat")) and dtype != "float8_e8m0fnu"
        return cls(f"{'float' if has_sign else 'int'}{width * 8}")


_WIDTHS = {kind: int(kind.value.lstrip("floatin")) // 8 for kind in ElementKind}
_CODES = {kind: code for code, kind in enumerate(ElementKind)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """A run of a source's bytes.

    Attributes:
        start: its first byte, from the source's data start. Any alignment.
        nbytes: a multiple of the kind's width, 1 element to `MAX_UNIT_BYTES`.
    """

    start: int
    nbytes: int
    kind: ElementKind

    @property
    def end(self) -> int:
        """The byte behind its last."""
        return self.start + self.nbytes

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return self.nbytes // self.kind.width_bytes


def plan_units(parts: Sequence[tuple[int, int, str]], unit_bytes: int = UNIT_BYTES) -> tuple[Unit, ...]:
    """Cuts a source into units.

    Neighbouring parts of one kind are one run, and a run is cut into as few units as `unit_bytes` allows, of even
    size. So many small tensors share a unit, and a large one has several, each of whole elements.

    Args:
        parts: (first byte from the source's data start, bytes, dtype's name) of each tensor, in order and without a
            gap between them. Parts of no bytes are passed over.
        unit_bytes: the largest unit, 64 to `MAX_UNIT_BYTES`; it is rounded down to a multiple of 64.

    Raises:
        InvalidRequestError: parts have gaps, overlap, or are no whole number of elements; an unknown dtype.
    """
    if not _CUT_BYTES <= unit_bytes <= MAX_UNIT_BYTES:
        raise InvalidRequestError(f"a unit has {_CUT_BYTES} to {MAX_UNIT_BYTES} bytes, not {unit_bytes}")
    kind_of = functools.cache(ElementKind.of_dtype)
    runs: list[tuple[int, int, ElementKind]] = []
    end: int | None = None
    for start, nbytes, dtype in parts:
        kind = kind_of(dtype)
        if start < 0 or nbytes < 0 or nbytes % itemsize_bytes(dtype):
            raise InvalidRequestError(f"{nbytes} bytes from byte {start} are no run of {dtype} elements")
        if end is not None and start != end:
            raise InvalidRequestError(f"parts of a source join: one ends at byte {end}, the next starts at {start}")
        end = start + nbytes
        if nbytes and runs and runs[-1][2] is kind:
            runs[-1] = (runs[-1][0], end, kind)
        elif nbytes:
            runs.append((start, end, kind))
    most = unit_bytes // _CUT_BYTES * _CUT_BYTES
    units: list[Unit] = []
    for start, end, kind in runs:
        number = -(-(end - start) // most)
        each = -(-(end - start) // (number * _CUT_BYTES)) * _CUT_BYTES
        units += [Unit(start=at, nbytes=min(each, end - at), kind=kind) for at in range(start, end, each)]
    return tuple(units)
