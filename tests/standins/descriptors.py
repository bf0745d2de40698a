"""What this process has open."""

from __future__ import annotations

import contextlib
import os


def num_open(name: str) -> int:
    """How many descriptors are of files with that name in their path. Other threads open and close others meanwhile."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it meanwhile
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(name in link for link in links)
