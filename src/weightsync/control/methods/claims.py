"""What a fleet does about announcements that may not be true: their agent is asked, by an instance."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from weightsync.control.barrier import VersionBarrier
from weightsync.control.instance import Member
from weightsync.errors import NotPublishedError, SyncFailedError, WeightSyncError
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

    def set(self, word: bool, then: Callable[[], None] = lambda: None) -> bool:
        """Says it; whether it is what counts. Who says it first does `then` before anybody else goes on."""
        with self._lock:
            if self._word is None:
                self._word = word
                then()
            return self._word is word


def named(versions: Sequence[ModelVersion]) -> str:
    """As errors name them."""
    return ", ".join(f"{each.model_id} {each.of}" for each in versions)


def failed_error(
    versions: Sequence[ModelVersion], failed: Mapping[Member, WeightSyncError], num_members: int, *, num_needed: int = 0
) -> WeightSyncError:
    """What the failures of all come to: where an agent has denied a version, that is what counts. That a trainer has
    ended with it counts where all say so, and for one model: of a set another one's may be there."""
    causes = {member.instance_id: error for member, error in failed.items()}
    for who, error in causes.items():
        if isinstance(error, NotPublishedError) and any(str(each.of) == error.version for each in versions):
            return NotPublishedError(
                error.message, peer=who, version=error.version, newest=error.newest,
                state_left="what was served is served",
            )  # fmt: skip
    alone = len(versions) == 1 and 0 < num_members <= len(causes)
    if alone and all(isinstance(error, NotPublishedError) for error in causes.values()):
        who, error = next(iter(causes.items()))
        return NotPublishedError(
            error.message, peer=who, version=named(versions), state_left="what was served is served"
        )  # fmt: skip
    lacking = f"{num_needed} have to stage it, and {num_members} take part; " if num_needed > num_members else ""
    return SyncFailedError(
        f"{lacking}{len(causes)} of {num_members} instances failed: "
        + "; ".join(f"{who}: {type(error).__name__}: {error}" for who, error in causes.items())[:2000],
        causes=causes,
        version=named(versions),
        state_left="what was served is served",
    )
