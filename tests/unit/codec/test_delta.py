"""The delta codec: what goes in comes out, in every form; many threads; nothing left behind."""

from __future__ import annotations

import itertools
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
)
from weightsync.codec.delta import encode_delta
from weightsync.codec.delta_cost import CostModel
from weightsync.codec.delta_format import Form
from weightsync.codec.delta_reader import DeltaReader
from weightsync.codec.delta_units import ElementKind, Unit, plan_units
from weightsync.errors import DeltaTooLargeError, InvalidRequestError

KINDS = list(ElementKind)
quick = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def sources(draw: st.DrawFn, most: int = 700) -> tuple[Bytes, Bytes, tuple[Unit, ...]]:
    """Old and new bytes of a few tensors of several kinds, at any alignment, and their units."""
    parts: list[tuple[int, int, str]] = []
    at = start = draw(st.integers(0, 9))
    pieces: list[tuple[Bytes, Bytes]] = []
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)):
        number = draw(st.integers(1, most))
        share = draw(st.sampled_from([0.0, 0.002, 0.02, 0.3, 0.9, 1.0]))
        seed = draw(st.integers(0, 2**31))
        pieces.append(changed_bytes(kind, number, share, seed=seed, most_step=draw(st.sampled_from([1, 3, 100, 0]))))
        parts.append((at, number * kind.width_bytes, DTYPE_OF[kind]))
        at += number * kind.width_bytes
    skipped = np.zeros(start, np.uint8)
    old = np.concatenate([skipped, *(before for before, _ in pieces)])
    new = np.concatenate([skipped, *(after for _, after in pieces)])
    return old, new, plan_units(parts, draw(st.sampled_from([64, 256, 1 << 20])))


@quick
@given(sources(), st.booleans())
def test_what_goes_in_comes_out(source: tuple[Bytes, Bytes, tuple[Unit, ...]], slow: bool) -> None:
    old, new, units = source
    reader = DeltaReader(blob_of(old, new, units, slow_link() if slow else fast_link()), units)
    assert (reader.base, reader.result) == (BASE, RESULT)
    memory = old.copy()
    for index, unit in enumerate(units):
        part = memory[unit.start : unit.end]
        differing = np.flatnonzero(
            old[unit.start : unit.end].view(unit.kind.word) != new[unit.start : unit.end].view(unit.kind.word)
        )
        change = reader.decode(index, part)
        assert np.array_equal(memory, np.concatenate([new[: unit.start], old[unit.start :]]))  # nothing is written yet
        assert (change is None) == (len(differing) == 0 and not reader.form(index).is_full)
        if change is None:
            assert reader.num_changed(index) == 0
            continue
        if change.positions is not None:
            assert change.positions.tolist() == differing.tolist()
            assert change.old is not None
            assert np.array_equal(change.old, part.view(unit.kind.word)[differing])
            assert reader.num_changed(index) == len(differing)
        change.apply(part)
        assert np.array_equal(part, new[unit.start : unit.end])
        change.apply(part)  # twice does no harm
        assert np.array_equal(part, new[unit.start : unit.end])
    assert np.array_equal(memory, new)


@quick
@given(sources(), st.booleans())
def test_writing_at_once_is_decoding_and_applying(source: tuple[Bytes, Bytes, tuple[Unit, ...]], slow: bool) -> None:
    """The change is the same, and a unit in a full form stays as it is. Seen red: stored before the step was made."""
    old, new, units = source
    reader = DeltaReader(blob_of(old, new, units, slow_link() if slow else fast_link()), units)
    memory = old.copy()
    for index, unit in enumerate(units):
        part = memory[unit.start : unit.end]
        apart, at_once = reader.decode(index, part), reader.decode(index, part, write=True)
        if apart is None or at_once is None:
            assert apart is at_once
            continue
        assert np.array_equal(apart.new, at_once.new)
        if at_once.positions is None:
            assert np.array_equal(part, old[unit.start : unit.end])
            at_once.apply(part)
        else:
            assert np.array_equal(apart.positions, at_once.positions)
            assert np.array_equal(apart.old, at_once.old)
        assert np.array_equal(part, new[unit.start : unit.end])
    assert np.array_equal(memory, new)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.00005, 0.01, 0.2, 1.0])
def test_each_kind_and_density(kind: ElementKind, share: float) -> None:
    old, new = changed_bytes(kind, 40_003, share, seed=3)
    units = plan_units([(0, len(old), DTYPE_OF[kind])], unit_bytes=100_000)
    reader = DeltaReader(blob_of(old, new, units), units)
    assert np.array_equal(applied(reader, old), new)
    if 0 < share < 0.1:
        assert reader.nbytes < 0.2 * len(old)


def test_long_gaps_and_wide_steps_go_through_escapes() -> None:
    """Red where an escape is read one short, or where low bits of a gap of many bytes are lost."""
    for kind in KINDS:
        old = np.zeros(300_000 * kind.width_bytes, np.uint8)
        new = old.copy()
        words, top = new.view(kind.word), 256**kind.width_bytes - 1
        for place, value in [
            (0, 1),
            (1, top),
            (300, 7),
            (8_000, 8),
            (9_000, 9),
            (150_000, top // 2),
            (299_999, top // 3),
        ]:
            words[place] = value
        units = plan_units([(0, len(old), DTYPE_OF[kind])])
        assert np.array_equal(applied(DeltaReader(blob_of(old, new, units), units), old), new)


def test_special_values_are_patterns_like_others() -> None:
    specials = {
        ElementKind.FLOAT16: [0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 0x007F, 0x807F],
        ElementKind.FLOAT32: [0, 1 << 31, 1, (1 << 31) + 1, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 0x007FFFFF],
        ElementKind.FLOAT64: [0, 1 << 63, 1, 0x7FF << 52, 0xFFF << 52, 0x7FF8000000000001, (1 << 64) - 1],
        ElementKind.FLOAT8: [0, 0x80, 1, 0x81, 0x7F, 0xFF, 0x7C, 0xFC],
    }
    for kind, values in specials.items():
        old = np.array([one for one in values for _ in values], kind.word).view(np.uint8)
        new = np.array([one for _ in values for one in values], kind.word).view(np.uint8)
        units = plan_units([(0, len(old), DTYPE_OF[kind])])
        assert np.array_equal(applied(DeltaReader(blob_of(old, new, units), units), old), new)


def test_steps_are_zigzag_differences_of_ranks() -> None:
    """All pairs of 8-bit patterns against plain Python. Red where the rank map or the zigzag is another one."""
    from weightsync.codec.delta_planes import find_changes

    for kind in (ElementKind.FLOAT8, ElementKind.INT8):
        old = np.repeat(np.arange(256, dtype=np.uint8), 256)
        new = np.tile(np.arange(256, dtype=np.uint8), 256)
        found = find_changes(old, new, Unit(start=0, nbytes=len(old), kind=kind), len(old))
        assert found is not None
        wanted = []
        for before, after in zip(old.tolist(), new.tolist(), strict=True):
            change = (rank(after, kind) - rank(before, kind)) % 256
            change -= 256 if change > 127 else 0
            if change:
                wanted.append(2 * change if change > 0 else -2 * change - 1)
        assert found[1].tolist() == wanted


def test_neighbouring_floats_are_one_step_apart() -> None:
    values = np.array([-1.0, -0.0, 0.0, 1e-40, 1.0, 2.0], np.float32)
    above = np.nextafter(values, np.float32(np.inf), dtype=np.float32)
    above[1] = 0.0  # -0.0 is the neighbour below 0.0
    from weightsync.codec.delta_planes import find_changes

    unit = Unit(start=0, nbytes=values.nbytes, kind=ElementKind.FLOAT32)
    found = find_changes(values.view(np.uint8), above.view(np.uint8), unit, 6)
    assert found is not None
    assert found[1].tolist() == [2] * 6


def test_a_dense_unit_is_full_on_a_fast_link_and_planes_on_a_slow_one() -> None:
    old, new = changed_bytes(ElementKind.FLOAT16, 50_000, 0.5, seed=1)
    units = plan_units([(0, len(old), "bfloat16")])
    fast = DeltaReader(blob_of(old, new, units, fast_link()), units)
    slow = DeltaReader(blob_of(old, new, units, slow_link()), units)
    assert (fast.form(0), slow.form(0)) == (Form.FULL, Form.PLANES)
    assert fast.num_changed(0) == 50_000
    change = fast.decode(0, old)
    assert change is not None
    assert change.positions is None
    assert np.array_equal(applied(fast, old), new)
    other, _ = changed_bytes(ElementKind.FLOAT16, 50_000, 0, seed=2)
    packed = DeltaReader(blob_of(old, other, units, slow_link()), units)
    assert packed.form(0) is Form.PACKED
    assert packed.nbytes < 0.85 * len(old)
    assert np.array_equal(applied(packed, old), other)


def test_planes_are_near_their_entropy() -> None:
    """`delta_bytes` of the speed table, with room for a small unit's tables."""
    old, new = changed_bytes(ElementKind.FLOAT16, 1 << 20, 0.01, seed=7, most_step=1)
    units = plan_units([(0, len(old), "bfloat16")])
    made = encode_delta(old, new, units, costs=slow_link(), base=BASE)
    places = np.flatnonzero(old.view(np.uint16) != new.view(np.uint16))
    gaps = np.diff(places, prepend=-1)
    shares = np.bincount(gaps)[np.bincount(gaps) > 0] / len(gaps)
    bound_bytes = len(places) * (float(-(shares * np.log2(shares)).sum()) + 1.0) / 8
    assert made.nbytes < 1.05 * bound_bytes


# --- chains --------------------------------------------------------------------------------------------------------


def test_a_chain_is_replayed_in_order() -> None:
    states = [changed_bytes(ElementKind.FLOAT16, 20_000, 0, seed=1)[0]]
    rng = np.random.default_rng(2)
    for _ in range(4):
        state = states[-1].copy()
        state.view(np.uint16)[rng.integers(0, 20_000, 300)] += 1
        states.append(state)
    units = plan_units([(0, 40_000, "bfloat16")], unit_bytes=8192)
    memory = states[0]
    for before, after in itertools.pairwise(states):
        memory = applied(DeltaReader(blob_of(before, after, units), units), memory)
    assert np.array_equal(memory, states[-1])


# --- threads, stops, sizes --------------------------------------------------------------------------------------


def test_many_threads_decode_at_once() -> None:
    """Red where a zstd object or room for decoding is shared between threads."""
    old, new = changed_bytes(ElementKind.FLOAT16, 200_000, 0.03, seed=4)
    units = plan_units([(0, len(old), "bfloat16")], unit_bytes=1 << 14)
    reader = DeltaReader(blob_of(old, new, units), units)
    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(applied, reader, old) for _ in range(64)]
        again = [pool.submit(blob_of, old, new, units) for _ in range(4)]
        assert all(np.array_equal(one.result(), new) for one in made)
        assert len({one.result() for one in again}) == 1


class StoppedError(Exception):
    """What a test's `check_cancelled` raises."""


def test_go_on_ends_it_and_nobody_reads_any_more() -> None:
    old, new = changed_bytes(ElementKind.FLOAT16, 400_000, 0.01, seed=4)
    units = plan_units([(0, len(old), "bfloat16")], unit_bytes=1 << 14)
    calls: list[int] = []
    lock = threading.Lock()

    def check_cancelled() -> None:
        with lock:
            calls.append(1)
            if len(calls) == 5:
                raise StoppedError
        if len(calls) > 5:
            time.sleep(0.2)  # the other threads hear of it first

    with pytest.raises(StoppedError):
        encode_delta(old, new, units, costs=slow_link(), base=BASE, check_cancelled=check_cancelled)
    number = len(calls)
    assert 5 <= number < len(units)
    assert np.array_equal(applied(DeltaReader(blob_of(old, new, units), units), old), new)
    assert len(calls) == number


def test_a_delta_that_grows_too_large_ends() -> None:
    old, new = changed_bytes(ElementKind.FLOAT16, 100_000, 0.3, seed=4)
    units = plan_units([(0, len(old), "bfloat16")], unit_bytes=1 << 14)
    with pytest.raises(DeltaTooLargeError):
        encode_delta(old, new, units, costs=slow_link(), base=BASE, max_bytes=20_000)
    made = encode_delta(old, new, units, costs=slow_link(), base=BASE, max_bytes=200_000)
    assert made.nbytes < 200_000 + 10_000


def test_an_encoded_delta_tells_what_it_is() -> None:
    old, new = changed_bytes(ElementKind.FLOAT16, 50_000, 0.02, seed=4)
    units = plan_units([(0, len(old), "bfloat16")], unit_bytes=1 << 15)
    costs = CostModel(link_bytes_per_s=1e6)
    made = encode_delta(old, new, units, costs=costs, base=BASE)
    changed = int((old.view(np.uint16) != new.view(np.uint16)).sum())
    assert (made.num_elements, made.num_changed) == (50_000, changed)
    assert [unit.form for unit in made.units] == [Form.PLANES] * len(units)
    assert sum(unit.nbytes for unit in made.units) < made.nbytes == len(made.to_bytes())
    assert made.seconds > 0
    for memory in (
        memoryview(bytearray(made.nbytes - 1)),
        memoryview(bytearray(made.nbytes + 1)),
        memoryview(made.to_bytes()),
    ):
        with pytest.raises(InvalidRequestError):
            made.write_into(memory)


@pytest.mark.parametrize("wrong", ["length", "type", "stride", "base", "result", "unit", "order"])
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    old, new = changed_bytes(ElementKind.FLOAT16, 100, 0.1, seed=1)
    units = plan_units([(0, 200, "bfloat16")], unit_bytes=64)
    calls: dict[str, dict[str, object]] = {
        "length": {"new": new[:-2]},
        "type": {"new": new.view(np.uint16)},
        "stride": {"new": np.repeat(new, 2)[::2]},
        "base": {"base": bytes(15)},
        "result": {"result": bytes(17)},
        "unit": {"units": (Unit(start=0, nbytes=202, kind=ElementKind.INT16),)},
        "order": {"units": units[::-1]},
    }
    call: dict[str, object] = {"new": new, "units": units, "base": BASE} | calls[wrong]
    with pytest.raises(InvalidRequestError):
        encode_delta(old, call.pop("new"), call.pop("units"), costs=slow_link(), **call)  # type: ignore[arg-type]


def test_memory_of_another_size_is_refused_and_left_alone() -> None:
    old, new = changed_bytes(ElementKind.INT32, 100, 0.1, seed=1)
    units = plan_units([(0, 400, "int32")])
    reader = DeltaReader(blob_of(old, new, units), units)
    with pytest.raises(InvalidRequestError):
        reader.decode(0, old[:-4])
    change = reader.decode(0, old)
    assert change is not None
    for memory in (old[:-4].copy(), np.repeat(old, 2)[::2]):
        with pytest.raises(InvalidRequestError):
            change.apply(memory)
    frozen = old.copy()
    frozen.flags.writeable = False
    with pytest.raises(InvalidRequestError):
        change.apply(frozen)
    with pytest.raises(InvalidRequestError, match="writable"):
        reader.decode(0, frozen, write=True)
    assert np.array_equal(frozen, old)


def test_no_units_and_unaligned_memory() -> None:
    nothing = np.empty(0, np.uint8)
    assert DeltaReader(blob_of(nothing, nothing, ()), ()).nbytes == len(blob_of(nothing, nothing, ()))
    raw = np.frombuffer(b"x" + struct.pack("<40d", *range(40)), np.uint8)
    after = raw.copy()
    after[1 + 8 * 7] ^= 1
    units = plan_units([(0, 320, "float64")])
    reader = DeltaReader(blob_of(raw[1:], after[1:], units), units)
    memory = raw.copy()
    change = reader.decode(0, memory[1:])
    assert change is not None
    change.apply(memory[1:])
    assert np.array_equal(memory, after)
