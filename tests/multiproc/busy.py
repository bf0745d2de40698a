"""A machine where something else runs on every core, at the priority that everything has."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

NUM_TURNS = 10
"""How often in a row a storm is run on a busy machine: what is late there is late now and then."""


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """A process for each core that never rests."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()
