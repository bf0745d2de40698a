"""Dtypes by name: sizes, names that there are not, and what may be cast."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.types import messages as m
from weightsync.errors import InvalidRequestError
from weightsync.types import dtype_name, itemsize_bytes, target_dtype
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
