"""EngineFanout: what the contract does not say: causes before consequences, and set-ups that can't be."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.standins.threads import fail_starts
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    LoadError,
    NoEnginesError,
    SyncFailedError,
    TransferError,
    WeightSyncError,
)
from weightsync.handles import fanout as fanout_module
from weightsync.handles.fanout import EngineFanout, in_thread
from weightsync.testing.contracts import ScriptedEngine
from weightsync.transfer.base import init_requests
from weightsync.types import CommitRequest, EmptyWeightSyncInitInfo, EngineOp, EngineReply, PauseRequest, ResumeRequest

RESUME = ResumeRequest(session="s")
LOST = TransferError("the connection broke")
BAD = LoadError("no room")


def failed(fanout: EngineFanout, timeout_s: float = 10.0) -> SyncFailedError:
    with pytest.raises(SyncFailedError) as caught:
        fanout.resume(RESUME, timeout_s=timeout_s)
    return caught.value


def test_two_engines_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="unique"):
        EngineFanout([ScriptedEngine("a"), ScriptedEngine("b"), ScriptedEngine("a")])


def test_no_engines_at_all() -> None:
    empty = EngineFanout([])
    for call in (
        lambda: empty.resume(RESUME, timeout_s=1),
        lambda: empty.commit(CommitRequest(session="s"), timeout_s=1),
        lambda: empty.get_world_sizes(timeout_s=1),
        lambda: empty.init({}, timeout_s=1),
    ):
        with pytest.raises(NoEnginesError):
            call()
    assert empty.describe(timeout_s=1) == ({}, {})


def test_an_init_of_nobody_is_not_a_wait_for_ever() -> None:
    with pytest.raises(WeightSyncError):
        EngineFanout([ScriptedEngine("a")]).init({}, timeout_s=1).result(1)


def test_a_consequence_gives_the_cause_time_to_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine's connection broke because another failed: the report names the one that failed."""
    monkeypatch.setattr(fanout_module, "_CAUSE_GRACE_S", 10.0)
    late = threading.Event()
    one = ScriptedEngine("one", fails={EngineOp.RESUME: LOST})
    two = ScriptedEngine("two", fails={EngineOp.RESUME: BAD}, waits={EngineOp.RESUME: late})
    outcome = in_thread(lambda: failed(EngineFanout([one, two])), name="call")
    assert one.entered[EngineOp.RESUME].wait(5)
    assert two.entered[EngineOp.RESUME].wait(5)
    with pytest.raises(TimeoutError):
        outcome.result(0.1)
    started = time.monotonic()
    late.set()
    assert list(outcome.result(20).causes) == ["two"]
    assert time.monotonic() - started < 8, "the cause itself ends the grace"


def test_a_consequence_alone_is_told_after_the_grace_not_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout_module, "_CAUSE_GRACE_S", 0.05)
    never = threading.Event()
    one = ScriptedEngine("one", fails={EngineOp.RESUME: LOST})
    two = ScriptedEngine("two", waits={EngineOp.RESUME: never})
    started = time.monotonic()
    error = failed(EngineFanout([one, two]))
    never.set()
    assert time.monotonic() - started < 8
    assert list(error.causes) == ["one"]
    assert error.is_consequence


def test_a_cause_is_told_at_once_without_any_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout_module, "_CAUSE_GRACE_S", 30.0)
    never = threading.Event()
    one = ScriptedEngine("one", fails={EngineOp.RESUME: BAD})
    two = ScriptedEngine("two", waits={EngineOp.RESUME: never})
    started = time.monotonic()
    error = failed(EngineFanout([two, one]))
    never.set()
    assert time.monotonic() - started < 8
    assert list(error.causes) == ["one"]


def test_when_everybody_has_answered_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout_module, "_CAUSE_GRACE_S", 30.0)
    started = time.monotonic()
    error = failed(EngineFanout([ScriptedEngine("one", fails={EngineOp.RESUME: LOST}), ScriptedEngine("two")]))
    assert time.monotonic() - started < 8
    assert list(error.causes) == ["one"]


def test_all_causes_that_are_known_are_told() -> None:
    engines = [ScriptedEngine(name, fails={EngineOp.RESUME: LOST}) for name in ("one", "two", "three")]
    assert set(failed(EngineFanout(engines)).causes) == {"one", "two", "three"}


def test_an_error_keeps_the_peer_it_names_itself() -> None:
    inner = LoadError("no room", peer="worker-3")
    error = failed(EngineFanout([ScriptedEngine("e", fails={EngineOp.RESUME: inner})]))
    assert error.causes["e"].peer == "worker-3"
    error = failed(EngineFanout([ScriptedEngine("e", fails={EngineOp.RESUME: LoadError("no room")})]))
    assert error.causes["e"].peer == "e"


def test_a_slow_engine_is_not_waited_for_twice() -> None:
    """The timeout is of the call, not of each engine."""
    never = threading.Event()
    engines = [ScriptedEngine(str(i), waits={EngineOp.PAUSE: never, EngineOp.COMMIT: never}) for i in range(40)]
    started = time.monotonic()
    with pytest.raises(WeightSyncError):
        EngineFanout(engines).pause(PauseRequest(session="s", timeout_s=1, lease_s=1), timeout_s=0.5)
    with pytest.raises(SyncFailedError):
        EngineFanout(engines).commit(CommitRequest(session="s"), timeout_s=0.5)
    never.set()
    assert time.monotonic() - started < 10


def test_whoever_joins_learns_in_time_that_an_engine_is_silent() -> None:
    """Seen red with a future that waits for the engine's own time-out, which may be late."""
    never = threading.Event()
    engines = [ScriptedEngine("answers"), ScriptedEngine("silent", waits={EngineOp.INIT: never})]
    info = EmptyWeightSyncInitInfo(strategy="cuda_ipc", group_name="g")
    requests = init_requests(info, {"answers": 1, "silent": 1}, run_id="r", model_id="m")
    error = EngineFanout(engines).init(requests, timeout_s=6.0).exception(30)
    assert isinstance(error, SyncFailedError)
    assert {who: type(cause) for who, cause in error.causes.items()} == {"silent": DeadlineExceededError}
    never.set()


def test_one_engine_is_called_in_the_caller_s_thread() -> None:
    """It lends the engine memory, so it may not return while the engine reads, whatever the time-out."""

    class Here(ScriptedEngine):
        def call(self, *args: object, **options: object) -> EngineReply:
            assert threading.current_thread() is threading.main_thread()
            return super().call(*args, **options)  # type: ignore[arg-type]

    one = fanout_module.DirectEngine(Here("one", fails={EngineOp.COMMIT: BAD}))
    assert one.resume(RESUME, timeout_s=10).keys() == {"one"}
    with pytest.raises(SyncFailedError) as caught:
        one.commit(CommitRequest(session="s"), timeout_s=10)
    assert caught.value.causes == {"one": BAD}


def test_late_answers_change_nothing() -> None:
    """A failure told is told; what comes later finds a future that is done."""
    late = threading.Event()
    ended = threading.Event()

    class Late(ScriptedEngine):
        def call(self, *args: object, **options: object) -> EngineReply:
            try:
                return super().call(*args, **options)  # type: ignore[arg-type]
            finally:
                ended.set()

    slow = Late("slow", fails={EngineOp.RESUME: LoadError("as well")}, waits={EngineOp.RESUME: late})
    error = failed(EngineFanout([slow, ScriptedEngine("bad", fails={EngineOp.RESUME: BAD})]))
    late.set()
    assert ended.wait(5)
    assert list(error.causes) == ["bad"]


def test_a_thread_hands_on_whatever_its_function_raises() -> None:
    assert in_thread(lambda: 5, name="t").result(5) == 5
    with pytest.raises(SystemExit):
        in_thread(lambda: exec("raise SystemExit"), name="t").result(5)  # noqa: S102


def test_a_call_that_can_t_be_started_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not raise: whoever started others before it waits for them."""
    fail_starts(monkeypatch, "t")
    assert "new thread" in str(in_thread(lambda: None, name="t").exception(0))


def test_a_wait_that_is_given_up_ends_no_call() -> None:
    """As at the end of a server. Seen red: the thread ended in an InvalidStateError, with a traceback for each."""
    go = threading.Event()
    call = in_thread(lambda: go.wait(10.0), name="a-call")

    async def give_up() -> None:
        waiting = asyncio.wrap_future(call)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    assert not call.cancelled()
    go.set()
    assert call.result(10.0) is True
