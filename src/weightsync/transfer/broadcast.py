"""Broadcast: chunks packed into buckets that one group of training rank 0 and all engine workers broadcasts.

Where each byte goes, and how often it is copied (counted in `docs/copies.md`):

    chunk (trainer's device) -pack-> send bucket -network-> receive bucket -load-> engine's weights

Two buckets on either side: while one is on the wire the next is packed here, and loaded there. A send bucket is
reused when its broadcast has ended and every engine's loader has let go of that chunk, a receive bucket when
the worker's own loader has. So at most two chunks are in flight, whatever the model's size.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import torch

from weightsync.copying import pack
from weightsync.errors import DeadlineExceededError, GroupJoinError, InvalidRequestError, SyncFailedError
from weightsync.observe import now_s
from weightsync.plan.buckets import BucketLayout, plan_bucket
from weightsync.tensors import PackedUpdates
from weightsync.transfer.base import RecordPhase, WeightTransferReceiver, WeightTransferStrategy
from weightsync.transfer.group import TransferGroup, join_group, open_store
from weightsync.transfer.window import WindowedSender
from weightsync.types import (
    BroadcastWeightUpdateRequest,
    Deadline,
    EngineReply,
    InferenceEngineClient,
    TorchDistributedWeightSyncInitInfo,
    Update,
    WeightChunk,
    WeightSyncInitInfo,
    WeightUpdateRequest,
)
from weightsync.types.deadline import check_wait_s

NUM_BUCKETS = 2
_OWN_WORD_S = 1.0  # before the end of this rank's own wait for the others


@dataclasses.dataclass(kw_only=True, eq=False)
class BroadcastTransferStrategy(WeightTransferStrategy):
    """Makes both ends of a packed broadcast. Stateless but for its settings.

    Args:
        backend: "gloo" or "nccl".
        master_addr: address of training rank 0 that every engine can reach; loopback by default.
        interface: this process's network interface for gloo; the one that leads to `master_addr` where not
            given, as engines always choose theirs.
        join_timeout_s: how long members wait for each other when the group is built.
        transfer_timeout_s: how long one sync may take.

    Raises:
        InvalidRequestError: a time-out is no time one can wait.
    """

    name = "broadcast"
    request_type = BroadcastWeightUpdateRequest

    backend: Literal["nccl", "gloo"] = "gloo"
    master_addr: str = "127.0.0.1"
    interface: str | None = None
    join_timeout_s: float = 30.0
    transfer_timeout_s: float = 300.0
    track: str = "trainer/sender"

    def __post_init__(self) -> None:
        check_wait_s("join_timeout_s", self.join_timeout_s)
        check_wait_s("transfer_timeout_s", self.transfer_timeout_s)

    def create_init_info(self, world_sizes: Mapping[str, int]) -> tuple[TorchDistributedWeightSyncInitInfo, object]:
        """Opens the store that the members meet at; see the base class."""
        store = open_store(self.master_addr, timeout_s=self.join_timeout_s)
        info = TorchDistributedWeightSyncInitInfo(
            strategy=self.name,
            master_addr=self.master_addr,
            master_port=store.port,
            world_size=1 + sum(world_sizes.values()),
            group_name=f"weightsync-{uuid.uuid4().hex[:12]}",
            backend=self.backend,
            join_timeout_s=self.join_timeout_s,
            transfer_timeout_s=self.transfer_timeout_s,
        )
        return info, store

    def create_sender(
        self, info: WeightSyncInitInfo, token: object, *, joined: Future[Mapping[str, EngineReply]], record: RecordPhase
    ) -> BroadcastTransferSender:
        """Joins as rank 0; gives up as soon as an engine's init fails. See the base class."""

        deadline = Deadline(self.join_timeout_s)

        def give_up_early() -> None:
            if joined.done() and (error := joined.exception()) is not None:
                if deadline.remaining_s < _OWN_WORD_S and _waited_in_vain(error):
                    return  # so does this rank, and it knows who is missing
                raise error

        return self._join(_group_info(info), token, give_up_early, record)

    def create_receiver(self, info: WeightSyncInitInfo, *, rank: int) -> BroadcastTransferReceiver:
        """Joins as `rank`; see the base class."""
        return BroadcastTransferReceiver(join_group(_group_info(info), rank=rank))

    def _join(
        self, info: TorchDistributedWeightSyncInitInfo, store: Any, watch: Callable[[], None], record: RecordPhase
    ) -> BroadcastTransferSender:
        group = join_group(info, rank=0, store=store, interface=self.interface, watch=watch)
        return BroadcastTransferSender(group, record=record, track=self.track)


class BroadcastTransferSender(WindowedSender):
    """Rank 0 of the group.

    Args:
        group: joined; owned from here on.
        record: where phases "pack", "transfer" and "wait for engines" go.
        plan: how a chunk's tensors lie in a bucket, from their sizes in bytes.
    """

    def __init__(
        self,
        group: TransferGroup,
        *,
        record: RecordPhase,
        track: str,
        plan: Callable[[Sequence[int]], BucketLayout] = plan_bucket,
    ) -> None:
        super().__init__(window=NUM_BUCKETS, record=record, track=track)
        self._group = group
        self._plan = plan
        self._buckets: list[torch.Tensor | None] = [None] * NUM_BUCKETS

    def create_request(
        self, chunk: WeightChunk, *, session: str, seq: int, layout: BucketLayout | None = None
    ) -> BroadcastWeightUpdateRequest:
        """See the base class. `layout`: how the chunk was packed; as it would be where not given."""
        layout = layout or self._plan([tensor.nbytes for tensor in chunk.tensors])
        return BroadcastWeightUpdateRequest(
            session=session,
            seq=seq,
            names=chunk.names,
            dtypes=chunk.dtypes,
            shapes=chunk.shapes,
            offsets=layout.offsets,
            bucket_bytes=layout.total_bytes,
        )

    def _send(
        self, chunk: WeightChunk, client: InferenceEngineClient, *, session: str, seq: int, deadline: Deadline
    ) -> tuple[Future[Any], ...]:
        """Packs, announces, broadcasts."""
        layout = self._plan([tensor.nbytes for tensor in chunk.tensors])
        started = now_s()
        bucket = self._pack(chunk, layout, seq)
        request = self.create_request(chunk, session=session, seq=seq, layout=layout)
        self._phase("pack", started, seq)
        loaded = client.update_weights(request, timeout_s=deadline.check("time to announce a chunk"))
        done = functools.partial(self._phase, "transfer", seq=seq)
        return loaded, self._group.start_broadcast(bucket, deadline=deadline, done=done)

    def close(self) -> None:
        self.usable = False
        self._group.close()
        self._buckets = [None] * NUM_BUCKETS

    def _pack(self, chunk: WeightChunk, layout: BucketLayout, seq: int) -> torch.Tensor:
        bucket = _grown(self._buckets, seq % NUM_BUCKETS, layout.total_bytes, self._group.device)
        pack(chunk.tensors, layout.offsets, bucket)
        if bucket.device.type == "cuda":
            torch.cuda.current_stream(bucket.device).synchronize()
        return bucket


class BroadcastTransferReceiver(WeightTransferReceiver):
    """A worker's end of the group.

    Args:
        group: joined; owned from here on.
    """

    def __init__(self, group: TransferGroup) -> None:
        self._group = group
        self._buckets: list[torch.Tensor | None] = [None] * NUM_BUCKETS
        self._free = [threading.Event() for _ in range(NUM_BUCKETS)]
        for free in self._free:
            free.set()

    def receive_weights(self, request: WeightUpdateRequest, *, deadline: Deadline) -> Iterator[Update]:
        """See the base class. The updates are views of one of two receive buckets."""
        if not isinstance(request, BroadcastWeightUpdateRequest):
            raise InvalidRequestError(
                f"a broadcast receiver was sent a {type(request).__name__}", state_left="nothing was received"
            )
        index = request.seq % NUM_BUCKETS
        if not self._free[index].wait(deadline.check("free receive bucket")):
            raise DeadlineExceededError(
                "no receive bucket came free in time", state_left="the loader still holds an earlier chunk"
            )
        self._free[index].clear()
        try:
            bucket = _grown(self._buckets, index, request.bucket_bytes, self._group.device)
            if bucket.is_cuda:  # kernels that this thread has queued may use its memory still; NCCL waits for none
                torch.cuda.current_stream(bucket.device).synchronize()
            self._group.broadcast(bucket, deadline=deadline)
        except BaseException:
            self._buckets[index] = None  # the group may still write there, however late
            self._free[index].set()
            raise
        return PackedUpdates.of(request, request.offsets, bucket)

    def release(self, request: WeightUpdateRequest) -> None:
        self._free[request.seq % NUM_BUCKETS].set()

    def close(self) -> None:
        self._group.close()
        self._buckets = [None] * NUM_BUCKETS


def _grown(buckets: list[torch.Tensor | None], index: int, nbytes: int, device: torch.device) -> torch.Tensor:
    bucket = buckets[index]
    if bucket is None or bucket.numel() < nbytes:
        buckets[index] = None
        bucket = buckets[index] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return bucket[:nbytes]


def _waited_in_vain(error: BaseException) -> bool:
    """Whether all that engines tell is that somebody did not come."""
    causes = error.causes.values() if isinstance(error, SyncFailedError) else ()
    return bool(causes) and all(isinstance(cause, GroupJoinError) for cause in causes)


def _group_info(info: WeightSyncInitInfo) -> TorchDistributedWeightSyncInitInfo:
    if not isinstance(info, TorchDistributedWeightSyncInitInfo):
        raise InvalidRequestError(f"a broadcast needs a torch_distributed init info, got {type(info).__name__}")
    return info
