"""Broadcast: what the transfer contract does not say: buckets, windows, groups that broke."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.config import WeightSyncConfig
from weightsync.errors import (
    DeadlineExceededError,
    GroupJoinError,
    InvalidRequestError,
    LoadError,
    SyncFailedError,
    TransferError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.handles.fanout import in_thread
from weightsync.testing.contracts import WeightTransferContract, bytes_of
from weightsync.transfer import broadcast, window
from weightsync.transfer.base import init_requests
from weightsync.transfer.broadcast import BroadcastTransferReceiver, BroadcastTransferSender, BroadcastTransferStrategy
from weightsync.transfer.group import join_group, open_store
from weightsync.transfer.registry import strategy_for, strategy_named
from weightsync.types import (
    BroadcastWeightUpdateRequest,
    Deadline,
    EmptyWeightSyncInitInfo,
    InitRequest,
    TorchDistributedWeightSyncInitInfo,
    WeightChunk,
)


class FakeGroup:
    """A group of two in memory: each broadcast hands rank 0's bytes to whoever asks next."""

    def __init__(self, data: bytes = b"") -> None:
        self.device = torch.device("cpu")
        self.data = data
        self.buffers: list[torch.Tensor] = []
        self.error: Exception | None = None
        self.closed = 0

    def broadcast(self, buffer: torch.Tensor, *, deadline: Deadline) -> None:
        if self.error is not None:
            raise self.error
        self.buffers.append(buffer)
        if self.data:
            buffer.copy_(
                torch.frombuffer(bytearray(self.data[: buffer.numel()].ljust(buffer.numel(), b"\0")), dtype=torch.uint8)
            )

    def start_broadcast(self, buffer: torch.Tensor, *, deadline: Deadline, done: Any) -> Future[None]:
        def job() -> None:
            try:
                self.broadcast(buffer, deadline=deadline)
            except Exception:
                self.close()
                raise
            done(0.0)

        return in_thread(job, name="fake-group")

    def close(self) -> None:
        self.closed += 1


def receiver(data: bytes = bytes(range(256)) * 8) -> tuple[Any, FakeGroup]:
    group = FakeGroup(data)
    return BroadcastTransferReceiver(group), group  # type: ignore[arg-type]


def request(seq: int, *, nbytes: int = 8, offset: int = 0, bucket: int = 512) -> BroadcastWeightUpdateRequest:
    return BroadcastWeightUpdateRequest(
        session="s",
        seq=seq,
        names=("w",),
        dtypes=("uint8",),
        shapes=((nbytes,),),
        offsets=(offset,),
        bucket_bytes=bucket,
    )


def test_a_tensor_is_taken_from_its_own_place_in_the_bucket() -> None:
    end, _ = receiver()
    (update,) = end.receive_weights(request(0, offset=256, nbytes=4), deadline=Deadline(5))
    assert update.tensor.tolist() == [0, 1, 2, 3]
    (update,) = end.receive_weights(request(1, offset=7, nbytes=4), deadline=Deadline(5))
    assert update.tensor.tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("is_cuda", [True, False])
def test_a_gpus_bucket_is_received_into_when_what_this_thread_has_queued_is_done(
    is_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU; with one: tests/gpu/test_cuda_streams.py. Seen red: the broadcast came first, into memory that
    torch had taken back from kernels which were queued yet."""
    order: list[Any] = []
    bucket = SimpleNamespace(is_cuda=is_cuda, device="cuda:1")
    group = SimpleNamespace(device="cuda:1", broadcast=lambda buffer, *, deadline: order.append(buffer))
    stream = SimpleNamespace(synchronize=lambda: order.append("synchronize"))
    monkeypatch.setattr(broadcast, "_grown", lambda *_: bucket)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: order.append(device) or stream)
    BroadcastTransferReceiver(group).receive_weights(request(0), deadline=Deadline(5))  # type: ignore[arg-type]
    assert order == (["cuda:1", "synchronize", bucket] if is_cuda else [bucket])


def test_a_bucket_is_not_received_into_while_its_loader_holds_it() -> None:
    """Seen to fail: with `release` called as soon as the bytes were there."""
    end, group = receiver()
    first, second = (next(end.receive_weights(request(seq), deadline=Deadline(5))) for seq in (0, 1))
    assert first.tensor.data_ptr() != second.tensor.data_ptr(), "two buckets"
    with pytest.raises(DeadlineExceededError):
        end.receive_weights(request(2), deadline=Deadline(0.05))
    assert len(group.buffers) == 2
    waiting = in_thread(lambda: next(end.receive_weights(request(2), deadline=Deadline(5))), name="third")
    end.release(request(0))
    assert waiting.result(5).tensor.data_ptr() == first.tensor.data_ptr(), "and there is no third"


def test_a_wait_for_a_bucket_that_ran_out_never_goes_on() -> None:
    """Faults of this kind log "proceeding" and load: here with a deadline that still finds a moment left."""

    class Generous(Deadline):
        def check(self, waiting_for: str, **facts: object) -> float:
            if threading.active_count() and time.monotonic() > self.end:
                raise DeadlineExceededError("at last")
            return 0.01

        end = 0.0

    deadline = Generous(5)
    deadline.end = time.monotonic() + 0.1
    end, group = receiver()
    end.receive_weights(request(0), deadline=Deadline(5))
    with pytest.raises(DeadlineExceededError):
        end.receive_weights(request(2), deadline=deadline)
    assert len(group.buffers) == 1


def test_release_can_be_repeated_and_frees_its_own_bucket_alone() -> None:
    end, _ = receiver()
    for seq in (0, 1):
        end.receive_weights(request(seq), deadline=Deadline(5))
    end.release(request(1))
    end.release(request(1))
    with pytest.raises(DeadlineExceededError):
        end.receive_weights(request(2), deadline=Deadline(0.05))
    end.receive_weights(request(3), deadline=Deadline(5))


def test_a_failed_receive_gives_its_bucket_back() -> None:
    end, group = receiver()
    group.error = TransferError("lost")
    for _ in range(3):
        with pytest.raises(TransferError):
            end.receive_weights(request(0), deadline=Deadline(30))
    group.error = None
    end.receive_weights(request(0), deadline=Deadline(30))


def test_what_a_broken_group_writes_late_reaches_no_bucket_that_is_used() -> None:
    """A native call that was given up still has its bucket. Seen red with a receiver that uses it again."""
    end, group = receiver()
    written_late: list[torch.Tensor] = []

    def break_off(buffer: torch.Tensor, *, deadline: Deadline) -> None:
        written_late.append(buffer)
        raise TransferError("lost")

    whole, group.broadcast = group.broadcast, break_off  # type: ignore[method-assign]
    with pytest.raises(TransferError):
        end.receive_weights(request(0), deadline=Deadline(30))
    group.broadcast = whole  # type: ignore[method-assign]
    (update,) = end.receive_weights(request(0), deadline=Deadline(30))
    written_late[0].fill_(77)
    assert bytes(update.tensor.numpy()) == bytes(range(8))


def test_buckets_grow_and_stay() -> None:
    end, group = receiver()
    for seq, bucket in enumerate([512, 512, 4096, 4096, 512, 512]):
        end.receive_weights(request(seq, bucket=bucket), deadline=Deadline(5))
        end.release(request(seq))
    assert [buffer.numel() for buffer in group.buffers] == [512, 512, 4096, 4096, 512, 512]
    assert len({buffer.data_ptr() for buffer in group.buffers[2:]}) == 2


class Client:
    """An `InferenceEngineClient` of which a sender needs one method."""

    def __init__(self) -> None:
        self.announced: list[BroadcastWeightUpdateRequest] = []
        self.answers: list[Future[Any]] = []
        self.at_once = True

    def update_weights(self, request: BroadcastWeightUpdateRequest, *, timeout_s: float) -> Future[Any]:
        self.announced.append(request)
        answer: Future[Any] = Future()
        if self.at_once:
            answer.set_result({})
        self.answers.append(answer)
        return answer


def sender() -> tuple[BroadcastTransferSender, FakeGroup, Any]:
    group = FakeGroup()
    made = BroadcastTransferSender(group, record=lambda record: None, track="t")  # type: ignore[arg-type]
    return made, group, Client()


def chunk(number: int = 0) -> WeightChunk:
    return WeightChunk(names=("a", "b"), tensors=(torch.full((300,), number, dtype=torch.uint8), torch.ones(3, 2).t()))


def test_what_is_announced_is_what_is_sent() -> None:
    end, group, client = sender()
    sent = chunk(7)
    assert end.send_chunks(iter([sent]), client, session="s", deadline=Deadline(5)) == 1
    (header,) = client.announced
    (bucket,) = group.buffers
    assert (header.names, header.dtypes, header.shapes) == (("a", "b"), ("uint8", "float32"), ((300,), (2, 3)))
    assert header.bucket_bytes == bucket.numel()
    for tensor, offset in zip(sent.tensors, header.offsets, strict=True):
        assert bytes(bucket[offset : offset + tensor.nbytes].numpy()) == bytes_of(tensor)


def test_a_chunk_is_let_go_of_once_it_is_packed() -> None:
    """Two chunks in flight at most, and none of them kept alive by the sender."""
    end, _, client = sender()
    client.at_once = False
    alive: list[weakref.ref[WeightChunk]] = []
    third = threading.Event()
    in_memory: list[int] = []

    def source() -> Iterator[WeightChunk]:
        for number in range(4):
            if number == 2:
                third.set()
            in_memory.append(sum(ref() is not None for ref in alive))
            made = chunk(number)
            alive.append(weakref.ref(made))
            yield made
            del made

    sending = in_thread(lambda: end.send_chunks(source(), client, session="s", deadline=Deadline(10)), name="send")
    while len(client.answers) < 2:
        time.sleep(0.001)
    assert not third.wait(0.2), "the third is not asked for while two are not loaded"
    assert len(client.announced) == 2
    for number in range(4):
        while len(client.answers) <= number:
            time.sleep(0.001)
        client.answers[number].set_result({})
    assert sending.result(5) == 4
    assert in_memory == [0, 0, 0, 0]


def test_the_third_chunk_waits_for_the_first_not_for_the_second() -> None:
    end, _, client = sender()
    client.at_once = False
    sending = in_thread(
        lambda: end.send_chunks(iter([chunk(n) for n in range(3)]), client, session="s", deadline=Deadline(10)),
        name="s",
    )
    while len(client.answers) < 2:
        time.sleep(0.001)
    client.answers[1].set_result({})
    with pytest.raises(TimeoutError):
        sending.result(0.1)
    assert len(client.announced) == 2
    client.answers[0].set_result({})
    while len(client.answers) < 3:
        time.sleep(0.001)
    client.answers[2].set_result({})
    assert sending.result(5) == 3


def test_an_engines_words_are_preferred_to_the_broken_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_WORDS_GRACE_S", 60.0)
    end, group, client = sender()
    client.at_once = False
    group.error = TransferError("a member left")
    sending = in_thread(lambda: end.send_chunks(iter([chunk()]), client, session="s", deadline=Deadline(10)), name="s")
    while not client.answers:
        time.sleep(0.001)
    while not group.closed:
        time.sleep(0.001)
    client.answers[0].set_exception(SyncFailedError("update failed", causes={"e": LoadError("no room")}))
    error = sending.exception(5)
    assert isinstance(error, SyncFailedError)
    assert not end.usable
    assert group.closed, "so that every other member's operation fails too"


def test_a_broken_connection_without_words_is_told_soon() -> None:
    end, group, client = sender()
    client.at_once = False
    group.error = TransferError("a member left")
    started = time.monotonic()
    with pytest.raises(TransferError, match="a member left"):
        end.send_chunks(iter([chunk(), chunk()]), client, session="s", deadline=Deadline(30))
    assert time.monotonic() - started < 10


def test_an_engine_that_never_answers_costs_the_deadline() -> None:
    end, _, client = sender()
    client.at_once = False
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        end.send_chunks(iter([chunk()]), client, session="s", deadline=Deadline(0.2))
    assert time.monotonic() - started < 10
    with pytest.raises(WeightSyncError, match="broken"):
        end.send_chunks(iter([chunk()]), client, session="s", deadline=Deadline(5))


# --- groups ---


def info(**changes: Any) -> TorchDistributedWeightSyncInitInfo:
    made, _ = BroadcastTransferStrategy(join_timeout_s=10).create_init_info({"e": 1})
    fields = {name: getattr(made, name) for name in made.__struct_fields__}
    return TorchDistributedWeightSyncInitInfo(**{**fields, **changes})


def test_a_master_that_is_not_there() -> None:
    started = time.monotonic()
    with pytest.raises(GroupJoinError) as caught:
        join_group(info(master_port=1, join_timeout_s=0.5), rank=1)
    assert caught.value.rank == 1
    assert time.monotonic() - started < 10


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(GroupJoinError, match=r"192\.0\.2\.1"):
        open_store("192.0.2.1", timeout_s=1)


def test_a_late_joiner_of_a_former_group_meets_nobody() -> None:
    """Same store, another name: its members are not ours."""
    strategy = BroadcastTransferStrategy(join_timeout_s=2)
    made, store = strategy.create_init_info({"e": 1})
    fields = {name: getattr(made, name) for name in made.__struct_fields__}
    former = TorchDistributedWeightSyncInitInfo(**{**fields, "group_name": "of yesterday"})
    late = in_thread(lambda: join_group(former, rank=1), name="late")
    with pytest.raises(GroupJoinError) as caught:
        join_group(made, rank=0, store=store)  # type: ignore[arg-type]
    assert caught.value.details["missing_ranks"] == [1]
    assert isinstance(late.exception(20), GroupJoinError)


class Pairs(WeightTransferContract):
    __test__ = False

    def make_strategy(self, *, join_timeout_s: float) -> BroadcastTransferStrategy:
        return BroadcastTransferStrategy(join_timeout_s=join_timeout_s)


def test_a_member_that_leaves_ends_the_others_wait_at_once() -> None:
    with Pairs().meet(2) as (end, _, engines, _):
        one, two = engines[0].receivers
        waiting = in_thread(lambda: one.receive_weights(request(0), deadline=Deadline(20)), name="wait")
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        started = time.monotonic()
        end.close()
        two.close()
        assert isinstance(waiting.exception(15), TransferError)
        assert time.monotonic() - started < 10


def test_a_receiver_that_is_alone_ends_with_its_deadline() -> None:
    strategy = BroadcastTransferStrategy(join_timeout_s=10)
    made, token = strategy.create_init_info({"e": 1})
    joining = in_thread(lambda: strategy.create_receiver(made, rank=1), name="join")
    joined: Future[Any] = Future()
    end = strategy.create_sender(made, token, joined=joined, record=lambda r: None)
    receiver = joining.result(15)
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        receiver.receive_weights(request(0), deadline=Deadline(0.3))
    assert time.monotonic() - started < 8
    end.close()


# --- strategies ---


def test_rank_offsets_come_from_each_engines_own_world_size() -> None:
    made = EmptyWeightSyncInitInfo(strategy="x", group_name="g")
    requests = init_requests(made, {"a": 2, "b": 1, "c": 4}, run_id="r", model_id="m")
    assert {who: request.rank_offset for who, request in requests.items()} == {"a": 1, "b": 3, "c": 4}
    assert next(iter(requests.values())) == InitRequest(run_id="r", model_id="m", info=made, rank_offset=1)


def test_the_world_is_everybody() -> None:
    made, _ = BroadcastTransferStrategy().create_init_info({"a": 2, "b": 1})
    assert made.world_size == 4
    again, _ = BroadcastTransferStrategy().create_init_info({"a": 2, "b": 1})
    assert made.group_name != again.group_name
    assert made.master_addr == "127.0.0.1", "loopback unless told otherwise"


def test_an_init_info_of_another_strategy_is_refused() -> None:
    other = EmptyWeightSyncInitInfo(strategy="broadcast", group_name="g")
    with pytest.raises(InvalidRequestError, match="EmptyWeightSyncInitInfo"):
        BroadcastTransferStrategy().create_receiver(other, rank=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_nccl_without_a_gpu_is_refused_in_words() -> None:
    strategy = BroadcastTransferStrategy(backend="nccl", join_timeout_s=5)
    made, token = strategy.create_init_info({"e": 1})
    other = in_thread(lambda: strategy.create_receiver(made, rank=1), name="join")
    with pytest.raises(UnsupportedError, match="gloo"):
        strategy.create_sender(made, token, joined=Future(), record=lambda r: None)
    assert isinstance(other.exception(5), UnsupportedError)


def test_strategies_by_name() -> None:
    assert isinstance(strategy_named("broadcast"), BroadcastTransferStrategy)
    with pytest.raises(UnsupportedError, match="broadcast"):
        strategy_named("os.system")
    made = strategy_for(WeightSyncConfig())
    assert isinstance(made, BroadcastTransferStrategy)
