"""The receiving end of both IPC strategies: opens what is announced for this worker's device or host."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

import torch

from weightsync.errors import InvalidRequestError, TransferAbortedError, UnsupportedError
from weightsync.tensors import PackedUpdates, tensor_from_bytes
from weightsync.transfer.base import WeightTransferReceiver
from weightsync.transfer.ipc_cuda import CudaBorrower
from weightsync.transfer.ipc_handles import MemoryBorrower, ShmBorrower
from weightsync.types import (
    CudaIpcWeightUpdateRequest,
    CudaMemoryHandle,
    Deadline,
    Full,
    MemoryHandle,
    PackedCudaIpcWeightUpdateRequest,
    Patch,
    PatchWeightUpdateRequest,
    Update,
    WeightUpdateRequest,
)
from weightsync.types.dtypes import itemsize_bytes

_logger = logging.getLogger(__name__)


class IpcTransferReceiver(WeightTransferReceiver):
    """Opens what is announced for this worker's device or host.

    Args:
        request_type: the kind of request that it takes, besides patches in shared memory.
        reach: the kinds of memory that this process can open; owned from here on.
        keep_mapped: whether host memory stays mapped when a session has ended.
    """

    def __init__(
        self, request_type: type[WeightUpdateRequest], reach: Sequence[MemoryBorrower], *, keep_mapped: bool = True
    ) -> None:
        self._request_type = request_type
        self._keep_mapped = keep_mapped
        self._borrowers = reach
        self._lock = threading.Lock()
        self._lent: dict[int, tuple[MemoryBorrower, list[MemoryHandle]]] = {}  # by chunk: whose, and what to let go of
        self._closed = False
        self._given_back = False

    def receive_weights(self, request: WeightUpdateRequest, *, deadline: Deadline) -> Iterable[Update]:
        """See the base class. The updates are views of the trainer's memory: they must not be written.

        Raises:
            UnsupportedError: nobody lends memory that this process can reach.
            SharedMemoryError: the memory is gone: the trainer died, or gave up this sync.
        """
        if type(request) is not self._request_type and not isinstance(request, PatchWeightUpdateRequest):
            raise InvalidRequestError(
                f"this receiver takes a {self._request_type.__name__} and was sent a {type(request).__name__}",
                state_left="nothing was received",
            )
        deadline.check("time to open a chunk")
        offers = _offers(request)
        borrower, handles = self._reachable(offers)
        with self._lock:
            if self._closed:
                raise TransferAbortedError("this receiver was closed")
            opened: list[MemoryHandle] = []
            self._lent[request.seq] = (borrower, opened)
        try:
            parts = self._open(request, borrower, handles, opened)
            if isinstance(request, PackedCudaIpcWeightUpdateRequest):
                return PackedUpdates.of(request, request.offsets, parts[0])
            return _updates(request, parts)
        except BaseException:
            self.release(request)
            raise

    def release(self, request: WeightUpdateRequest) -> None:
        """See the base class. Returns when what the loader began to copy has been copied."""
        with self._lock:
            lent = self._lent.get(request.seq)
        if lent is None:
            return
        borrower, _ = lent
        try:
            borrower.finish_reading()
        finally:
            with self._lock:
                _, opened = self._lent.pop(request.seq, (borrower, []))
            try:
                borrower.let_go(opened)
            finally:
                self._give_back()

    def end_session(self) -> None:
        """See the base class. What a loader reads yet stays readable for it."""
        if not self._keep_mapped:
            for borrower in self._borrowers:
                borrower.unmap()

    def close(self) -> None:
        """Lets go of the memory, as soon as no loader reads it any more. See the base class."""
        with self._lock:
            self._closed = True
        self._give_back()

    def _give_back(self) -> None:
        with self._lock:
            if not self._closed or self._lent or self._given_back:
                return
            self._given_back = True
        for borrower in self._borrowers:
            borrower.close()

    def _reachable(self, offers: Sequence[Sequence[MemoryHandle]]) -> tuple[MemoryBorrower, Sequence[MemoryHandle]]:
        for borrower in self._borrowers:
            for handles in offers:
                if all(borrower.can_open(handle) for handle in handles):
                    return borrower, handles
        here = " and ".join(borrower.place for borrower in self._borrowers)
        there = ", ".join(sorted({_place_of(handles[0]) for handles in offers}))
        raise UnsupportedError(
            f"the trainer lends memory of {there}, this worker can open that of {here}: run them on the same device "
            "(for CPU tensors: on one host, as one user, with one /dev/shm), or use strategy broadcast",
            state_left="nothing was received",
        )

    @staticmethod
    def _open(
        request: WeightUpdateRequest,
        borrower: MemoryBorrower,
        handles: Sequence[MemoryHandle],
        opened: list[MemoryHandle],
    ) -> list[torch.Tensor]:
        """Opens a chunk's tensors (of a patch: all positions, then all values; of a packed chunk its bucket alone).
        Adds to `opened` what has to be let go of with the chunk, also when it fails."""
        if isinstance(request, PatchWeightUpdateRequest):
            return [borrower.open(handle, keep=True) for handle in handles]
        if isinstance(request, PackedCudaIpcWeightUpdateRequest):
            at = [handles[0].offset_bytes + offset for offset in request.offsets]
        else:
            at = [handle.offset_bytes for handle in handles]
        for name, dtype, offset in zip(request.names, request.dtypes, at, strict=True):
            if offset % itemsize_bytes(dtype):
                raise InvalidRequestError(f"a {dtype} at byte {offset} of its memory is not aligned", parameter=name)
        is_bucket, parts = isinstance(request, PackedCudaIpcWeightUpdateRequest), []
        for handle in handles:
            parts.append(borrower.open(handle, keep=is_bucket))
            if not is_bucket:
                opened.append(handle)
        return parts


def borrowers() -> list[MemoryBorrower]:
    """What this process can open: the memory of its current GPU, of the others that it sees, and of its host."""
    found: list[MemoryBorrower] = [ShmBorrower()]
    if not torch.cuda.is_available():
        return found
    try:
        mine = torch.cuda.current_device()
        indices = sorted(range(torch.cuda.device_count()), key=lambda index: index != mine)
    except RuntimeError as error:  # this is a fork of who used it
        _logger.warning("memory of GPUs is not opened here: %s", error)
        return found
    for index in indices:
        try:
            found.insert(-1, CudaBorrower(torch.device("cuda", index)))
        except (UnsupportedError, RuntimeError) as error:  # not NVIDIA's, or it is no more
            _logger.warning("memory of GPU %d is not opened here: %s", index, error)
    return found


def _offers(request: WeightUpdateRequest) -> tuple[tuple[MemoryHandle, ...], ...]:
    if isinstance(request, PackedCudaIpcWeightUpdateRequest):
        return tuple((handle,) for handle in request.handles)
    if isinstance(request, PatchWeightUpdateRequest):
        return ((*request.positions, *request.values),)
    assert isinstance(request, CudaIpcWeightUpdateRequest)
    return request.handles


def _place_of(handle: MemoryHandle) -> str:
    return f"GPU {handle.device_uuid}" if isinstance(handle, CudaMemoryHandle) else f"host {handle.host_nonce}"


def _updates(request: WeightUpdateRequest, parts: Sequence[torch.Tensor]) -> list[Update]:
    """All of a chunk's, so that their digests are taken together."""
    if isinstance(request, PatchWeightUpdateRequest):
        where, what = parts[: len(request.names)], parts[len(request.names) :]
        return [
            Patch(
                name=name, positions=tensor_from_bytes(at, dtype="uint32", shape=(count,)),
                values=tensor_from_bytes(new, dtype=dtype, shape=(count,)),
            )
            for name, dtype, count, at, new in zip(
                request.names, request.dtypes, request.counts, where, what, strict=True
            )
        ]  # fmt: skip
    return [
        Full(name=name, tensor=tensor_from_bytes(part, dtype=dtype, shape=shape))
        for name, dtype, shape, part in zip(request.names, request.dtypes, request.shapes, parts, strict=True)
    ]
