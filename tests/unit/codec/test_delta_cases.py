"""Cases that the delta codec's tests share, and the tests of units: what a source is cut into."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.codec.delta import encode_delta
from weightsync.codec.delta_cost import CostModel
from weightsync.codec.delta_reader import DeltaReader
from weightsync.codec.delta_units import ElementKind, Unit, plan_units
from weightsync.errors import InvalidRequestError
from weightsync.types.dtypes import ITEMSIZE_BYTES

Bytes = npt.NDArray[np.uint8]

BASE = bytes(range(16))
RESULT = bytes(range(100, 116))
DTYPE_OF = {
    ElementKind.FLOAT8: "float8_e4m3fn",
    ElementKind.FLOAT16: "bfloat16",
    ElementKind.FLOAT32: "float32",
    ElementKind.FLOAT64: "float64",
    ElementKind.INT8: "uint8",
    ElementKind.INT16: "int16",
    ElementKind.INT32: "int32",
    ElementKind.INT64: "int64",
}


def slow_link() -> CostModel:
    """Bytes are dear: a unit is full only where that is smaller."""
    return CostModel(link_bytes_per_s=1e5, num_cores=2, fixed=True)


def fast_link() -> CostModel:
    """Time is dear: a unit of which much has changed is full, as it is."""
    return CostModel(link_bytes_per_s=1e12, num_cores=2, fixed=True)


def rank(bits: int, kind: ElementKind) -> int:
    """The rank map of docs/delta-format.md, in plain Python."""
    sign = 1 << (8 * kind.width_bytes - 1)
    if not kind.is_float:
        return bits
    return (2 * sign - 1) ^ bits if bits & sign else bits | sign


def changed_bytes(
    kind: ElementKind, num_elements: int, share: float, *, seed: int, most_step: int = 3
) -> tuple[Bytes, Bytes]:
    """(old, new): weights, of which about a share has changed by up to so many ranks; `most_step` 0: by anything."""
    rng = np.random.default_rng(seed)
    if kind is ElementKind.FLOAT16:
        values = (rng.standard_normal(num_elements) * 0.02).astype(np.float32).view(np.uint32)
        old = (values >> 16).astype(np.uint16).view(np.uint8)
    elif kind in (ElementKind.FLOAT32, ElementKind.FLOAT64):
        old = (rng.standard_normal(num_elements) * 0.02).astype(kind.value).view(np.uint8)
    else:
        old = rng.integers(0, 256, num_elements * kind.width_bytes, dtype=np.uint8)
    new = old.copy()
    words = new.view(kind.word)
    where = np.flatnonzero(rng.random(num_elements) < share)
    if most_step:
        steps = rng.integers(1, most_step + 1, len(where)) * rng.choice([-1, 1], len(where))
        words[where] += steps.astype(np.int64).astype(kind.word)
    else:
        words[where] = rng.integers(0, 256, len(where) * kind.width_bytes, dtype=np.uint8).view(kind.word)
    return old, new


def training_step(num_elements: int, *, seed: int) -> tuple[Bytes, Bytes]:
    """(old, new): bf16 weights before and after one small step of their fp32 masters; about 1 % differ."""
    rng = np.random.default_rng(seed)
    before = (rng.standard_normal(num_elements) * 0.02).astype(np.float32)
    after = before + (rng.random(num_elements).astype(np.float32) - 0.5) * np.float32(4e-6)
    old, new = (((x.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).view(np.uint8) for x in (before, after))
    return old, new


def blob_of(old: Bytes, new: Bytes, units: Sequence[Unit], costs: CostModel | None = None) -> bytes:
    """An encoded delta's bytes."""
    made = encode_delta(old, new, units, costs=costs or slow_link(), base=BASE, result=RESULT)
    memory = bytearray(made.nbytes)
    made.write_into(memoryview(memory))
    return bytes(memory)


def applied(reader: DeltaReader, old: Bytes) -> Bytes:
    """`old` after the delta."""
    memory = old.copy()
    for index, unit in enumerate(reader.units):
        change = reader.decode(index, memory[unit.start : unit.end])
        if change is not None:
            change.apply(memory[unit.start : unit.end])
    return memory


def raised_by(call: Callable[[], object]) -> BaseException | None:
    """What a call raises."""
    try:
        call()
    except BaseException as error:
        return error
    return None


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE_BYTES))
def test_every_dtype_has_a_kind_of_its_width(dtype: str) -> None:
    kind = ElementKind.of_dtype(dtype)
    parts = 2 if dtype.startswith("complex") else 1
    assert kind.width_bytes * parts == ITEMSIZE_BYTES[dtype]
    assert kind.is_float == (dtype.startswith(("float", "bfloat", "complex")) and dtype != "float8_e8m0fnu")
    assert kind.word.itemsize == kind.width_bytes


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(ITEMSIZE_BYTES)), st.integers(0, 300)), max_size=12),
    st.integers(64, 500),
    st.integers(0, 7),
)
def test_units_cover_the_source_once(tensors: list[tuple[str, int]], unit_bytes: int, start: int) -> None:
    parts, at = [], start
    for dtype, number in tensors:
        parts.append((at, number * ITEMSIZE_BYTES[dtype], dtype))
        at += number * ITEMSIZE_BYTES[dtype]
    units = plan_units(parts, unit_bytes)
    place = start
    for unit in units:
        assert unit.start == place
        assert 0 < unit.nbytes <= unit_bytes
        assert unit.nbytes % unit.kind.width_bytes == 0
        place = unit.end
    assert place == at
    for first, nbytes, dtype in parts:  # every byte is read as its own tensor's elements
        for unit in units:
            if nbytes and unit.start < first + nbytes and first < unit.end:
                assert unit.kind is ElementKind.of_dtype(dtype)
                assert (first - unit.start) % unit.kind.width_bytes == 0


def test_small_tensors_share_a_unit_and_large_ones_have_even_ones() -> None:
    small = [(at * 100, 100, "bfloat16" if at % 2 else "float16") for at in range(50)]
    assert [(unit.start, unit.nbytes) for unit in plan_units(small)] == [(0, 5000)]
    units = plan_units([(0, 1_000_000, "float32")], unit_bytes=300_000)
    assert len(units) == 4
    assert max(unit.nbytes for unit in units) - min(unit.nbytes for unit in units) <= 4 * 64


@pytest.mark.parametrize(
    "parts",
    [
        [(0, 4, "int16"), (6, 2, "int16")],
        [(0, 4, "int16"), (2, 4, "int16")],
        [(0, 3, "int16")],
        [(-2, 2, "int16")],
        [(0, 2, "int17")],
    ],
)
def test_parts_that_do_not_join_are_refused(parts: list[tuple[int, int, str]]) -> None:
    with pytest.raises(InvalidRequestError):
        plan_units(parts)
