"""How long the demo waits for one step, and what it says meanwhile. A run has no limit: a slow machine takes longer."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

import torch

_FIRST_WORD_S = 5.0


class Patience:
    """The time that one step may take, and a word now and then while it is waited for.

    Args:
        timeout_s: of one step.
        say: gets the words: after 5 s, 10 s, 20 s and so on.
        clock: in seconds.
    """

    def __init__(
        self, timeout_s: float, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout_s = timeout_s
        self._say = say
        self._clock = clock
        self.renew()

    def renew(self) -> None:
        """A step was done; the next one has all the time again."""
        self._began_s = self._clock()
        self._next_word_s = _FIRST_WORD_S

    def wait(self, waiting_for: str) -> bool:
        """Says, where it is time to, what is waited for and for how long; whether that was too long."""
        waited_s = self._clock() - self._began_s
        if waited_s >= self._next_word_s:
            self._next_word_s *= 2
            self._say(f"waiting for {waiting_for}: {waited_s:.0f} s so far {here()}")
        return waited_s >= self.timeout_s


@contextlib.contextmanager
def patiently(waiting_for: str, say: Callable[[str], None]) -> Iterator[None]:
    """Says now and then what is waited for, beside a call that blocks and has a limit of its own."""
    patience, ended = Patience(float("inf"), say), threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            patience.wait(waiting_for)

    thread = threading.Thread(target=watch, name="weightsync-demo-patience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(5)


def here() -> str:
    """What may make a step slow on this machine, in brackets."""
    num_cores = len(os.sched_getaffinity(0))
    vectors = torch.backends.cpu.get_cpu_capability()
    if "AVX512" not in vectors:
        vectors += ", no AVX-512"
    return f"({num_cores} core{'s' * (num_cores > 1)}, {vectors}; load {os.getloadavg()[0]:.1f})"
