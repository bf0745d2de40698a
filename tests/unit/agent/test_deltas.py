"""Deltas: what is proved is served in full where none can be made. With bytes: tests/multiproc/test_pull_delta.py."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.agent.deltas import Deltas
from weightsync.agent.proved import Proved
from weightsync.agent.prover import Prover
from weightsync.trainer.buffer import PublicationBuffer
from weightsync.trainer.offload_plan import plan_hosts
from weightsync.trainer.segment_writer import write_header
from weightsync.types import Deadline, TensorSpec, Version

LONG_S = 30.0


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("CUDA out of memory"), OSError(28, "no space is left")])
def test_a_version_is_served_though_no_delta_of_it_can_be_made(error: Exception) -> None:
    """Seen red: each second version was refused, proved as it was."""
    specs = [TensorSpec(name="a", dtype="float32", shape=(4096,))]
    plan = plan_hosts(specs, [{"host": "h", "boxes": [[0, [0], [4096]]]}])
    (layout,) = plan.layouts
    buffer = PublicationBuffer(layout.total_bytes, guard_s=1.0)
    deltas = Deltas(lambda: "http://x", budget_bytes=None, full_sync_interval=0, evicted=lambda segment: None)
    found: list[Any] = []
    now: list[Proved] = []
    told = threading.Condition()

    def tell(what: Any) -> None:
        with told:
            found.append(what)
            told.notify_all()

    def proved(publication: Any, source: int, proof: Any, seconds: float) -> None:
        now[:] = [Proved(publication=publication, source=source, proof=proof)]
        tell(publication.manifest.version.number)

    def fails(*asked: Any, **more: Any) -> Any:
        raise error

    prover = Prover(proved, lambda version, why: tell(why), served=lambda: now[0] if now else None, deltas=deltas)
    deltas.want()
    deltas.load_codec()
    compiled = Deadline(120.0)
    while not deltas.codec_ready:
        compiled.check("the codec")
        threading.Event().wait(0.01)  # it is compiled, in a thread
    deltas._search = fails  # type: ignore[assignment]
    prover.start()
    try:
        for number in range(1, 5):
            turn = buffer.acquire(lambda: None)
            assert turn is not None
            version = Version(run_id="r", number=number)
            turn.segment.memory[layout.data_start : layout.data_start + 4] = bytes([number] * 4)
            write_header(turn.segment.memory, layout, version, "m")
            buffer.written(turn)
            publication = plan.publication(
                version, "m", specs, endpoints=["http://x"], segments={"h": turn.segment.name}, block_bytes=4 << 20
            )
            prover.publish(publication, 0)
            with told:
                assert told.wait_for(lambda sent=number: len(found) == sent, LONG_S)  # type: ignore[misc]
        assert found == [1, 2, 3, 4]
    finally:
        prover.close()
        buffer.close()


@pytest.mark.parametrize(("budget", "codec", "expected"), [(None, True, True), (0, True, False), (9, False, False)])
def test_an_agent_says_whether_it_can_make_any(
    budget: int | None, codec: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: "delta" was a mode of every agent."""

    def warm_up() -> None:
        if not codec:
            raise ImportError("no numba here")

    monkeypatch.setattr("weightsync.codec.delta.warm_up", warm_up)
    deltas = Deltas(lambda: "http://x", budget_bytes=budget, full_sync_interval=0, evicted=lambda segment: None)
    assert deltas.can_be_made == (budget != 0), "as far as is known"
    deltas.load_codec()
    assert deltas.can_be_made == expected


def test_an_agent_behind_one_that_died_rests_at_first() -> None:
    """Seen red: one that is killed while it makes a delta was killed so with every version."""
    specs = [TensorSpec(name="a", dtype="int8", shape=(8,))]
    plan = plan_hosts(specs, [{"host": "h", "boxes": [[0, [0], [8]]]}])
    deltas = Deltas(lambda: "http://x", budget_bytes=None, full_sync_interval=0, evicted=lambda segment: None, rest=2)
    deltas.want()
    deltas._codec = "ready"
    version = Version(run_id="r", number=1)
    publication = plan.publication(
        version, "m", specs, endpoints=["http://x"], segments={"h": "none"}, block_bytes=4 << 20
    )
    older: Any = SimpleNamespace(lies_like=lambda *_: True)
    why = [deltas._why_not_due(older, publication, 0) for _ in range(3)]
    assert ["a rest" in each if each else None for each in why] == [True, True, None]


@pytest.mark.parametrize("is_held", [True, False])
def test_that_a_delta_is_begun_is_told_before_it_is_made(is_held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    deltas = Deltas(
        lambda: "http://x",
        budget_bytes=None,
        full_sync_interval=0,
        evicted=lambda segment: None,
        begun=lambda: seen.append("begun"),
    )
    monkeypatch.setattr(deltas, "_make", lambda *_: bool(seen.append("made")))
    monkeypatch.setattr(deltas, "_base", SimpleNamespace(begin=lambda: is_held, end=lambda: None))
    nothing: Any = SimpleNamespace()
    deltas.make(nothing, 0, nothing, check_cancelled=lambda: None)
    assert seen == (["begun", "made"] if is_held else [])
