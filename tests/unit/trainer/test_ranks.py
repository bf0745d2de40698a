"""TrainingRanks on two real ranks: an error on either is known to both, and both stay in step afterwards."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from tests.multiproc.pull_kit import wait_until
from tests.standins.processes import children, free_port, in_gloo_world, run_ranks
from weightsync.codec.base import Codec
from weightsync.codec.full import FullCodec, FullEncoder
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import (
    EngineUnreachableError,
    ExtractError,
    LoadError,
    SyncFailedError,
    TrainerRankError,
    TransferAbortedError,
    VersionError,
    WeightSyncError,
)
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.handles.fanout import EngineFanout
from weightsync.load.module import ModuleWeightLoader
from weightsync.trainer import extraction
from weightsync.trainer.push import PushSync
from weightsync.trainer.ranks import TrainingRanks
from weightsync.transfer.native import NativeThread
from weightsync.transfer.registry import strategy_named
from weightsync.types import EngineOp, EngineReply, EngineRequest, Update, WeightChunk, deadline
from weightsync.types.engine import PatchBase

MEET_S = 6.0
SCHEDULING_S = 5.0  # between a moment and the thread that waits for it, where everything else runs too


def facts(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


# --- alone ---


def test_a_rank_that_is_alone_agrees_with_itself() -> None:
    ranks = TrainingRanks(timeout_s=1)
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.agree(True)
    assert not ranks.agree(False)
    assert ranks.exchange({"a": 1}) == [{"a": 1}]
    error = VersionError("no")
    with pytest.raises(VersionError) as caught:
        ranks.settle(error)
    assert caught.value is error is ranks.agreed_error
    assert ranks.settle(None, a=1)[0]["a"] == 1
    assert ranks.agreed_error is None
    ranks.close()
    ranks.close()


def test_a_rank_that_does_not_answer_may_only_be_slow() -> None:
    """Seen red: the trainer's own group was said to be broken, and no setting was named."""
    ranks, come = TrainingRanks(timeout_s=0.05), threading.Event()
    ranks._thread = NativeThread("test-ranks")
    try:
        with pytest.raises(TrainerRankError, match=r"no answer within 0\.05 s; it may only be slow \(raise ") as caught:
            ranks._native(lambda held: come.wait(20))
    finally:
        come.set()
    assert caught.value.message.endswith("or have failed before the ranks met: see its log")
    assert str(caught.value.state_left).startswith("weightsync's own group of these ranks is given up: ")


# --- two ranks ---


def in_step(rank: int, world_size: int) -> list[Any]:
    """Every way to agree, with an error on either rank, on both and on none; after each, both are in step."""
    ranks = TrainingRanks(timeout_s=20)
    said: list[Any] = [ranks.agree(rank == 1), ranks.agree(False), ranks.agree(True)]
    for faulty in ([0], [1], [0, 1], []):
        error: WeightSyncError | None = None
        if rank in faulty:
            error = SyncFailedError(f"of rank {rank}", causes={"e": LoadError("no room", parameter="w")})
        try:
            ranks.settle(error, extra=rank)
            said.append("ok")
        except WeightSyncError as caught:
            said.append(facts(caught) if caught is ranks.agreed_error else ("not the agreed one", ""))
        said.append(ranks.exchange({"rank": rank, "faulty": faulty, "text": "ü" * (rank * 1000)}))
        said.append(ranks.agree(rank == 0))
    return said


def test_an_error_on_any_rank_is_raised_on_every_rank_and_both_stay_in_step() -> None:
    zero, one = run_ranks(in_step, 2)
    assert zero[:3] == one[:3] == [True, False, True]
    for index, faulty in enumerate(([0], [1], [0, 1], [])):
        base = 3 + 3 * index
        for rank, said in enumerate((zero, one)):
            outcome, exchanged, agreed = said[base : base + 3]
            if faulty:
                kind, text = outcome
                assert kind == "SyncFailedError", "typed on every rank"
                assert "no room" in text, "the cause is told on every rank"
                assert f"of rank {rank if rank in faulty else faulty[0]}" in text, "one's own error first"
            else:
                assert outcome == "ok"
            assert [what["rank"] for what in exchanged] == [0, 1]
            assert all(what["faulty"] == faulty for what in exchanged)
            assert [len(what["text"]) for what in exchanged] == [0, 1000]
            assert agreed is True


def left_early(rank: int, world_size: int) -> list[Any]:
    """Rank 1 fails before it comes to what the others agree on, and tells it where all meet afterwards."""
    ranks = TrainingRanks(timeout_s=20)
    said: list[Any] = []
    for again in range(3):
        error: WeightSyncError = LoadError(f"no room {again}")
        if rank != 1:
            said.append(ranks.agree(False))
            error = TransferAbortedError("another training rank stopped")
        try:
            ranks.settle(error)
        except WeightSyncError as caught:
            said.append(facts(caught))
        said.append([what["rank"] for what in ranks.exchange({"rank": rank})])
    return said


def test_a_rank_that_leaves_an_agreement_early_stops_the_others() -> None:
    """Seen red: gloo ended the healthy rank's process, as two collectives of other sizes met."""
    zero, one, two = run_ranks(left_early, 3)
    for said in (zero, two):
        assert said[0::3] == [True] * 3
        assert [kind for kind, _ in said[1::3]] == ["LoadError"] * 3, "the cause, on every rank"
    assert one[0::2] == [("LoadError", f"no room {again}") for again in range(3)]
    assert zero[2::3] == one[1::2] == two[2::3] == [[0, 1, 2]] * 3, "and all are in step"


def lonely(rank: int, world_size: int, conn: Any) -> Any:
    ranks = TrainingRanks(timeout_s=30)
    conn.send("ready")
    conn.recv()
    started = time.monotonic()
    seen = []
    for call in (lambda: ranks.agree(False), lambda: ranks.exchange({}), lambda: ranks.settle(LoadError("mine"))):
        try:
            call()
        except WeightSyncError as error:
            seen.append(type(error).__name__)
    conn.send((seen, time.monotonic() - started))
    conn.recv()


def test_a_rank_that_is_killed_is_noticed_at_once_and_not_waited_for_again() -> None:
    with children() as start:
        port = free_port()
        two = [start(in_gloo_world, rank, 2, port, lonely, (), talk=True, name=f"rank{rank}") for rank in range(2)]
        assert [child.recv(30) for child in two] == ["ready", "ready"]
        two[1].kill()
        two[0].conn.send("go")
        seen, seconds = two[0].recv(60)
    assert seen == ["TrainerRankError", "TrainerRankError", "LoadError"], "one's own error stays the one that is told"
    assert seconds < 15


def meets(rank: int, world_size: int, conn: Any) -> Any:
    """Makes a group with the other rank, and agrees with it, each within `MEET_S`."""
    conn.send("ready")
    while (order := conn.recv()) is not None:
        started = time.monotonic()
        try:
            if order == "meet":
                ranks = TrainingRanks(timeout_s=MEET_S)
            ranks.agree(False)
            conn.send(("ok", time.monotonic() - started))
        except WeightSyncError as error:
            conn.send((type(error).__name__, time.monotonic() - started))
    os._exit(0)  # the default group has lost a member


@pytest.mark.parametrize("orders", [["meet"], ["meet", "agree"]], ids=" ".join)
def test_a_rank_that_is_stopped_costs_the_time_out_and_no_more(orders: list[str]) -> None:
    """While the ranks' group is made (seen red with one that the caller makes: torch's own error), and in it."""
    with children() as start:
        port = free_port()
        two = [start(in_gloo_world, rank, 2, port, meets, (), talk=True, name=f"rank{rank}") for rank in range(2)]
        assert [child.recv(30) for child in two] == ["ready", "ready"]
        for order in orders[:-1]:
            for child in two:
                child.conn.send(order)
            assert [child.recv(30)[0] for child in two] == ["ok", "ok"]
        two[1].stop()
        two[0].conn.send(orders[-1])
        kind, seconds = two[0].recv(30)
    assert kind == "TrainerRankError"
    assert seconds < MEET_S + SCHEDULING_S


def closes(rank: int, world_size: int, conn: Any) -> Any:
    """How many threads and descriptors it has after one group, and after many; then closes one beside a dead rank."""

    def opened() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def once() -> None:
        ranks = TrainingRanks(timeout_s=20)
        ranks.settle(None)
        ranks.close()
        assert ranks._thread is not None
        assert ranks._thread._inside.ended.wait(20)

    threading.excepthook = lambda told: os._exit(3)  # a thread may not end in an error
    once()
    before = opened()
    for _ in range(5):
        once()
    last = TrainingRanks(timeout_s=20)
    last.settle(None)
    # a thread ends a little behind its last word
    wait_until(lambda: opened()[0] <= before[0] + 4, "the threads of the others have ended")
    conn.send((before, opened()))
    conn.recv()
    started = time.monotonic()
    last.close()
    conn.send(time.monotonic() - started)
    conn.recv()
    os._exit(0)  # the default group has lost a member


def closes_last(rank: int, world_size: int) -> int:
    """How many errors its threads have ended with where the trainer has destroyed its groups before."""
    failed: list[Any] = []
    threading.excepthook = failed.append
    ranks = TrainingRanks(timeout_s=20)
    ranks.settle(None)
    torch.distributed.destroy_process_group()
    ranks.close()
    assert ranks._thread is not None
    assert ranks._thread._inside.ended.wait(20)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return len(failed)


def test_a_group_may_be_closed_behind_the_trainers_own() -> None:
    """Seen red: a traceback, "Invalid process group specified or has been destroyed"."""
    assert run_ranks(closes_last, 2) == [0, 0]


def test_a_group_that_is_closed_gives_its_threads_and_descriptors_back() -> None:
    """Beside a rank that is dead, too. Seen red: each group's stayed for the life of the process."""
    with children() as start:
        port = free_port()
        two = [start(in_gloo_world, rank, 2, port, closes, (), talk=True, name=f"rank{rank}") for rank in range(2)]
        for (threads, descriptors), (threads_now, descriptors_now) in [child.recv(60) for child in two]:
            assert threads_now <= threads + 4, "those of one open group"
            assert descriptors_now <= descriptors + 8
        two[1].kill()
        two[0].conn.send("go")
        assert two[0].recv(30) < SCHEDULING_S


def push_of(
    rank: int, *, strategy: str = "broadcast", chunks: int = 0, codec: Codec | None = None
) -> tuple[PushSync, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    client = EngineFanout([EmbeddedEngine.of(ModuleWeightLoader(nn.Linear(3, 2)))]) if rank == 0 else None
    return PushSync(
        ModuleWeightExtractor(model, chunk_bytes=1 << 20 if chunks else None),
        client,
        strategy=strategy_named(strategy),
        codec=codec,
        transfer_timeout_s=15.0,
        join_timeout_s=10.0,
    ), model


def diverging(rank: int, world_size: int) -> list[Any]:
    """Ranks that do not mean the same sync; after each a good one."""
    push, model = push_of(rank)
    seen: list[Any] = []

    def attempt(version: int) -> None:
        started = time.monotonic()
        try:
            seen.append(push.sync_weights(version).version.number)
        except WeightSyncError as error:
            seen.append(facts(error)[0])
        assert time.monotonic() - started < 8, "told at once, not at a deadline"

    attempt(1)  # nobody called initialize
    push.initialize()
    attempt(1)
    attempt(2 + rank)
    attempt(4)
    original = push._parts.extractor.metadata
    if rank == 1:
        push._parts.extractor.metadata = lambda dtype=None: original(dtype)[:1]  # type: ignore[method-assign]
    attempt(5)
    push._parts.extractor.metadata = original  # type: ignore[method-assign]
    attempt(6)
    if rank == 1:
        push._parts.extractor.metadata = lambda dtype=None: {}["a hook that fails"]  # type: ignore[method-assign]
    attempt(7)
    push._parts.extractor.metadata = original  # type: ignore[method-assign]
    attempt(8)
    attempt(7)
    attempt(9)
    push.close()
    for options, words in (({"strategy": ["broadcast", "cuda_ipc"][rank]}, "strategy"), ({"chunks": rank}, "chunks")):
        other = push_of(rank, **options)[0]
        other.initialize()
        try:
            other.sync_weights(1)
        except WeightSyncError as error:
            seen.append((facts(error)[0], words in str(error)))
        other.close()
    assert model is not None
    return seen


def test_ranks_that_do_not_mean_the_same_sync_are_told_at_once_and_stay_in_step() -> None:
    zero, one = run_ranks(diverging, 2)
    for said in (zero, one):
        assert said[1:6] == [1, "ConfigError", 4, "ConfigError", 6]
        assert said[0] == "StateError"
        assert isinstance(said[6], str), "an extractor that can't even say what it has"
        assert said[7:10] == [8, "VersionError", 9]
        assert said[10:] == [("ConfigError", True)] * 2, "another strategy, other chunks"
    assert one[6] == ExtractError.__name__


class FailsOnce(FullCodec):
    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    def encoder(self, base: PatchBase | None = None) -> FullEncoder:
        self.num_asked += 1
        if self.num_asked == 1:
            raise ZeroDivisionError
        return super().encoder(base)


def encoder_fails(rank: int, world_size: int) -> list[Any]:
    push, _ = push_of(rank, codec=FailsOnce())
    push.initialize()
    seen: list[Any] = []
    for version in (1, 2):
        try:
            seen.append(push.sync_weights(version).version.number)
        except WeightSyncError as error:
            seen.append(facts(error)[0])
    push.close()
    return seen


def test_a_codec_that_fails_as_it_begins_fails_the_sync_on_every_rank() -> None:
    """Rank 0 alone has one. Seen red: its word of that met another collective of the other rank's."""
    assert run_ranks(encoder_fails, 2) == [["SyncFailedError", 2]] * 2


def comes_early(rank: int, world_size: int) -> list[Any]:
    """Rank 1's clock goes on by more than a sync may take while it waits for rank 0 to call."""
    push, _ = push_of(rank)
    push.initialize()
    if rank == 1:
        extraction._TELL_S = 0.0
        agree, clock = push._agree_on_start, SimpleNamespace(late_s=0.0)
        deadline.time = SimpleNamespace(monotonic=lambda: time.monotonic() + clock.late_s)  # type: ignore[assignment]

        def waits(*args: Any) -> None:
            agree(*args)
            clock.late_s += 1000.0

        push._agree_on_start = waits  # type: ignore[method-assign]
    seen: list[Any] = []
    for version in (1, 2):
        try:
            seen.append(push.sync_weights(version).version.number)
        except WeightSyncError as error:
            seen.append(facts(error))
    push.close()
    return seen


def test_the_time_of_a_sync_begins_when_every_rank_has_come() -> None:
    """Seen red: the rank that came first gave the ranks up in the middle of a healthy sync, for good."""
    assert run_ranks(comes_early, 2) == [[1, 2]] * 2


class DoesNotJoin(EmbeddedEngine):
    within_s = 0.0

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        if op is EngineOp.INIT:
            self.within_s = timeout_s
            raise EngineUnreachableError("not now", peer=self.engine_id)
        return super().call(op, request, timeout_s=timeout_s)


def test_rank_0_meets_engines_within_the_time_that_the_others_wait_for_it() -> None:
    """Seen red: the engine had all of `join_timeout_s`, and the other ranks gave rank 0 up meanwhile."""
    engine = DoesNotJoin.of(ModuleWeightLoader(nn.Linear(3, 2)))
    assert isinstance(engine, DoesNotJoin)
    push = PushSync(ModuleWeightExtractor(nn.Linear(3, 2)), engine, transfer_timeout_s=1.0, join_timeout_s=20.0)
    with pytest.raises(SyncFailedError, match="not now"):
        push.initialize()
    ranks = push._ranks
    push.close()
    assert ranks is not None
    assert 0 < engine.within_s < ranks._timeout_s


class Copies(ModuleWeightExtractor):
    """Chunks that are copies, as of a model that is sharded or cast; it knows which are alive."""

    made: ClassVar[list[weakref.ref[torch.Tensor]]] = []

    def extract_weights(self, dtype: str | None = None) -> Iterator[WeightChunk]:
        for chunk in super().extract_weights(dtype):
            tensors = tuple(tensor.clone() for tensor in chunk.tensors)
            self.made.extend(weakref.ref(tensor) for tensor in tensors)
            yield WeightChunk(names=chunk.names, tensors=tensors, module_name=chunk.module_name)


class Rejects(ModuleWeightLoader):
    def load_weights(self, updates: Iterable[Update]) -> None:
        for update in updates:
            if update[0].startswith("3."):
                raise ValueError("no room")
            super().load_weights([update])


def test_a_failed_sync_keeps_no_chunk_in_the_trainers_memory() -> None:
    """Seen red: the frames that the error's traceback names held one until the next sync went well."""
    model, engine = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))) for _ in range(2))
    push = PushSync(Copies(model, chunk_bytes=80), EmbeddedEngine.of(Rejects(engine)), transfer_timeout_s=15.0)
    push.initialize()
    with contextlib.suppress(SyncFailedError):
        push.sync_weights(1)
        raise AssertionError("the engine took it")
    gc.collect()
    assert len(Copies.made) >= 4
    assert not [ref for ref in Copies.made if ref() is not None]
    assert push._ranks is not None
    assert push._ranks.agreed_error is not None, "the error itself is kept"
    push.close()
