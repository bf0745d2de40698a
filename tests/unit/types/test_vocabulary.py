"""Specs, boxes, versions, manifests, chunks, dtypes and deadlines."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.types import messages as m
from weightsync.errors import DeadlineExceededError, InvalidRequestError, VersionError
from weightsync.types import (
    Box,
    Deadline,
    Manifest,
    TensorSpec,
    Version,
    WeightChunk,
    dtype_name,
    itemsize_bytes,
    target_dtype,
)
from weightsync.types.dtypes import CASTABLE, ITEMSIZE_BYTES


def test_item_sizes_are_those_of_torch() -> None:
    for name, size in ITEMSIZE_BYTES.items():
        assert getattr(torch, name).itemsize == size
        assert dtype_name(getattr(torch, name)) == dtype_name(f"torch.{name}") == dtype_name(name) == name


@pytest.mark.parametrize("name", ["", "object", "float128", "Bfloat16", "bfloat16 ", "torch.nn", "float4_e2m1fn_x2"])
def test_an_unknown_dtype_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="unknown dtype"):
        itemsize_bytes(name)


@given(m.dtypes, st.none() | m.dtypes)
def test_only_ordinary_floats_are_cast(dtype: str, wanted: str | None) -> None:
    assert target_dtype(dtype, wanted) == (wanted if wanted and dtype in CASTABLE else dtype)


@settings(deadline=None)
@given(m.specs())
def test_the_bytes_of_a_spec_are_those_of_its_part(spec: TensorSpec) -> None:
    part = spec.shape if spec.box is None else spec.box.shape
    assert spec.nbytes == torch.empty(part, dtype=getattr(torch, spec.dtype), device="meta").nbytes


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "x" * 1025},
        {"dtype": "float31"},
        {"shape": (-1,)},
        {"shape": (1 << 30, 1 << 30)},
        {"shape": (1,) * 33},
        {"box": Box(offset=(0,), shape=(2,))},
        {"box": Box(offset=(1, 0), shape=(4, 3))},
        {"box": Box(offset=(5, 0), shape=(0, 3))},
        {"offset": -1},
        {"source": -1},
    ],
    ids=lambda changes: str(changes)[:60],
)
def test_a_spec_that_cant_be(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        TensorSpec(**{"name": "a", "dtype": "float32", "shape": (4, 3), **changes})


@pytest.mark.parametrize(("offset", "shape"), [((0,), (1, 2)), ((-1,), (1,)), ((0,), (-1,))])
def test_a_box_that_cant_be(offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError):
        Box(offset=offset, shape=shape)


def test_boxes_know_what_they_cover() -> None:
    assert Box(offset=(0, 0), shape=(4, 3)).covers((4, 3))
    assert not Box(offset=(0, 0), shape=(4, 2)).covers((4, 3))
    assert not Box(offset=(4, 0), shape=(0, 3)).covers((0, 3)), "an empty box elsewhere is not the whole"
    assert Box(offset=(), shape=()).covers(())
    assert Box(offset=(), shape=()).numel == 1


@given(st.integers(0, 100), st.integers(0, 100))
def test_versions_compare_within_a_run_alone(a: int, b: int) -> None:
    assert Version(run_id="r", number=a).is_newer_than(Version(run_id="r", number=b)) == (a > b)
    with pytest.raises(VersionError, match="different runs"):
        Version(run_id="r", number=a).is_newer_than(Version(run_id="s", number=b))
    with pytest.raises(TypeError):
        _ = Version(run_id="r", number=a) < Version(run_id="r", number=b)  # type: ignore[operator]


@pytest.mark.parametrize(("run_id", "number"), [("", 1), ("x" * 257, 1), ("r", -1)])
def test_a_version_that_cant_be(run_id: str, number: int) -> None:
    with pytest.raises(InvalidRequestError):
        Version(run_id=run_id, number=number)


def spec(name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype="uint8", shape=(2,))


V = Version(run_id="r", number=1)


def test_a_manifest_names_every_tensor_once() -> None:
    with pytest.raises(InvalidRequestError, match="once"):
        Manifest(version=V, model_id="m", tensors=(spec("a"), spec("b"), spec("a")))
    with pytest.raises(InvalidRequestError, match="no tensors"):
        Manifest(version=V, model_id="m", tensors=())


def test_digests_are_filled_in_for_all_or_none() -> None:
    manifest = Manifest(version=V, model_id="m", tensors=(spec("a"), spec("b")))
    one, two = (f"xxh3:{number:032x}" for number in (1, 2))
    filled = manifest.with_digests({"b": two, "a": one}, "3")
    assert [filled.digest(name) for name in ("a", "b")] == [one, two]
    assert filled.model_digest == "3"
    assert manifest.digest("a") is None, "the other one is as it was"
    wrongs: list[dict[str, str]] = [{"a": one}, {"a": one, "b": two, "c": one}, {}, {"a": one, "b": "xxh3:1"}]
    for wrong in [*wrongs, {"a": one, "b": two.removeprefix("xxh3:")}, {"a": one, "b": f"xxh3: {two[6:]}"}]:
        with pytest.raises(InvalidRequestError):
            manifest.with_digests(wrong, "3")


def chunk(**changes: Any) -> WeightChunk:
    fields: dict[str, Any] = {"names": ("a", "b"), "tensors": (torch.ones(2, 3), torch.ones(2, dtype=torch.int8))}
    return WeightChunk(**{**fields, **changes})


def test_a_chunk_reads_off_what_is_not_declared() -> None:
    found = chunk()
    assert found.dtypes == ("float32", "int8")
    assert found.shapes == ((2, 3), (2,))
    assert found.total_size_bytes == 26
    declared = chunk(dtypes=("float32", "int8"), shapes=((2, 3), (2,)), total_size_bytes=26)
    assert (declared.dtypes, declared.shapes, declared.total_size_bytes) == (found.dtypes, found.shapes, 26)


@pytest.mark.parametrize(
    "changes",
    [
        {"names": (), "tensors": ()},
        {"names": ("a",)},
        {"names": ("a", "a")},
        {"names": ("a", "b", "c")},
        {"dtypes": ("float32",)},
        {"dtypes": ("float32", "uint8")},
        {"shapes": ((2, 3),)},
        {"shapes": ((3, 2), (2,))},
        {"total_size_bytes": 25},
        {"total_size_bytes": 0},
        {"total_size_bytes": -2},
    ],
    ids=str,
)
def test_a_chunk_that_contradicts_itself(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        chunk(**changes)


def test_a_chunk_of_a_dtype_that_cant_travel() -> None:
    with pytest.raises(InvalidRequestError, match="unknown dtype"):
        WeightChunk(names=("a",), tensors=(torch.empty(2, dtype=torch.float4_e2m1fn_x2),))


def test_waits_that_share_a_deadline_do_not_add_up() -> None:
    deadline = Deadline(0.05)
    assert 0 < deadline.check("a start") <= 0.05
    threading.Event().wait(deadline.remaining_s)
    while not deadline.expired:
        pass
    assert deadline.remaining_s == 0.0
    with pytest.raises(DeadlineExceededError, match=r"no answer within 0\.05 s") as caught:
        deadline.check("answer", rank=3, state_left="nothing was changed")
    assert (caught.value.rank, caught.value.state_left) == (3, "nothing was changed")


@pytest.mark.parametrize("timeout_s", [0.0, -5.0])
def test_a_deadline_that_has_passed(timeout_s: float) -> None:
    assert Deadline(timeout_s).expired
    with pytest.raises(DeadlineExceededError):
        Deadline(timeout_s).check("anything")
