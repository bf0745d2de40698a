"""The actors' classes and the rest of the package without a cluster: what they answer, and to whom."""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.standins.processes import free_port
from weightsync.clients.controller import ControllerClient
from weightsync.cluster import actors as actors_module
from weightsync.cluster import fleet as fleet_module
from weightsync.cluster import launch as launching
from weightsync.cluster import manager
from weightsync.cluster import trainer_actor as trainer_actor_module
from weightsync.cluster.actors import ActorHandle, Address, StartedActor, Whereabouts, answer, end, value_of
from weightsync.cluster.controller_actor import ControllerActor, RayController, settings_of
from weightsync.cluster.engine_actor import EngineActor, EngineContext, RayEngine
from weightsync.cluster.fleet import RayFleet
from weightsync.cluster.launch import config_of, meeting_address
from weightsync.cluster.manager import RayWeightSync
from weightsync.cluster.placement import FleetPlacement, Placement, actor_options
from weightsync.cluster.ranks import RayRank
from weightsync.cluster.service_actor import RayService
from weightsync.cluster.trainer_actor import RankContext, TrainerActor
from weightsync.config import WeightSyncConfig
from weightsync.control.build import Built as BuiltController
from weightsync.control.build import build_controller
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.methods.mock import MockMethod
from weightsync.control.methods.push import PushMethod
from weightsync.engine.server import EngineServer
from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    DigestMismatchError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    LoadError,
    SharedMemoryError,
    StateError,
    SyncFailedError,
    SyncInProgressError,
    TrainerRankError,
    WeightSyncError,
)
from weightsync.handles.fanout import in_thread
from weightsync.handles.http import HttpEngine
from weightsync.memory import MappedSegment, Segment
from weightsync.types import CommitRequest, DescribeRequest, EngineOp, EngineReply

CONTEXT = EngineContext(engine_id="e", index=0)


def taken_still() -> ConfigError:
    error = ConfigError("can't listen")
    error.__cause__ = OSError(errno.EADDRINUSE, "address already in use")
    return error


class Built:
    """What a factory may build."""

    def __init__(self, context: EngineContext) -> None:
        self.engine = self
        self.closed = 0
        self.num_calls = 0

    def call(self, op: EngineOp, request: Any, *, timeout_s: float) -> EngineReply:
        self.num_calls += 1
        if isinstance(request, CommitRequest):
            raise SyncFailedError("no", causes={"w": DigestMismatchError("bytes differ", parameter="p")})
        return EngineReply(engine_id="e", world_size=3)

    def generate(self, text: str, *, times: int = 1) -> str:
        return text * times

    def close(self) -> None:
        self.closed += 1


class Restarted:
    """An actor's handle: who is behind it changes. An error is Ray's word."""

    def __init__(self, now: Any) -> None:
        self.now: Any = now

    def listen(self, loopback: bool) -> Any:
        if isinstance(self.now, Exception):
            raise self.now
        return self.now.listen(loopback)


class Direct(RayEngine):
    """Calls the actor's class in this process."""

    def urgent(self, method: str, *args: Any, kind: type[Any], timeout_s: float) -> Any:
        return value_of(getattr(self.actor, method)(*args), kind, peer=self.name, what=method)


@pytest.fixture
def actors() -> Iterator[Callable[[], EngineActor]]:
    """Makes engines' actors; none listens after the test."""
    made: list[EngineActor] = []

    def make() -> EngineActor:
        made.append(EngineActor(CONTEXT, Built))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_an_engine_listens_when_it_is_asked_where_with_a_token_of_its_own(actors: Callable[[], EngineActor]) -> None:
    one, other = (value_of(actors().listen(True), Address, peer="e", what="listen") for _ in range(2))
    assert one.token != other.token
    assert one.url.startswith("http://127.0.0.1:")
    actor = actors()
    url, token = value_of(actor.listen(True), Address, peer="e", what="listen")
    assert value_of(actor.listen(True), Address, peer="e", what="listen") == (url, token)
    with contextlib.closing(HttpEngine(url, token=token)) as engine:
        assert engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5).world_size == 3
        with pytest.raises(SyncFailedError) as caught:
            engine.call(EngineOp.COMMIT, CommitRequest(session="s"), timeout_s=5)
        assert isinstance(caught.value.causes["w"], DigestMismatchError)
    with contextlib.closing(HttpEngine(url)) as engine, pytest.raises(AuthError):
        engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    actor.close()
    with contextlib.closing(HttpEngine(url, token=token)) as engine, pytest.raises(EngineUnreachableError):
        engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    with pytest.raises(EngineError, match="closed"):
        value_of(actor.listen(True), Address, peer="e", what="listen")


def test_a_describe_finds_the_actor_that_ray_has_started_again_and_no_other_step_does(
    actors: Callable[[], EngineActor],
) -> None:
    """A commit whose connection broke may have happened. Seen to fail: with the address kept for good."""
    before, again, last = actors(), actors(), actors()
    engine = Direct(Restarted(before), engine_id="e", loopback=True)
    assert engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5).world_size == 3
    before.close()
    engine.actor.now = again
    assert engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5).world_size == 3
    again.close()
    engine.actor.now = last
    with pytest.raises(EngineUnreachableError):
        engine.call(EngineOp.COMMIT, CommitRequest(session="s"), timeout_s=5)
    assert last._built[""].num_calls == 0
    with pytest.raises(SyncFailedError):
        engine.call(EngineOp.COMMIT, CommitRequest(session="s"), timeout_s=5)


@pytest.mark.parametrize("reached_before", [True, False])
def test_an_actor_that_ray_has_started_again_at_the_same_port_is_found(
    actors: Callable[[], EngineActor], monkeypatch: pytest.MonkeyPatch, reached_before: bool
) -> None:
    """By its token. Seen to fail: it was taken for the one that is gone, as its URL is the same; and where it listens
    before it is looked for, it refused the old token for good."""
    port = free_port()
    monkeypatch.setattr("weightsync.engine.server.EngineServer", functools.partial(EngineServer, port=port))
    before, again = actors(), actors()
    engine = Direct(Restarted(before), engine_id="e", loopback=True)
    engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    before.close()
    if reached_before:
        again.listen(True)
    engine.actor.now = again
    assert engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5).world_size == 3
    assert engine.address().url.endswith(f":{port}")


def test_an_engine_that_was_replaced_is_called_no_more(actors: Callable[[], EngineActor]) -> None:
    """Though it still answers. Seen to fail: with an address that is kept whosever it is."""
    before, after = actors(), actors()
    engine = Direct(before, engine_id="e", loopback=True)
    engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    engine.replace(after)
    engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    assert (before._built[""].num_calls, after._built[""].num_calls) == (1, 1)


@pytest.mark.parametrize("word", ["gone", "nothing"])
def test_where_nobody_answers_rays_word_tells_why(actors: Callable[[], EngineActor], word: str) -> None:
    actor = Restarted(actors())
    engine = Direct(actor, engine_id="e", loopback=True)
    engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    actor.now.close()
    actor.now = EngineUnreachableError("gone", peer="e") if word == "gone" else DeadlineExceededError("busy")
    with pytest.raises(EngineUnreachableError, match="gone" if word == "gone" else "can't connect to") as caught:
        engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    assert caught.value.peer == "e"


def test_a_handle_is_sent_without_its_connection(actors: Callable[[], EngineActor]) -> None:
    engine = Direct(actors(), engine_id="e", loopback=True)
    engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    assert engine.__getstate__() == {"actor": engine.actor, "name": "e", "loopback": True, "_reached": None}


def test_only_public_methods_are_asked(actors: Callable[[], EngineActor]) -> None:
    actor = actors()
    assert actor.ask("", "generate", ("ab",), {"times": 2}) == (None, "abab")
    for part, name in (("", "_private"), ("", "__class__"), ("", "closed"), ("", "nothing"), ("other", "generate")):
        with pytest.raises(InvalidRequestError, match=r"no public method|has no 'other' here, but ''"):
            value_of(actor.ask(part, name, (), {}), None, peer="e", what="ask")


def test_a_factory_that_fails_is_told_to_everybody_who_asks() -> None:
    def broken(context: EngineContext) -> Any:
        raise OSError("no such model")

    actor = EngineActor(CONTEXT, broken)
    for told in (actor.ready(), actor.listen(True), actor.ask("", "generate", (), {})):
        with pytest.raises(EngineError, match="building the engine failed: OSError: no such model") as caught:
            value_of(told, object, peer="", what="")
        assert caught.value.peer == "e"
    with pytest.raises(ConfigError, match="not a dict"):
        value_of(EngineActor(CONTEXT, lambda _: {}).ready(), object, peer="e", what="")


def test_closing_twice_closes_once_and_later_calls_are_refused(actors: Callable[[], EngineActor]) -> None:
    actor = actors()
    built = actor._built[""]
    actor.close()
    num_closed = built.closed
    actor.close()
    assert built.closed == num_closed >= 1
    with pytest.raises(InvalidRequestError, match="closed"):
        value_of(actor.ask("", "generate", ("a",), {}), None, peer="e", what="ask")


def test_a_rank_that_has_not_joined_says_so() -> None:
    rank = TrainerActor(1, 2)
    for told in (rank.initialize(), rank.sync_weights(1), rank.run("step", (), {})):
        with pytest.raises(StateError, match="has not joined") as caught:
            value_of(told, object, peer="", what="")
        assert caught.value.rank == 1
    with pytest.raises(InvalidRequestError, match="no engine 'e'"):
        value_of(rank.replace_engine("e", None), object, peer="", what="")


def test_a_rank_that_is_closed_in_the_middle_of_a_sync_leaves_no_shared_memory() -> None:
    """It is killed next; a driver that was interrupted ends it so. Seen to fail: without the unlinking."""

    class Busy:
        @property
        def push(self) -> Any:
            raise SyncInProgressError("a sync runs")

    rank = TrainerActor(0, 1)
    rank._trainer = Busy()
    with Segment(4096) as segment:
        assert rank.close() == (None, None)
        with pytest.raises(SharedMemoryError, match="gone"):
            MappedSegment(segment.name, need_bytes=1)


def test_a_trainer_that_pushes_in_its_own_step_is_pushed_by_nobody_else() -> None:
    """Its engines are met; the driver's call is refused, and nothing is broken by it."""

    class Pushes:
        closed = 0

        def step(self, version: int | None = None) -> None: ...

        def close(self, *, wait: bool = True) -> None:
            self.closed += 1

    class Own:
        push = Pushes()

    rank = TrainerActor(0, 1)
    rank._trainer = Own()
    assert rank.initialize() == (None, None)
    with pytest.raises(StateError, match="pushes in its own step"):
        value_of(rank.sync_weights(1), object, peer="", what="")
    rank.close()
    assert Own.push.closed == 1


def test_a_last_version_is_pushed_where_the_job_ends_in_order_and_no_step_runs() -> None:
    """Seen red: behind an error, or in the middle of a step, half-changed weights went out under an older number."""
    asked: list[bool] = []
    begun, go = threading.Event(), threading.Event()

    class Pushes:
        def step(self, version: int | None = None) -> None: ...

        def close(self, *, wait: bool = True) -> None:
            asked.append(wait)

    class Own:
        push = Pushes()

        def step(self) -> None:
            begun.set()
            assert go.wait(60.0)

    rank = TrainerActor(0, 1)
    rank._trainer = Own()
    rank.close()
    rank.close(in_order=False)
    step = in_thread(lambda: rank.run("step", (), {}), name="step")
    assert begun.wait(60.0)
    rank.close()
    go.set()
    assert step.result(60.0) == (None, None)
    rank.close()
    assert asked == [True, False, False, True]


@pytest.mark.parametrize("which", ["all are idle", "one owes an answer", "one is gone", "a call is under way"])
def test_a_job_one_of_whose_ranks_may_still_be_in_a_step_does_not_end_in_order(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: one rank pushed its last version, and waited for the others, which did not."""
    there = Whereabouts("node", "127.0.0.1", 1)
    ended: list[dict[str, bool]] = []
    monkeypatch.setattr(launching, "running_ray", lambda: None)
    monkeypatch.setattr(launching, "reserved", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(launching, "here", lambda: ("node", "127.0.0.1"))
    monkeypatch.setattr(launching, "_meeting", lambda *_: None)
    monkeypatch.setattr(launching, "ask_all", lambda *_, **__: None)
    monkeypatch.setattr(launching, "end", lambda _, **how: ended.append(how))
    monkeypatch.setattr(manager, "settle_owed", settled := Settled())
    for actor, handle in ((EngineActor, RayEngine), (TrainerActor, RayRank)):
        monkeypatch.setattr(actor, "start", lambda *_, **__: object())
        monkeypatch.setattr(handle, "ready", lambda *_, **__: there)
    with contextlib.ExitStack() as held, launching.launch(cast(Any, None), Built, num_ranks=1, num_engines=1) as sync:
        settled.error = SyncInProgressError("it still works") if which == "one owes an answer" else None
        sync._broken = TrainerRankError("rank 1 is gone") if which == "one is gone" else None
        if which == "a call is under way":
            held.enter_context(sync._busy)
    assert ended == [{"in_order": which == "all are idle"}, {}]


class Settled:
    """Stands for `settle_owed`."""

    error: WeightSyncError | None = None

    def __call__(self, owed: object) -> None:
        if self.error is not None:
            raise self.error


def test_how_actors_end_is_said_to_each() -> None:
    submitted: list[tuple[str, dict[str, Any]]] = []

    class Handle(ActorHandle):
        def submit(self, method: str, *args: Any, group: str, **options: Any) -> Any:
            submitted.append((self.name, options))

        def get(self, ref: Any, what: str, *, timeout_s: float) -> Any:
            return answer()

    end([Handle(None, name="a"), Handle(None, name="b")], in_order=False)
    assert submitted == [("a", {"in_order": False}), ("b", {"in_order": False})]


def test_an_actor_that_is_still_closing_when_it_is_killed_leaves_no_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen red: a whole model stayed on each host whose engine was in a long load."""
    unlinked, go = threading.Event(), threading.Event()
    monkeypatch.setattr(actors_module, "_UNLINK_S", 0.05)
    monkeypatch.setattr(actors_module, "unlink_own", unlinked.set)

    class Loads:
        def close(self) -> None:
            assert go.wait(60.0)

    def closes(actor: StartedActor) -> None:
        unlinked.clear()
        go.clear()
        closing = in_thread(actor.close, name="close")
        assert unlinked.wait(60.0)
        go.set()
        assert closing.result(60.0) == (None, None)

    engine, rank = StartedActor("s"), TrainerActor(0, 1)
    engine._keep("", Loads())
    rank._trainer = cast(Any, SimpleNamespace(push=Loads()))
    monkeypatch.setattr(trainer_actor_module, "unlink_own", lambda: None)  # behind its close
    closes(engine)
    closes(rank)


@pytest.mark.parametrize(
    ("error", "ends"), [(OSError("not yet"), True), (taken_still(), True), (ConfigError("never"), False)]
)
def test_only_what_may_be_over_soon_ends_an_actor_that_was_started_again(
    error: Exception, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong for good is answered, as in the first start."""
    ended: list[int] = []
    monkeypatch.setattr(actors_module, "is_restarted", lambda: True)
    monkeypatch.setattr(actors_module, "_AGAIN_S", 0.0)
    monkeypatch.setattr(actors_module, "unlink_own", lambda: ended.append(0))
    monkeypatch.setattr(actors_module.os, "_exit", ended.append)

    def broken(context: EngineContext) -> Any:
        raise error

    actor = EngineActor(CONTEXT, broken)
    assert ended == ([0, 1] if ends else [])
    with pytest.raises(ConfigError if isinstance(error, ConfigError) else EngineError):
        value_of(actor.ready(), object, peer="", what="")


def test_what_an_actor_takes_is_said_as_ray_names_it() -> None:
    """Seen red: Ray refuses "memory" among an actor's other resources."""
    taken = actor_options({"CPU": 4.0, "memory": 5e9, "special": 1.0})
    assert taken == {"num_cpus": 4.0, "num_gpus": 0, "memory": 5e9, "resources": {"special": 1.0}}
    assert actor_options({"GPU": 1.0}) == {"num_cpus": 0, "num_gpus": 1.0, "resources": None}


def test_a_rank_whose_pushes_a_controller_orders_makes_no_other_ones() -> None:
    config = WeightSyncConfig.load({"push": {"controller": "http://control:8700"}})
    context = RankContext(rank=0, world_size=1, engines=(), config=config, token="secret-of-16-letters")
    assert "secret" not in repr(context)
    with pytest.raises(ConfigError, match=r"http://control:8700 orders the pushes.*weightsync\.push\("):
        context.push(cast(Any, None))


class Rank(RayRank):
    """Answers with futures instead of Ray's references, as `says` has it; None: not yet."""

    def __init__(self, rank: int) -> None:
        super().__init__(None, rank)
        self.says: Any = None
        self.last: Future[Any] = Future()
        self.num_calls = 0

    def submit(self, method: str, *args: Any, group: str = "") -> Any:
        self.last, self.num_calls = Future(), self.num_calls + 1
        if isinstance(self.says, Exception):
            self.last.set_exception(self.says)
        elif self.says is not None:
            self.last.set_result(self.says)
        return self.last

    def get(self, ref: Any, what: str, *, timeout_s: float) -> Any:
        return ref.result(0)


def test_an_engine_that_is_started_in_vain_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it kept its bundle, and every later try waited for that."""
    ended: list[object] = []
    monkeypatch.setattr(manager, "kill", ended.append)

    def late(self: RayEngine, *, timeout_s: float) -> None:
        raise DeadlineExceededError("not ready")

    monkeypatch.setattr(RayEngine, "ready", late)
    old = RayEngine(cast(Any, "old"), engine_id="e")
    sync = RayWeightSync([], [old], config=config_of(None), start_engine=lambda engine_id: "fresh")
    with pytest.raises(DeadlineExceededError, match="not ready"):
        sync.restart_engine("e", timeout_s=1.0)
    assert (ended, sync.engines["e"].actor) == (["fresh"], "old")


def test_a_rank_that_still_owes_an_answer_is_asked_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is in a step that failed on rank 0: what is called now would wait behind it, on one rank alone.

    Seen to fail: without `settle_owed` the second call reached both ranks.
    """

    def settled(refs: Any, *, timeout_s: float) -> list[Any]:
        return list(wait(refs, timeout_s, FIRST_COMPLETED).done)

    monkeypatch.setattr("weightsync.cluster.ranks.wait_any", settled)
    monkeypatch.setattr("weightsync.cluster.ranks._GRACE_S", 0.05)
    ranks = [Rank(0), Rank(1)]
    sync = RayWeightSync(ranks, [], config=config_of(None), start_engine=lambda engine_id: None)
    good = (None, 7)
    bad = (WeightSyncError("why", rank=0).to_dict(), None)
    ranks[0].says = bad
    with pytest.raises(WeightSyncError, match="why"):
        sync.run("step", timeout_s=5)
    ranks[0].says = good
    for _ in range(2):
        with pytest.raises(SyncInProgressError, match="training rank 1 still works"):
            sync.run("step", timeout_s=5)
    assert [rank.num_calls for rank in ranks] == [1, 1]
    ranks[1].last.set_result(good)
    ranks[1].says = good
    assert sync.run("step", timeout_s=5) == [7, 7]
    ranks[0].says, ranks[1].says = bad, None
    with pytest.raises(WeightSyncError, match="why"):
        sync.run("step", timeout_s=5)
    ranks[1].last.set_exception(TrainerRankError("gone", rank=1))
    for _ in range(2):
        with pytest.raises(TrainerRankError, match="gone"):
            sync.run("step", timeout_s=5)


def test_a_time_out_that_the_driver_would_not_know_is_refused() -> None:
    """Seen red: the driver took a slower push for a broken job, and the job was lost."""
    context = RankContext(rank=0, world_size=1, engines=(), config=WeightSyncConfig())
    with pytest.raises(ConfigError, match="transfer_timeout_s: the driver waits by `transfer`"):
        context.push(cast(Any, None), transfer_timeout_s=1800.0)


def test_a_rank_is_never_restarted() -> None:
    with pytest.raises(ConfigError, match="max_restarts"):
        TrainerActor.start(0, 1, max_restarts=1)


_SAID = st.one_of(st.binary(max_size=200), st.text(), st.integers(), st.none(), st.lists(st.binary(), max_size=3))


@given(st.one_of(_SAID, st.tuples(_SAID), st.tuples(_SAID, _SAID), st.tuples(st.dictionaries(st.text(), _SAID), _SAID)))
def test_whatever_is_answered_is_a_value_or_one_typed_error(told: object) -> None:
    with pytest.raises(WeightSyncError):
        value_of(told, Whereabouts, peer="e", what="ready")


def test_an_answer_is_a_value_or_an_error() -> None:
    assert value_of(answer([1, "a"]), list[Any], peer="", what="") == [1, "a"]
    unknown = object()
    assert value_of(answer(unknown), None, peer="", what="") is unknown
    with pytest.raises(WeightSyncError, match="it failed") as caught:
        value_of((LoadError("it failed", rank=3).to_dict(), None), object, peer="p", what="")
    assert (type(caught.value), caught.value.rank, caught.value.peer) == (LoadError, 3, "p")


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(Address("http://127.0.0.1:1", "secret"))


def test_a_controller_is_sent_to_other_processes() -> None:
    """As a trainer's actor gets it; the copy has connections of its own."""
    handle = ActorHandle("an actor", name="the controller")
    controller = RayController(handle, Address("http://127.0.0.1:1", "0123456789abcdef"))
    assert pickle.dumps(controller), "its connections are not sent"
    sent = copy.copy(controller)
    assert (sent.url, sent.handle.name) == ("http://127.0.0.1:1", "the controller")
    with pytest.raises(EngineUnreachableError, match="does a weightsync controller run there"):
        sent.status(timeout_s=5)


# Placement.


def test_separate_actors_have_bundles_of_their_own() -> None:
    layout = Placement(rank_cpus=2, rank_gpus=1, engine_gpus=2).layout(num_ranks=2, num_engines=1)
    assert layout.bundles == ({"CPU": 2, "GPU": 1}, {"CPU": 2, "GPU": 1}, {"CPU": 1, "GPU": 2})
    assert (layout.of_ranks, layout.of_engines) == ((0, 1), (2,))


def test_colocated_actors_share_them() -> None:
    layout = Placement(colocated=True, rank_gpus=0.25, engine_gpus=0.75).layout(num_ranks=2, num_engines=2)
    assert layout.bundles == ({"CPU": 2.0, "GPU": 1.0},) * 2
    assert layout.of_ranks == layout.of_engines == (0, 1)
    with pytest.raises(ConfigError, match="3 ranks go with 3 engines, not 1"):
        Placement(colocated=True).layout(num_ranks=3, num_engines=1)


@pytest.mark.parametrize(
    "amounts",
    [
        {"rank_cpus": -1},
        {"rank_cpus": 0},
        {"engine_cpus": 0},
        {"colocated": True, "rank_gpus": 0.5},
        {"colocated": True, "rank_gpus": 1, "engine_gpus": 1},
    ],
)
def test_a_placement_that_ray_could_not_give_is_refused(amounts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Placement(**amounts)


# Where everybody meets.


def test_loopback_as_long_as_nobody_is_elsewhere() -> None:
    here = Whereabouts(node_id="a", node_ip="10.0.0.1", pid=1)
    there = Whereabouts(node_id="b", node_ip="10.0.0.2", pid=1)
    assert meeting_address(here, [here, here]) == "127.0.0.1"
    assert meeting_address(here, [here, there]) == "10.0.0.1"


def test_a_config_from_what_users_have() -> None:
    assert config_of("packed_cuda_ipc").transfer.strategy == "packed_cuda_ipc"
    assert config_of(None).transfer.strategy is None
    with pytest.raises(ConfigError):
        config_of("carrier pigeon")


def test_a_controller_on_ray_is_built_from_all_that_its_configuration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor's class in this process: the method, and the keys of the fleet, are those of the file."""
    monkeypatch.setattr("weightsync.cluster.controller_actor.here", lambda: ("node", "127.0.0.1"))
    built: list[BuiltController] = []

    def build(*args: Any, **options: Any) -> BuiltController:
        built.append(build_controller(*args, **options))
        return built[-1]

    monkeypatch.setattr("weightsync.cluster.controller_actor.build_controller", build)
    of_pull = {"sets": [["a", "b"]], "commit_policy": "quorum(2)", "lease_s": 3.0}
    for method, kind, keys in (("pull", FleetMethod, of_pull), ("push", PushMethod, {}), ("mock", MockMethod, {})):
        fleet = {"models": ["a", "b"], "port": 0, **keys}
        settings = settings_of({"sync_method": method, "sync_mode": "fully-async", "fleet": fleet}, {})
        actor = ControllerActor(settings.model_dump(exclude_unset=True), "secret-of-16-letters")
        url, token = value_of(actor.listen(), Address, peer="c", what="listen")
        with contextlib.closing(ControllerClient(url, token=token)) as client:
            assert client.status().sync_mode == {"a": "fully-async", "b": "fully-async"}
        assert type(built[-1].controller.method) is kind
        assert (built[-1].controller.method.pool is None) is (kind is not FleetMethod)
        actor.close()
    pool = built[0].controller.method.pool
    assert pool is not None
    assert pool.lease_s == 3.0


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"fleet": {"host": "127.0.0.1"}}, {}, "fleet.host"),
        ({"sync_method": "tinker"}, {}, "set_tinker_service_holder"),
        ({}, {"max_restarts": 1}, "set fleet.port"),
    ],
)
def test_what_a_controller_on_ray_can_not_be(config: dict[str, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings_of(config, options)


# Without Ray.


def printed_by(code: str) -> str:
    """What a fresh interpreter prints: this one may be connected to a cluster."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


LAUNCH = """
from weightsync.cluster.launch import launch
from weightsync.errors import MissingDependencyError, StateError
try:
    with launch(None, None, num_ranks=1, num_engines=1): pass
except (MissingDependencyError, StateError) as error:
    print(type(error).__name__, error)
"""


def test_a_driver_that_is_connected_to_nothing_is_told_so() -> None:
    """Ray would start a cluster of its own at the first call."""
    assert "StateError this process is connected to no Ray cluster: call ray.init() first" in printed_by(LAUNCH)


def test_the_package_imports_without_ray_and_without_torch_and_says_what_is_missing() -> None:
    code = """
import sys
sys.modules["ray"] = None
from weightsync.cluster import controller_actor, fleet, launch, manager, placement, ranks, service_actor, trainer_actor
assert "torch" not in sys.modules
"""
    said = printed_by(code + LAUNCH)
    assert said.startswith("MissingDependencyError")
    assert "pip install 'weightsync[ray]'" in said


def test_a_job_ends_its_ranks_before_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: all at once, and the last version, which the ranks push at their end, found engines that were gone."""
    ended: list[tuple[list[str], dict[str, bool]]] = []
    ranks = [object()]  # the second one does not start
    monkeypatch.setattr(launching, "running_ray", lambda: None)
    monkeypatch.setattr(launching, "reserved", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(launching, "end", lambda handles, **how: ended.append(([each.name for each in handles], how)))
    monkeypatch.setattr(EngineActor, "start", lambda *_, **__: object())
    monkeypatch.setattr(TrainerActor, "start", lambda *_, **__: ranks.pop())
    with pytest.raises(IndexError), launching.launch(cast(Any, None), Built, num_ranks=2, num_engines=2):
        raise AssertionError("it has not started")
    assert ended == [(["training rank 0"], {"in_order": False}), (["engine-0", "engine-1"], {})]


def test_services_are_waited_for_though_an_answer_of_the_controller_takes_too_long() -> None:
    """Seen red: the first such answer ended the wait, and with it the fleet that had just been started."""

    class Slow:
        answers: ClassVar[list[Any]] = [DeadlineExceededError("no CPU"), SimpleNamespace(instances=())]

        def status(self, *, timeout_s: float) -> Any:
            answer = self.answers.pop(0) if self.answers else there
            if isinstance(answer, Exception):
                raise answer
            return answer

    live = SimpleNamespace(instance_id="service-0", state="live", why="")
    there = SimpleNamespace(instances=(live,))
    with contextlib.ExitStack() as stack:
        fleet = RayFleet(
            cast(Any, Slow()), cast(Any, SimpleNamespace(controller=("http://c", "token"))), cast(Any, None),
            FleetPlacement(), {}, stack, controller_returns=False,
        )  # fmt: skip
        fleet.wait_live(("service-0",), timeout_s=60.0)
        Slow.answers += [DeadlineExceededError("no CPU")]
        with pytest.raises(DeadlineExceededError, match="service-0 is not known: the controller did not answer"):
            fleet.wait_live(("service-0",), timeout_s=0.0)


def test_a_service_that_was_started_again_is_not_waited_for_by_its_old_processes_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen red: the process that had just been killed was still live for the controller, and the wait was over."""
    old, new = (
        SimpleNamespace(instance_id="service-0", state="live", why=None, url=f"http://{name}")
        for name in ("old", "new")
    )
    answers = [old, old, old, new]
    controller = SimpleNamespace(status=lambda *, timeout_s: SimpleNamespace(instances=(answers.pop(0),)))
    monkeypatch.setattr(fleet_module, "kill", lambda actor: None)
    monkeypatch.setattr(RayFleet, "_start", lambda *given: RayService(None, name="service-0"))
    monkeypatch.setattr(RayService, "ready", lambda *given, timeout_s: Whereabouts("node", "ip", 1))
    with contextlib.ExitStack() as stack:
        fleet = RayFleet(
            cast(Any, controller), cast(Any, SimpleNamespace(controller=("http://c", "token"))), cast(Any, None),
            FleetPlacement(), {}, stack, controller_returns=False,
        )  # fmt: skip
        fleet.services["service-0"] = RayService(None, name="service-0")
        fleet._bundles["service-0"] = (None, 0)
        fleet.restart_service("service-0", timeout_s=60.0)
        with pytest.raises(DeadlineExceededError, match="service-0 was started again, and its old process has a lease"):
            fleet.wait_live(timeout_s=0.0)
        fleet.wait_live(timeout_s=60.0)
        assert answers == []
