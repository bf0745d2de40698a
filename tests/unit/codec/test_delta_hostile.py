"""Frames made to hurt: whatever sizes a delta declares, it is refused within the memory that its units allow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.codec.test_delta_cases import Bytes
from tests.unit.codec.test_delta_damage import damaged_payloads, forged
from weightsync.codec.delta_format import Entry, Form
from weightsync.codec.delta_reader import DeltaReader
from weightsync.codec.delta_units import ElementKind, Unit
from weightsync.errors import DeltaFormatError

MOST_GROWTH_BYTES = 64 << 20
UNIT = Unit(start=0, nbytes=4096, kind=ElementKind.INT16)
BLOCK_BYTES = 1 << 17
MAGIC = b"\x28\xb5\x2f\xfd"


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """While the body runs this process takes no more than so much memory beyond what it has: the peak counts."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = _memory_bytes("VmRSS")
    yield
    assert _memory_bytes("VmHWM") - before < MOST_GROWTH_BYTES


def _memory_bytes(which: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) << 10
    raise AssertionError(f"this system does not count {which}")


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """What begins as a zstd frame: windows of up to terabytes, contents of up to 2^64 bytes, any blocks."""
    size_code, single = draw(st.integers(0, 3)), draw(st.integers(0, 1))
    checksum, dictionary = draw(st.integers(0, 1)), draw(st.integers(0, 3))
    head = bytes([size_code << 6 | single << 5 | checksum << 2 | dictionary])
    window = b"" if single else bytes([draw(st.integers(0, 255))])
    names = draw(st.binary(min_size=(0, 1, 2, 4)[dictionary], max_size=(0, 1, 2, 4)[dictionary]))
    width = (1 if single else 0, 2, 4, 8)[size_code]
    content = draw(st.sampled_from([4096, 2048, 2**31, 2**40, 2**63, 2**64 - 1, 0]) | st.integers(0, 2**64 - 1))
    size = (content - (256 if width == 2 else 0)) % (1 << 8 * width)
    body = b""
    for _ in range(draw(st.integers(0, 6))):
        kind, length = draw(st.integers(0, 3)), draw(st.sampled_from([0, 1, 100, 4096, 1 << 17, (1 << 21) - 1]))
        body += (length << 3 | kind << 1 | draw(st.integers(0, 1))).to_bytes(3, "little")
        body += draw(st.binary(max_size=40))
    return MAGIC + head + window + names + size.to_bytes(width, "little") + body


def bomb(num_blocks: int, declared: int | None) -> bytes:
    """A frame of so many blocks of 128 KiB, each of one byte that is repeated: four bytes make 131,072."""
    head = bytes([0xC0, 0x60]) + declared.to_bytes(8, "little") if declared is not None else bytes([0x00, 0x60])
    block = BLOCK_BYTES << 3 | 1 << 1
    body = (block.to_bytes(3, "little") + b"x") * (num_blocks - 1) + (block | 1).to_bytes(3, "little") + b"x"
    return MAGIC + head + body


@st.composite
def bombs(draw: st.DrawFn) -> bytes:
    """That say how much is in them, say something else, or say nothing."""
    num_blocks = draw(st.sampled_from([1, 2, 1000, 3000]))
    return bomb(
        num_blocks, draw(st.sampled_from([num_blocks * BLOCK_BYTES, UNIT.nbytes, UNIT.num_elements, 1000, None]))
    )


def check_frame(frame: bytes, form: Form) -> None:
    """In the place of each packed piece."""
    lengths = (len(frame), 0, 0, 0) if form is Form.PACKED else (0, len(frame), 0, 0)
    entry = Entry(form=form, num_changed=UNIT.num_elements, lengths=lengths)
    check(UNIT, forged(UNIT, entry, frame), np.zeros(UNIT.nbytes, np.uint8))


def check(unit: Unit, blob: bytes, old: Bytes) -> None:
    """It is refused, or makes a change of the unit; within the bound."""
    with bounded():
        try:
            change = DeltaReader(blob, [unit]).decode(0, old.copy(), write=True)
        except DeltaFormatError:
            return
    assert change is None or 0 < len(change.new) <= unit.num_elements


def under_a_bound(num_frames: int, num_payloads: int) -> None:
    @settings(deadline=None, max_examples=num_frames, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(frames() | bombs(), st.sampled_from([Form.PACKED, Form.PLANES]))
    def hostile_frames(frame: bytes, form: Form) -> None:
        check_frame(frame, form)

    @settings(deadline=None, max_examples=num_payloads, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(damaged_payloads())
    def hostile_payloads(case: tuple[Unit, Entry, bytes, Bytes]) -> None:
        unit, entry, body, old = case
        check(unit, forged(unit, entry, body), old)

    hostile_frames()
    hostile_payloads()


needs_peak = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="this system does not count peaks of memory anew"
)


def test_a_bomb_is_one() -> None:
    """What the frames below are made of is what a plain reader unpacks."""
    assert zstandard.ZstdDecompressor().decompress(bomb(3, 3 * BLOCK_BYTES)) == b"x" * (3 * BLOCK_BYTES)
    silent = zstandard.ZstdDecompressor().decompress(bomb(2, None), max_output_size=1 << 20)
    assert len(silent) == 2 * BLOCK_BYTES


@needs_peak
def test_hostile_frames_are_refused_within_a_bound() -> None:
    under_a_bound(500, 100)


@needs_peak
@pytest.mark.soak
def test_ten_thousand_hostile_deltas_are_refused_within_a_bound() -> None:
    under_a_bound(8_000, 2_000)


@needs_peak
@pytest.mark.parametrize("window", [0xFF, 0xF8, 0xA0])
def test_a_window_of_terabytes_makes_no_room_for_it(window: int) -> None:
    """The content is as long as it should be, and only the window is not."""
    raw = (4096 << 3 | 1).to_bytes(3, "little") + bytes(4096)
    frame = MAGIC + bytes([0x40, window]) + (4096 - 256).to_bytes(2, "little") + raw
    check_frame(frame, Form.PACKED)


@needs_peak
def test_nothing_is_kept_of_what_was_refused() -> None:
    """Also not by the unpacker, which lives as long as its thread."""
    refused = [bomb(num_blocks, declared) for num_blocks in (1, 3000) for declared in (None, UNIT.nbytes, 1 << 40)]
    for frame in refused:
        check_frame(frame, Form.PACKED)
    with bounded():
        for _ in range(100):
            for frame in refused:
                check_frame(frame, Form.PACKED)
