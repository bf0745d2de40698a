"""Gives memory back to the system: malloc keeps what large bodies took, in pieces, for as long as the process lives."""

from __future__ import annotations

import asyncio
import ctypes
import functools
from collections.abc import Callable

FROM_BYTES = 8 << 20
"""Less than that is not worth it."""
_AFTER_S = 0.2
"""The request's last references are gone by then; and many that end together are one."""


class Trimmer:
    """Of one event loop."""

    def __init__(self) -> None:
        self._schedule_soon: asyncio.TimerHandle | None = None

    def freed(self, num_bytes: int) -> None:
        """A request with so many bytes has ended."""
        if num_bytes >= FROM_BYTES and self._schedule_soon is None and _malloc_trim() is not None:
            self._schedule_soon = asyncio.get_running_loop().call_later(_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._schedule_soon = None
        trim = _malloc_trim()
        assert trim is not None
        asyncio.get_running_loop().run_in_executor(None, trim, 0)  # some milliseconds


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; other C libraries have none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
