"""Benches of hosts for the tests of this folder, skipped by name where the machine has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from weightsync.testing.hosts import Hosts, why_not


@pytest.fixture
def bench() -> Iterator[Callable[..., Hosts]]:
    """Makes benches as `Hosts` does, and takes them down after the test."""
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(Hosts(*args, **options))


@pytest.fixture
def two(bench: Callable[..., Any]) -> Hosts:
    """Two hosts: trainer and rollout."""
    return bench(["trainer", "rollout"])
