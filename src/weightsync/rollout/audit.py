"""Audit: reads all live weights again, piece by piece, while the engine serves, and says what digest they have."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable

from weightsync.codec.digest import ShardSum, model_digest, shard_sum
from weightsync.errors import TransferAbortedError
from weightsync.plan.boxes import split_box, whole_box
from weightsync.types import HeldTensor, TensorSpec, itemsize_bytes

_PIECE_BYTES = 1 << 20
"""Small enough that a piece is summed by the audit's own thread alone, and that cancelling it takes no time."""
_NICE = 10


class Audit:
    """One reading of live weights. `cancel` ends it from any thread."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._ended = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether what it found says nothing: a session may write the live weights by now."""
        return self._cancelled.is_set()

    def cancel(self, *, wait_s: float = 0.0) -> None:
        """Ends it soon; waits so long for that."""
        self._cancelled.set()
        self._ended.wait(wait_s)

    def run(self, held: Iterable[HeldTensor], specs: Iterable[TensorSpec]) -> str:
        """The digest of what is held; on one core, behind everything else that wants it.

        Raises:
            TransferAbortedError: it was cancelled.
        """
        _be_nice()
        try:
            total = ShardSum.zero()
            for each in held:
                box = each.box or whole_box(each.spec.shape)
                for block in split_box(box, _PIECE_BYTES // itemsize_bytes(each.spec.dtype)):
                    if self._cancelled.is_set():
                        raise TransferAbortedError("the audit was cancelled: another session began")
                    cut = tuple(
                        slice(place - start, place - start + extent)
                        for place, start, extent in zip(block.offset, box.offset, block.shape, strict=True)
                    )
                    total += shard_sum(HeldTensor(spec=each.spec, box=block, tensor=each.tensor[cut]))
            return model_digest(specs, total)
        finally:
            self._ended.set()


def _be_nice() -> None:
    """Lowers this thread's priority, where threads have one of their own (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
