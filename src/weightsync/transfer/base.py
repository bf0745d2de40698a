"""WeightTransferStrategy, Sender and Receiver: how bytes are pushed. Knows no codec, no loader, no extractor."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, cast

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types import (
    AnyUpdateRequest,
    Deadline,
    EngineReply,
    InferenceEngineClient,
    InitRequest,
    MemoryHandle,
    PhaseRecord,
    Update,
    WeightChunk,
    WeightSyncInitInfo,
    WeightUpdateRequest,
)
from weightsync.types.manifest import ArtifactKind

RecordPhase = Callable[[PhaseRecord], None]
"""Where a sender reports each phase it timed."""


class ChunkSharer(abc.ABC):
    """Lends chunks of one training rank, where they lie, to engines that can reach that memory. Every rank has one.

    Driven by the thread that extracts, in lockstep on all ranks. Of the ranks that have the same `place` one shares.

    Attributes:
        num_slots: how many chunks are lent at once; chunk `seq` takes the memory of chunk `seq - num_slots`.
    """

    num_slots: int

    @abc.abstractmethod
    def place(self, chunk: WeightChunk) -> str:
        """Who can reach the chunk's memory: equal on ranks that would serve the same engines."""

    @abc.abstractmethod
    def share(self, chunk: WeightChunk, seq: int) -> tuple[MemoryHandle, ...]:
        """Makes the chunk's bytes readable for others; they are complete when this returns.

        Called only when every engine has let go of chunk `seq - num_slots`.

        Returns:
            What engines open them by.

        Raises:
            SharedMemoryError: there is no room for them.
            UnsupportedError: this memory can't be lent; says why.
        """

    @abc.abstractmethod
    def end_sync(self, *, failed: bool) -> None:
        """Drops references to chunks. Idempotent.

        Args:
            failed: an engine may be reading still. Its session is aborted, so it never serves what it reads.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Gives the memory back. Whoever still has it open reads the old bytes on. Idempotent."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SharedChunk(WeightChunk):
    """A chunk that training ranks have lent.

    Attributes:
        handles: for each rank that lends, by rank, what its `ChunkSharer.share` returned.
        lent: where the lent tensors lay (`memory_of`).
        let_go: called by the sender, once every engine's loader has let go of the chunk.
    """

    handles: tuple[tuple[MemoryHandle, ...], ...] = ()
    lent: tuple[tuple[int, int], ...] = ()
    let_go: Callable[[], None] = lambda: None

    @classmethod
    def of(
        cls, chunk: WeightChunk, handles: tuple[tuple[MemoryHandle, ...], ...], *, let_go: Callable[[], None]
    ) -> SharedChunk:
        return cls(
            names=chunk.names,
            tensors=chunk.tensors,
            module_name=chunk.module_name,
            handles=handles,
            lent=memory_of(chunk),
            let_go=let_go,
        )


def memory_of(chunk: WeightChunk) -> tuple[tuple[int, int], ...]:
    """Address and bytes of each tensor: a tensor that was replaced has another."""
    return tuple((tensor.data_ptr(), tensor.nbytes) for tensor in chunk.tensors)


class WeightTransferSender(abc.ABC):
    """The pushing end. Training rank 0 alone has one. Not thread-safe: one sync at a time."""

    @abc.abstractmethod
    def send_chunks(
        self, chunks: Iterable[WeightChunk], client: InferenceEngineClient, *, session: str, deadline: Deadline
    ) -> int:
        """For each chunk announces the request, then moves the bytes, and watches both.

        A chunk is let go of as soon as its bytes are packed or, where they are lent in place, when the last
        receiver's loader has let go of it; the window of chunks in flight is bounded.

        Args:
            chunks: whole tensors in stream order; consumed lazily. `SharedChunk`s where the strategy has a sharer.
            client: tells the engines what comes.
            session: the open session on every engine.
            deadline: of the whole sync.

        Returns:
            The number of chunks sent; every engine has then loaded all of them.

        Raises:
            SyncFailedError: an engine answered an announcement with an error; raised at once.
            UnsupportedError: a chunk is not the one that was lent: some codec made another.
            TransferError: the bytes could not be moved. In both cases the sender is broken: close it and
                make a new one. Engines are left in their session: abort it.
            DeadlineExceededError: as above.
        """

    @abc.abstractmethod
    def create_request(self, chunk: WeightChunk, *, session: str, seq: int) -> WeightUpdateRequest:
        """The header that announces a chunk: names, dtypes, shapes, and what a receiver finds its bytes by.

        Args:
            chunk: a `SharedChunk` where the strategy has a sharer.
            session: the open session.
            seq: number of the chunk in it.

        Raises:
            UnsupportedError: the chunk has to be lent, and is not.
        """

    @property
    @abc.abstractmethod
    def usable(self) -> bool:
        """Whether another sync can use this sender; False after any error."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leaves the group and gives back buffers. Idempotent, never blocks longer than a second."""


class WeightTransferReceiver(abc.ABC):
    """The receiving end. Every engine worker has one."""

    def parse_request(self, request_dict: Mapping[str, Any]) -> AnyUpdateRequest:
        """A chunk's header that crossed as plain data (`msgspec.to_builtins`), checked as if it came from the network.

        Raises:
            InvalidRequestError: it is none, or sizes, offsets or names in it can't be. Nothing was allocated.
        """
        return parse_request(request_dict)

    @abc.abstractmethod
    def receive_weights(self, request: WeightUpdateRequest, *, deadline: Deadline) -> Iterable[Update]:
        """Receives the bytes of one announced chunk, then hands out its updates.

        The bytes are there when this returns (it is not lazy); the updates borrow the receiver's memory
        until `release(request)`. Called in the order of `seq`.

        Raises:
            InvalidRequestError: a request of another strategy. Nothing was received.
            TransferError: the bytes did not come; the receiver is broken.
            DeadlineExceededError: as above.
        """

    @abc.abstractmethod
    def release(self, request: WeightUpdateRequest) -> None:
        """Tells that the loader has let go of the chunk's memory. Idempotent."""

    def end_session(self) -> None:  # noqa: B027  (a hook with a default)
        """All chunks of a session were loaded, or it has ended: what is kept for the next one alone may go.
        Idempotent.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leaves the group, which makes the other members' pending operations fail. Idempotent."""


def parse_request(request_dict: Mapping[str, Any]) -> AnyUpdateRequest:
    """See `WeightTransferReceiver.parse_request`."""
    try:
        return cast(AnyUpdateRequest, msgspec.convert(request_dict, AnyUpdateRequest))
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"this is no header of a chunk: {error}") from error


class WeightTransferStrategy(abc.ABC):
    """A stateless factory. Both ends are created where they are used, concurrently.

    Attributes:
        name: how configs and init infos call it, e.g. "broadcast".
        request_type: the kind of request its sender announces.
    """

    name: str
    request_type: type[AnyUpdateRequest]

    @abc.abstractmethod
    def create_init_info(self, world_sizes: Mapping[str, int]) -> tuple[WeightSyncInitInfo, object]:
        """Training rank 0: makes what receivers need, and a token that `create_sender` takes back
        (an open store, say).

        Args:
            world_sizes: workers of each engine, as that engine reports them.
        """

    @abc.abstractmethod
    def create_sender(
        self, info: WeightSyncInitInfo, token: object, *, joined: Future[Mapping[str, EngineReply]], record: RecordPhase
    ) -> WeightTransferSender:
        """Training rank 0: joins, while the engines' init requests are under way in `joined`.

        Raises:
            GroupJoinError: not everybody came in time. Nothing is left open.
            SyncFailedError: an engine's init failed; raised without waiting for the others.
        """

    @abc.abstractmethod
    def create_receiver(self, info: WeightSyncInitInfo, *, rank: int) -> WeightTransferReceiver:
        """Engine worker: joins as `rank`.

        Raises:
            GroupJoinError: not everybody came in time. Nothing is left open.
        """

    def create_sharer(self) -> ChunkSharer | None:
        """Every training rank: what lends this rank's copy of each chunk to engines beside it; None where bytes
        are sent. Its sender then takes nothing but `SharedChunk`s.
        """
        return None


def init_requests(
    info: WeightSyncInitInfo,
    world_sizes: Mapping[str, int],
    *,
    run_id: str,
    model_id: str,
    artifact: ArtifactKind = "model",
    returns: bool = False,
) -> dict[str, InitRequest]:
    """One init request an engine, with rank offsets from the world sizes that engines report.

    Args:
        world_sizes: in the order of the ranks: the first engine's workers come right after rank 0.
        artifact: what will come.
        returns: see `InitRequest`.
    """
    requests: dict[str, InitRequest] = {}
    rank = 1
    for engine_id, world_size in world_sizes.items():
        requests[engine_id] = InitRequest(
            run_id=run_id,
            model_id=model_id,
            info=info,  # type: ignore[arg-type]
            rank_offset=rank,
            artifact=artifact,
            returns=returns,
        )
        rank += world_size
    return requests
