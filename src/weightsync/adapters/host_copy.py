"""HostCopy: whole tensors that a framework gathers one after the other, kept in host memory.

Frameworks give an iterator that gathers each tensor over all training ranks as it is walked. Whoever sends while it
walks holds those ranks up, and hangs with them where the receiver waits for one of them. So: copy first, send after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from weightsync.errors import ExtractError, InvalidRequestError, WeightSyncError, as_weightsync_error
from weightsync.tensors import host_empty


class HostCopy:
    """The tensors of the last iterator. Its memory is kept from one to the next. Not thread-safe."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
        """Walks all of it, and copies.

        An iterator may use a tensor's memory for the next one. It is walked to its end also where a copy fails: other
        training ranks walk theirs in step.

        Args:
            weights: names and whole tensors, on any device.

        Returns:
            What came, contiguous and in host memory; true until the next call.

        Raises:
            InvalidRequestError: a name comes twice, or nothing came.
            ExtractError: a tensor could not be copied.
            Exception: what the iterator raised.
        """
        taken: dict[str, torch.Tensor] = {}
        failed: WeightSyncError | None = None
        with torch.no_grad():
            for name, tensor in weights:
                if failed is not None:
                    continue
                try:
                    if name in taken:
                        raise InvalidRequestError("this tensor comes twice", parameter=name)
                    taken[name] = self._copy(name, tensor.detach())
                except Exception as error:
                    failed = as_weightsync_error(error, ExtractError, "a tensor could not be copied", parameter=name)
        self._held = taken
        if failed is not None:
            raise failed
        if not taken:
            raise InvalidRequestError("there is not one tensor to send")
        return taken

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._held.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            kept = host_empty(tensor.shape, tensor.dtype, pinned=tensor.is_cuda)
        return kept.copy_(tensor)
