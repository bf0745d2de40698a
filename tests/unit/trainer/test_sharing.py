"""RankSharing: who lends, chunk by chunk."""

from __future__ import annotations

from typing import Any

import torch

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
