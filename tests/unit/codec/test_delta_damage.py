"""Blobs that are damaged, cut off, forged or of another base: a typed error, nothing written, no large allocation."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.codec.test_delta_cases import (
    BASE,
    DTYPE_OF,
    Bytes,
    blob_of,
    changed_bytes,
    fast_link,
    raised_by,
    slow_link,
)
from weightsync.codec import delta_kernels as kernels
from weightsync.codec.delta_format import Entry, Form, head_bytes, write_head
from weightsync.codec.delta_reader import DeltaReader
from weightsync.codec.delta_units import ElementKind, Unit, plan_units
from weightsync.errors import DeltaFormatError

KIND_LIST = list(ElementKind)


def every_form() -> tuple[Bytes, tuple[Unit, ...], dict[str, bytes]]:
    """Small blobs that have every form between them, with escapes."""
    pieces = [
        changed_bytes(ElementKind.FLOAT16, 300, 0.1, seed=1, most_step=30),
        changed_bytes(ElementKind.INT32, 40, 0.0, seed=2),
        changed_bytes(ElementKind.FLOAT32, 60, 1.0, seed=3, most_step=0),
    ]
    old = np.concatenate([before for before, _ in pieces])
    new = np.concatenate([after for _, after in pieces])
    new.view(np.uint16)[299] ^= 0x4001
    units = plan_units([(0, 600, "bfloat16"), (600, 160, "int32"), (760, 240, "float32")])
    blobs = {"planes": blob_of(old, new, units, slow_link()), "full": blob_of(old, new, units, fast_link())}
    return old, units, blobs


def read_all(blob: bytes, units: tuple[Unit, ...], old: Bytes) -> None:
    """What a receiver does before it writes anything."""
    reader = DeltaReader(blob, units)
    for index, unit in enumerate(units):
        reader.decode(index, old[unit.start : unit.end])


@pytest.mark.parametrize("which", ["planes", "full"])
def test_one_wrong_byte_anywhere_is_found(which: str) -> None:
    old, units, blobs = every_form()
    blob = blobs[which]
    read_all(blob, units, old)
    for at in range(len(blob)):
        for change in (1, 0x80, 0xFF):
            bad = bytearray(blob)
            bad[at] ^= change
            error = raised_by(lambda bad=bad: read_all(bytes(bad), units, old))  # type: ignore[misc]
            assert type(error) is DeltaFormatError, f"byte {at} ^ {change}: {error!r}"


@pytest.mark.parametrize("which", ["planes", "full"])
def test_cut_off_or_longer_is_found(which: str) -> None:
    _, units, blobs = every_form()
    blob = blobs[which]
    for size in range(len(blob)):
        assert type(raised_by(lambda size=size: DeltaReader(blob[:size], units))) is DeltaFormatError  # type: ignore[misc]
    for more in (b"\0", b"x" * 100):
        assert type(raised_by(lambda more=more: DeltaReader(blob + more, units))) is DeltaFormatError  # type: ignore[misc]


def test_another_layout_is_refused() -> None:
    _, units, blobs = every_form()
    first = units[0]
    for other in (
        units[:-1],
        (*units, Unit(start=1000, nbytes=4, kind=ElementKind.INT32)),
        (dataclasses.replace(first, kind=ElementKind.INT16), *units[1:]),
        (dataclasses.replace(first, nbytes=598), *units[1:]),
        (units[1], units[0], units[2]),
        (),
    ):
        with pytest.raises(DeltaFormatError):
            DeltaReader(blobs["planes"], other)


def forged(unit: Unit, entry: Entry, body: bytes) -> bytes:
    """A blob of one unit whose checksums are right, whatever it says."""
    entry = dataclasses.replace(entry, checksum=xxhash.xxh3_64_intdigest(body))
    return write_head([unit], [entry], base=BASE, result=None) + body


def entry_of(blob: bytes, unit: Unit) -> tuple[Entry, bytes]:
    return DeltaReader(blob, [unit]).entry(0), blob[head_bytes(1) :]


def unpacked(frame: bytes) -> bytes | None:
    """A frame's content; None where an earlier change has spoiled it."""
    try:
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=1 << 20)
    except zstandard.ZstdError:
        return None


@st.composite
def damaged_payloads(draw: st.DrawFn) -> tuple[Unit, Entry, bytes, Bytes]:
    """A real unit's payload and entry with anything in them changed; pieces that unpack are packed again."""
    kind = draw(st.sampled_from(KIND_LIST))
    number = draw(st.integers(1, 400))
    seed = draw(st.integers(0, 2**31))
    old, new = changed_bytes(kind, number, draw(st.sampled_from([0.02, 0.3, 1.0])), seed=seed, most_step=100)
    new.view(kind.word)[-1] ^= kind.word.type(1)
    (unit,) = plan_units([(0, len(old), DTYPE_OF[kind])])
    entry, body = entry_of(blob_of(old, new, (unit,)), unit)
    pieces, at = [], 0
    for length in entry.lengths:
        pieces.append(bytearray(body[at : at + length]))
        at += length
    facts: dict[str, object] = {}
    for _ in range(draw(st.integers(1, 4))):
        which = draw(st.integers(0, 3))
        piece = pieces[which]
        packed = bytes(piece[:4]) == zstandard.FRAME_HEADER and draw(st.booleans())
        if packed:
            content = unpacked(bytes(piece))
            packed = content is not None
            piece = piece if content is None else bytearray(content)
        action = draw(st.sampled_from(["byte", "bytes", "cut", "longer", "other"]))
        if action == "byte" and piece:
            piece[draw(st.integers(0, len(piece) - 1))] = draw(st.integers(0, 255))
        elif action == "bytes" and piece:
            place = draw(st.integers(0, len(piece) - 1))
            piece[place : place + 8] = draw(st.binary(min_size=8, max_size=8))[: len(piece) - place]
        elif action == "cut" and piece:
            del piece[draw(st.integers(0, len(piece) - 1)) :]
        elif action == "longer":
            piece += draw(st.binary(min_size=1, max_size=20))
        elif action == "other":
            name = draw(st.sampled_from(["num_changed", "gap_bits", "step_bits", "form", "raw"]))
            if name == "num_changed":
                facts[name] = max(0, entry.num_changed + draw(st.sampled_from([-1, 1, 2**31, 1000])))
            elif name == "form":
                facts[name] = draw(st.sampled_from(list(Form)))
            elif name == "raw":
                facts["raw_lengths"] = draw(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)))
            else:
                facts[name] = draw(st.integers(0, 255))
        if packed and "raw_lengths" not in facts and which in (2, 3):
            raw = [*entry.raw_lengths]
            raw[which - 2] = len(piece)
            entry = dataclasses.replace(entry, raw_lengths=(raw[0], raw[1]))
        pieces[which] = bytearray(zstandard.ZstdCompressor().compress(bytes(piece))) if packed else piece
    first, second, third, fourth = (len(piece) for piece in pieces)
    entry = dataclasses.replace(entry, lengths=(first, second, third, fourth), **facts)  # type: ignore[arg-type]
    return unit, entry, b"".join(pieces), old


@settings(deadline=None, max_examples=1500, suppress_health_check=[HealthCheck.too_slow])
@given(damaged_payloads(), st.booleans())
def test_forged_content_is_refused_or_stays_within_its_unit(
    case: tuple[Unit, Entry, bytes, Bytes], write: bool
) -> None:
    """Right checksums over wrong content: an error of the format, or some change inside the unit; nothing else."""
    unit, entry, body, old = case
    guard = np.full(len(old) + 128, 0xA5, np.uint8)
    guard[64:-64] = old
    try:
        change = DeltaReader(forged(unit, entry, body), [unit]).decode(0, guard[64:-64], write=write)
    except DeltaFormatError:
        assert (guard[:64] == 0xA5).all()
        assert (guard[-64:] == 0xA5).all()
        return
    if change is None:
        return
    if change.positions is not None:
        places = change.positions.astype(np.int64)
        assert (np.diff(places) > 0).all()
        assert 0 <= places[0] <= places[-1] < unit.num_elements
        assert change.old is not None
        assert not (change.old == change.new).any()
    change.apply(guard[64:-64])
    assert (guard[:64] == 0xA5).all()
    assert (guard[-64:] == 0xA5).all()


def planes(unit: Unit, joint: bytes, *, low: bytes = b"", gaps: bytes = b"", rest: bytes = b"", **facts: int) -> bytes:
    """A blob of one unit in the form `PLANES`."""

    def packed(data: bytes) -> bytes:
        return zstandard.ZstdCompressor().compress(data) if data else b""

    pieces = (low, packed(joint), packed(gaps), packed(rest))
    first, second, third, fourth = (len(piece) for piece in pieces)
    entry = Entry(
        form=Form.PLANES,
        num_changed=facts.pop("num_changed", len(joint)),
        lengths=(first, second, third, fourth),
        raw_lengths=(len(gaps), len(rest)),
        **facts,
    )
    return forged(unit, entry, b"".join(pieces))


WIDE = Unit(start=0, nbytes=800, kind=ElementKind.INT64)
NARROW = Unit(start=0, nbytes=100, kind=ElementKind.INT8)
MAX_VARINT = b"\xff" * 9


@pytest.mark.parametrize(
    ("unit", "blob"),
    [
        (WIDE, planes(WIDE, b"\x08" * 51)),  # gaps of 1 each: the last position is 101
        (WIDE, planes(WIDE, b"\xf8", gaps=b"\x64")),  # 31 + 100
        (WIDE, planes(WIDE, b"\xf8", gaps=MAX_VARINT + b"\x01")),
        (WIDE, planes(WIDE, b"\xf8\xf8", gaps=b"\x01")),  # an escape too few
        (WIDE, planes(WIDE, b"\x00", gaps=b"\x01")),  # one too many
        (WIDE, planes(WIDE, b"\x00", rest=b"\x01")),
        (WIDE, planes(WIDE, b"\x07", rest=b"\x80")),  # a varint that does not end
        (WIDE, planes(WIDE, b"\x07", rest=MAX_VARINT + b"\x01")),  # 7 + 2^64 - 1
        (WIDE, planes(WIDE, b"\x07", rest=b"\xf8" + b"\xff" * 8 + b"\x01")),  # 2^64 - 1: the step would be 0
        (NARROW, planes(NARROW, b"\x07", rest=b"\xf8\x01")),  # 7 + 248: the step would be 256
        (NARROW, planes(NARROW, b"\x07", low=b"\x1f", rest=b"\x01", step_bits=5)),  # 8 * 32 + 31
        (NARROW, planes(NARROW, b"\x00", low=b"\xff", step_bits=6)),  # more step bits than an element has room for
        (NARROW, planes(NARROW, b"\x00", low=b"\xff\x00", gap_bits=9)),
        (NARROW, planes(NARROW, b"\x00", low=b"\x00\x00", gap_bits=8)),  # low bits of two
        (NARROW, planes(NARROW, b"\x00" * 101)),
        (NARROW, planes(NARROW, b"\x00" * 50, num_changed=100)),
        (NARROW, planes(NARROW, b"\x00" * 50, num_changed=49)),
        (NARROW, planes(NARROW, b"", num_changed=0)),
    ],
)
def test_numbers_that_no_unit_has_are_refused(unit: Unit, blob: bytes) -> None:
    with pytest.raises(DeltaFormatError):
        DeltaReader(blob, [unit]).steps(0)  # decode would see it by the values as well


@pytest.mark.parametrize(
    ("joint", "rest", "new"), [(b"\x00", b"", 255), (b"\x07", b"\xf7\x01", 128), (b"\x07", b"\x00", 4)]
)
def test_the_widest_steps_are_read(joint: bytes, rest: bytes, new: int) -> None:
    """Steps 1 (-1), 255 (-128) and 8 (+4) of an 8-bit integer: the bounds above are not too narrow."""
    total = int(kernels.sum_values(np.zeros(1, np.uint32), np.asarray([new], np.uint8)))
    change = DeltaReader(planes(NARROW, joint, rest=rest, values=total), [NARROW]).decode(0, np.zeros(100, np.uint8))
    assert change is not None
    assert change.new.tolist() == [new]


def test_a_frame_that_unpacks_to_more_makes_no_room_for_it() -> None:
    """A frame of a gigabyte in a few bytes: its content's size is compared before anything is allocated."""
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    longer = zstandard.ZstdCompressor().compress(bytes(100)) + b"more"
    for frame in (bomb, silent, longer, b"\x28\xb5\x2f\xfd", b"?" * 50):
        for form, number in ((Form.PACKED, 100), (Form.PLANES, 100)):
            lengths = (len(frame), 0, 0, 0) if form is Form.PACKED else (0, len(frame), 0, 0)
            blob = forged(NARROW, Entry(form=form, num_changed=number, lengths=lengths), frame)
            reader = DeltaReader(blob, [NARROW])
            tracemalloc.start()
            error = raised_by(lambda reader=reader: reader.decode(0, np.zeros(100, np.uint8)))  # type: ignore[misc]
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert type(error) is DeltaFormatError
            assert peak < 1 << 20


def test_more_changes_than_elements_are_refused_before_there_is_room_for_them() -> None:
    frame = zstandard.ZstdCompressor().compress(b"x")
    many = 1 << 31
    wrong = [
        Entry(form=Form.PLANES, num_changed=many, lengths=(0, len(frame), 0, 0)),
        Entry(form=Form.PLANES, num_changed=9, lengths=(0, len(frame), 1, 0), raw_lengths=(1 << 20, 0)),
        Entry(form=Form.PLANES, num_changed=9, lengths=(0, len(frame), 0, 1), raw_lengths=(0, 1 << 20)),
    ]
    for entry in wrong:
        with pytest.raises(DeltaFormatError, match="numbers that can't go with its form"):
            DeltaReader(forged(NARROW, entry, bytes(entry.nbytes)), [NARROW])


@pytest.mark.parametrize("kind", list(ElementKind))
def test_a_wrong_bit_of_the_base_is_found_in_an_element_that_changes(kind: ElementKind) -> None:
    """Any bit of any of them, though the difference is right. Seen to pass unseen without `Entry.values`."""
    old, new = changed_bytes(kind, 500, 0.02, seed=5)
    units = plan_units([(0, len(old), DTYPE_OF[kind])])
    reader = DeltaReader(blob_of(old, new, units), units)
    width = kind.width_bytes
    changed = sorted({int(byte) // width for byte in np.flatnonzero(old != new)})
    assert changed
    for element in changed:
        for bit in range(8 * width):
            rotten = old.copy()
            rotten[element * width + bit // 8] ^= 1 << bit % 8
            with pytest.raises(DeltaFormatError):
                reader.decode(0, rotten)
            with pytest.raises(DeltaFormatError):
                reader.decode(0, rotten, write=True)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400))
def test_any_bytes_are_no_delta(data: bytes) -> None:
    with pytest.raises(DeltaFormatError):
        DeltaReader(data, [NARROW])
