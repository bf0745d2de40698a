"""Where changes are searched for makes no difference to the delta. The CPU stands for the GPU: the code is the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.unit.codec.test_delta import sources
from tests.unit.codec.test_delta_cases import BASE, RESULT, Bytes, fast_link
from weightsync.codec.delta import encode_delta
from weightsync.codec.delta_planes import find_changes
from weightsync.codec.delta_units import ElementKind, Unit
from weightsync.codec.device_search import DeviceSearch
from weightsync.errors import UnsupportedError


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(sources())
def test_the_delta_is_the_same_byte_for_byte(source: tuple[Bytes, Bytes, tuple[Unit, ...]]) -> None:
    """Red with one step changed in `DeviceSearch`."""
    old, new, units = source
    blobs = [
        encode_delta(old, new, units, costs=fast_link(), base=BASE, result=RESULT, search=search).to_bytes()
        for search in (None, DeviceSearch("cpu"))
    ]
    assert blobs[0] == blobs[1]


@pytest.mark.parametrize("kind", list(ElementKind))
def test_more_changes_than_there_is_room_for_are_none(kind: ElementKind) -> None:
    unit = Unit(start=0, nbytes=64 * kind.width_bytes, kind=kind)
    old, new = np.zeros(unit.nbytes, np.uint8), np.ones(unit.nbytes, np.uint8)
    search = DeviceSearch("cpu")
    assert search(old, new, unit, 63) is None
    assert find_changes(old, new, unit, 63) is None
    found = search(old, new, unit, 64)
    assert found is not None
    assert found[0].tolist() == list(range(64))


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(UnsupportedError, match="no-such-device"):
        DeviceSearch("no-such-device")
