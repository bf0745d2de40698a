"""An engine reads its live weights when it is asked: what it says, and what it does where they are others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.engine.patch_kit import LONG_S, Rig, Trainer, held_sums
from weightsync.engine import audit
from weightsync.errors import DeadlineExceededError, NotServingError, StateError
from weightsync.handles.fanout import in_thread
from weightsync.load.module import ModuleWeightLoader
from weightsync.types import AuditRequest, Deadline, DescribeRequest, EngineOp, EngineReply


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    there = Trainer()
    yield there
    there.close()


def verified(rig: Rig) -> EngineReply:
    return rig.engine.call(EngineOp.AUDIT, AuditRequest(), timeout_s=LONG_S)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_is_live_is_what_was_published(trainer: Trainer, num_workers: int) -> None:
    rig = Rig(num_workers)
    for number in (1, 2):
        rig.load(trainer.pulled())
        reply = verified(rig)
        assert (reply.digests_equal, reply.unprovable) == (True, None)
        assert reply.version is not None
        assert reply.version.number == number
        trainer.step()


def test_a_bit_that_nobody_published(trainer: Trainer) -> None:
    """In one of two workers. It serves no more, until a version is loaded in full."""
    rig = Rig(2)
    rig.load(trainer.pulled())
    rig.modules[1].bf16.view(torch.int16)[0, 0] ^= 1
    reply = verified(rig)
    assert reply.digests_equal is False
    assert "an audit found" in str(reply.unhealthy)
    with pytest.raises(NotServingError), rig.engine.generation(timeout_s=0.1):
        pass
    trainer.step()
    assert not rig.load(trainer.pulled()).patched
    assert verified(rig).digests_equal
    rig.serves(trainer.weights, 2)


@pytest.mark.parametrize("by_itself", [False, True], ids=["asked", "behind a patch"])
def test_other_tensors_than_those_that_were_loaded(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, by_itself: bool
) -> None:
    """They are found before anything is read."""
    rig = Rig(2)
    rig.load(trainer.pulled())

    def assign() -> None:
        others = {name: tensor.clone() for name, tensor in rig.modules[1].state_dict().items()}
        rig.modules[1].load_state_dict(others, assign=True)

    if by_itself:
        real = rig.workers[1].audit

        def audit_late(name: str) -> bool:
            assign()
            return real(name)

        monkeypatch.setattr(rig.workers[1], "audit", audit_late)
        trainer.step()
        assert rig.load(trainer.pulled()).patched
        wait_fenced(rig)
    else:
        assign()
    reply = verified(rig)
    assert reply.digests_equal is False
    assert "an audit found" in str(reply.unhealthy)
    with pytest.raises(NotServingError), rig.engine.generation(timeout_s=0.1):
        pass
    assert not rig.load(trainer.pulled()).patched
    assert verified(rig).digests_equal
    rig.serves(trainer.weights, trainer.number)


def test_two_who_ask_at_once_are_both_told(trainer: Trainer) -> None:
    """Seen to fail where the second interrupted the first, as a version does."""
    rig = Rig(2)
    rig.load(trainer.pulled())
    asked = [in_thread(lambda: verified(rig), name=f"asked-{index}") for index in range(4)]
    assert [each.result(LONG_S).digests_equal for each in asked] == [True] * 4


def test_while_a_version_is_loaded_it_says_which_and_for_how_long(trainer: Trainer) -> None:
    """Its trainer may be dead."""
    said: list[str] = []

    class Asks(ModuleWeightLoader):
        def load_weights(self, weights: Any) -> None:
            with pytest.raises(StateError, match="is being loaded: ask again") as caught:
                verified(rig)
            said.append(caught.value.message)
            super().load_weights(weights)

    rig = Rig(loader=Asks)
    rig.load(trainer.pulled())
    assert said[0].startswith("run/1 is being loaded")
    assert " s at the latest" in said[0]


def test_where_nobody_can_tell() -> None:
    reply = verified(Rig())
    assert reply.digests_equal is None
    assert "nothing was synced" in str(reply.unprovable)


def test_a_loader_whose_live_weights_are_a_copy(trainer: Trainer) -> None:
    """`differs` is asked for each tensor that was read, and what it says is what is found."""
    asked: list[str] = []
    odd: list[str] = []

    class Copies(ModuleWeightLoader):
        audits_copy = True

        def differs(self, name: str) -> str | None:
            asked.append(name)
            return f"{name} is repacked" if name in odd else None

    rig = Rig(loader=Copies)
    rig.load(trainer.pulled())
    assert verified(rig).digests_equal
    assert sorted(asked) == sorted(trainer.weights)
    odd.append("fp32")
    reply = verified(rig)
    assert reply.digests_equal is False
    assert "fp32 is repacked" in str(reply.unhealthy)


@pytest.mark.parametrize("copies", [True, False])
def test_a_version_that_comes_meanwhile_ends_it(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, copies: bool
) -> None:
    class Loader(ModuleWeightLoader):
        audits_copy = copies

    rig = Rig(loader=Loader)
    rig.load(trainer.pulled())
    reading, go = held_sums(monkeypatch)
    asked = in_thread(lambda: verified(rig), name="asked")
    assert reading.wait(LONG_S)
    trainer.step()
    trainer.patch = None
    rig.load(trainer.pulled())
    go.set()
    with pytest.raises(StateError, match="ask again"):
        asked.result(LONG_S)
    monkeypatch.undo()
    assert verified(rig).digests_equal
    rig.serves(trainer.weights, 2)


def slowed(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event, list[int]]:
    """Audits wait: (one reads, go on, how often one began)."""
    reading, go, runs = threading.Event(), threading.Event(), []
    real = audit.Audit.run

    def run(self: Any, *args: Any, **options: Any) -> str:
        runs.append(1)
        reading.set()
        go.wait(LONG_S)
        return real(self, *args, **options)

    monkeypatch.setattr(audit.Audit, "run", run)
    return reading, go, runs


def wait_fenced(rig: Rig) -> None:
    deadline = Deadline(LONG_S)
    while rig.engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=LONG_S).serving:
        assert not deadline.expired
    with pytest.raises(NotServingError), rig.engine.generation(timeout_s=0.1):
        pass


def test_wrong_bytes_are_fenced_though_nobody_waits_any_more(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: the engine was fenced by whoever waited for the answer."""
    rig = Rig(2)
    rig.load(trainer.pulled())
    rig.modules[1].bf16.view(torch.int16)[0, 0] ^= 1
    _, go, _ = slowed(monkeypatch)
    with pytest.raises(DeadlineExceededError):
        rig.engine.call(EngineOp.AUDIT, AuditRequest(), timeout_s=0.05)
    go.set()
    wait_fenced(rig)


def test_wrong_bytes_of_one_worker_are_fenced_where_another_can_not_tell(trainer: Trainer) -> None:
    rig = Rig(2)
    rig.load(trainer.pulled())
    rig.modules[1].bf16.view(torch.int16)[0, 0] ^= 1

    def verify(timeout_s: float) -> EngineReply:
        raise StateError("a version came while live weights were read: ask again")

    rig.workers[0].verify = verify  # type: ignore[method-assign]
    with pytest.raises(StateError):
        verified(rig)
    wait_fenced(rig)


def test_whoever_asks_while_it_reads_shares_the_reading(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.load(trainer.pulled())
    reading, go, runs = slowed(monkeypatch)
    asked = [in_thread(lambda: verified(rig), name="first")]
    assert reading.wait(LONG_S)
    for _ in range(5):
        with pytest.raises(DeadlineExceededError):
            rig.engine.call(EngineOp.AUDIT, AuditRequest(), timeout_s=0.05)
    go.set()
    assert all(each.result(LONG_S).digests_equal for each in asked)
    assert len(runs) == 1


def test_a_worker_waits_no_longer_than_it_is_told(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks next is told what the same reading finds."""
    rig = Rig()
    rig.load(trainer.pulled())
    reading, go, runs = slowed(monkeypatch)
    with pytest.raises(DeadlineExceededError, match="were not read within"):
        rig.workers[0].verify(0.05)
    assert reading.wait(LONG_S)
    go.set()
    assert rig.workers[0].verify(LONG_S).digests_equal
    assert len(runs) == 1


def test_a_verdict_is_of_the_version_that_was_read(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 is wrong, and version 2 is loaded before the answer is made. Seen to say that 2 is proved."""
    rig = Rig()
    rig.load(trainer.pulled())
    rig.modules[0].bf16.view(torch.int16)[0, 0] ^= 1
    worker, real = rig.workers[0], rig.workers[0].describe
    loaded: list[object] = []

    def describe() -> EngineReply:
        if not loaded:
            loaded.append(True)
            trainer.step()
            trainer.patch = None
            rig.load(trainer.pulled())
        return real()

    monkeypatch.setattr(worker, "describe", describe)
    reply = verified(rig)
    assert loaded
    assert reply.version is not None
    assert (reply.digests_equal, reply.version.number) == (False, 1)
    rig.serves(trainer.weights, 2)


def test_live_tensors_that_are_others_at_the_end_are_not_what_was_read(trainer: Trainer) -> None:
    moved: list[str | None] = [None]

    class Moves(ModuleWeightLoader):
        def moved(self) -> str | None:
            return moved[0]

    rig = Rig(loader=Moves)
    rig.load(trainer.pulled())
    assert verified(rig).digests_equal
    moved[0] = "somebody has put others there"
    reply = verified(rig)
    assert reply.digests_equal is False
    assert "somebody has put others there" in str(reply.unhealthy)
