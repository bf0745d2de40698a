"""The servers' log: one line of a kind a while, with the number of those that were left out.

Whoever can reach a port can make a server complain as often as they like. A line for each would fill a disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

EVERY_S = 30.0
_MAX_KINDS = 64
"""Kinds of lines that are known at once; texts are ours, so there are few."""


class OneAWhile(logging.Filter):
    """Lets one record of a kind through in so many seconds; the next one says how many were left out.

    Args:
        every_s: how often a kind may be told of.
        clock: seconds; for tests.
    """

    def __init__(self, every_s: float = EVERY_S, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        self._told: dict[object, tuple[float, int]] = {}  # by kind: when it was told of, how many were left out since

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[0] if record.exc_info else None
        if error is not None and issubclass(error, asyncio.CancelledError):
            return False  # a request that ends with its server
        kind, now_s = (record.msg, record.levelno, error), self._clock()
        told_s, num_left_out = self._told.get(kind, (-self._every_s, 0))
        if now_s - told_s < self._every_s:
            self._told[kind] = (told_s, num_left_out + 1)
            return False
        self._told.pop(kind, None)
        if len(self._told) >= _MAX_KINDS:
            self._told.pop(next(iter(self._told)))
        self._told[kind] = (now_s, 0)
        if num_left_out:
            record.msg = f"{str(record.msg).rstrip()} (and {num_left_out} more of these in {now_s - told_s:.0f} s)"
        return True


logger = logging.getLogger("weightsync.net.http")
"""What every server of ours says of its connections."""

logger.addFilter(OneAWhile())
