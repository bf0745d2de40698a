"""The layout of a segment, read by the real safetensors library; and what foreign headers can do: raise one error."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load

from weightsync.errors import InvalidRequestError, UnsupportedError
from weightsync.plan.safetensors import Layout, entry_name, plan_layout, read_header, read_stamp
from weightsync.tensors import byte_array
from weightsync.types import Box, TensorSpec, Version, itemsize_bytes

_DTYPES = ("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "uint16", "int16", "float16", "bfloat16", "uint32",
           "int32", "float32", "uint64", "int64", "float64", "complex64")  # fmt: skip

dtypes = st.sampled_from(_DTYPES)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
ids = st.text(st.sampled_from('"\\/aü😀 '), min_size=1, max_size=20)


@st.composite
def parts_of_a_host(draw: st.DrawFn) -> list[TensorSpec]:
    """Whole tensors, and boxes of others."""
    parts = []
    for name in draw(st.lists(names, max_size=8, unique=True)):
        dtype, shape = draw(dtypes), draw(shapes)
        cuts = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
        box = Box(offset=tuple(a for a, _ in cuts), shape=tuple(b - a for a, b in cuts))
        parts.append(TensorSpec(name=name, dtype=dtype, shape=shape, box=draw(st.sampled_from([None, box]))))
    return parts


def file_of(layout: Layout, stamp: Version | None, model_id: str) -> bytes:
    """A whole file, whose bytes differ from one place to the next."""
    data = (bytes(range(256)) * (layout.total_bytes // 256 + 1))[: layout.total_bytes - layout.data_start]
    return layout.header(stamp, model_id) + data


@settings(deadline=None)
@given(parts=parts_of_a_host(), run_id=ids, number=st.integers(0, 2**53), model_id=ids)
def test_the_real_library_reads_every_part_where_it_was_laid(
    parts: list[TensorSpec], run_id: str, number: int, model_id: str
) -> None:
    try:
        layout = plan_layout(parts, source=3)
    except UnsupportedError:  # "w" as the box 0:1 and a tensor that is named "w@0:1"
        assert len({entry_name(part) for part in parts}) < len(parts)
        return
    version = Version(run_id=run_id, number=number)
    file = file_of(layout, version, model_id)
    assert len(file) == layout.total_bytes
    assert layout.data_start % 4096 == 0
    assert [(part.name, part.dtype, part.shape, part.box, part.source) for part in layout.parts] == [
        (part.name, part.dtype, part.shape, part.box, 3) for part in parts
    ]
    end = layout.data_start
    for part in sorted(layout.parts, key=lambda part: (part.offset, part.nbytes)):
        assert part.offset == end, "contiguous"
        assert part.offset % itemsize_bytes(part.dtype) == 0, "aligned"
        end += part.nbytes
    assert end == layout.total_bytes

    found = load(file)
    assert found.keys() == {entry_name(part) for part in parts}
    for part in layout.parts:
        tensor = found[entry_name(part)]
        assert tensor.dtype == getattr(torch, part.dtype)
        assert tuple(tensor.shape) == (part.shape if part.box is None else part.box.shape)
        assert byte_array(tensor).tobytes() == file[part.offset : part.offset + part.nbytes]

    assert read_stamp(memoryview(file)) == (version, model_id)
    start, tensors, metadata = read_header(memoryview(file))
    assert start == layout.data_start
    assert metadata["format"] == "pt"
    assert {name: (spec.dtype, spec.offset) for name, spec in tensors.items()} == {
        entry_name(part): (part.dtype, part.offset) for part in layout.parts
    }
    unstamped = file_of(layout, None, model_id)
    assert read_stamp(memoryview(unstamped)) is None
    assert load(unstamped).keys() == found.keys()


@example(run_id="ü" * 80, model_id="m")
@example(run_id="ü" * 86, model_id="m")
@given(
    run_id=st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=256),
    model_id=st.text(max_size=256),
)
def test_a_stamp_comes_back_or_is_refused_before_anything_is_written(run_id: str, model_id: str) -> None:
    layout, version = plan_layout([TensorSpec(name="w", dtype="int8", shape=(3,))]), Version(run_id=run_id, number=1)
    if len(json.dumps([run_id, 1, model_id])) > 512:
        with pytest.raises(InvalidRequestError, match="too long"):
            layout.header(version, model_id)
    else:
        header = layout.header(version, model_id)
        assert len(header) == layout.data_start
        assert read_stamp(memoryview(header)) == (version, model_id)


def test_what_the_format_cannot_name_is_refused() -> None:
    whole = TensorSpec(name="w", dtype="float32", shape=(4,))
    box = Box(offset=(0,), shape=(2,))
    for parts in (
        [TensorSpec(name="w", dtype="complex128", shape=(1,))],
        [TensorSpec(name="__metadata__", dtype="int8", shape=(1,))],
        [whole, whole],
        [TensorSpec(name="w", dtype="int8", shape=(4,), box=box), TensorSpec(name="w@0:2", dtype="int8", shape=())],
    ):
        with pytest.raises(UnsupportedError):
            plan_layout(parts)


# Foreign headers.


def framed(header: Any, data: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def entry(shape: Any = (2,), start: Any = 0, end: Any = 2, dtype: Any = "I8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"w": entry(end=3)},
        {"w": entry(end=1)},
        {"w": entry(start=-1, end=1)},
        {"w": entry(start=2, end=0)},
        {"w": entry(shape=[1.5], dtype="F16", end=3)},
        {"w": entry(shape=[True], end=1)},
        {"w": entry(start=0.0)},
        {"w": entry(shape=[-2, -1])},
        {"w": entry(shape=[2**40, 2**40], end=2**80)},
        {"w": entry(shape=2)},
        {"w": entry(dtype="F3")},
        {"w": entry(dtype=["I8"])},
        {"w": entry(), "v": entry()},
        {"w": entry(), "v": entry(start=3, end=5)},
        {"w": entry(start=1, end=3)},
        {"w": {"dtype": "I8", "shape": [2]}},
        {"w": []},
        {"\ud800": entry()},
        {"__metadata__": 5, "w": entry()},
        {"__metadata__": [["a", "b"]], "w": entry()},
        [entry()],
        "w",
        b"{",
        b"\xff\xfe\x00",
        b'{"w": {"dtype": "I8", "shape": [2], "data_offsets": [0, ' + b"9" * 5000 + b"]}}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_a_lying_header_is_one_error_and_the_real_library_refuses_it_too(header: Any) -> None:
    file = framed(header, 2)
    with pytest.raises(InvalidRequestError) as caught:
        read_header(memoryview(file))
    assert len(str(caught.value)) < 1000
    with pytest.raises(SafetensorError):
        load(file)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
odd_entries = st.dictionaries(
    st.sampled_from(["w", "v", "__metadata__", ""]),
    json_values
    | st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["I8", "F32"]) | json_values,
            "shape": st.lists(st.integers(-1, 3) | json_values, max_size=2),
            "data_offsets": st.lists(st.integers(-1, 12) | json_values, max_size=3),
        }
    ),
    max_size=3,
)


@given(
    st.binary(max_size=80).map(memoryview)
    | odd_entries.map(lambda header: memoryview(framed(header, 12)))
    | st.tuples(st.integers(0, 2**64 - 1), st.binary(max_size=60)).map(
        lambda case: memoryview(case[0].to_bytes(8, "little") + case[1])
    )
)
def test_garbage_is_one_error(memory: memoryview) -> None:
    try:
        start, tensors, _ = read_header(memory)
    except InvalidRequestError:
        pass
    else:
        assert start <= len(memory)
        assert all(type(extent) is int for spec in tensors.values() for extent in spec.shape)
    with contextlib.suppress(InvalidRequestError):
        read_stamp(memory)


@pytest.mark.parametrize(
    "said",
    ['["run",1,"model"]', "", "[]", "[1,2,3]", '["r","1","m"]', '["r",1.5,"m"]', '["r",true,"m"]',
                     '["r",-1,"m"]', '["",1,"m"]', '["r",1,"m",4]', '["r",1,null]', "[" * 900, "{", 5, None, []],
)  # fmt: skip
def test_a_stamp_names_a_version_or_is_an_error(said: Any) -> None:
    memory = memoryview(framed({"__metadata__": {"weightsync": said}}))
    if said == '["run",1,"model"]':
        assert read_stamp(memory) == (Version(run_id="run", number=1), "model")
    elif said == "":
        assert read_stamp(memory) is None
    else:
        with pytest.raises(InvalidRequestError):
            read_stamp(memory)


def test_a_nested_stamp_does_not_exhaust_the_stack() -> None:
    for head in (b'{"__metadata__":' + b"[" * 5000, b'{"__metadata__":{"weightsync":' + b'{"a":' * 500):
        with pytest.raises(InvalidRequestError):
            read_stamp(memoryview(framed(head)))
