"""JoinedEngines: what it says of an engine that hung and is left out. The rest: tests/multiproc/test_push*.py."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest
from torch import nn

from tests.standins.threads import logged_here
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import EngineUnreachableError, NoEnginesError, SyncFailedError, WeightSyncError, error_from_dict
from weightsync.handles.fanout import EngineFanout
from weightsync.handles.http import HttpEngine
from weightsync.load.module import ModuleWeightLoader
from weightsync.net import client
from weightsync.observe import Recorder
from weightsync.testing.contracts import ScriptedEngine
from weightsync.trainer.engines import JoinedEngines
from weightsync.transfer.broadcast import BroadcastTransferStrategy
from weightsync.types import Deadline, EngineHandle, EngineOp, EngineReply, EngineRequest


@pytest.fixture
def hung() -> Iterator[HttpEngine]:
    """An engine whose kernel takes connections, and which answers none."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        engine = HttpEngine(f"http://127.0.0.1:{silent.getsockname()[1]}", engine_id="hung")
        yield engine
        engine.close()


def joined(*engines: EngineHandle) -> JoinedEngines:
    return JoinedEngines(
        EngineFanout(engines), BroadcastTransferStrategy(), model_id="default", join_timeout_s=5.0,
        recorder=Recorder("trainer"),
    )  # fmt: skip


def failed(engines: JoinedEngines, *, require_all: bool = False) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        engines.ready(Deadline(1.0), run_id="run", require_all=require_all)
    return caught.value


def test_an_engine_that_hung_is_not_asked_and_the_error_says_so(hung: HttpEngine) -> None:
    """Seen red: the words of the first step again, at once: "no engine answers: ... within 3 s"."""
    engines = joined(hung)
    first = failed(engines)
    assert isinstance(first, NoEnginesError)
    assert "no engine answers: hung: " in str(first)
    assert first.retry_after_s is None, "it was asked"
    then = failed(engines)
    assert isinstance(then, NoEnginesError)
    assert re.search(
        r"no engine was asked: hung: left out \d+\.\d s ago, so it was not asked; it is asked again in \d\.\d s\. "
        r"Why: DeadlineExceededError: .*describe",
        str(then),
    ), str(then)
    assert then.retry_after_s is not None
    assert 0 < then.retry_after_s <= 5.0
    told = error_from_dict(then.to_dict())  # as the other training ranks are told
    assert told.retry_after_s == then.retry_after_s


def test_an_engine_whose_machine_is_gone_is_not_asked_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: by chance, for which of two times of 3 s was over first; each step took 3 s more then."""
    tried = []

    def silent(places: object, within: Deadline) -> socket.socket:
        tried.append(places)
        raise TimeoutError("timed out")

    monkeypatch.setattr(client, "dialled", silent)
    gone = HttpEngine("http://127.0.0.1:9", engine_id="gone")
    engines = joined(gone)
    assert "no engine answers: gone: can't connect" in str(failed(engines))
    then = failed(engines)
    gone.close()
    assert "no engine was asked: gone: left out" in str(then)
    assert len(tried) == 1


def test_where_nobody_answers_the_error_says_what_holds() -> None:
    """Seen red: nothing, for which a push puts "the next sync goes on with those that answer"."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = HttpEngine(f"http://127.0.0.1:{unused.getsockname()[1]}", engine_id="gone")
    error = failed(joined(gone))
    gone.close()
    assert isinstance(error, NoEnginesError)
    assert error.state_left == ("nothing was changed: an engine that still runs serves what it did")


def test_so_does_the_error_where_all_engines_have_to_take_part(hung: HttpEngine) -> None:
    engines = joined(ScriptedEngine("answers"), hung)
    assert failed(engines, require_all=True).retry_after_s is None
    then = failed(engines, require_all=True)
    assert isinstance(then, SyncFailedError)
    assert "so it was not asked" in str(then.causes["hung"])
    assert then.retry_after_s is not None


def test_who_takes_an_engine_over_is_told_from_whom(caplog: pytest.LogCaptureFixture) -> None:
    """Seen red: a wrong port took somebody's engine without a word; a trainer that has ended in order is nobody."""
    engine = EmbeddedEngine.of(ModuleWeightLoader(nn.Linear(2, 2)), engine_id="e")
    first, second, third = joined(engine), joined(engine), joined(engine)
    for trainer, run_id in ((first, "one"), (first, "one"), (second, "two")):
        trainer.ready(Deadline(30.0), run_id=run_id, require_all=True)
    with pytest.raises(WeightSyncError, match="taken over by two"):
        first.ready(Deadline(30.0), run_id="one", require_all=True)
    second.close()
    third.ready(Deadline(30.0), run_id="three", require_all=True)
    said = [record.getMessage() for record in logged_here(caplog) if "taken over" in record.getMessage()]
    assert said == ["e was taken over from run one, which has not said that it ended"]
    third.close()
    first.group.leave()


def test_an_engine_that_is_back_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Seen red: that it was left out was told, and not that it is there again."""

    class Away(EmbeddedEngine):
        is_away = True

        def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
            if self.is_away:
                raise EngineUnreachableError("it is away", peer=self.engine_id)
            return super().call(op, request, timeout_s=timeout_s)

    stays, other = EmbeddedEngine.of(ModuleWeightLoader(nn.Linear(2, 2)), engine_id="stays"), nn.Linear(2, 2)
    away = Away.of(ModuleWeightLoader(other), engine_id="away")
    assert isinstance(away, Away)
    engines = joined(stays, away)
    for away.is_away in (True, True, False, False):
        engines.ready(Deadline(30.0), run_id="one", require_all=False)
    said = [record.getMessage() for record in logged_here(caplog) if "engine away" in record.getMessage()]
    assert len(said) == 2
    assert said[0].startswith("syncing without engine away: ")
    assert said[1] == "engine away takes part again"
    engines.close()
