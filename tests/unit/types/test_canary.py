"""Canary: what is none is refused when it is made, and when it is read."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.errors import InvalidRequestError
from weightsync.types.canary import Canary, distance

GOOD: dict[str, Any] = {"tokens": (1, 2), "logprobs": (-1.0,), "tolerance": 0.1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": (1,), "logprobs": ()},
        {"tokens": (1, -2)},
        {"logprobs": (-1.0, -1.0)},
        {"logprobs": (float("nan"),)},
        {"logprobs": (float("-inf"),)},
        {"tolerance": 0.0},
        {"tolerance": float("inf")},
        {"tokens": tuple(range(5000)), "logprobs": (-1.0,) * 4999},
    ],
)
def test_what_is_none_is_refused(wrong: dict[str, Any]) -> None:
    Canary(**GOOD)
    with pytest.raises(InvalidRequestError):
        Canary(**{**GOOD, **wrong})


def test_distance_is_the_greatest() -> None:
    assert distance((1.0, 2.0, -3.0), (1.0, 2.5, -2.0)) == 1.0
