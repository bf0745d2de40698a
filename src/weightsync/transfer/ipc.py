"""CUDA IPC and packed CUDA IPC: engines open the trainer's memory beside them, and no byte is sent.

The kind of handle follows the tensors: CUDA tensors are opened through the driver, CPU tensors through named shared
memory. Where each byte goes, and how often it is copied (counted in `docs/copies.md`):

    cuda_ipc, CUDA:          chunk's own memory ---------------- opened by the engine -load-> engine's weights
    cuda_ipc, CPU; packed:   chunk -share-> bucket of the rank - opened by the engine -load-> engine's weights

Every training rank has the whole chunk, so each device's copy is lent by one rank of that device, and each engine
worker takes the handles of its own device. Handles are typed data; none is ever a pickle.

Two chunks are announced while a third is being built, so a rank has three buckets. One is written again when every
engine's loader has let go of its chunk: on rank 0 the sender says so, the other ranks learn it by agreeing on the next.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, ClassVar, cast

import torch

from weightsync.errors import GroupJoinError, InvalidRequestError, UnsupportedError
from weightsync.plan.buckets import plan_bucket
from weightsync.tensors import byte_view
from weightsync.transfer.base import ChunkSharer, RecordPhase, SharedChunk, WeightTransferStrategy, memory_of
from weightsync.transfer.ipc_copy import Copier
from weightsync.transfer.ipc_cuda import CudaLender
from weightsync.transfer.ipc_handles import MemoryLender, ShmLender
from weightsync.transfer.ipc_receive import IpcTransferReceiver, borrowers
from weightsync.transfer.window import WindowedSender
from weightsync.types import (
    CudaIpcWeightUpdateRequest,
    Deadline,
    EmptyWeightSyncInitInfo,
    EngineReply,
    InferenceEngineClient,
    MemoryHandle,
    PackedCudaIpcWeightUpdateRequest,
    WeightChunk,
    WeightSyncInitInfo,
    WeightUpdateRequest,
)

_NUM_ANNOUNCED = 2
_NUM_SLOTS = _NUM_ANNOUNCED + 1
_JOIN_GRACE_S = 2.0  # engines are given the join timeout and one second; their answer should be heard


@dataclasses.dataclass(kw_only=True, eq=False)
class _IpcTransferStrategy(WeightTransferStrategy):
    """What both strategies share.

    Args:
        join_timeout_s: how long engines may take to get ready.
        keep_mapped: whether engines keep the host memory that they have mapped from one session to the next.
    """

    packed: ClassVar[bool]
    join_timeout_s: float = 30.0
    track: str = "trainer/sender"
    keep_mapped: bool = True

    def create_init_info(self, world_sizes: Mapping[str, int]) -> tuple[EmptyWeightSyncInitInfo, object]:
        """Nothing to open: each request carries its handles. See the base class."""
        group_name = f"weightsync-{uuid.uuid4().hex[:12]}"
        return EmptyWeightSyncInitInfo(strategy=self.name, group_name=group_name, keep_mapped=self.keep_mapped), None

    def create_sender(
        self, info: WeightSyncInitInfo, token: object, *, joined: Future[Mapping[str, EngineReply]], record: RecordPhase
    ) -> IpcTransferSender:
        """Waits until every engine is ready. See the base class."""
        try:
            joined.result(self.join_timeout_s + _JOIN_GRACE_S)
        except TimeoutError:
            raise GroupJoinError(f"not every engine was ready within {self.join_timeout_s:g} s") from None
        return IpcTransferSender(packed=self.packed, record=record, track=self.track)

    def create_receiver(self, info: WeightSyncInitInfo, *, rank: int) -> IpcTransferReceiver:
        """Finds out what memory this process can reach; see the base class."""
        if not isinstance(info, EmptyWeightSyncInitInfo):
            raise InvalidRequestError(f"{self.name} needs an empty init info, got {type(info).__name__}")
        return IpcTransferReceiver(self.request_type, borrowers(), keep_mapped=info.keep_mapped)

    def create_sharer(self) -> IpcSharer:
        return IpcSharer(packed=self.packed)


class CudaIpcTransferStrategy(_IpcTransferStrategy):
    """One handle a tensor. CUDA tensors are opened where they lie, CPU tensors are copied once."""

    name = "cuda_ipc"
    request_type = CudaIpcWeightUpdateRequest
    packed = False


class PackedCudaIpcTransferStrategy(_IpcTransferStrategy):
    """One handle a chunk: its tensors are copied once into a bucket that is allocated once."""

    name = "packed_cuda_ipc"
    request_type = PackedCudaIpcWeightUpdateRequest
    packed = True


class IpcSharer(ChunkSharer):
    """Lends one training rank's chunks. The kind of memory follows each chunk's tensors.

    Args:
        packed: one handle a chunk, for its bucket; else one a tensor.
    """

    num_slots = _NUM_SLOTS

    def __init__(self, *, packed: bool) -> None:
        self._packed = packed
        self._lenders: dict[torch.device, MemoryLender] = {}
        self._lent: list[tuple[torch.Tensor, ...]] = [()] * _NUM_SLOTS
        self._copier = Copier()

    def place(self, chunk: WeightChunk) -> str:
        return self._lender(chunk)[0].place

    def share(self, chunk: WeightChunk, seq: int) -> tuple[MemoryHandle, ...]:
        """See the base class. Keeps the chunk's tensors where they are lent in place, else nothing of the chunk."""
        slot = seq % _NUM_SLOTS
        self._lent[slot] = ()
        lender, device = self._lender(chunk)
        if lender.lends_in_place and not self._packed:
            self._lent[slot] = tuple(tensor.to(device).contiguous() for tensor in chunk.tensors)
            return tuple(lender.in_place(tensor) for tensor in self._lent[slot])
        sizes = [tensor.nbytes for tensor in chunk.tensors]
        layout = plan_bucket(sizes)
        bucket = lender.bucket(slot, layout.total_bytes)
        if device.type == "cpu":
            self._copier.copy(chunk.tensors, layout.offsets, bucket)
        else:
            for tensor, offset in zip(chunk.tensors, layout.offsets, strict=True):
                bucket[offset : offset + tensor.nbytes].copy_(byte_view(tensor.contiguous()), non_blocking=True)
        if self._packed:
            return (lender.handle(slot, 0, layout.total_bytes),)
        return tuple(lender.handle(slot, offset, size) for offset, size in zip(layout.offsets, sizes, strict=True))

    def end_sync(self, *, failed: bool) -> None:
        self._lent = [()] * _NUM_SLOTS
        if failed:
            for device in [device for device, lender in self._lenders.items() if not lender.outlives_failure]:
                self._lenders.pop(device).close()

    def close(self) -> None:
        self.end_sync(failed=False)
        self._copier.close()
        while self._lenders:
            self._lenders.popitem()[1].close()

    def _lender(self, chunk: WeightChunk) -> tuple[MemoryLender, torch.device]:
        device = next((tensor.device for tensor in chunk.tensors if tensor.is_cuda), torch.device("cpu"))
        lender = self._lenders.get(device)
        if lender is None:
            lender = CudaLender(device, _NUM_SLOTS) if device.type == "cuda" else ShmLender(_NUM_SLOTS)
            self._lenders[device] = lender
        return lender, device


class IpcTransferSender(WindowedSender):
    """Announces what the training ranks have lent.

    Args:
        packed: as for the sharer.
        record: where the phase "wait for engines" goes.
    """

    def __init__(self, *, packed: bool, record: RecordPhase, track: str) -> None:
        super().__init__(window=_NUM_ANNOUNCED, record=record, track=track)
        self._packed = packed
        self._lent: dict[int, SharedChunk] = {}

    def create_request(self, chunk: WeightChunk, *, session: str, seq: int) -> WeightUpdateRequest:
        """See the base class: the handles of a lent chunk."""
        chunk = _as_lent(chunk)
        common: dict[str, Any] = {
            "session": session,
            "seq": seq,
            "names": chunk.names,
            "dtypes": chunk.dtypes,
            "shapes": chunk.shapes,
        }
        if not self._packed:
            return CudaIpcWeightUpdateRequest(**common, handles=chunk.handles)
        sizes = tuple(tensor.nbytes for tensor in chunk.tensors)
        return PackedCudaIpcWeightUpdateRequest(
            **common, sizes=sizes, offsets=plan_bucket(sizes).offsets, handles=tuple(one for (one,) in chunk.handles)
        )

    def _send(
        self, chunk: WeightChunk, client: InferenceEngineClient, *, session: str, seq: int, deadline: Deadline
    ) -> tuple[Future[Any], ...]:
        """Announces it. It is told when it is let go of."""
        request: Any = self.create_request(chunk, session=session, seq=seq)
        self._lent[seq] = cast(SharedChunk, chunk)
        return (client.update_weights(request, timeout_s=deadline.check("time to announce a chunk")),)

    def _settle(self, in_flight: dict[int, tuple[Future[Any], ...]], *, upto: int, deadline: Deadline) -> None:
        super()._settle(in_flight, upto=upto, deadline=deadline)
        for seq in [seq for seq in self._lent if seq <= upto]:
            self._lent.pop(seq).let_go()

    def close(self) -> None:
        self.usable = False
        self._lent.clear()


def _as_lent(chunk: WeightChunk) -> SharedChunk:
    """The chunk, which must be the one that was lent, tensor by tensor."""
    if not isinstance(chunk, SharedChunk):
        raise UnsupportedError(
            "the chunk to be announced is not one that training ranks have lent: a codec made another one. Engines "
            "open the trainer's own tensors here; a codec that changes them needs strategy broadcast"
        )
    if chunk.lent != (now := memory_of(chunk)):
        changed = next((name for name, was, is_now in zip(chunk.names, chunk.lent, now) if was != is_now), None)  # noqa: B905
        raise UnsupportedError(
            "the tensor to be announced is not the one that training ranks have lent: a codec that changes tensors "
            "needs strategy broadcast",
            parameter=changed,
        )
    return chunk
