"""Peers: the workers of one vLLM engine, who agree on how a step went before any of them answers."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

from weightsync.errors import EngineError, UnsupportedError, WeightSyncError
from weightsync.handles.vllm_messages import error_text

_AGREE_MARGIN_S = 60.0  # an abort alone may wait half of it for a loader that hangs


class BackendError(RuntimeError):
    """What vLLM is given to raise: a text in which the other side finds the typed error again."""

    def __init__(self, error: WeightSyncError) -> None:
        super().__init__(error_text(error))


class Peers:
    """The workers of one engine, who tell each other how a step went. Small JSON over vLLM's own CPU group."""

    def __init__(self, world_size: int) -> None:
        self._size = world_size
        self._group: Any = None
        self.rank = 0
        if world_size > 1:
            group = _group_of_workers(world_size)
            self._group = group.cpu_group
            self.rank = int(group.rank_in_group)

    @property
    def alone(self) -> bool:
        """Whether there is no other worker."""
        return self._size == 1

    @property
    def speaks(self) -> bool:
        """Whether this is the worker that raises."""
        return self.rank == self._size - 1

    def exchange(self, mine: bytes, *, wait_s: float) -> list[bytes]:
        """What every worker said, by rank; all call it.

        Args:
            mine: what this one says.
            wait_s: how long the others may take; and a margin.

        Raises:
            EngineError: not every worker answered in time. vLLM's own group is of no use then, so neither is vLLM.
        """
        if self._group is None:
            return [mine]
        import torch

        wait_s += _AGREE_MARGIN_S
        sizes = self._gather(torch.tensor([len(mine)], dtype=torch.int64), wait_s)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        gathered = self._gather(padded, wait_s)
        return [bytes(each[: int(size)].tolist()) for each, size in zip(gathered, sizes, strict=True)]

    def _gather(self, mine: Any, wait_s: float) -> list[Any]:
        import torch
        import torch.distributed as dist

        out = [torch.empty_like(mine) for _ in range(self._size)]
        try:
            work = dist.all_gather(out, mine, group=self._group, async_op=True)
            work.wait(timedelta(seconds=wait_s))
        except RuntimeError as error:
            raise BackendError(EngineError(f"the workers of this engine lost each other: {error}")) from error
        return out


def _group_of_workers(world_size: int) -> Any:
    """vLLM's group of this engine's workers: its world, or the part of it that belongs to one data-parallel replica."""
    from vllm.distributed import parallel_state

    for name in ("get_inner_dp_world_group", "get_world_group"):
        with contextlib.suppress(AttributeError, AssertionError):  # not in this release; not made for this engine
            group = getattr(parallel_state, name)()
            if group.world_size == world_size:
                return group
    raise UnsupportedError(f"vLLM has no group of just this engine's {world_size} workers")
