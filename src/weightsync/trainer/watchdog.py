"""Watchdog: for how long an agent has answered nothing though it could have, by what the kernel says of its threads."""

from __future__ import annotations

import contextlib
import dataclasses
import os

_AT_MOST = 10.0
"""A silence of so many times the limit is too long, whatever the reason."""
_IDLE_SHARE = 0.05
_LONGEST = 8.0
_CALM = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThreadTimes:
    """What a process's threads have done since they began.

    Attributes:
        cpu_s: seconds on a CPU, all threads.
        waited_s: seconds that each thread was ready and got no CPU, by thread.
        ready: whether one of them wants a CPU now, or waits inside the kernel for a disk or for memory.
    """

    cpu_s: float
    waited_s: dict[str, float]
    ready: bool


def thread_times(pid: int, *, proc: str = "/proc") -> ThreadTimes | None:
    """What the kernel says of a process; None where it says nothing (another system, no scheduler statistics)."""
    cpu_s, ready = 0.0, False
    waited_s: dict[str, float] = {}
    try:
        threads = os.listdir(f"{proc}/{pid}/task")
    except OSError:
        return None
    for thread in threads:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            with open(f"{proc}/{pid}/task/{thread}/schedstat", encoding="ascii") as file:
                ran_ns, waited_ns = file.read().split()[:2]
            with open(f"{proc}/{pid}/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                state = file.read().rpartition(")")[2].split()[0]
            cpu_s += int(ran_ns) / 1e9
            waited_s[thread] = int(waited_ns) / 1e9
            ready = ready or state in "RD"
    return ThreadTimes(cpu_s=cpu_s, waited_s=waited_s, ready=ready) if waited_s else None


def starved_s(before: ThreadTimes | None, now: ThreadTimes | None, elapsed_s: float) -> float:
    """How much of a stretch of time a process wanted to work and was given no CPU for."""
    if before is None or now is None:
        return 0.0
    waited_s = max((waited - before.waited_s.get(thread, 0.0) for thread, waited in now.waited_s.items()), default=0.0)
    if now.ready and now.cpu_s - before.cpu_s < _IDLE_SHARE * elapsed_s:
        return elapsed_s  # it waits still, in one stretch, which is added up when it ends
    return min(elapsed_s, max(0.0, waited_s))


class Patience:
    """Patience with one agent after the other: what counts is time in which it could have answered.

    A host may have no CPU for an agent, or none for the process that asks it: killing it then makes more work and helps
    nobody. And where one was killed, the next one has twice as long.

    Args:
        limit_s: of silence.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._factor = 1.0
        self._times: ThreadTimes | None = None
        self._pid = -1
        self.silent_s = 0.0
        self.elapsed_s = 0.0
        self._alive_s = 0.0

    def begin(self, pid: int) -> None:
        """Another agent."""
        self._pid, self._times = pid, thread_times(pid)
        self._alive_s = 0.0
        self.heard()

    def heard(self) -> None:
        """It has answered."""
        self.silent_s = self.elapsed_s = 0.0

    def look(self, elapsed_s: float, meant_s: float) -> None:
        """A look at it.

        Args:
            elapsed_s: seconds since the last one.
            meant_s: after how long it was to come: where it is late, this process got no CPU itself, and what the agent
                has said was not read.
        """
        now = thread_times(self._pid)
        self.silent_s += max(0.0, min(elapsed_s, meant_s) - starved_s(self._times, now, elapsed_s))
        self.elapsed_s += min(elapsed_s, 2 * meant_s)
        self._times = now
        self._alive_s += elapsed_s
        if self._alive_s > _CALM * self._limit_s * self._factor:
            self._factor = 1.0

    def is_over(self, *, extra_s: float = 0.0) -> bool:
        """Whether it has been silent for too long.

        Args:
            extra_s: that it is given for a long order.
        """
        limit_s = self._limit_s * self._factor + extra_s
        return self.silent_s > limit_s or self.elapsed_s > _AT_MOST * limit_s

    def killed(self) -> None:
        """It was, so the next one has longer."""
        self._factor = min(2 * self._factor, _LONGEST)
