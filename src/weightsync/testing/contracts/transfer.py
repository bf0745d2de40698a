"""What every `WeightTransferStrategy` keeps, and an engine around its receivers."""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from weightsync.errors import (
    GroupJoinError,
    InvalidRequestError,
    LoadError,
    StateError,
    SyncFailedError,
    WeightSyncError,
)
from weightsync.handles.fanout import EngineFanout, in_thread
from weightsync.testing.contracts.cases import LONG_S, an_update, bytes_of
from weightsync.transfer.base import (
    ChunkSharer,
    SharedChunk,
    WeightTransferReceiver,
    WeightTransferSender,
    WeightTransferStrategy,
    init_requests,
)
from weightsync.types import (
    CudaIpcWeightUpdateRequest,
    Deadline,
    EngineOp,
    EngineReply,
    EngineRequest,
    Full,
    InitRequest,
    SharedMemoryHandle,
    UpdateRequest,
    WeightChunk,
    WeightSyncInitInfo,
)

Received = tuple[str, torch.dtype, tuple[int, ...], bytes]
"""Name, dtype, shape and bytes of a tensor that arrived."""


class ReceiverEngine:
    """An `EngineHandle` around bare receivers: joins at init, receives what is announced, keeps the bytes.

    Args:
        engine_id: its id.
        strategy: makes its receivers.
        world_size: how many.
    """

    def __init__(self, engine_id: str, strategy: WeightTransferStrategy, *, world_size: int = 1) -> None:
        self.engine_id = engine_id
        self._strategy = strategy
        self.world_size = world_size
        self.receivers: list[WeightTransferReceiver] = []
        self._got: list[dict[int, list[Received]]] = [{} for _ in range(world_size)]
        self.before_load: Callable[[int], None] = lambda seq: None
        self._turn = threading.Condition()
        self._next = [0] * world_size

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        match request:
            case InitRequest():
                self.receivers = _at_once(
                    lambda i: self._strategy.create_receiver(request.info, rank=request.rank_offset + i),
                    self.world_size,
                )
            case UpdateRequest(update=update):
                _at_once(lambda i: self._receive(i, update), self.world_size)
        return EngineReply(engine_id=self.engine_id, world_size=self.world_size)

    def got(self, index: int = 0) -> list[Received]:
        """What arrived at a worker, in the order of the chunks' numbers."""
        return [item for _, items in sorted(self._got[index].items()) for item in items]

    def forget(self) -> None:
        """Ready for another session."""
        self._got = [{} for _ in range(self.world_size)]
        self._next = [0] * self.world_size

    def close(self) -> None:
        """Closes all receivers."""
        for receiver in self.receivers:
            receiver.close()

    def _receive(self, index: int, update: Any) -> None:
        receiver = self.receivers[index]
        with self._turn:
            assert self._turn.wait_for(lambda: self._next[index] == update.seq, LONG_S)
        updates = receiver.receive_weights(update, deadline=Deadline(LONG_S))
        with self._turn:
            self._next[index] += 1
            self._turn.notify_all()
        self.before_load(update.seq)
        got: list[Received] = []
        for item in updates:
            assert isinstance(item, Full)
            got.append((item.name, item.tensor.dtype, tuple(item.tensor.shape), bytes_of(item.tensor)))
        receiver.release(update)
        self._got[index][update.seq] = got


def _at_once(function: Callable[[int], Any], count: int) -> list[Any]:
    calls = [in_thread(lambda i=i: function(i), name=f"contract-{i}") for i in range(count)]  # type: ignore[misc]
    return [call.result(2 * LONG_S) for call in calls]


class WeightTransferContract(abc.ABC):
    """What every pair of `WeightTransferSender` and `WeightTransferReceiver` keeps, both ends in one process."""

    ends_meet = True
    """Whether ends meet each other when they are created, so that one that stays away is named on both sides."""

    @abc.abstractmethod
    def make_strategy(self, *, join_timeout_s: float) -> WeightTransferStrategy:
        """A strategy whose both ends can be made in this process."""

    def ready(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """The chunks as the sender gets them: lent first, where the strategy lends, as a lone training rank does it."""
        sharer = self.make_strategy(join_timeout_s=LONG_S).create_sharer()
        if sharer is None:
            yield from chunks
            return
        self._sharers.append(sharer)  # it outlives the generator: the last chunks are read after it has ended
        num_let_go = 0

        def let_go() -> None:
            nonlocal num_let_go
            num_let_go += 1

        for seq, chunk in enumerate(chunks):
            assert num_let_go > seq - sharer.num_slots, "asked for a chunk whose memory is still read"
            yield SharedChunk.of(chunk, (sharer.share(chunk, seq),), let_go=let_go)

    @contextlib.contextmanager
    def meet(
        self, *world_sizes: int, join_timeout_s: float = LONG_S
    ) -> Iterator[tuple[WeightTransferSender, EngineFanout, list[ReceiverEngine], WeightSyncInitInfo]]:
        """A sender and engines of these world sizes that have met."""
        self._sharers: list[ChunkSharer] = []
        strategy = self.make_strategy(join_timeout_s=join_timeout_s)
        engines = [ReceiverEngine(f"e{i}", strategy, world_size=size) for i, size in enumerate(world_sizes)]
        client = EngineFanout(engines)
        sizes = {engine.engine_id: engine.world_size for engine in engines}
        info, token = strategy.create_init_info(sizes)
        joined = client.init(init_requests(info, sizes, run_id="r", model_id="m"), timeout_s=LONG_S)
        sender = strategy.create_sender(info, token, joined=joined, record=lambda record: None)
        joined.result(LONG_S)
        try:
            yield sender, client, engines, info
        finally:
            for engine in engines:
                engine.close()
            sender.close()
            for sharer in self._sharers:
                sharer.close()

    @staticmethod
    def chunks(count: int, *, seed: int = 0, numel: int = 1000) -> list[WeightChunk]:
        """Chunks of different sizes, dtypes and shapes: 0-d, empty and not contiguous ones included."""
        generator = torch.Generator().manual_seed(seed)

        def words(size: int) -> torch.Tensor:
            return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)

        made = []
        for n in range(count):
            size = numel * (1 + (n * 7) % 5)
            tensors = {
                f"{n}.bf16": words(2 * size).view(torch.bfloat16),
                f"{n}.fp8": words(15).view(torch.float8_e4m3fn).reshape(3, 5),
                f"{n}.odd": words(7),
                f"{n}.step": torch.tensor(n, dtype=torch.int64),
                f"{n}.empty": torch.empty(0, 4),
                f"{n}.mask": words(9) > 127,
                f"{n}.t": words(48).view(torch.float32).reshape(4, 3).t(),
            }
            made.append(WeightChunk(names=tuple(tensors), tensors=tuple(tensors.values())))
        return made

    @staticmethod
    def expected(chunks: Iterable[WeightChunk]) -> list[Received]:
        """What each receiver must have got, in order."""
        return [
            (name, tensor.dtype, tuple(tensor.shape), bytes_of(tensor))
            for chunk in chunks
            for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
        ]

    def test_every_worker_of_every_engine_gets_every_byte_in_order(self) -> None:
        """World sizes differ; several syncs over the same ends."""
        with self.meet(1, 2) as (sender, client, engines, _):
            for turn in range(3):
                chunks = self.chunks(5, seed=turn)
                sent = sender.send_chunks(self.ready(chunks), client, session=f"s{turn}", deadline=Deadline(LONG_S))
                assert sent == len(chunks)
                assert sender.usable
                for engine in engines:
                    for index in range(engine.world_size):
                        assert engine.got(index) == self.expected(chunks)
                    engine.forget()

    def test_a_chunk_that_a_loader_holds_is_never_overwritten(self) -> None:
        """The window is bounded: while the first chunk is held, few others are asked for, none reaches its memory."""
        go = threading.Event()
        chunks = self.chunks(8)
        taken = 0

        def counted() -> Iterator[WeightChunk]:
            nonlocal taken
            for chunk in chunks:
                taken += 1
                yield chunk

        with self.meet(1) as (sender, client, engines, _):
            held = threading.Event()

            def hold(seq: int) -> None:
                if seq == 0:
                    held.set()
                    assert go.wait(LONG_S)

            engines[0].before_load = hold
            sending = in_thread(
                lambda: sender.send_chunks(self.ready(counted()), client, session="s", deadline=Deadline(LONG_S)),
                name="contract-send",
            )
            try:
                assert held.wait(LONG_S)
                with pytest.raises(TimeoutError):
                    sending.result(0.3)  # everything that may happen has happened
                assert taken <= 3
            finally:
                go.set()
            assert sending.result(LONG_S) == len(chunks)
            assert engines[0].got() == self.expected(chunks)

    def test_nothing_to_send_is_nothing_sent(self) -> None:
        """And the ends stay usable."""
        with self.meet(1) as (sender, client, _, __):
            assert sender.send_chunks(self.ready(()), client, session="s", deadline=Deadline(LONG_S)) == 0
            assert sender.usable

    def test_an_engines_error_ends_the_transfer_at_once(self) -> None:
        """With the engine's own words; then the sender says that it is broken."""
        with self.meet(1, 1) as (sender, client, engines, _):

            def fail(seq: int) -> None:
                if seq == 1:
                    engines[1].close()
                    raise LoadError("no room", parameter="1.odd")

            engines[1].before_load = fail
            started = time.monotonic()
            with pytest.raises(SyncFailedError) as caught:
                sender.send_chunks(self.ready(self.chunks(20)), client, session="s", deadline=Deadline(LONG_S))
            assert time.monotonic() - started < LONG_S / 2
            assert type(caught.value.causes["e1"]) is LoadError
            assert not sender.usable
            with pytest.raises(WeightSyncError):
                sender.send_chunks(self.ready(self.chunks(1)), client, session="s", deadline=Deadline(LONG_S))

    def test_a_failing_source_of_chunks_is_told_as_it_is(self) -> None:
        """The trainer's own error, not one of the transport's."""

        def source() -> Iterator[WeightChunk]:
            yield from self.chunks(2)
            raise LoadError("extraction stopped here")

        with self.meet(1) as (sender, client, _, __):
            with pytest.raises(LoadError, match="extraction stopped here"):
                sender.send_chunks(self.ready(source()), client, session="s", deadline=Deadline(LONG_S))
            assert not sender.usable

    def test_a_member_that_does_not_take_part_costs_the_deadline_and_no_more(self) -> None:
        """An engine that takes the announcement and then does nothing."""
        never = threading.Event()

        class Deaf(ReceiverEngine):
            def _receive(self, index: int, update: Any) -> None:
                never.wait(LONG_S)

        with self.meet(1) as (sender, client, engines, _):
            engines[0].__class__ = Deaf
            started = time.monotonic()
            try:
                with pytest.raises(WeightSyncError):
                    sender.send_chunks(self.ready(self.chunks(5)), client, session="s", deadline=Deadline(0.5))
            finally:
                never.set()
            assert time.monotonic() - started < LONG_S / 2

    def test_a_receiver_refuses_another_strategys_request(self) -> None:
        """Before it waits for a single byte."""
        handle = SharedMemoryHandle(host_nonce="n", name="a", offset_bytes=0, size_bytes=4)
        fields: dict[str, Any] = {"session": "s", "seq": 0, "names": ("w",), "dtypes": ("uint8",), "shapes": ((4,),)}
        foreign: Any = CudaIpcWeightUpdateRequest(**fields, handles=((handle,),))
        with self.meet(1) as (sender, client, engines, _):
            if isinstance(foreign, self.make_strategy(join_timeout_s=1.0).request_type):
                foreign = an_update()
            with pytest.raises(InvalidRequestError):
                engines[0].receivers[0].receive_weights(foreign, deadline=Deadline(LONG_S))
            chunks = self.chunks(2)
            sender.send_chunks(self.ready(chunks), client, session="s", deadline=Deadline(LONG_S))
            assert engines[0].got() == self.expected(chunks), "and it goes on working"

    def test_closing_is_quick_and_can_be_repeated(self) -> None:
        """Also with nobody at the other end any more."""
        with self.meet(1) as (sender, _, engines, __):
            started = time.monotonic()
            for _ in range(2):
                sender.close()
                engines[0].close()
            assert time.monotonic() - started < LONG_S
            assert not sender.usable

    def test_a_member_that_stays_away_costs_the_join_timeout_and_no_more(self) -> None:
        """Where ends meet each other, both sides say which ranks are missing."""
        strategy = self.make_strategy(join_timeout_s=2.0)
        for _ in range(3):
            info, token = strategy.create_init_info({"e0": 1, "e1": 2})
            joined: Future[Mapping[str, EngineReply]] = Future()
            receiver = in_thread(functools.partial(strategy.create_receiver, info, rank=2), name="contract-receiver")
            started = time.monotonic()
            with pytest.raises(GroupJoinError) as caught:
                strategy.create_sender(info, token, joined=joined, record=lambda record: None)
            if caught.value.details.get("missing_ranks") != [1, 2, 3]:  # else this machine was late for rank 2
                break
        if self.ends_meet:
            assert caught.value.details["missing_ranks"] == [1, 3]
            assert isinstance(receiver.exception(LONG_S), GroupJoinError)
        else:
            receiver.result(LONG_S).close()
        assert time.monotonic() - started < LONG_S / 2

    def test_an_engine_that_can_not_join_ends_the_join_at_once(self) -> None:
        """Its own error, long before the join timeout."""
        strategy = self.make_strategy(join_timeout_s=LONG_S)
        info, token = strategy.create_init_info({"e0": 1})
        joined: Future[Mapping[str, EngineReply]] = Future()
        joined.set_exception(SyncFailedError("init failed", causes={"e0": StateError("busy")}))
        started = time.monotonic()
        with pytest.raises(SyncFailedError):
            strategy.create_sender(info, token, joined=joined, record=lambda record: None)
        assert time.monotonic() - started < LONG_S / 2
