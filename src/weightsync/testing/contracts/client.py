"""What every `InferenceEngineClient` keeps, and an engine that a test scripts."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from weightsync.errors import DeadlineExceededError, LoadError, NoEnginesError, SyncFailedError, WeightSyncError
from weightsync.handles.fanout import in_thread
from weightsync.testing.contracts.cases import LONG_S, SESSION, an_update
from weightsync.types import (
    AbortRequest,
    BeginRequest,
    CommitRequest,
    EmptyWeightSyncInitInfo,
    EngineHandle,
    EngineOp,
    EngineReply,
    EngineRequest,
    InferenceEngineClient,
    InitRequest,
    Manifest,
    PauseRequest,
    ResumeRequest,
    StageRequest,
    TensorSpec,
    Version,
)

_ANSWERED_S = 5.0
"""Who answers has answered by then, beside whom never does: on a busy machine, too."""


class ScriptedEngine:
    """An `EngineHandle` that does what a test says, and remembers what it was asked.

    Args:
        engine_id: its id.
        world_size: what it reports.
        fails: errors by step.
        waits: events by step; the step is answered when the event is set, or never.
    """

    def __init__(
        self,
        engine_id: str,
        *,
        world_size: int = 1,
        fails: Mapping[EngineOp, Exception] | None = None,
        waits: Mapping[EngineOp, threading.Event] | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.world_size = world_size
        self.fails = dict(fails or {})
        self.waits = dict(waits or {})
        self.asked: list[tuple[EngineOp, EngineRequest]] = []
        self.entered = {op: threading.Event() for op in EngineOp}

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        self.asked.append((op, request))
        self.entered[op].set()
        if op in self.waits and not self.waits[op].wait(max(timeout_s, LONG_S)):
            raise DeadlineExceededError("the test never let this step go on")
        if op in self.fails:
            raise self.fails[op]
        return EngineReply(engine_id=self.engine_id, world_size=self.world_size)


_MANIFEST = Manifest(
    version=Version(run_id="contract", number=1),
    model_id="default",
    tensors=(TensorSpec(name="w", dtype="uint8", shape=(4,)),),
)
_Blocking = Callable[[InferenceEngineClient, float], object]
_BLOCKING: dict[EngineOp, _Blocking] = {
    EngineOp.DESCRIBE: lambda client, s: client.get_world_sizes(timeout_s=s),
    EngineOp.BEGIN: lambda client, s: client.begin(
        BeginRequest(session=SESSION, manifest=_MANIFEST, deadline_s=LONG_S), timeout_s=s
    ),
    EngineOp.STAGE: lambda client, s: client.stage(StageRequest(session=SESSION, manifest=_MANIFEST), timeout_s=s),
    EngineOp.PAUSE: lambda client, s: client.pause(
        PauseRequest(session=SESSION, timeout_s=LONG_S, lease_s=LONG_S), timeout_s=s
    ),
    EngineOp.RESUME: lambda client, s: client.resume(ResumeRequest(session=SESSION), timeout_s=s),
    EngineOp.UPDATE_WEIGHTS: lambda client, s: client.update_weights(an_update(), timeout_s=s).result(s),
}
_FAIL_FAST = sorted(_BLOCKING)


class InferenceEngineClientContract(abc.ABC):
    """What every `InferenceEngineClient` keeps: a failure is never turned into a wait, and never into a success."""

    @abc.abstractmethod
    def make_client(self, engines: Sequence[EngineHandle]) -> InferenceEngineClient:
        """A client whose calls reach these engines, in this order. What it opens is closed by `close_all`."""

    def close_all(self) -> None:  # noqa: B027 (a hook that may stay empty)
        """Gives back what `make_client` opened. Called after each test."""

    @pytest.fixture(autouse=True)
    def _closed(self) -> Iterator[None]:
        yield
        self.close_all()

    def test_every_engine_is_asked_and_answers_under_its_own_name(self) -> None:
        """World sizes are each engine's own; the order is that of the rank offsets."""
        engines = [
            ScriptedEngine("b", world_size=2),
            ScriptedEngine("a", world_size=1),
            ScriptedEngine("c", world_size=4),
        ]
        client = self.make_client(engines)
        assert list(client.engine_ids) == ["b", "a", "c"]
        sizes = client.get_world_sizes(timeout_s=LONG_S)
        assert list(sizes.items()) == [("b", 2), ("a", 1), ("c", 4)]

    @pytest.mark.parametrize("op", _FAIL_FAST)
    def test_each_step_reaches_every_engine_once(self, op: EngineOp) -> None:
        """With the request that was given."""
        engines = [ScriptedEngine("a"), ScriptedEngine("b")]
        _BLOCKING[op](self.make_client(engines), LONG_S)
        for engine in engines:
            assert [asked for asked, _ in engine.asked] == [op]
        assert engines[0].asked == engines[1].asked

    def test_each_engine_gets_its_own_init_request(self) -> None:
        """And init returns at once: the sender joins meanwhile."""
        go = threading.Event()
        engines = [ScriptedEngine(name, waits={EngineOp.INIT: go}) for name in ("a", "b")]
        requests = {name: _init(rank) for rank, name in enumerate(("a", "b"), start=1)}
        future = self.make_client(engines).init(requests, timeout_s=LONG_S)
        assert all(engine.entered[EngineOp.INIT].wait(LONG_S) for engine in engines)
        assert not future.done()
        go.set()
        assert set(future.result(LONG_S)) == {"a", "b"}
        assert [engine.asked[0][1] for engine in engines] == [requests["a"], requests["b"]]

    @pytest.mark.parametrize("op", _FAIL_FAST)
    def test_one_failure_is_told_while_another_engine_still_works(self, op: EngineOp) -> None:
        """Rank 0 must not sit in a broadcast for an engine that has failed already."""
        go = threading.Event()
        slow = ScriptedEngine("slow", waits={op: go})
        bad = ScriptedEngine("bad", fails={op: LoadError("no room", parameter="w")})
        client = self.make_client([slow, bad])
        started = time.monotonic()
        try:
            with pytest.raises(SyncFailedError) as caught:
                _BLOCKING[op](client, LONG_S)
        finally:
            go.set()
        assert time.monotonic() - started < LONG_S / 2
        assert list(caught.value.causes) == ["bad"]
        cause = caught.value.causes["bad"]
        assert type(cause) is LoadError
        assert (cause.parameter, cause.peer) == ("w", "bad")

    @pytest.mark.parametrize("op", [EngineOp.BEGIN, EngineOp.STAGE, EngineOp.PAUSE])
    def test_an_engine_that_never_answers_is_a_typed_error_that_names_it(self, op: EngineOp) -> None:
        """Within the timeout."""
        never = threading.Event()
        client = self.make_client([ScriptedEngine("good"), ScriptedEngine("mute", waits={op: never})])
        started = time.monotonic()
        try:
            with pytest.raises(WeightSyncError, match="mute"):
                _BLOCKING[op](client, 0.3)
        finally:
            never.set()
        assert time.monotonic() - started < LONG_S / 2

    def test_an_error_of_an_engine_that_is_not_ours_is_typed(self) -> None:
        """Whatever an engine raises."""
        client = self.make_client([ScriptedEngine("e", fails={EngineOp.STAGE: ZeroDivisionError("oops")})])
        with pytest.raises(SyncFailedError) as caught:
            _BLOCKING[EngineOp.STAGE](client, LONG_S)
        assert isinstance(caught.value.causes["e"], WeightSyncError)
        assert caught.value.causes["e"].peer == "e"

    def test_commit_waits_for_everybody(self) -> None:
        """Which engines have committed must be known, whoever failed first."""
        go = threading.Event()
        slow = ScriptedEngine("slow", waits={EngineOp.COMMIT: go})
        bad = ScriptedEngine("bad", fails={EngineOp.COMMIT: LoadError("no")})
        client = self.make_client([slow, bad])
        outcome = in_thread(
            lambda: client.commit(CommitRequest(session=SESSION), timeout_s=LONG_S), name="contract-commit"
        )
        assert bad.entered[EngineOp.COMMIT].wait(LONG_S)
        assert slow.entered[EngineOp.COMMIT].wait(LONG_S)
        assert not outcome.done()
        go.set()
        error = outcome.exception(LONG_S)
        assert isinstance(error, SyncFailedError)
        assert set(error.causes) == {"bad"}
        assert "slow" in str(error), "it says who serves the new version"

    def test_commit_that_somebody_never_answers(self) -> None:
        """Ends at its timeout and names who did not."""
        never = threading.Event()
        client = self.make_client([ScriptedEngine("good"), ScriptedEngine("mute", waits={EngineOp.COMMIT: never})])
        try:
            with pytest.raises(SyncFailedError) as caught:
                client.commit(CommitRequest(session=SESSION), timeout_s=_ANSWERED_S)
        finally:
            never.set()
        assert isinstance(caught.value.causes["mute"], DeadlineExceededError)
        assert "good" not in caught.value.causes

    def test_describe_and_abort_never_raise(self) -> None:
        """They return what failed."""
        never = threading.Event()
        fault = LoadError("no")
        engines = [
            ScriptedEngine("good"),
            ScriptedEngine("bad", fails={EngineOp.DESCRIBE: fault, EngineOp.ABORT: fault}),
            ScriptedEngine("mute", waits={EngineOp.DESCRIBE: never, EngineOp.ABORT: never}),
        ]
        client = self.make_client(engines)
        try:
            replies, errors = client.describe(timeout_s=_ANSWERED_S)
            failed = client.abort(AbortRequest(session=SESSION, reason="as told"), timeout_s=_ANSWERED_S)
        finally:
            never.set()
        assert set(replies) == {"good"}
        assert set(errors) == set(failed) == {"bad", "mute"}
        assert type(errors["bad"]) is LoadError
        assert isinstance(failed["mute"], DeadlineExceededError)

    def test_only_leaves_the_others_alone(self) -> None:
        """And keeps the order."""
        engines = [ScriptedEngine("a"), ScriptedEngine("b"), ScriptedEngine("c")]
        client = self.make_client(engines).only(["c", "a"])
        assert list(client.engine_ids) == ["a", "c"]
        client.resume(ResumeRequest(session=SESSION), timeout_s=LONG_S)
        assert [len(engine.asked) for engine in engines] == [1, 0, 1]

    @pytest.mark.parametrize("op", [*_FAIL_FAST, EngineOp.COMMIT])
    def test_no_engine_is_a_failure_never_a_success(self, op: EngineOp) -> None:
        """Zero engines found and a sync reported as good is a fault that systems of this kind had."""
        client = self.make_client([ScriptedEngine("a")]).only([])
        step: _Blocking = _BLOCKING.get(op) or (lambda c, s: c.commit(CommitRequest(session=SESSION), timeout_s=s))
        with pytest.raises(NoEnginesError):
            step(client, LONG_S)

    def test_a_failure_leaves_nothing_behind(self) -> None:
        """The next call is a new one."""
        engine = ScriptedEngine("e", fails={EngineOp.BEGIN: LoadError("once")})
        client = self.make_client([engine])
        with pytest.raises(SyncFailedError):
            _BLOCKING[EngineOp.BEGIN](client, LONG_S)
        engine.fails.clear()
        _BLOCKING[EngineOp.BEGIN](client, LONG_S)


def _init(rank: int) -> InitRequest:
    info = EmptyWeightSyncInitInfo(strategy="none", group_name="g")
    return InitRequest(run_id="r", model_id="m", info=info, rank_offset=rank)
