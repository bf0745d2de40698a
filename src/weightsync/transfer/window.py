"""The window of chunks in flight, as a sender watches it: bounded, and any failure ends it at once."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from typing import Any

from weightsync.errors import is_consequence
from weightsync.types import Deadline

_WORDS_GRACE_S = 1.0  # how long to wait for an engine to say why its connection broke


def settle(in_flight: dict[int, tuple[Future[Any], ...]], *, upto: int, deadline: Deadline) -> None:
    """Waits until chunks up to `upto` are moved and loaded, and forgets these.

    Args:
        in_flight: by number, what has to be done before that chunk is; the first is the engines' answer.
        upto: the last number that is waited for.
        deadline: of the sync.

    Raises:
        WeightSyncError: a failure of any chunk in flight, at once.
        DeadlineExceededError: not done in time.
    """
    while True:
        _raise_first(in_flight, deadline)
        pending = {future for futures in in_flight.values() for future in futures if not future.done()}
        if not any(future in pending for seq, futures in in_flight.items() if seq <= upto for future in futures):
            break
        left = deadline.check("answer of the engines to an announced chunk", state_left="the sync has failed")
        wait_for(pending, timeout=left, return_when=FIRST_COMPLETED)
    for seq in [seq for seq in in_flight if seq <= upto]:
        del in_flight[seq]


def _raise_first(in_flight: dict[int, tuple[Future[Any], ...]], deadline: Deadline) -> None:
    """Raises a failure, preferring an engine's own words to the broken connection that follows from them."""
    futures = {future for both in in_flight.values() for future in both}
    failed = _failures(futures)
    if failed and all(is_consequence(error) for error in failed):
        answers = {both[0] for both in in_flight.values()}
        wait_for(answers, timeout=min(_WORDS_GRACE_S, deadline.remaining_s))
        failed = _failures(futures)
    if failed:
        raise min(failed, key=is_consequence)


def _failures(futures: Iterable[Future[Any]]) -> list[BaseException]:
    return [error for future in futures if future.done() and (error := future.exception()) is not None]
