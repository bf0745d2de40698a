"""Threads of one read: as many as can be had."""

from __future__ import annotations

import threading
from collections.abc import Callable

from weightsync.errors import StateError


def start_threads(run: Callable[[], None], count: int, *, name: str) -> list[threading.Thread]:
    """Starts so many threads of `run`; fewer, where this process can't have more, and at least one.

    Raises:
        StateError: it can't have one. Nothing runs.
    """
    started: list[threading.Thread] = []
    for number in range(count):
        thread = threading.Thread(target=run, name=f"{name}-{number}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not started:
                raise StateError(f"no thread can be started to read: {error}") from error
            break
        started.append(thread)
    return started
