"""The delta's format: a slow reader in plain Python, written from docs/delta-format.md; that page's fixed vector."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard

from tests.unit.codec.test_delta_cases import (
    BASE,
    DTYPE_OF,
    RESULT,
    Bytes,
    applied,
    blob_of,
    changed_bytes,
    fast_link,
    rank,
    slow_link,
    training_step,
)
from weightsync.codec.delta_reader import DeltaReader
from weightsync.codec.delta_units import ElementKind, Unit, plan_units
from weightsync.errors import DeltaFormatError

PAGE = Path(__file__).parents[3] / "docs" / "delta-format.md"
KIND_NAMES = ["float8", "float16", "float32", "float64", "int8", "int16", "int32", "int64"]


class Bits:
    """Bits from the lowest of the first byte on."""

    def __init__(self, data: bytes) -> None:
        self.value, self.size, self.at = int.from_bytes(data, "little"), 8 * len(data), 0

    def take(self, number: int) -> int:
        found = (self.value >> self.at) & ((1 << number) - 1)
        self.at += number
        return found

    def is_at_end(self) -> bool:
        return self.at <= self.size < self.at + 8


class Varints:
    """LEB128, one behind the other."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self) -> int:
        value, shift = 0, 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value


def unpacked(frame: bytes, size: int) -> bytes:
    if not size:
        return b""
    assert zstandard.frame_content_size(frame) == size
    return zstandard.ZstdDecompressor().decompress(frame)


def stepped(bits: int, step: int, kind: ElementKind) -> int:
    """The element `step` (zigzag) ranks away."""
    size = 1 << (8 * kind.width_bytes)
    wanted = (rank(bits, kind) + (-(step + 1) // 2 if step & 1 else step // 2)) % size
    if not kind.is_float:
        return wanted
    return wanted ^ (size >> 1) if wanted & (size >> 1) else size - 1 - wanted


def mixed(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return x ^ x >> 31


def plane_steps(pieces: list[bytes], number: int, raw: list[int], gap_bits: int, step_bits: int) -> dict[int, int]:
    """Position -> step, of the form 1."""
    low, joint = Bits(pieces[0]), unpacked(pieces[1], number)
    gaps, rest = Varints(unpacked(pieces[2], raw[0])), Varints(unpacked(pieces[3], raw[1]))
    found, position = {}, -1
    for pair in joint:
        gap_low, step_low = low.take(gap_bits), low.take(step_bits)
        gap_high = pair >> 3 if pair >> 3 < 31 else 31 + gaps.take()
        step_high = pair & 7 if pair & 7 < 7 else 7 + rest.take()
        position += 1 + (gap_high << gap_bits | gap_low)
        found[position] = 1 + (step_high << step_bits | step_low)
    assert low.is_at_end()
    return found


def slow_read(blob: bytes, old: bytes) -> tuple[bytes, bytes, bytes]:
    """(base, result, new bytes), from the page alone."""
    magic, version, flags, base, result, total, num_units, zero = struct.unpack_from("<8sII16s16sQII", blob)
    assert (magic, version, flags, total, zero) == (b"wsdelta\n", 1, 1, len(blob), 0)
    head = 64 + 64 * num_units
    assert xxhash.xxh3_64_intdigest(blob[:head]) == struct.unpack_from("<Q", blob, head)[0]
    at, new = head + 8, bytearray(old)
    for index in range(num_units):
        fields = struct.unpack_from("<QQBBBBI4I2IQQ", blob, 64 + 64 * index)
        start, nbytes, code, form, gap_bits, step_bits, number = fields[:7]
        lengths, raw, checksum = fields[7:11], list(fields[11:13]), fields[13]
        assert xxhash.xxh3_64_intdigest(blob[at : at + sum(lengths)]) == checksum
        pieces = []
        for length in lengths:
            pieces.append(blob[at : at + length])
            at += length
        kind = ElementKind(KIND_NAMES[code])
        width = kind.width_bytes
        before = old[start : start + nbytes]
        elements = [int.from_bytes(before[place : place + width], "little") for place in range(0, nbytes, width)]
        if form == 3:
            new[start : start + nbytes] = pieces[0]
        elif form == 4:
            content = unpacked(pieces[0], nbytes)
            count = nbytes // width
            new[start : start + nbytes] = bytes(
                content[byte * count + place] for place in range(count) for byte in range(width)
            )
        elif form:
            assert form == 1
            steps = plane_steps(pieces, number, raw, gap_bits, step_bits)
            assert len(steps) == number
            total = 0
            for position, step in steps.items():
                value = stepped(elements[position], step, kind)
                total += mixed((value + position * 0x9E3779B97F4A7C15) % (1 << 64))
                new[start + position * width : start + (position + 1) * width] = value.to_bytes(width, "little")
            assert total % (1 << 64) == fields[14]
        else:
            assert (form, number, sum(lengths)) == (0, 0, 0)
        assert form == 1 or fields[14] == 0
    assert at == len(blob)
    return base, result, bytes(new)


@pytest.mark.parametrize("kind", list(ElementKind))
@pytest.mark.parametrize(("share", "most_step"), [(0.0, 1), (0.01, 3), (0.2, 200), (1.0, 0)])
def test_the_slow_reader_reads_what_is_written(kind: ElementKind, share: float, most_step: int) -> None:
    old, new = changed_bytes(kind, 3000, share, seed=11, most_step=most_step)
    units = plan_units([(0, len(old), DTYPE_OF[kind])], unit_bytes=4096)
    for costs in (slow_link(), fast_link()):
        assert slow_read(blob_of(old, new, units, costs), old.tobytes()) == (BASE, RESULT, new.tobytes())


def test_the_slow_reader_reads_a_training_step() -> None:
    old, new = training_step(50_000, seed=3)
    units = plan_units([(0, len(old), "bfloat16")])
    assert slow_read(blob_of(old, new, units), old.tobytes()) == (BASE, RESULT, new.tobytes())


# --- the page's vector ------------------------------------------------------------------------------------------


def vector_source() -> tuple[Bytes, Bytes, tuple[Unit, ...]]:
    """The page's source: old, new and units."""
    old = (7 * np.arange(300) % 251).astype(np.uint8)
    new = old.copy()
    halves = new[:192].view(np.uint16)
    halves[5] += 1
    halves[40] -= 9
    halves[95] ^= 0x8000
    new[288:] ^= 0xFF
    return old, new, plan_units([(0, 192, "bfloat16"), (192, 96, "int32"), (288, 12, "uint8")])


def page_blob() -> bytes:
    """The page's hex block."""
    found = re.search(r"## Fixed vector\n.*?```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return bytes.fromhex(found.group(1))


def test_the_pages_vector_is_read() -> None:
    old, new, units = vector_source()
    reader = DeltaReader(page_blob(), units)
    assert (reader.base, reader.result) == (BASE, RESULT)
    assert [reader.form(index).name for index in range(3)] == ["PLANES", "UNCHANGED", "FULL"]
    assert np.array_equal(applied(reader, old), new)
    assert slow_read(page_blob(), old.tobytes())[2] == new.tobytes()


def test_the_pages_vector_is_written() -> None:
    """All but zstd's own choices, which may differ from one of its versions to the next."""
    old, new, units = vector_source()
    made, wanted = DeltaReader(blob_of(old, new, units), units), DeltaReader(page_blob(), units)
    for index in range(len(units)):
        entry, expected = made.entry(index), wanted.entry(index)
        assert (entry.form, entry.num_changed, entry.raw_lengths) == (
            expected.form,
            expected.num_changed,
            expected.raw_lengths,
        )
        assert (entry.gap_bits, entry.step_bits) == (expected.gap_bits, expected.step_bits)
        assert entry.values == expected.values
        assert contents(made, index) == contents(wanted, index)


OF_FORM_2 = """
777364656c74610a0100000001000000000102030405060708090a0b0c0d0e0f
6465666768696a6b6c6d6e6f7071727348010000000000000300000000000000
0000000000000000c00000000000000001020000030000000300000004000000
2d0000000000000097010000000000007e891ed70958af25ed32e9a55cb942dd
c000000000000000600000000000000006000000000000000000000000000000
00000000000000000000000000000000c294d3380580062d0000000000000000
20010000000000000c00000000000000040300000c0000000c00000000000000
0000000000000000000000000000000087911b63c9555f920000000000000000
90d0e849522dbfabc2d116e602f78328b52ffd6097001d0100a8010003000000
051256050055050000550501395505040003261094cd4172f814c002f7f0e9e2
dbd4cdc6bfb8b1aa
"""
"""The page's source as releases before this one could write it: its first unit has the form 2."""


def test_a_form_that_earlier_releases_wrote_is_refused_by_its_number() -> None:
    """Whole and with right checksums: nothing of it is read, and the receiver knows why."""
    _, _, units = vector_source()
    with pytest.raises(DeltaFormatError, match="unit 0 of a delta has form 2, which this library does not read"):
        DeltaReader(bytes.fromhex(OF_FORM_2), units)


def contents(reader: DeltaReader, index: int) -> list[bytes]:
    """A payload's four pieces, unpacked."""
    body, found = bytes(reader.payload(index)), []
    for length in reader.entry(index).lengths:
        piece, body = body[:length], body[length:]
        is_frame = piece[:4] == zstandard.FRAME_HEADER
        found.append(zstandard.ZstdDecompressor().decompress(piece) if is_frame else piece)
    return found


def test_the_pages_rank_map_is_the_kernels() -> None:
    rows = re.findall(r"^\| `(0x[0-9a-f]{4})` \|[^|]*\| `(0x[0-9a-f]{4})` \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(rows) >= 8
    for bits, wanted in rows:
        assert rank(int(bits, 16), ElementKind.FLOAT16) == int(wanted, 16)
