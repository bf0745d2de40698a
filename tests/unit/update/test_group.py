"""TransferGroup: it is kept while the same engines are in it, and built anew else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.update.kit import Engine
from weightsync.errors import EngineError, SyncFailedError
from weightsync.handles.fanout import EngineFanout
from weightsync.observe import Recorder
from weightsync.transfer.ipc import PackedCudaIpcTransferStrategy
from weightsync.types import Deadline, EngineOp, EngineReply
from weightsync.update.group import TransferGroup


class Rig:
    def __init__(self, *engines: Engine) -> None:
        self.engines = engines
        strategy = PackedCudaIpcTransferStrategy()
        self.group = TransferGroup(strategy, model_id="m", join_timeout_s=10.0, recorder=Recorder("test"))

    def join(self, *engines: Engine, run_id: str = "r") -> list[int]:
        """How often each engine has been told to join a group."""
        engines = engines or self.engines
        replies = {
            each.engine_id: EngineReply(engine_id=each.engine_id, world_size=each.world_size, group=each.group)
            for each in engines
        }
        self.group.join(EngineFanout(engines), replies, run_id=run_id, deadline=Deadline(10.0))
        return [each.steps.count("init") for each in self.engines]


def test_it_is_kept_while_nothing_changes() -> None:
    rig = Rig(Engine("a", world_size=3), Engine("b"))
    assert rig.join() == rig.join() == [1, 1]
    assert [dict(each.asked)["init"].rank_offset for each in rig.engines] == [1, 4]
    assert rig.group.sender is not None
    assert rig.group.sender.usable


@pytest.mark.parametrize("why", ["another run", "left", "an engine lost it", "a broken sender"])
def test_it_is_built_anew(why: str) -> None:
    rig = Rig(Engine("a"), Engine("b"))
    rig.join()
    if why == "left":
        rig.group.leave()
        rig.group.leave()
    elif why == "an engine lost it":
        rig.engines[1].group = None
    elif why == "a broken sender":
        assert rig.group.sender is not None
        rig.group.sender.close()
    assert rig.join(run_id="s" if why == "another run" else "r") == [2, 2]


def test_others_are_another_group() -> None:
    rig = Rig(Engine("a"), Engine("b"))
    rig.join()
    assert rig.join(rig.engines[0]) == [2, 1]
    assert rig.join() == [3, 2]


def test_after_a_failure_there_is_none() -> None:
    rig = Rig(Engine("a"), Engine("b", init=EngineError("no room")))
    for attempt in (1, 2):
        with pytest.raises(SyncFailedError, match="no room"):
            rig.join()
        assert rig.group.sender is None
        assert rig.engines[0].steps.count("init") == attempt


def test_ctrl_c_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it was a GroupJoinError, which a loop that goes on after a failed step has caught."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    rig = Rig(Engine("a"))
    monkeypatch.setattr(rig.group._strategy, "create_sender", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.join()
    assert rig.group.sender is None
    monkeypatch.undo()
    assert rig.join() == [2]


def test_the_sender_has_left_the_group_that_engines_are_told_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Theirs may wait for it: an NCCL group ends when all its members end it."""
    rig = Rig(Engine("a"))
    rig.join()
    sender = rig.group.sender
    assert sender is not None
    told: list[bool] = []
    engine = rig.engines[0]
    answer = engine.call

    def call(op: EngineOp, *request: Any, **limit: Any) -> EngineReply:
        told.extend([sender.usable] if op is EngineOp.ABORT else [])
        return answer(op, *request, **limit)

    monkeypatch.setattr(engine, "call", call)
    rig.group.end(EngineFanout(rig.engines), timeout_s=10.0)
    assert (told, rig.group.sender) == ([False], None)
