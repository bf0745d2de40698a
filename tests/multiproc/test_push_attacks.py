"""What a hostile review found once, in real processes: each of these failed before it was mended."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from tests.multiproc.spine import TOKEN, Engine, build, client_of, make_worker
from tests.multiproc.test_push_faults import AT_ONCE_S, PATIENT, Trainer, _wait_until_stopped, check_serving, setup
from tests.standins.processes import children
from weightsync import EmbeddedEngine, ModuleWeightLoader, PushSync
from weightsync.engine.processes import ProcessWorker
from weightsync.errors import (
    DeadlineExceededError,
    DigestMismatchError,
    SyncFailedError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.extract.module import ModuleWeightExtractor
from weightsync.handles.fanout import EngineFanout
from weightsync.handles.http import HttpEngine
from weightsync.types import AbortRequest, DescribeRequest, EngineOp, EngineReply, EngineRequest


@pytest.fixture
def start() -> Any:
    with children() as starter:
        yield starter


def test_a_trainer_killed_inside_the_pause_has_a_successor(start: Any) -> None:
    """The dead trainer's pause does not lock its successor out, nor the engine's users for long."""
    one, two, trainer = setup(start)
    two.ask("arm", {"at": "commit", "do": "stop"}, worker=0)
    trainer.ranks[0].conn.send(2)
    _wait_until_stopped(two.worker_pids[0])
    trainer.ranks[0].kill()
    os.kill(two.worker_pids[0], signal.SIGCONT)
    fresh = Trainer(start, {"one": one.url, "two": two.url})
    assert fresh.sync("initialize")["type"] == "ok"
    assert one.generate()[0] == "ok", "the take-over ends the dead trainer's pause, long before its lease would"
    assert fresh.sync(1)["engines"] == ("one", "two")
    check_serving(one, 1, 1)
    check_serving(two, 1, 1)


def test_a_stale_trainer_is_refused(start: Any) -> None:
    """A run that was taken over does not come back: (run, version) keeps meaning one content."""
    one, two, old = setup(start)
    new = Trainer(start, {"one": one.url, "two": two.url})
    assert new.sync("initialize")["type"] == "ok"
    assert new.sync(5)["type"] == "ok"
    said = old.sync(9)
    assert said["type"] in {"SyncFailedError", "GroupJoinError"}
    assert "taken over" in said["text"]
    check_serving(one, 5, 1)
    assert new.sync(6)["engines"] == ("one", "two")
    check_serving(two, 6, 2)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_pause_that_fails_costs_several_ranks_one_sync(start: Any, in_place: bool) -> None:
    """A generation outlasts `pause_timeout_s`; all ranks raise, and all of them sync again."""
    one, two, trainer = setup(start, ranks=2, push=PATIENT, in_place=in_place)
    one.ask("hold", 60.0)
    said = trainer.order(2)
    assert {rank["type"] for rank in said} == {"SyncFailedError"}
    assert all("pause failed on one" in rank["text"] for rank in said)
    assert all(rank["seconds"] < AT_ONCE_S for rank in said)
    one.ask("let go")
    assert trainer.order(3)[1]["engines"] == ("one", "two")
    check_serving(one, 3, 3)
    check_serving(two, 3, 3)


class Liar:
    """An engine that answers 200 to everything and does nothing but join."""

    engine_id = "liar"

    def __init__(self) -> None:
        self._real = EmbeddedEngine.of(ModuleWeightLoader(nn.Linear(2, 2)))

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        if op in {EngineOp.STAGE, EngineOp.COMMIT}:
            return EngineReply(engine_id="liar")
        return self._real.call(op, request, timeout_s=timeout_s)


def test_an_answer_without_a_proof_is_no_success() -> None:
    push = PushSync(ModuleWeightExtractor(nn.Linear(2, 2)), EngineFanout([Liar()]), transfer_timeout_s=5.0)
    push.initialize()
    with pytest.raises(DigestMismatchError, match="without a proof"):
        push.sync_weights(1)
    push.close()


class Boastful(Liar):
    """An engine of half a million workers, it says."""

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        reply = self._real.call(op, request, timeout_s=timeout_s)
        return EngineReply(engine_id="liar", world_size=60_000) if op == EngineOp.DESCRIBE else reply


def test_a_world_size_that_nobody_has_costs_the_join_deadline_and_no_more() -> None:
    push = PushSync(ModuleWeightExtractor(nn.Linear(2, 2)), EngineFanout([Boastful()]), join_timeout_s=1.0)
    with pytest.raises(WeightSyncError) as caught:
        push.initialize()
    assert len(str(caught.value)) < 2000
    with pytest.raises(WeightSyncError, match="world_size"):
        EngineReply(engine_id="e", world_size=3_000_000)


def test_a_stopped_worker_holds_up_no_answer() -> None:
    """abort, describe and close of an engine with a stopped worker process end in time, though its pipe is full.

    Seen to fail (no end): with `close` waiting for the pipe, and with phases drained from the worker without a limit.
    """
    stopped = ProcessWorker(make_worker, args=({},), start_method="fork", track="e/worker-0")
    engine = EmbeddedEngine([stopped])
    os.kill(stopped.pid, signal.SIGSTOP)
    started = time.monotonic()
    with contextlib.suppress(WeightSyncError):
        engine.call(EngineOp.ABORT, AbortRequest(session="s", reason="x" * 500_000), timeout_s=1.0)
    with pytest.raises(DeadlineExceededError):
        engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=1.0)
    engine.close()
    assert time.monotonic() - started < 20


class Fused(nn.Module):
    """q and k are views of one tensor, with which the forward computes."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.zeros(4, 4)
        self.q = nn.Parameter(self.fused[:2], requires_grad=False)
        self.k = nn.Parameter(self.fused[2:], requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.fused.t()


def test_views_of_a_fused_tensor_are_loaded_in_place_or_not_at_all() -> None:
    """Swapping q and k would leave the fused tensor on old weights, and every digest equal."""
    trained = Fused()
    with torch.no_grad():
        trained.fused.fill_(2.0)
    for in_place in (False, True):
        served = Fused()
        engine = EmbeddedEngine.of(ModuleWeightLoader(served, in_place=in_place))
        push = PushSync(
            ModuleWeightExtractor(trained, chunk_bytes=None), EngineFanout([engine]), transfer_timeout_s=10.0
        )
        push.initialize()
        if in_place:
            assert push.sync_weights(1).digests_equal is True
            assert served(torch.ones(1, 4)).tolist() == [[8.0] * 4]
        else:
            with pytest.raises(SyncFailedError) as caught:
                push.sync_weights(1)
            assert isinstance(caught.value.causes["engine-0"], UnsupportedError)
            assert "in_place=True" in str(caught.value)
        push.close()


def test_interrupting_a_sync_stays_an_interrupt(start: Any) -> None:
    """Ctrl-C is no SyncFailedError that a retry loop swallows; engines go on with their old version."""
    engine = Engine(start, "e")
    extractor = ModuleWeightExtractor(build(3), chunk_bytes=300)
    push = PushSync(extractor, client_of({"e": engine.url}), dtype="bfloat16", transfer_timeout_s=8.0)
    push.initialize()
    push.sync_weights(1)
    send = push._engines.group.sender.send_chunks  # type: ignore[union-attr]

    def interrupted(*args: Any, **options: Any) -> int:
        threading.Event().wait(0.01)
        raise KeyboardInterrupt

    push._engines.group.sender.send_chunks = interrupted  # type: ignore[union-attr,method-assign]
    with pytest.raises(KeyboardInterrupt):
        push.sync_weights(2)
    assert send is not None
    assert engine.generate()[2].endswith("/1")
    assert push.sync_weights(3).digests_equal is True
    push.close()


@pytest.mark.parametrize("in_place", [False, True])
def test_generations_wait_out_a_healthy_sync_and_none_is_turned_away(in_place: bool) -> None:
    """Whoever waits for the pause waits through the commit too; only half-loaded weights turn a request away."""
    served, trained = build(1, dtype=torch.bfloat16), build(2)
    engine = EmbeddedEngine.of(ModuleWeightLoader(served, in_place=in_place))
    push = PushSync(ModuleWeightExtractor(trained, chunk_bytes=300), engine, dtype="bfloat16", transfer_timeout_s=10.0)
    push.initialize()
    over = threading.Event()
    seen: list[Any] = []

    def generate() -> None:
        while not over.is_set():
            try:
                with engine.generation(timeout_s=10.0) as version:
                    seen.append(None if version is None else version.number)
            except WeightSyncError as error:
                seen.append(error)

    threads = [threading.Thread(target=generate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for version in range(1, 16):
        push.sync_weights(version)
    over.set()
    for thread in threads:
        thread.join(10)
    push.close()
    assert not [what for what in seen if isinstance(what, WeightSyncError)]
    assert 15 in seen


def test_initialize_tells_a_wrong_address_or_token_even_beside_a_good_engine(start: Any) -> None:
    """One of two does not let the trainer in: that is told before step 1, unless asked otherwise."""
    engine = Engine(start, "good")
    wrong = HttpEngine(engine.url, engine_id="bad", token="not-the-token-at-all")
    client = EngineFanout([HttpEngine(engine.url, engine_id="good", token=TOKEN), wrong])
    push = PushSync(ModuleWeightExtractor(build(3), chunk_bytes=None), client, dtype="bfloat16", join_timeout_s=5.0)
    with pytest.raises(SyncFailedError, match="AuthError"):
        push.initialize()
    push.initialize(require_all=False)
    report = push.sync_weights(1)
    assert report.lost_engine_ids == ("bad",)
    assert "token" in report.lost["bad"]
    push.close()


def untyped(rank: int, world_size: int, url: str) -> list[str]:
    from tests.multiproc.spine import push_of

    push = push_of(build(3), {"e": url}, fsdp=False, transfer_timeout_s=5.0)
    push.initialize()
    good = push._parts.extractor.metadata
    if rank == 1:
        push._parts.extractor.metadata = lambda dtype: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    outcomes = []
    for version in (1, 2):
        try:
            outcomes.append(str(push.sync_weights(version).digests_equal))
        except WeightSyncError as error:
            outcomes.append(type(error).__name__)
        push._parts.extractor.metadata = good  # type: ignore[method-assign]
    push.close()
    return outcomes


def test_an_untyped_error_on_one_rank_leaves_all_ranks_in_step(start: Any) -> None:
    from tests.standins.processes import run_ranks

    engine = Engine(start, "e")
    assert run_ranks(untyped, 2, engine.url) == [["ExtractError", "True"]] * 2
