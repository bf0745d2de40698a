"""The window of chunks in flight, as a sender watches it: bounded, and any failure ends it at once."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from typing import Any

from weightsync.errors import TransferAbortedError, is_consequence
from weightsync.observe import now_s
from weightsync.transfer.base import RecordPhase, WeightTransferSender
from weightsync.types import Deadline, InferenceEngineClient, PhaseRecord, WeightChunk

_WORDS_GRACE_S = 3.0  # for an engine to say why its connection broke: one second was too few on a starved host


class WindowedSender(WeightTransferSender):
    """A sender that announces chunk after chunk, a few ahead of the engines. What a chunk needs is a subclass's.

    Args:
        window: chunks that may be in flight while another one is made.
        record: where the phase "wait for engines" goes, and a subclass's own.
    """

    usable = True

    def __init__(self, *, window: int, record: RecordPhase, track: str) -> None:
        self._window = window
        self._record = record
        self._track = track

    def send_chunks(
        self, chunks: Iterable[WeightChunk], client: InferenceEngineClient, *, session: str, deadline: Deadline
    ) -> int:
        if not self.usable:
            raise TransferAbortedError("this sender is broken; build a new one", state_left="nothing was sent")
        self.usable = False  # until everything went well
        in_flight: dict[int, tuple[Future[Any], ...]] = {}
        stream = iter(chunks)
        seq = 0
        while True:
            self._settle(in_flight, upto=seq - self._window, deadline=deadline)  # before the next chunk is asked for
            chunk = next(stream, None)
            if chunk is None:
                break
            in_flight[seq] = self._send(chunk, client, session=session, seq=seq, deadline=deadline)
            del chunk
            seq += 1
        started = now_s()
        self._settle(in_flight, upto=seq, deadline=deadline)
        self._phase("wait for engines", started, seq - 1)
        self.usable = True
        return seq

    @abc.abstractmethod
    def _send(
        self, chunk: WeightChunk, client: InferenceEngineClient, *, session: str, seq: int, deadline: Deadline
    ) -> tuple[Future[Any], ...]:
        """Announces a chunk and starts to move it.

        Returns:
            What has to be done before the chunk is there; the engines' answer comes first.
        """

    def _settle(self, in_flight: dict[int, tuple[Future[Any], ...]], *, upto: int, deadline: Deadline) -> None:
        settle(in_flight, upto=upto, deadline=deadline)

    def _phase(self, name: str, started: float, seq: int) -> None:
        self._record(PhaseRecord(name=name, start_s=started, end_s=now_s(), track=self._track, detail=f"chunk {seq}"))


def settle(in_flight: dict[int, tuple[Future[Any], ...]], *, upto: int, deadline: Deadline) -> None:
    """Waits until chunks up to `upto` are moved and loaded, and forgets these.

    Args:
        in_flight: by number, what has to be done before that chunk is; the first is the engines' answer.
        upto: the last number that is waited for.

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
    answers = [both[0] for both in in_flight.values()]
    # of two that are as bad, the engine's words are found first
    futures = answers + [future for both in in_flight.values() for future in both[1:]]
    failed = _failures(futures)
    if failed and all(is_consequence(error) for error in failed):
        wait_for(answers, timeout=min(_WORDS_GRACE_S, deadline.remaining_s))
        failed = _failures(futures)
    if failed:
        raise min(failed, key=is_consequence)


def _failures(futures: Iterable[Future[Any]]) -> list[BaseException]:
    return [error for future in futures if future.done() and (error := future.exception()) is not None]
