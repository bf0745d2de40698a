"""Training ranks that several tests use one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.standins.processes import RankPool, children


@pytest.fixture(scope="package")
def two_ranks() -> Iterator[Callable[[str], RankPool]]:
    """Two ranks for all tests of one backend: DeepSpeed and Megatron take seconds to import."""
    pools: dict[str, RankPool] = {}
    with children() as start:
        yield lambda backend: pools.setdefault(backend, RankPool(start, 2))
