"""Applies deltas to a staging: unit by unit, on all cores, with the sum of what was really changed.

    blob -> decode a unit beside the staging's own bytes and write it -> sum of the change
    base's sum + changes == the sum that was published? else nothing here counts

Each byte that changes is read and written once; the rest of the staging is only read where the delta's mode needs it.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from weightsync.codec.delta_reader import DeltaReader, UnitChange
from weightsync.codec.delta_units import Unit, plan_units
from weightsync.codec.model_digest import ShardSum, change_sum
from weightsync.errors import DigestMismatchError
from weightsync.host.staging import TargetMap
from weightsync.plan.boxes import whole_box
from weightsync.threads import map_all
from weightsync.types import TensorSpec, itemsize_bytes
from weightsync.types.publication import DeltaLink, Source

Places: TypeAlias = npt.NDArray[np.integer[Any]]

_DENSE_STEP = 1 << 20
_NARROW = 1 << 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changed:
    """Elements of one tensor that a delta has changed.

    Attributes:
        spec: the whole tensor's.
        places: flat, rising, none twice; in pieces of `width_bytes`. uint32 where the whole tensor has at most 2**32 of
            them, else int64.
        width_bytes: the size of an element, or of a part of one (complex numbers).
    """

    spec: TensorSpec
    places: Places
    width_bytes: int


class DeltaApplier:
    """Brings one source's part of a staging from a base to a later version, delta by delta.

    Whatever it raises, the staging then has neither version: everything has to be fetched anew.

    Args:
        source: of the publication.
        parts: that lie in it.
        places: where they lie in the staging.
        digest: sum of the source's bytes as the staging has them, 32 hex digits.
        keep_at_most: elements whose places are kept for `changed`, counted once a delta; beyond it none are.
    """

    def __init__(
        self, source: Source, parts: Sequence[TensorSpec], places: TargetMap, digest: str, *, keep_at_most: int
    ) -> None:
        self._start = source.data_start
        ordered = sorted(parts, key=lambda part: (part.offset, part.nbytes))
        self._units = plan_units([(part.offset - self._start, part.nbytes, part.dtype) for part in ordered])
        self._places = places
        self._digest = digest
        self._keep_at_most = keep_at_most
        self._lock = threading.Lock()
        self._num_kept: int | None = 0
        self._kept: dict[str, list[Changed]] = {}

    @property
    def changed(self) -> list[Changed] | None:
        """What was changed, a tensor each; None where it was too much to be kept."""
        if self._num_kept is None:
            return None
        for name, pieces in self._kept.items():  # pieces go as they are joined: of one tensor alone there are both
            self._kept[name] = [dataclasses.replace(pieces[0], places=united([piece.places for piece in pieces]))]
        return [pieces[0] for pieces in self._kept.values()]

    def apply(self, blob: memoryview, link: DeltaLink) -> None:
        """One delta.

        Raises:
            DeltaFormatError: it is none, or not of this layout.
            DigestMismatchError: it builds on other bytes, or what came out are others than were published.
        """
        reader = DeltaReader(blob, self._units)
        if reader.base.hex() != self._digest:
            raise DigestMismatchError(
                f"the delta {link.base} -> {link.version} builds on other bytes than are here",
                published=reader.base.hex(), received=self._digest,
            )  # fmt: skip
        self._expect(
            sum(reader.num_changed(index) for index in range(len(self._units)) if not reader.form(index).is_full)
        )
        sums = map_all(lambda index: self._apply_unit(reader, index), range(len(self._units)))
        total = ShardSum(lane_a=int(self._digest[:16], 16), lane_b=int(self._digest[16:], 16))
        for change in sums:
            total += change
        self._digest = f"{total.lane_a:016x}{total.lane_b:016x}"
        if reader.result is None or reader.result.hex() != self._digest:
            raise DigestMismatchError(
                f"the delta {link.base} -> {link.version} gave other bytes than were published",
                published="" if reader.result is None else reader.result.hex(), received=self._digest,
            )  # fmt: skip

    def check_result(self, published: str) -> None:
        """Raises DigestMismatchError where the staging does not have the bytes of that sum."""
        if self._digest != published:
            raise DigestMismatchError("the deltas lead to other bytes", published=published, received=self._digest)

    def _apply_unit(self, reader: DeltaReader, index: int) -> ShardSum:
        unit = self._units[index]
        if reader.num_changed(index) == 0:
            return ShardSum.zero()
        offset = self._start + unit.start
        memory = self._places.borrow(offset, unit.nbytes)
        bytes_now = self._places.get(offset, unit.nbytes) if memory is None else memory
        change = reader.decode(index, bytes_now, write=True)
        if change is None:
            return ShardSum.zero()
        total = self._sum_of(unit, change, bytes_now)
        if change.positions is None:
            change.apply(bytes_now)
        if memory is None:
            self._places.put(offset, bytes_now)
        return total

    def _sum_of(self, unit: Unit, change: UnitChange, bytes_now: npt.NDArray[np.uint8]) -> ShardSum:
        """The sum of a change, and a note of its places; of a full unit before it is written."""
        total = ShardSum.zero()
        width = change.new.itemsize
        old = bytes_now.view(change.new.dtype) if change.old is None else change.old
        for part, low, high in self._places.parts_in(self._start + unit.start, unit.nbytes):
            first, end = ((place - self._start - unit.start) // width for place in (low, high))
            if change.positions is None:
                steps = [(start, min(start + _DENSE_STEP, end)) for start in range(first, end, _DENSE_STEP)]
                for start, stop in steps:
                    differ = start + np.flatnonzero(old[start:stop] != change.new[start:stop])
                    total += self._note(part, low, first, width, differ, old[differ], change.new[differ])
            else:
                cut = slice(*np.searchsorted(change.positions, (first, end)))
                if cut.stop > cut.start:
                    where = change.positions[cut].astype(np.int64)
                    total += self._note(part, low, first, width, where, old[cut], change.new[cut])
        return total

    def _expect(self, num_places: int) -> None:
        """Keeps none from now on where so many more are too many: so nothing is kept in vain."""
        if self._num_kept is not None and self._num_kept + num_places > self._keep_at_most:
            self._num_kept = None
            self._kept.clear()

    def _note(
        self,
        part: TensorSpec,
        low: int,
        first: int,
        width: int,
        where: npt.NDArray[np.int64],
        old: npt.NDArray[np.generic],
        new: npt.NDArray[np.generic],
    ) -> ShardSum:
        """Sum of changed pieces of one part, of which piece `first` of the unit lies at byte `low` of the source."""
        if not len(where):
            return ShardSum.zero()
        places = _in_whole(part, where - first + (low - part.offset) // width, width)
        is_narrow = math.prod(part.shape) * (itemsize_bytes(part.dtype) // width) <= _NARROW
        kept = places.astype(np.uint32) if is_narrow and self._num_kept is not None else places
        with self._lock:
            self._expect(len(places))
            if self._num_kept is not None:
                self._num_kept += len(places)
                found = Changed(spec=part, places=kept, width_bytes=width)
                self._kept.setdefault(part.name, []).append(found)
        return change_sum(part, width, places, np.ascontiguousarray(old), np.ascontiguousarray(new))


def _in_whole(part: TensorSpec, places: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
    """Places in a part's box, in pieces of `width` bytes, as places in the whole tensor."""
    if part.box is None or part.box == whole_box(part.shape):
        return places
    pieces = itemsize_bytes(part.dtype) // width
    element, within = np.divmod(places, pieces)
    index = np.unravel_index(element, part.box.shape)
    moved = tuple(axis + start for axis, start in zip(index, part.box.offset, strict=True))
    flat = np.ravel_multi_index(moved, part.shape).astype(np.int64)
    return np.asarray(flat * pieces + within, np.int64)


def united(finds: Sequence[Places]) -> Places:
    """Places of several finds in one tensor as one, rising and none twice.

    The units of one delta have other places each, which rise: put in order they are what is wanted, and nothing has to
    be hashed. Only finds of several deltas have places in common, and only those of several sources lie among each
    other.
    """
    ordered = sorted(finds, key=lambda places: places[:1].tolist())
    places = ordered[0] if len(ordered) == 1 else np.concatenate(ordered)
    return places if (places[1:] > places[:-1]).all() else np.unique(places)
