"""The whole push path in real processes: FSDP2 ranks, gloo, engines behind HTTP; bytes compared one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.multiproc.spine import Engine, build, cast_bytes, push_of, shard, step
from tests.multiproc.test_push_faults import _wait_until_stopped
from tests.standins.processes import Child, children, run_ranks


def train_and_push(rank: int, world_size: int, placement: str, urls: dict[str, str], steps: int) -> list[Any]:
    model = shard(build(5), placement, world_size)
    push = push_of(model, urls)
    push.initialize()
    reports = []
    for version in range(1, steps + 1):
        step(model)
        report = push.sync_weights(version)
        reports.append(
            (report.version.number, report.digests_equal, report.num_chunks, report.engine_ids, report.total_bytes)
        )
    push.close()
    return reports


@pytest.mark.parametrize(
    ("placement", "ranks"), [("shard0", 2), ("shard0", 3), ("shard1", 2), ("shard1", 3), ("hsdp", 4), ("hsdp", 2)]
)
def test_engines_hold_the_trainers_bytes(placement: str, ranks: int) -> None:
    """Engines of world size 1 and 2 at once; every worker's live bytes are the trainer's cast bytes.

    Seen to fail: with `rank * own_bytes` offsets in the receiver's unpacking, and with the cast left out.
    """
    with children() as start:
        engines = [Engine(start, "one", 1), Engine(start, "two", 2)]
        urls = {engine.id: engine.url for engine in engines}
        results = run_ranks(train_and_push, ranks, placement, urls, 2)
        assert all(result == results[0] for result in results), "every rank gets the same report"
        number, equal, num_chunks, ids, total_bytes = results[0][-1]
        assert (number, equal, ids) == (2, True, ("one", "two"))
        assert num_chunks >= 3
        reference = build(5)
        step(reference)
        step(reference)
        expected = cast_bytes(reference)
        assert total_bytes == sum(len(data) for name, data in expected.items() if name != "head.weight")
        for engine in engines:
            for worker in range(engine.world_size):
                assert engine.weights(worker) == expected
            outcome, _, version = engine.generate()
            assert outcome == "ok"
            assert version is not None
            assert version.endswith("/2")


def push_once(urls: dict[str, str], seed: int, versions: list[int], options: dict[str, Any], conn: Any) -> None:
    """A trainer of one rank that syncs when told to."""
    torch.set_num_threads(1)
    model: nn.Module = build(seed)
    push = push_of(model, urls, fsdp=False, **options)
    push.initialize()
    conn.send("ready")
    for version in versions:
        conn.recv()
        step(model)
        conn.send(push.sync_weights(version))
    push.close()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_single_rank_pushes_a_plain_module(in_place: bool) -> None:
    """No process group on the trainer's side at all; loading beside or over the live weights."""
    with children() as start:
        engine = Engine(start, "e", in_place=in_place)
        trainer = start(push_once, {"e": engine.url}, 3, [4, 9], {}, talk=True)
        assert trainer.recv() == "ready"
        model = build(3)
        for version in (4, 9):
            trainer.conn.send("go")
            report = trainer.recv()
            step(model)
            assert report.version.number == version
            assert report.digests_equal is True
            assert engine.weights() == cast_bytes(model)
            assert report.paused_s > 0
            assert {"extract", "pack", "transfer", "load", "verify", "pause", "commit", "resume"} <= set(
                report.phases_s
            )


def test_memory_of_the_sender_does_not_grow_with_the_model() -> None:
    """At most two chunks are in flight: the announcements outstanding are counted while a loader is stopped."""
    with children() as start:
        engine = Engine(start, "e", blocks=12)
        engine.ask("arm", {"at": "load", "chunk": 1, "do": "stop"})
        child: Child = start(count_in_flight, {"e": engine.url}, talk=True)
        chunks_taken = child.recv(20)
        assert chunks_taken <= 1 + 2 + 1, "one loaded, two in flight, one being built"
        _wait_until_stopped(engine.worker_pids[0])
        engine.child.cont()
        assert child.result(20) > 10


def count_in_flight(urls: dict[str, str], conn: Any) -> int:
    """Pushes to an engine whose loader is stopped; says how many chunks were extracted when nothing moves any more."""
    import threading

    model = build(5, blocks=12)
    push = push_of(model, urls, fsdp=False)
    taken = 0
    quiet = threading.Event()
    extract = push._parts.extractor.extract_weights

    def counted(dtype: str | None) -> Any:
        nonlocal taken
        for chunk in extract(dtype):
            taken += 1
            quiet.clear()
            yield chunk

    push._parts.extractor.extract_weights = counted  # type: ignore[method-assign]
    push.initialize()
    thread = threading.Thread(target=push.sync_weights, args=(1,))
    thread.start()
    while True:
        before = taken
        if not quiet.wait(1.0) and taken == before and taken > 0:
            break
    conn.send(taken)
    thread.join(15)
    return taken
