"""RankSharing: training ranks that lend their copies of a chunk to the engines beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from weightsync.errors import SharedMemoryError, TransferAbortedError, WeightSyncError, as_weightsync_error
from weightsync.trainer.ranks import TrainingRanks
from weightsync.transfer.base import ChunkSharer, SharedChunk
from weightsync.types import MemoryHandle, WeightChunk


class RankSharing:
    """One sync's sharing on one training rank. Every rank makes one and calls it in lockstep.

    Which ranks share is settled at the first chunk of each kind of device (a model may have some tensors on the CPU),
    when its place is known: the first rank of each place. The others do nothing. Where rank 0 alone shares, which is
    the rule for CPU tensors on one host, ranks exchange nothing more; else they exchange handles, as JSON, at each
    chunk.
    """

    def __init__(self, sharer: ChunkSharer, ranks: TrainingRanks) -> None:
        self.num_slots = sharer.num_slots
        self._sharer = sharer
        self._ranks = ranks
        self._by_kind: dict[str, tuple[int, ...]] = {}

    def share(self, chunk: WeightChunk, seq: int, *, let_go: Callable[[], None]) -> WeightChunk:
        """Lends the chunk.

        Args:
            chunk: equal on all ranks, each with its own copy, on a device of the same kind.
            let_go: what rank 0's sender calls when every engine has let go of it.

        Returns:
            On rank 0 the chunk with everybody's handles; elsewhere the chunk.

        Raises:
            WeightSyncError: this rank can't share. Where ranks exchange handles, every rank raises; else the
                others learn it by their next agreement.
        """
        kind = _kind_of(chunk)  # the same on every rank, so all of them settle it at the same chunk
        if kind not in self._by_kind:
            self._by_kind[kind] = self._first_of_each_place(chunk)
        sharing_ranks = self._by_kind[kind]
        handles: tuple[MemoryHandle, ...] = ()
        error: WeightSyncError | None = None
        if self._ranks.rank in sharing_ranks:
            try:
                handles = self._sharer.share(chunk, seq)
            except BaseException as caught:
                error = self._typed(caught)
        if sharing_ranks == (0,):
            if error is not None:
                raise error
            replies: list[Any] = [handles]
        else:
            replies = self._told(error, [msgspec.to_builtins(handle) for handle in handles])
        if self._ranks.rank != 0:
            return chunk
        lists = tuple(msgspec.convert(replies[rank], tuple[MemoryHandle, ...]) for rank in sharing_ranks)
        return SharedChunk.of(chunk, lists, let_go=let_go)

    def _first_of_each_place(self, chunk: WeightChunk) -> tuple[int, ...]:
        place, error = "", None
        try:
            place = self._sharer.place(chunk)
        except BaseException as caught:
            error = self._typed(caught)
        places = self._told(error, place)
        return tuple(rank for rank, each in enumerate(places) if each not in places[:rank])

    def _told(self, error: WeightSyncError | None, mine: Any) -> list[Any]:
        """What every rank says; raises on all of them if any has an error: its own, or that there is one."""
        if self._ranks.agree(error is not None):  # first: one that has no chunk to lend comes to this alone
            raise error or TransferAbortedError(
                "another training rank could not lend its memory, or stopped the sync",
                rank=self._ranks.rank,
                state_left="nothing was sent",
            )
        return [one["said"] for one in self._ranks.exchange({"said": mine})]

    def _typed(self, caught: BaseException) -> WeightSyncError:
        return as_weightsync_error(caught, SharedMemoryError, "a chunk could not be lent", rank=self._ranks.rank)


def _kind_of(chunk: WeightChunk) -> str:
    """The kind of device that the chunk is lent from: the CPU only where all of it lies there."""
    return next((tensor.device.type for tensor in chunk.tensors if tensor.device.type != "cpu"), "cpu")
