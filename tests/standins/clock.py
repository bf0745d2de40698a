"""A clock that stands until the test moves it, in place of `time` in some modules."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from types import ModuleType

import pytest


class StandingClock:
    """What those modules take for `time`.

    Args:
        patched: takes it back.
        modules: that have `import time`.

    Attributes:
        now_s: moved by the test.
        num_looks: how often each thread has looked, by its name.
    """

    def __init__(self, patched: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.now_s = time.monotonic()
        self.num_looks: collections.Counter[str] = collections.Counter()
        for module in modules:
            patched.setattr(module, "time", self)

    def monotonic(self) -> float:
        self.num_looks[threading.current_thread().name] += 1
        return self.now_s

    def acted(self, thread_name: str) -> Callable[[], bool]:
        """Says whether the thread that looks again and again has acted on what the clock says now: its third look from
        now on comes after all that it does because of its second."""
        enough = self.num_looks[thread_name] + 3
        return lambda: self.num_looks[thread_name] >= enough
