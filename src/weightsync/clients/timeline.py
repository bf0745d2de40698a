"""TimelineClient: what happened at a face of ours, and how far its clock is from this one. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from weightsync.net.client import JsonClient
from weightsync.observe import now_s
from weightsync.types import Deadline
from weightsync.types.timeline import Timeline

_NUM_ASKED = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """How far another process's clock is from this one.

    Attributes:
        ahead_s: by so much it is ahead.
        error_s: by so much more or less, at the most.
    """

    ahead_s: float
    error_s: float


class TimelineClient(JsonClient):
    """`/timeline` of a controller, a rollout service or an agent; see `JsonClient` for arguments and errors."""

    def __init__(self, url: str, *, token: str | None = None, verify: bool | str = True) -> None:
        super().__init__(url, runs="a weightsync controller, rollout service or agent", token=token, verify=verify)

    def clock(self, *, timeout_s: float = 10.0) -> Timeline:
        """What answers there, and its time; without phases."""
        return self.call("GET", "/timeline/clock", Timeline, timeout_s=timeout_s)

    def offset(self, *, timeout_s: float = 10.0, clock: Callable[[], float] = now_s) -> ClockOffset:
        """As NTP finds it: the other clock was read between sending and receiving, at the midpoint give or take half
        the exchange. The shortest of a few exchanges counts.

        Args:
            timeout_s: for all of them.
            clock: of this process, in seconds.
        """
        deadline = Deadline(timeout_s)
        found: list[ClockOffset] = []
        for _ in range(_NUM_ASKED):
            sent_s = clock()
            there_s = self.clock(timeout_s=deadline.check("the clock", peer=self.url)).now_s
            came_s = clock()
            found.append(ClockOffset(ahead_s=there_s - (sent_s + came_s) / 2, error_s=(came_s - sent_s) / 2))
        return min(found, key=lambda offset: offset.error_s)

    def timeline(self, *, timeout_s: float = 10.0) -> Timeline:
        """Its last phases."""
        return self.call("GET", "/timeline", Timeline, timeout_s=timeout_s)
