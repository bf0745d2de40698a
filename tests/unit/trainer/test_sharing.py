"""RankSharing: who lends, chunk by chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.standins.processes import run_ranks
from weightsync.errors import ExtractError, TransferAbortedError, WeightSyncError
from weightsync.trainer.ranks import TrainingRanks
from weightsync.trainer.sharing import RankSharing
from weightsync.types import WeightChunk


class Sharer:
    """Of the rank on another GPU than rank 0, which is on the same host."""

    num_slots = 3

    def __init__(self) -> None:
        self.shared: list[int] = []

    def place(self, chunk: WeightChunk) -> str:
        return "host" if chunk.tensors[0].device.type == "cpu" else "GPU 1"

    def share(self, chunk: WeightChunk, seq: int) -> tuple[()]:
        self.shared.append(seq)
        return ()


class Ranks:
    """Two ranks; rank 0 says what rank 1 does, and that its place is its own GPU."""

    rank = 1

    def agree(self, failed: bool) -> bool:
        return failed

    def exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**mine, "said": "GPU 0" if mine["said"] == "GPU 1" else mine["said"]}, mine]


def test_who_lends_is_settled_for_each_kind_of_device() -> None:
    """A model whose first chunk lies on the CPU; the meta device stands for a GPU.

    Seen to fail: settled by the first chunk alone, rank 1 lent nothing, and its GPU's engine was offered GPU 0's.
    """
    sharer = Sharer()
    sharing = RankSharing(sharer, Ranks())  # type: ignore[arg-type]
    for seq, device in enumerate(["cpu", "meta", "meta", "cpu", "meta"]):
        chunk = WeightChunk(names=("w",), tensors=(torch.ones(1, device=device),))
        assert sharing.share(chunk, seq, let_go=lambda: None) is chunk
    assert sharer.shared == [1, 2, 4]


def one_has_no_chunk(rank: int, world_size: int) -> str:
    """Rank 1 can't build its chunk, which it says in `agree`; the others come to lend theirs."""
    ranks = TrainingRanks(timeout_s=20)
    error: WeightSyncError = ExtractError("no room")
    if rank == 1:
        assert ranks.agree(True)
    else:
        chunk = WeightChunk(names=("w",), tensors=(torch.ones(1),))
        with pytest.raises(TransferAbortedError) as caught:
            RankSharing(Sharer(), ranks).share(chunk, 0, let_go=lambda: None)  # type: ignore[arg-type]
        error = caught.value
    with pytest.raises(ExtractError) as agreed:
        ranks.settle(error)
    return str(agreed.value)


def test_a_rank_that_has_no_chunk_to_lend_stops_the_others() -> None:
    """Seen red: they were in another exchange, read its words as their own, and the ranks' group was lost."""
    assert all("no room" in said for said in run_ranks(one_has_no_chunk, 2))
