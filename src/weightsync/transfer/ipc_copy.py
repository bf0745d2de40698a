"""Copies tensors into a bucket of CPU memory, on all cores.

Why not torch's `copy_`: its threads meet at a barrier after every tensor, so that one core which something else uses
(the engine's loader, above all) holds up all of them. Here threads take pieces of 8 MiB as they come to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightsync.addresses import Int64s, copy_runs, pieces
from weightsync.copying import SMALL_BYTES, pack
from weightsync.tensors import byte_array
from weightsync.types.process import num_cores

_PIECE_BYTES = 8 << 20
_MAX_THREADS = 16  # with 8 a copy took a third longer on 16 cores; more were not measured

_Copy = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]


class Copier:
    """A few threads that copy. Closed by its owner; one thread at a time calls it."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def copy(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int], bucket: torch.Tensor) -> None:
        """Writes each tensor's bytes at its offset; all are there when this returns.

        Args:
            tensors: on the CPU, any dtype and layout.
            offsets: bytes, one a tensor; the ranges do not overlap.
            bucket: 1-D uint8, on the CPU.
        """
        target = bucket.numpy()
        batches: list[list[_Copy]] = []
        room = 0
        large = [index for index, tensor in enumerate(tensors) if tensor.nbytes > SMALL_BYTES]
        if len(large) < len(tensors):
            small = [index for index, tensor in enumerate(tensors) if tensor.nbytes <= SMALL_BYTES]
            pack([tensors[index] for index in small], [offsets[index] for index in small], bucket)
        for index in large:
            tensor, offset = tensors[index], offsets[index]
            source = byte_array(tensor.detach().resolve_conj().resolve_neg().contiguous())
            for start in range(0, source.size, _PIECE_BYTES):
                piece = source[start : start + _PIECE_BYTES]
                if piece.size > room:
                    batches.append([])
                    room = _PIECE_BYTES
                batches[-1].append((target[offset + start : offset + start + piece.size], piece))
                room -= piece.size
        self._each(_run, batches)

    def copy_runs(self, targets: Int64s, sources: Int64s, num_bytes: Int64s) -> None:
        """As `addresses.copy_runs`, of many; all are there when this returns."""
        self._each(
            lambda piece: copy_runs(targets[piece], sources[piece], num_bytes[piece]), pieces(num_bytes, _PIECE_BYTES)
        )

    def _each(self, function: Callable[[Any], None], batches: Sequence[Any]) -> None:
        if len(batches) > 1:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(min(num_cores(), _MAX_THREADS), thread_name_prefix="weightsync-share")
            calls: list[Future[None]] = []
            try:
                for batch in batches:
                    calls.append(self._pool.submit(function, batch))
                for call in calls:
                    call.result()
            except BaseException:  # what is queued, or runs, must not write later
                pool, self._pool = self._pool, None
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        elif batches:
            function(batches[0])

    def close(self) -> None:
        """Ends the threads. Idempotent; it works again afterwards."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


def _run(batch: Sequence[_Copy]) -> None:
    for target, source in batch:
        np.copyto(target, source)  # lets go of the GIL
