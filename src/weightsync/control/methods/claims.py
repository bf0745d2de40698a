"""What a fleet does about announcements that may not be true: their agent is asked, by an instance."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

from weightsync.control.barrier import VersionBarrier
from weightsync.errors import NotPublishedError, WeightSyncError
from weightsync.handles.fanout import in_thread
from weightsync.types import Deadline
from weightsync.types.fleet import ModelVersion

_LOOK_S = 0.2
_ASK_AGAIN_S = 1.0

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def asking_about(
    wanted: ModelVersion, barrier: VersionBarrier, ask: Callable[[ModelVersion], bool], timeout_s: float
) -> Iterator[Callable[[], None]]:
    """While a model that is ahead of its set waits for the others, its agent is asked whether what was announced last
    is there: a number that will never come must not hold them up.

    Args:
        wanted: the version.
        barrier: where it waits; what is denied is taken back there.
        ask: returns when the agent has it; False where nobody could be asked; raises what the agent said.
        timeout_s: asked no longer than this.

    Yields:
        What raises NotPublishedError, once the agent has denied it.
    """
    over, ended = Deadline(timeout_s), threading.Event()
    denied: list[NotPublishedError] = []

    def run() -> None:
        known: ModelVersion | None = None
        pause_s = _LOOK_S
        while not ended.wait(pause_s) and not over.expired:
            pause_s, newest = _LOOK_S, barrier.published().get(wanted.model_id)
            if newest is None or newest == known or not barrier.is_ahead(newest):
                continue
            try:
                known = newest if ask(newest) else None
            except NotPublishedError as error:
                barrier.deny(newest, error.newest)
                if newest.of == wanted.of or error.newest is None:
                    denied.append(error)
                    barrier.look()
                    return
            except WeightSyncError as error:
                _logger.info("model %s: nobody says whether %s is there: %s", newest.model_id, newest.of, error)
                pause_s = _ASK_AGAIN_S

    def check() -> None:
        if denied:
            raise denied[0]

    if len(barrier.set_of(wanted.model_id)) > 1:
        in_thread(run, name="weightsync-ask-about")
    try:
        yield check
    finally:
        ended.set()


class Once:
    """The first word counts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._word: bool | None = None

    def set(self, word: bool) -> bool:
        """Says it; whether it is what counts."""
        with self._lock:
            if self._word is None:
                self._word = word
            return self._word is word
