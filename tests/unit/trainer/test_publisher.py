"""WeightManager: what it refuses before anything is started. The rest is in `multiproc/test_offload*.py`."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest

from weightsync.errors import InvalidRequestError, StateError
from weightsync.trainer.publisher import WeightManager


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -1.0, 1e9])
def test_a_wait_that_nobody_can_wait_is_refused(timeout_s: float) -> None:
    """Seen to fail: NaN was taken for a time that is over, and infinity for one that no lock can wait."""
    with contextlib.closing(WeightManager("m")) as manager:
        for wait in (manager.wait_published, manager.wait_delta_ready):
            with pytest.raises(InvalidRequestError, match="timeout_s is a number of seconds from 0 to"):
                wait(1, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("version", "error"),
    [(0, StateError), (-1, InvalidRequestError), (1.5, InvalidRequestError), (True, InvalidRequestError)],
)
def test_a_version_is_a_whole_number_and_0_seconds_are_a_look(version: Any, error: type[Exception]) -> None:
    with contextlib.closing(WeightManager("m")) as manager, pytest.raises(error):
        manager.wait_published(version, timeout_s=0)
