"""Specs, boxes and versions: what they cover, how they compare, and what can't be one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.types import messages as m
from weightsync.errors import InvalidRequestError, VersionError
from weightsync.types import Box, TensorSpec, Version


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
