"""A chunk reads off what is not declared, and refuses what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weightsync.errors import InvalidRequestError
from weightsync.types import WeightChunk


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
