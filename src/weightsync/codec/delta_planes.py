"""One unit in each of its forms: planes, full and packed. docs/delta-format.md has the bytes."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from weightsync.codec import delta_kernels as kernels
from weightsync.codec.delta_format import MAX_STEP_BITS, Entry, Form, varint_bytes
from weightsync.codec.delta_units import Unit
from weightsync.errors import DeltaFormatError

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]
Positions = npt.NDArray[np.uint32]

LEVEL = 1
"""zstd's level. On simulated AdamW steps (bf16, 0.4 to 11 % changed) level 3 took 3 to 7 times as long and made
deltas 2 to 5 % larger."""

_SAMPLE = 2048
_EIGHT = np.zeros(1, np.uint64)
_ALL_ONES = (1 << 64) - 1
_own = threading.local()


class Payload(NamedTuple):
    """A unit's line in the table and the bytes that go with it, in order."""

    entry: Entry
    pieces: tuple[bytes, ...]


def shape_of(unit: Unit) -> tuple[int, int]:
    """(bits of an element, all ones where its rank map is used else 0): what the kernels take."""
    return unit.kind.width_bytes * 8, _ALL_ONES if unit.kind.is_float else 0


class Scratch:
    """Room for changes that one call uses again and again: fresh memory for each unit costs a page fault a page.

    Any number of threads may use it at once. What it gave is taken back by `put`.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._most = max((unit.num_elements * (4 + unit.kind.width_bytes) + 8 for unit in units), default=0)
        self._free: collections.deque[Bytes] = collections.deque()

    def take(self) -> Bytes:
        """Room for the changes of any of the units; memory is used only where it is written."""
        try:
            return self._free.pop()
        except IndexError:
            return np.empty(self._most, np.uint8)

    def put(self, room: Bytes) -> None:
        """Gives room back; nobody uses it or a view of it any more."""
        self._free.append(room)


class Found(NamedTuple):
    """The elements of a unit that differ: where, by how much, and `kernels.sum_values` of what they are now."""

    positions: Positions
    steps: Words
    values: int


def find_changes(old: Bytes, new: Bytes, unit: Unit, room: int, scratch: Bytes | None = None) -> Found | None:
    """The elements that differ; None where there are more than `room`. They lie in `scratch`, where it is given."""
    bits, flips = shape_of(unit)
    room = max(1, min(room, unit.num_elements))
    if scratch is None:
        scratch = np.empty(room * (4 + unit.kind.width_bytes) + 8, np.uint8)
    positions = scratch[: 4 * room].view(np.uint32)
    steps = scratch[4 * (room + room % 2) :][: room * unit.kind.width_bytes].view(unit.kind.word)
    total = np.empty(1, np.uint64)
    number = kernels.find_changes(old, new, steps, positions, bits, flips, total)
    return None if number == kernels.TOO_MANY else Found(positions[:number], steps[:number], int(total[0]))


def planes_payload(unit: Unit, found: Found) -> Payload:
    """The form `PLANES` of at least one change."""
    positions, steps, values = found
    number = len(positions)
    gap_bits, step_bits = _choose_split(unit, positions, steps)
    num_low = -(-number * (gap_bits + step_bits) // 8)
    low, joint = np.empty(num_low + 8, np.uint8), np.empty(number, np.uint8)
    gaps, rest = np.empty(5 * number, np.uint8), np.empty(varint_bytes(unit) * number, np.uint8)
    num_gaps, num_rest = kernels.write_planes(positions, steps, gap_bits, step_bits, low, joint, gaps, rest)
    pieces = (low[:num_low].tobytes(), pack(joint), pack(gaps[:num_gaps]), pack(rest[:num_rest]))
    return payload(
        Form.PLANES,
        pieces,
        num_changed=number,
        gap_bits=gap_bits,
        step_bits=step_bits,
        raw_lengths=(num_gaps, num_rest),
        values=values,
    )


def _choose_split(unit: Unit, positions: Positions, steps: Words) -> tuple[int, int]:
    """(gap bits, step bits), from a sample."""
    number = len(positions)
    which = np.arange(0, number, max(1, number // _SAMPLE))
    gaps = positions[which].astype(np.int64)
    gaps[1:] -= positions[which[1:] - 1]
    gaps[1:] -= 1
    most = MAX_STEP_BITS[unit.kind.width_bytes]
    found = kernels.choose_split(gaps.view(np.uint64), steps[which].astype(np.uint64), number, most)
    return int(found[0]), int(found[1])


def full_payload(unit: Unit, new: Bytes) -> Payload:
    """The form `FULL`: a copy of the new bytes."""
    return payload(Form.FULL, (new.tobytes(),), num_changed=unit.num_elements)


def packed_payload(unit: Unit, new: Bytes) -> Payload:
    """The form `PACKED`, or `FULL` where packing gains nothing."""
    planes = np.empty(len(new), np.uint8)
    kernels.split_bytes(new, planes, unit.kind.width_bytes)
    packed = pack(planes)
    if len(packed) >= len(new):
        return full_payload(unit, new)
    return payload(Form.PACKED, (packed,), num_changed=unit.num_elements)


def payload(form: Form, pieces: tuple[bytes, ...], **facts: Any) -> Payload:
    """A payload of up to four pieces, with their lengths and their checksum."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    first, second, third, fourth = [len(piece) for piece in pieces] + [0] * (4 - len(pieces))
    lengths = (first, second, third, fourth)
    return Payload(Entry(form=form, lengths=lengths, checksum=state.intdigest(), **facts), pieces)


def pieces_of(entry: Entry, body: memoryview) -> list[memoryview]:
    """The four pieces of a unit's payload.

    Raises:
        DeltaFormatError: the payload's checksum is not the table's.
    """
    if body.nbytes != entry.nbytes or xxhash.xxh3_64_intdigest(body) != entry.checksum:
        raise DeltaFormatError("a unit of a delta is damaged: its checksum is wrong")
    pieces, at = [], 0
    for length in entry.lengths:
        pieces.append(body[at : at + length])
        at += length
    return pieces


def read_planes(unit: Unit, entry: Entry, body: memoryview) -> tuple[Positions, Words]:
    """Positions and steps of a unit in the form `PLANES`.

    Raises:
        DeltaFormatError: the payload is damaged, or is not what its table says.
    """
    low, joint, gaps, rest = pieces_of(entry, body)
    number = entry.num_changed
    positions, steps = np.empty(number, np.uint32), np.empty(number, unit.kind.word)
    found = kernels.read_planes(
        np.frombuffer(low, np.uint8),
        unpack(joint, number),
        unpack(gaps, entry.raw_lengths[0]),
        unpack(rest, entry.raw_lengths[1]),
        entry.gap_bits,
        entry.step_bits,
        unit.num_elements,
        shape_of(unit)[0],
        positions,
        steps,
        _EIGHT,
    )
    if found == kernels.BAD:
        raise DeltaFormatError("a unit of a delta has changes that its elements can't have")
    return positions, steps


def read_full(unit: Unit, entry: Entry, body: memoryview) -> Bytes:
    """The new bytes of a unit in a full form; of the form `FULL` a view of the blob.

    Raises:
        DeltaFormatError: the payload is damaged, or is not what its table says.
    """
    piece = pieces_of(entry, body)[0]
    if entry.form is Form.FULL:
        return np.frombuffer(piece, np.uint8)
    joined = np.empty(unit.nbytes, np.uint8)
    kernels.join_bytes(unpack(piece, unit.nbytes), joined, unit.kind.width_bytes)
    return joined


def pack(data: Bytes) -> bytes:
    """One zstd frame that tells its content's size; nothing where there is nothing."""
    if not len(data):
        return b""
    if not hasattr(_own, "packer"):
        _own.packer = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False, write_content_size=True)
    packed: bytes = _own.packer.compress(data)
    return packed


def unpack(frame: memoryview, size: int) -> Bytes:
    """The content of one zstd frame, which has to be of `size` bytes: known before room is made for it.

    Raises:
        DeltaFormatError: it is not one whole frame of that content.
    """
    if not size and not frame.nbytes:
        return np.empty(0, np.uint8)
    if not hasattr(_own, "unpacker"):
        _own.unpacker = zstandard.ZstdDecompressor()
    try:
        if zstandard.frame_content_size(frame) != size:
            raise DeltaFormatError(f"a frame of a delta does not have the {size} bytes that its table says")
        content = _own.unpacker.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaFormatError(f"a frame of a delta is damaged: {error}") from None
    if len(content) != size:
        raise DeltaFormatError(f"a frame of a delta does not have the {size} bytes that its table says")
    return np.frombuffer(content, np.uint8)
