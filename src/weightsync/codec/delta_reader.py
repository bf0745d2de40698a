"""The receiving half of the delta codec: a blob that is checked, and the change of each of its units."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from weightsync.addresses import loops
from weightsync.codec.delta_format import Entry, Form, head_bytes, read_head
from weightsync.codec.delta_units import Unit
from weightsync.errors import DeltaFormatError, InvalidRequestError

Steps: TypeAlias = tuple[npt.NDArray[np.uint32], npt.NDArray[Any]]
"""Positions and zigzag steps of a unit."""

coding = functools.partial(loops, "weightsync.codec.delta_planes", needs="deltas need numba and zstandard")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class UnitChange:
    """What a delta does to one unit. Values are absolute: `apply` twice does what it does once.

    Attributes:
        positions: uint32, rising: the elements that change, counted from the unit's first; None in a full unit,
            where all are written.
        old: the elements at `positions` before, as unsigned integers of their width, as `decode` found them; None in a
            full unit.
        new: as many elements after. In a full unit this may be a view of the blob, unaligned.
    """

    unit: Unit
    positions: npt.NDArray[np.uint32] | None
    old: npt.NDArray[Any] | None
    new: npt.NDArray[Any]

    def apply(self, memory: npt.NDArray[np.uint8]) -> None:
        """Writes the new elements.

        Args:
            memory: the unit's bytes, 1-D and contiguous, of any alignment.

        Raises:
            InvalidRequestError: `memory` is not of the unit's size, or not writable. Nothing was written.
        """
        _check_bytes(memory, self.unit)
        _check_writable(memory)
        if self.positions is None:
            memory[:] = self.new.view(np.uint8)
            return
        from weightsync.codec import delta_kernels

        found = delta_kernels.put_elements(memory, self.positions, self.new, self.unit.kind.width_bytes)
        assert found == 0  # whoever made the positions has checked them


class DeltaReader:
    """A delta's blob. The head is checked here, each unit's payload when it is decoded.

    Any number of threads may decode at once, the same unit as well. With `write` it is one for each memory, and once: a
    second time steps on from what the first has written.

    Args:
        blob: the whole blob. It is borrowed: it must stay as it is while this, or a full unit's change, is in use.
        units: what the reader's own layout is cut into; the blob has to name the same ones.

    Attributes:
        base: 16 bytes, what the sender calls the state that the delta starts from.
        result: 16 bytes, what it calls the state after; None where it did not say.

    Raises:
        DeltaFormatError: the blob is damaged, cut off, of another version or of another layout.
    """

    def __init__(self, blob: memoryview | bytes | bytearray, units: Sequence[Unit]) -> None:
        self._blob = memoryview(blob).cast("B")
        self.units = tuple(units)
        self.base, self.result, self._entries = read_head(self._blob, self.units)
        self.nbytes = self._blob.nbytes
        self._starts = [head_bytes(len(self.units))]
        for entry in self._entries:
            self._starts.append(self._starts[-1] + entry.nbytes)

    def form(self, index: int) -> Form:
        return self._entries[index].form

    def num_changed(self, index: int) -> int:
        """How many of a unit's elements change; in a full form all of them count."""
        return self._entries[index].num_changed

    def entry(self, index: int) -> Entry:
        return self._entries[index]

    def payload(self, index: int) -> memoryview:
        """A unit's encoded bytes, not checked."""
        return self._blob[self._starts[index] : self._starts[index + 1]]

    def decode(self, index: int, old: npt.NDArray[np.uint8], *, write: bool = False) -> UnitChange | None:
        """The change of one unit; None where nothing changes.

        Args:
            old: the unit's bytes as they are, 1-D and contiguous, of any alignment.
            write: writes the elements that change into `old` as they are found, which walks through memory once where
                `apply` walks a second time. A full unit is not written: it would leave no old bytes to compare with.

        Raises:
            DeltaFormatError: the payload is damaged, or what it makes of these old bytes is not what it made of the
                base. Elements that don't change are not looked at: a digest of the result proves those. With `write`
                some or all of its elements may have been written.
            InvalidRequestError: `old` is not of the unit's size, or not writable. Nothing was written.
        """
        unit, entry = self.units[index], self._entries[index]
        _check_bytes(old, unit)
        if write:
            _check_writable(old)
        if entry.form is Form.UNCHANGED:
            return None
        planes = coding()
        if entry.form.is_full:
            new = planes.read_full(unit, entry, self.payload(index))
            return UnitChange(unit=unit, positions=None, old=None, new=new.view(unit.kind.word))
        positions, values = self.steps(index)
        was = np.empty(len(positions), unit.kind.word)
        bits, flips = planes.shape_of(unit)
        target = old if write else np.empty(0, np.uint8)
        if planes.kernels.take_steps(old, positions, values, was, bits, flips, target) == planes.kernels.BAD:
            raise AssertionError("positions were checked")
        if planes.kernels.sum_values(positions, values) != entry.values:
            raise DeltaFormatError("the old bytes of a unit are not those that its delta was made from")
        return UnitChange(unit=unit, positions=positions, old=was, new=values)

    def steps(self, index: int) -> Steps:
        """Positions and steps of a unit in the form `PLANES`.

        Raises:
            InvalidRequestError: it is of another form.
            DeltaFormatError: the payload is damaged.
        """
        unit, entry = self.units[index], self._entries[index]
        if entry.form is not Form.PLANES:
            raise InvalidRequestError(f"a unit of form {entry.form.name.lower()} has no steps")
        return cast(Steps, coding().read_planes(unit, entry, self.payload(index)))


def _check_bytes(memory: npt.NDArray[np.uint8], unit: Unit) -> None:
    if memory.dtype != np.uint8 or memory.shape != (unit.nbytes,) or not memory.flags.c_contiguous:
        raise InvalidRequestError(f"a unit of {unit.nbytes} bytes needs that many, contiguous, as uint8")


def _check_writable(memory: npt.NDArray[np.uint8]) -> None:
    if not memory.flags.writeable:
        raise InvalidRequestError("a unit's memory has to be writable")
