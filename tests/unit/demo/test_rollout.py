"""Rollout: its end where a generation does not come back."""

from __future__ import annotations

import threading
import time

from weightsync.demo.rollout import Rollout


class Stuck(Rollout):
    """As one whose server is paused."""

    refusals = ()

    def __init__(self) -> None:
        super().__init__("engine-0", "tiny")
        self.inside, self.over = threading.Event(), threading.Event()

    def _generate_once(self) -> None:
        self.inside.set()
        self.over.wait(300)


def test_the_end_does_not_wait_for_a_server_that_does_not_answer() -> None:
    """Seen red with a minute, as an engine whose thread is inside of torch is given."""
    engine = Stuck()
    engine.start()
    assert engine.inside.wait(60)
    begun_s = time.monotonic()
    engine.close()
    took_s = time.monotonic() - begun_s
    engine.over.set()
    assert took_s < 40
