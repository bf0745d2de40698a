"""WeightTransferSender as the documents have it: one call is one push of ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, ClassVar, cast

import msgspec

from weightsync.adapters.compat.calls import config_of, in_thread
from weightsync.adapters.compat.extractors import AnyChunks, Chunks, Handed, as_chunks
from weightsync.adapters.compat.groups import ProcessGroup
from weightsync.errors import StateError
from weightsync.observe import Recorder
from weightsync.trainer.push import PushSync
from weightsync.transfer import base
from weightsync.transfer.broadcast import BroadcastTransferSender as _BroadcastSender
from weightsync.transfer.group import TransferGroup
from weightsync.transfer.ipc import IpcTransferSender
from weightsync.transfer.registry import strategy_named
from weightsync.types import (
    EngineReply,
    InferenceEngineClient,
    SyncReport,
    TorchDistributedWeightSyncInitInfo,
    WeightChunk,
    WeightSyncInitInfo,
    WeightUpdateRequest,
)


@dataclasses.dataclass(frozen=True)
class TransferRequest:
    """What the plan's `get_request` gives: the names, dtypes and shapes of all that a sender was given.

    `client.update_weights(request)` moves it: the plan moves first and tells afterwards, which waits for itself.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    sender: WeightTransferSender = dataclasses.field(repr=False, compare=False)

    def keys(self) -> Iterable[str]:
        """So that `update_weights(**request)` works, too."""
        return [field.name for field in dataclasses.fields(self)]

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


class WeightTransferSender:
    """The pushing end, on every training rank. One sync at a time; `close` leaves the group.

    Args:
        process_group: joined by hand; else both ends join at the first sync.
        strategy: ours; of a subclass by its name where not given.
        cfg: its deadlines, and the model's name.
    """

    name: ClassVar[str] = "broadcast"

    def __init__(
        self, process_group: ProcessGroup | None = None, *, strategy: Met | None = None, cfg: Any = None
    ) -> None:
        self._strategy = strategy or Met(strategy_named(self.name), None)
        self._config = config_of(cfg)
        if process_group is not None:
            self._strategy.group = process_group
        self._client: InferenceEngineClient | None = None
        self._source = Handed()
        self._push: PushSync | None = None
        self._pending: Chunks | None = None
        self._sharer: base.ChunkSharer | None = None
        self._num_sent = self._num_requests = 0

    async def initialize(
        self, inference_client: InferenceEngineClient, process_group: ProcessGroup | None = None
    ) -> None:
        """Meets the engines and joins; every training rank. Else the first sync does it.

        Raises:
            WeightSyncError: as `PushSync.initialize`.
        """
        if process_group is not None:
            self._strategy.group = process_group
        push = self.for_client(inference_client)._pushing()
        await in_thread(push.initialize)

    async def send_chunks(
        self, chunks: AnyChunks, inference_client: InferenceEngineClient | None = None
    ) -> SyncReport | None:
        """Brings every engine to these weights: announced, moved, proved, committed. Every training rank.

        Args:
            chunks: of `extract_weights`; another iterator, async or not, or a coroutine that gives one, is read to its
                end first.
            inference_client: the engines. Without them (the plan's `send_chunks(chunks)`) nothing moves yet:
                `client.update_weights(get_request())` does it.

        Returns:
            What was done; None where nothing has moved yet.

        Raises:
            WeightSyncError: as `PushSync.sync_weights`; engines serve their old version, or refuse to serve.
        """
        self._pending = await as_chunks(chunks)
        if inference_client is None:
            return None
        return await self.send_pending(inference_client)

    async def send_weights(
        self, weight_chunks: AnyChunks, inference_client: InferenceEngineClient | None = None
    ) -> SyncReport | None:
        """The call graph's name of `send_chunks`."""
        return await self.send_chunks(weight_chunks, inference_client)

    async def send_pending(self, inference_client: InferenceEngineClient | None = None) -> SyncReport:
        """Moves what `send_chunks` was given.

        Raises:
            StateError: it was given nothing, or it was moved already.
        """
        chunks, self._pending = self._pending, None
        if chunks is None:
            raise StateError("there is nothing to send: send_chunks(chunks) first", state_left="nothing was sent")
        self._source.now = chunks
        push = self.for_client(inference_client)._pushing()
        self._num_sent += 1
        version = self._num_sent

        def sync() -> SyncReport:
            if push.run_id is None:
                push.initialize()
            return push.sync_weights(version)

        return await in_thread(sync)

    def create_request(self, chunk: WeightChunk) -> WeightUpdateRequest:
        """The header of one chunk by itself, e.g. for a receiver's `receive_weights`; `send_chunks` makes its own.

        Where the strategy lends memory the chunk is lent: until the next but two, or `close`.
        """
        if self._sharer is None:
            self._sharer = self._strategy.create_sharer()
        seq, self._num_requests = self._num_requests, self._num_requests + 1
        if self._sharer is None:
            sender: base.WeightTransferSender = _BroadcastSender(cast(TransferGroup, None), record=_nowhere, track="")
        else:
            chunk = base.SharedChunk.of(chunk, (self._sharer.share(chunk, seq),), let_go=lambda: None)
            sender = IpcTransferSender(packed=self._strategy.name == "packed_cuda_ipc", record=_nowhere, track="")
        return sender.create_request(chunk, session="by itself", seq=seq)

    def get_request(self) -> TransferRequest:
        """What `send_chunks` was given, as one header. Nothing is gathered for it.

        Raises:
            StateError: it was given nothing.
        """
        if self._pending is None:
            raise StateError("there is nothing to send: send_chunks(chunks) first", state_left="nothing was sent")
        specs = self._pending.specs
        return TransferRequest(
            names=[spec.name for spec in specs],
            dtypes=[spec.dtype for spec in specs],
            shapes=[list(spec.shape) for spec in specs],
            sender=self,
        )

    async def close(self) -> None:
        """Leaves the group; engines go on serving. Idempotent."""
        if self._push is not None:
            await in_thread(self._push.close)
        if self._sharer is not None:
            self._sharer.close()

    def for_client(self, client: InferenceEngineClient | None) -> WeightTransferSender:
        """This sender; from here on it sends to these engines, where some are given."""
        if client is not None and client is not self._client:
            push, self._client, self._push = self._push, client, None
            if push is not None:
                push.close()
        return self

    def _pushing(self) -> PushSync:
        if self._push is None:
            transfer = self._config.transfer
            self._push = PushSync(
                self._source,
                self._client,
                strategy=self._strategy,
                model_id=self._config.inference_service.model_tag,
                transfer_timeout_s=transfer.transfer_timeout_s,
                join_timeout_s=transfer.join_timeout_s,
                pause_timeout_s=transfer.pause_timeout_s,
                require_all_engines=True,
                recorder=Recorder("trainer/rank-0"),
            )
        return self._push


class BroadcastTransferSender(WeightTransferSender):
    """By a process group."""


class CudaIpcTransferSender(WeightTransferSender):
    """By handles, one a tensor."""

    name = "cuda_ipc"


class PackedCudaIpcTransferSender(WeightTransferSender):
    """By handles, one a chunk."""

    name = "packed_cuda_ipc"


class Met(base.WeightTransferStrategy):
    """Our strategy, which at its first sync uses the info, or the group, that was made before."""

    def __init__(self, ours: base.WeightTransferStrategy, met: tuple[WeightSyncInitInfo, object] | None) -> None:
        self._ours, self._first = ours, met
        self.name, self.request_type = ours.name, ours.request_type
        self.group: ProcessGroup | None = None

    def create_init_info(self, world_sizes: Mapping[str, int]) -> tuple[WeightSyncInitInfo, object]:
        if self.group is not None:
            group, self.group = self.group, None
            return group.info, group
        met, self._first = self._first, None
        if met is None:
            return self._ours.create_init_info(world_sizes)
        info, token = met
        if isinstance(info, TorchDistributedWeightSyncInitInfo):
            info = msgspec.structs.replace(info, world_size=1 + sum(world_sizes.values()))
        return info, token

    def create_sender(
        self,
        info: WeightSyncInitInfo,
        token: object,
        *,
        joined: Future[Mapping[str, EngineReply]],
        record: base.RecordPhase,
    ) -> base.WeightTransferSender:
        if isinstance(token, ProcessGroup):
            return _BroadcastSender(token.group, record=record, track="trainer/sender")
        return self._ours.create_sender(info, token, joined=joined, record=record)

    def create_receiver(self, info: WeightSyncInitInfo, *, rank: int) -> base.WeightTransferReceiver:
        return self._ours.create_receiver(info, rank=rank)

    def create_sharer(self) -> base.ChunkSharer | None:
        return self._ours.create_sharer()


def _nowhere(phase: object) -> None:
    """Nobody times a header that is made by itself."""
