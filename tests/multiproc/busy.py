"""A machine where something else runs on every core, at the priority that everything has."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil

NUM_TURNS = 10
"""How often in a row a storm is run on a busy machine: what is late there is late now and then."""
MAX_IDLE = 0.02
"""Of the time: what the cores may rest while two loads change places."""


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """A process for each core that never rests, in a session of its own as a load from another terminal is.

    Linux shares a core between sessions first, so that half of each core is the load's, however many processes a storm
    has. Fails where a process of the load has ended before its time, or the cores had time to rest.
    """
    cores = sorted(os.sched_getaffinity(0))
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in cores]
    before_s = _resting_and_all_s(cores)
    try:
        yield
        resting_s, all_s = (now - then for now, then in zip(_resting_and_all_s(cores), before_s, strict=True))
        assert [process.poll() for process in load] == [None] * len(cores), "the load went on to the end"
        assert resting_s <= MAX_IDLE * all_s, f"the cores rested {resting_s:.1f} s of {all_s:.1f} s"
    finally:
        for process in load:
            process.kill()
        for process in load:
            process.wait()


def _resting_and_all_s(cores: list[int]) -> tuple[float, float]:
    """What these cores have rested since the machine started, and all the time that they had."""
    times = psutil.cpu_times(percpu=True)
    return (sum(times[core].idle + times[core].iowait for core in cores), sum(sum(times[core]) for core in cores))
