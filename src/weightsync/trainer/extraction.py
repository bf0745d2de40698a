"""Extraction in a thread beside sending: every rank runs it in lockstep, rank 0 hands its chunks over.

At most two chunks exist: the one being built here, and the one the sender packs. The caller waits with a
deadline, so a rank that hangs inside a collective costs the caller its deadline and no more. On CUDA the thread works
on the caller's own streams: what a training step has queued there comes first, and what is freed there may be reused.

Where chunks are lent instead of sent, they are lent here, by every rank that has engines beside it. A chunk takes the
memory of the one `num_slots` before it, so rank 0 does not agree to build it until the engines have let go of that one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from weightsync.codec.digest import shard_sums
from weightsync.codec.model_digest import ShardSum
from weightsync.codec.whole import whole_sum
from weightsync.errors import (
    DeadlineExceededError,
    ExtractError,
    StateError,
    TransferAbortedError,
    WeightSyncError,
    as_weightsync_error,
)
from weightsync.extract.base import WeightExtractor
from weightsync.observe import Recorder
from weightsync.tensors import own_streams
from weightsync.trainer.ranks import TrainingRanks
from weightsync.trainer.sharing import RankSharing
from weightsync.transfer.native import clear_frames
from weightsync.types import Deadline, TensorTable, WeightChunk

_GATHER_BYTES_S = 100 << 20
"""A slow trainer gathers and consumes as much in a second."""
_TELL_S = 2.0  # how long after the deadline the other ranks' word of it may take


class LockstepExtraction:
    """One extraction of the whole model. Every training rank makes one, with the same arguments.

    Args:
        recorder: where the phases "extract" and "digest" go.
        keep: whether chunks are handed over (rank 0) or dropped (the others).
        sharing: lends each chunk before it is handed over or dropped; None: chunks are sent.
    """

    def __init__(
        self,
        extractor: WeightExtractor,
        *,
        dtype: str | None,
        ranks: TrainingRanks,
        deadline: Deadline,
        recorder: Recorder,
        keep: bool,
        sharing: RankSharing | None = None,
    ) -> None:
        self._extractor = extractor
        self._dtype = dtype
        self._ranks = ranks
        self._deadline = deadline
        self._recorder = recorder
        self._keep = keep
        self._sharing = sharing
        self._num_let_go = 0
        self._late = Deadline(deadline.remaining_s + _TELL_S)
        self._changed = threading.Condition()
        self._chunk: WeightChunk | None = None
        self._wanted = False
        self._ended = False
        self._error: WeightSyncError | None = None
        self._stop: WeightSyncError | None = None
        self._sum: ShardSum | None = None
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._device = torch.cuda.current_device() if in_use else None
        self._streams: list[torch.cuda.Stream] = []
        self._thread = threading.Thread(target=self._run, name="weightsync-extract", daemon=True)

    def start(self) -> None:
        """Starts the thread. No collective of the trainer may run until `finish`, which says where none can be had."""
        if self._device is not None:
            self._streams = own_streams()
        try:
            self._thread.start()
        except RuntimeError as error:
            try:
                self._agree(StateError(f"no thread can be started to extract: {error}", rank=self._ranks.rank))
            except WeightSyncError as agreed:  # the other ranks waited for it, too
                self._error, self._ended = agreed, True

    def chunks(self) -> Iterator[WeightChunk]:
        """Rank 0: the chunks, one at a time; the next is built while this one is packed."""
        while True:
            with self._changed:
                self._wanted = True
                self._changed.notify_all()
                while self._chunk is None and not self._ended:
                    self._changed.wait(self._deadline.check("next chunk of the extraction"))
                chunk, self._chunk = self._chunk, None
                if chunk is None:
                    if self._error is not None:
                        raise self._error
                    return
            yield chunk
            del chunk

    def stop(self, error: WeightSyncError) -> None:
        """Makes every rank stop before its next chunk."""
        with self._changed:
            self._stop = self._stop or error
            self._changed.notify_all()

    def finish(self) -> ShardSum | None:
        """Waits for the end.

        Returns:
            This rank's part of the model's digest; None where it can't be had without communication.

        Raises:
            WeightSyncError: extraction failed here or on another rank.
            DeadlineExceededError: it hangs; the thread is left behind (see `hangs`).
        """
        with self._changed:
            while not self._ended:
                left = self._deadline.remaining_s or self._late.remaining_s
                if not left:
                    raise DeadlineExceededError(
                        "the extraction did not end in time",
                        rank=self._ranks.rank,
                        state_left="a training rank hangs in a collective: restart the job",
                    )
                self._changed.wait(left)
            if self._error is not None:
                raise self._error
            return self._sum

    @property
    def hangs(self) -> bool:
        return self._thread.is_alive() and not self._ended

    def _run(self) -> None:
        try:
            if self._device is not None:
                for stream in self._streams:
                    torch.cuda.set_stream(stream)
                torch.cuda.set_device(self._device)  # last: `set_stream` changes it
            self._extract()
        except BaseException as error:
            self._error = as_weightsync_error(error, ExtractError, "extraction failed", rank=self._ranks.rank)
            clear_frames(error)  # the trainer may keep this until its next sync
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _extract(self) -> None:
        stream: Iterator[WeightChunk] | None = None
        number = 0
        while True:
            self._agree(self._await_slot(number))
            try:
                if stream is None:
                    stream = iter(self._extractor.extract_weights(self._dtype))
                with self._recorder.phase("extract", detail=f"chunk {number}"):
                    chunk = next(stream, None)
            except BaseException as error:
                self._agree(as_weightsync_error(error, ExtractError, "extraction failed", rank=self._ranks.rank))
                raise
            if chunk is None:
                break
            if self._sharing is not None:
                try:
                    with self._recorder.phase("share", detail=f"chunk {number}"):
                        chunk = self._sharing.share(chunk, number, let_go=self._let_go)
                except WeightSyncError as error:
                    self._agree(error)
                    raise
            if self._keep:
                try:
                    self._hand_over(chunk)
                except WeightSyncError as error:
                    self._agree(error)  # the other ranks wait in their next agree
                    raise
            del chunk
            number += 1
        if self._extractor.can_shard_locally():
            with self._recorder.phase("digest"):
                whole = self._extractor.local_whole(self._dtype)
                if whole is None:
                    self._sum = shard_sums(self._extractor.local_shards(self._dtype))
                else:
                    self._sum = whole_sum(*whole, convert=True)

    def _await_slot(self, number: int) -> WeightSyncError | None:
        """Rank 0: waits until chunk `number` may take an earlier one's memory, or this is told to stop."""
        if self._sharing is None or not self._keep:
            return None
        try:
            with self._changed:
                while number - self._sharing.num_slots >= self._num_let_go and self._stop is None:
                    self._changed.wait(self._deadline.check("engines to let go of a chunk", rank=self._ranks.rank))
        except DeadlineExceededError as error:
            return error
        return None

    def _let_go(self) -> None:
        """Called by the sender, chunk after chunk in order."""
        with self._changed:
            self._num_let_go += 1
            self._changed.notify_all()

    def _agree(self, error: WeightSyncError | None) -> None:
        """Every rank stops here if any has to; a rank's own error is raised by its caller."""
        error = error or self._stop
        if self._ranks.agree(error is not None):
            raise error or TransferAbortedError(
                "another training rank stopped the sync", rank=self._ranks.rank, state_left="weights are unchanged"
            )

    def _hand_over(self, chunk: WeightChunk) -> None:
        """Gives a chunk to the sender once it asks; gives up quietly when told to stop: the next `_agree` tells all."""
        with self._changed:
            while not self._wanted and self._stop is None:
                self._changed.wait(self._deadline.check("sender to take a chunk", rank=self._ranks.rank))
            if self._stop is None:
                self._wanted = False
                self._chunk = chunk
                self._changed.notify_all()


def gather(
    extractor: WeightExtractor,
    consume: Callable[[Iterator[WeightChunk]], None],
    *,
    dtype: str | None,
    ranks: TrainingRanks,
    timeout_s: float,
    recorder: Recorder,
    failed: str,
) -> None:
    """Every rank gathers the whole model, and rank 0 consumes it. A rank that fails tells the others before their next
    collective, which is one of the trainer's own group.

    Args:
        consume: takes rank 0's chunks to their end, and keeps none.
        timeout_s: of gathering, which has 1 s more for each 100 MiB.
        failed: what an untyped error of `consume` is said to be.

    Raises:
        WeightSyncError: on every rank.
    """
    seconds = timeout_s + TensorTable.of(extractor.metadata(dtype)).total_bytes / _GATHER_BYTES_S
    extraction = LockstepExtraction(
        extractor, dtype=dtype, ranks=ranks, deadline=Deadline(seconds), recorder=recorder, keep=ranks.rank == 0
    )
    extraction.start()
    try:
        if ranks.rank == 0:
            consume(extraction.chunks())
        extraction.finish()
    except BaseException as error:
        if isinstance(error, Exception):
            typed = as_weightsync_error(error, ExtractError, failed, rank=ranks.rank)
        else:  # Ctrl-C: it is what comes out
            typed = TransferAbortedError("the trainer was interrupted", rank=ranks.rank)
        extraction.stop(typed)
        with contextlib.suppress(WeightSyncError):
            extraction.finish()
        if extraction.hangs:  # inside a collective, and nobody may pair with that
            ranks.give_up("the extraction hangs in a collective")
        if isinstance(error, Exception) and typed is not error:
            raise typed from error
        raise
