"""RayEngine over real actors: what is answered, what is garbage, who is dead, who is slow."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.actors import Rollout
from tests.cluster.conftest import STORE_BYTES
from tests.cluster.strangers import Garbler, Stranger, mute_engine
from tests.multiproc.pull_kit import wait_until
from weightsync.cluster.engine_actor import EngineActor, EngineContext, RayEngine
from weightsync.cluster.ray_calls import kill, load_ray
from weightsync.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    LoadError,
    StateError,
    UnsupportedError,
)
from weightsync.handles.fanout import EngineFanout, in_thread
from weightsync.types import CommitRequest, Deadline, DescribeRequest, EngineOp

pytestmark = pytest.mark.timeout(600)

GROUPS = {"urgent": 1, "asks": 1}
CALL_S = 30.0  # the first call imports and starts the actor's server


@pytest.fixture(scope="module")
def engine(ray_cluster: Any) -> Iterator[RayEngine]:
    """An engine that Ray restarts once."""
    actor = EngineActor.start(EngineContext(engine_id="e", index=0), Rollout, max_restarts=1)
    engine = RayEngine(actor, engine_id="e")
    engine.ready(timeout_s=100)
    yield engine
    kill(engine.actor)


def failing_once_again(context: EngineContext, counter: str) -> Any:
    """Is built, then fails once, then is built again."""
    with open(counter, "a") as built:
        built.write(".")
    if os.path.getsize(counter) == 2:
        raise OSError("the memory of the dead one is not free yet")
    return Rollout(context)


def test_a_start_that_fails_once_behind_a_restart_is_tried_again(ray_cluster: Any, tmp_path: Path) -> None:
    """Seen red: the actor lived on, answered nothing but that error, and Ray held it for alive."""
    counter = tmp_path / "counter"
    factory = functools.partial(failing_once_again, counter=str(counter))
    actor = EngineActor.start(EngineContext(engine_id="r", index=0), factory, max_restarts=3)
    engine = RayEngine(actor, engine_id="r")
    try:
        first = engine.ready(timeout_s=100)
        os.kill(first.pid, signal.SIGKILL)

        def is_there_again() -> bool:
            with contextlib.suppress(EngineUnreachableError):  # while Ray starts it
                return engine.ready(timeout_s=100).pid != first.pid
            return False

        wait_until(is_there_again, "it is there again", 100.0)
        assert counter.read_text() == "..."
        assert engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=CALL_S).engine_id == "r"
    finally:
        kill(actor)


def test_a_step_is_answered_and_a_refusal_is_typed(engine: RayEngine) -> None:
    reply = engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=CALL_S)
    assert (reply.engine_id, reply.version, reply.world_size) == ("e", None, 1)
    with pytest.raises(StateError, match="commit comes while the session holds the pause"):
        engine.call(EngineOp.COMMIT, CommitRequest(session="nobody's"), timeout_s=CALL_S)


def test_the_users_own_methods(engine: RayEngine) -> None:
    """Typed errors stay what they were; others keep their words; what is private stays so."""
    assert engine.ask("wait", 0.0, timeout_s=CALL_S) is False
    with pytest.raises(LoadError, match="typed") as caught:
        engine.ask("fail", True, timeout_s=CALL_S)
    assert caught.value.parameter == "p"
    with pytest.raises(EngineError, match="ValueError: plain") as plain:
        engine.ask("fail", typed=False, timeout_s=CALL_S)
    assert plain.value.peer == "e"
    for name in ("_hidden", "nothing", "__init__"):
        with pytest.raises(InvalidRequestError, match="no public method"):
            engine.ask(name, timeout_s=CALL_S)


@pytest.mark.parametrize("how", ["here", "there"])
def test_a_result_that_ray_can_not_carry_is_no_death(engine: RayEngine, how: str) -> None:
    with pytest.raises(UnsupportedError, match="unreadable"):
        engine.ask("unreadable", how, timeout_s=10)
    assert engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=CALL_S).engine_id == "e"


def test_a_slow_answer_costs_its_timeout(engine: RayEngine) -> None:
    slow = in_thread(lambda: engine.ask("wait", 20.0, timeout_s=20), name="slow")
    with pytest.raises(DeadlineExceededError, match=r"e did not answer wait within 0\.2 s"):
        engine.ask("wait", 20.0, timeout_s=0.2)
    until_waiting(engine, 2)
    engine.ask("let_go", timeout_s=CALL_S)
    assert slow.result(CALL_S) is True


def until_waiting(engine: RayEngine, number: int) -> None:
    """Returns when so many calls are under way there."""
    deadline = Deadline(CALL_S)
    while engine.ask("waiting", timeout_s=CALL_S) < number:
        deadline.check("calls to be under way")


def test_a_handle_can_be_sent_on(engine: RayEngine) -> None:
    """As rank 0's actor gets it: by Ray's own framing."""
    import ray

    copy: RayEngine = ray.get(ray.put(engine), timeout=5)
    assert copy.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=CALL_S).engine_id == "e"


def test_a_process_that_is_killed_is_unreachable_until_ray_has_restarted_it(engine: RayEngine) -> None:
    """kill -9 during a call; then the same handle reaches a new process; after the last restart it stays dead."""
    pid = engine.ask("where", timeout_s=CALL_S)[0]
    under_way = in_thread(lambda: engine.ask("wait", 20.0, timeout_s=20), name="under way")
    until_waiting(engine, 1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineUnreachableError, match="the actor of e is gone"):
        under_way.result(CALL_S)
    deadline = Deadline(100)
    while True:
        deadline.check("restart by Ray")
        try:
            fresh = engine.ready(timeout_s=10)
            break
        except EngineUnreachableError:
            continue
    assert fresh.pid != pid
    os.kill(fresh.pid, signal.SIGKILL)
    deadline = Deadline(60)
    while True:
        _, errors = EngineFanout([engine]).describe(timeout_s=5)
        if isinstance(errors.get("e"), EngineUnreachableError):
            break
        deadline.check("word of the death")


@pytest.fixture(scope="module")
def garbler(ray_cluster: Any) -> Iterator[RayEngine]:
    actor = load_ray().remote(concurrency_groups=GROUPS)(Garbler).options(num_cpus=0).remote()
    yield RayEngine(actor, engine_id="g")
    kill(actor)


@pytest.mark.parametrize(
    "said", [b"bytes", "text", None, 7, (None,), ("no error", 7), ([], None), ({"error": 7}, None)]
)
def test_garbage_is_no_answer(garbler: RayEngine, said: object) -> None:
    """To a step and to a method; one typed error that names the engine."""
    garbler.get(garbler.submit("say", said, group="urgent"), "say", timeout_s=20)
    for ask in (
        lambda: garbler.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=20),
        lambda: garbler.ask("generate", timeout_s=20),
    ):
        with pytest.raises(EngineError) as caught:
            ask()
        assert type(caught.value) is EngineError
        assert caught.value.peer == "g"


def test_an_actor_of_another_kind_is_told_as_such(ray_cluster: Any) -> None:
    actor = load_ray().remote(concurrency_groups=GROUPS)(Stranger).options(num_cpus=0).remote()
    stranger = RayEngine(actor, engine_id="s")
    with pytest.raises(UnsupportedError, match="s can't be asked for listen"):
        stranger.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=20)
    with pytest.raises(UnsupportedError, match="s can't"):
        stranger.ask("generate", timeout_s=20)
    with pytest.raises(UnsupportedError, match="s can't be asked for ready"):
        stranger.ready(timeout_s=CALL_S)
    kill(stranger.actor)


def test_a_node_that_dies_takes_its_engine_with_it(ray_cluster: Any) -> None:
    """The node's raylet is killed, and so is everything on it."""
    node = ray_cluster.add_node(num_cpus=1, resources={"third": 1}, object_store_memory=STORE_BYTES)
    actor = EngineActor.start(EngineContext(engine_id="far", index=0), mute_engine, resources={"third": 1})
    engine = RayEngine(actor, engine_id="far")
    engine.ready(timeout_s=100)
    with pytest.raises(EngineError, match="mute"):
        engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=CALL_S)
    ray_cluster.remove_node(node, allow_graceful=False)
    deadline = Deadline(60)
    while True:  # until the engine's own process has noticed, it answers
        _, errors = EngineFanout([engine]).describe(timeout_s=5)
        if isinstance(errors["far"], EngineUnreachableError):
            break
        deadline.check("word of the node's death")
