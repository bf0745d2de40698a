"""What the tests of several hosts share: processes of the other kits, started in a host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.standins.processes import Child
from weightsync.testing.hosts import Host

Start = Callable[..., Child]


def starter_in(host: Host, start: Start) -> Start:
    """As `start`, in that host."""

    def starter(function: Callable[..., Any], *args: Any, **options: Any) -> Child:
        return start(host.place.run, function, *args, **options)

    return starter
