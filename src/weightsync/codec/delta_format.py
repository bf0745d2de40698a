"""The head of a delta's blob: what both ends agree on before a unit is read. The bytes are in docs/delta-format.md.

Nothing in a head is trusted before its checksum is right, and no length in it before the units of the reader's own
layout allow it.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Sequence

import xxhash

from weightsync.codec.delta_units import Unit
from weightsync.errors import DeltaFormatError

MAGIC = b"wsdelta\n"
FORMAT_VERSION = 1

_HEAD = struct.Struct("<8sII16s16sQII")
_ENTRY = struct.Struct("<QQBBBBI4I2IQQ")
_SUM = struct.Struct("<Q")
_HAS_RESULT = 1
_NO_RESULT = bytes(16)
_MAX_UNITS = 1 << 24


class Form(enum.IntEnum):
    """How a unit's change is written. 2 was a form of earlier releases; like any unknown number it is refused."""

    UNCHANGED = 0
    PLANES = 1
    FULL = 3
    """The unit's new bytes as they are."""
    PACKED = 4
    """The unit's new bytes as byte planes in one zstd frame."""

    @property
    def is_full(self) -> bool:
        """Whether it is the new bytes, whatever the old ones were."""
        return self in (Form.FULL, Form.PACKED)


MAX_STEP_BITS = {1: 5, 2: 13, 4: 24, 8: 24}
"""The most step bits of an element of so many bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A unit's line in the table.

    Attributes:
        num_changed: elements that differ; all of the unit's in a full form.
        gap_bits: low bits of gaps that are written as they are (`PLANES`, else 0).
        step_bits: likewise of steps.
        lengths: bytes of the four pieces of its payload, in order.
        raw_lengths: bytes of the third and of the fourth piece, unpacked.
        checksum: XXH3-64 of its payload.
        values: `delta_kernels.sum_values` of the elements after the change (`PLANES`, else 0): what tells that the old
            bytes were the right ones.
    """

    form: Form
    num_changed: int = 0
    gap_bits: int = 0
    step_bits: int = 0
    lengths: tuple[int, int, int, int] = (0, 0, 0, 0)
    raw_lengths: tuple[int, int] = (0, 0)
    checksum: int = xxhash.xxh3_64_intdigest(b"")
    values: int = 0

    @property
    def nbytes(self) -> int:
        return sum(self.lengths)


def head_bytes(num_units: int) -> int:
    """Bytes of the head of a blob of so many units."""
    return _HEAD.size + num_units * _ENTRY.size + _SUM.size


def write_head(units: Sequence[Unit], entries: Sequence[Entry], *, base: bytes, result: bytes | None) -> bytes:
    """The head of a blob whose payloads, one behind the other in the units' order, follow it."""
    total = head_bytes(len(units)) + sum(entry.nbytes for entry in entries)
    flags = 0 if result is None else _HAS_RESULT
    parts = [_HEAD.pack(MAGIC, FORMAT_VERSION, flags, base, result or _NO_RESULT, total, len(units), 0)]
    for unit, entry in zip(units, entries, strict=True):
        parts.append(
            _ENTRY.pack(
                unit.start,
                unit.nbytes,
                unit.kind.code,
                entry.form,
                entry.gap_bits,
                entry.step_bits,
                entry.num_changed,
                *entry.lengths,
                *entry.raw_lengths,
                entry.checksum,
                entry.values,
            )
        )
    body = b"".join(parts)
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def read_head(blob: memoryview, units: Sequence[Unit]) -> tuple[bytes, bytes | None, tuple[Entry, ...]]:
    """Reads and checks a head.

    Args:
        blob: the whole blob, 1-D bytes.
        units: what the reader's own layout is cut into.

    Returns:
        base, result (None where the sender did not say) and each unit's entry.

    Raises:
        DeltaFormatError: not a blob of this version and these units, damaged, cut off or too long; or its table
            asks for more than the units have. Payloads were not looked at.
    """
    size = head_bytes(len(units))
    if len(units) > _MAX_UNITS or blob.nbytes < _HEAD.size + _SUM.size:
        raise DeltaFormatError(f"{blob.nbytes} bytes are no delta of {len(units)} units")
    magic, version, flags, base, result, total, num_units, zero = _HEAD.unpack_from(blob)
    if magic != MAGIC:
        raise DeltaFormatError("these bytes do not start as a delta does")
    if version != FORMAT_VERSION:
        raise DeltaFormatError(f"a delta of format {version} came, this library reads {FORMAT_VERSION}")
    if total != blob.nbytes or blob.nbytes < size:
        raise DeltaFormatError(f"a delta of {total} bytes came as {blob.nbytes}")
    if num_units != len(units):
        raise DeltaFormatError(f"a delta of {num_units} units does not fit a layout of {len(units)}")
    if xxhash.xxh3_64_intdigest(blob[: size - _SUM.size]) != _SUM.unpack_from(blob, size - _SUM.size)[0]:
        raise DeltaFormatError("the head of a delta is damaged: its checksum is wrong")
    if flags & ~_HAS_RESULT or zero or (not flags and result != _NO_RESULT):
        raise DeltaFormatError("the head of a delta has bits that this format does not know")
    entries = tuple(
        _entry(index, unit, fields)
        for index, (unit, fields) in enumerate(
            zip(units, _ENTRY.iter_unpack(blob[_HEAD.size : size - _SUM.size]), strict=True)
        )
    )
    if size + sum(entry.nbytes for entry in entries) != total:
        raise DeltaFormatError("the payloads of a delta are not as long as the delta")
    return base, result if flags else None, entries


def _entry(index: int, unit: Unit, fields: tuple[int, ...]) -> Entry:
    start, nbytes, kind, form, gap_bits, step_bits, num_changed = fields[:7]
    if (start, nbytes, kind) != (unit.start, unit.nbytes, unit.kind.code):
        raise DeltaFormatError(f"unit {index} of a delta is not that of the layout", unit=index)
    try:
        entry = Entry(
            form=Form(form),
            num_changed=num_changed,
            gap_bits=gap_bits,
            step_bits=step_bits,
            lengths=(fields[7], fields[8], fields[9], fields[10]),
            raw_lengths=(fields[11], fields[12]),
            checksum=fields[13],
            values=fields[14],
        )
    except ValueError:
        raise DeltaFormatError(
            f"unit {index} of a delta has form {form}, which this library does not read", unit=index
        ) from None
    if not _is_possible(unit, entry):
        raise DeltaFormatError(f"unit {index} of a delta has numbers that can't go with its form", unit=index)
    return entry


def _is_possible(unit: Unit, entry: Entry) -> bool:
    """Whether a reader may make room for what the entry says: never more than the unit's elements allow."""
    number, bits = entry.num_changed, entry.gap_bits + entry.step_bits
    lengths, raw = entry.lengths, entry.raw_lengths
    if entry.form is not Form.PLANES and (bits or entry.values):
        return False
    if entry.form is Form.UNCHANGED:
        return number == 0 and not any(lengths) and not any(raw)
    if entry.form is Form.FULL:
        return number == unit.num_elements and lengths == (unit.nbytes, 0, 0, 0) and not any(raw)
    if entry.form is Form.PACKED:
        return number == unit.num_elements and lengths[0] > 0 and not any(lengths[1:]) and not any(raw)
    if not 1 <= number <= unit.num_elements:
        return False
    fits = entry.gap_bits <= 8 and entry.step_bits <= MAX_STEP_BITS[unit.kind.width_bytes]
    fits = fits and lengths[0] == -(-number * bits // 8) and lengths[1] > 0
    fits = fits and (lengths[2] > 0) == (raw[0] > 0) and (lengths[3] > 0) == (raw[1] > 0)
    return fits and raw[0] <= 5 * number and raw[1] <= varint_bytes(unit) * number


def varint_bytes(unit: Unit) -> int:
    """Bytes of the longest escaped step of the unit's kind."""
    return -(-unit.kind.width_bytes * 8 // 7)
