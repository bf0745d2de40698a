"""The actors' classes and the rest of the package without a cluster: what they answer, and to whom."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.cluster.client import Whereabouts
from weightsync.cluster.engine_actor import EngineActor, EngineContext
from weightsync.cluster.launch import config_of, meeting_address
from weightsync.cluster.manager import RayWeightSync
from weightsync.cluster.placement import Placement
from weightsync.cluster.ranks import RayRank
from weightsync.cluster.trainer_actor import TrainerActor, interface_towards, start_trainer
from weightsync.cluster.wire import answer, read_answer, refusal
from weightsync.errors import (
    ConfigError,
    DigestMismatchError,
    EngineError,
    InvalidRequestError,
    SharedMemoryError,
    StateError,
    SyncFailedError,
    SyncInProgressError,
    TrainerRankError,
    WeightSyncError,
)
from weightsync.memory import MappedSegment, Segment
from weightsync.net.messages import encode
from weightsync.types import CommitRequest, DescribeRequest, EngineOp, EngineReply

CONTEXT = EngineContext(engine_id="e", index=0)


class Built:
    """What a factory may build."""

    def __init__(self, context: EngineContext) -> None:
        self.engine = self
        self.closed = 0

    def call(self, op: EngineOp, request: Any, *, timeout_s: float) -> EngineReply:
        if isinstance(request, CommitRequest):
            raise SyncFailedError("no", causes={"w": DigestMismatchError("bytes differ", parameter="p")})
        return EngineReply(engine_id="e", world_size=3)

    def generate(self, text: str, *, times: int = 1) -> str:
        return text * times

    def close(self) -> None:
        self.closed += 1


def reply_of(body: bytes) -> EngineReply:
    return read_answer(body, EngineReply, peer="e", what="call")


def test_a_step_goes_in_and_out_as_json() -> None:
    """No exception leaves the actor, so none is ever pickled: errors are JSON, causes and all."""
    actor = EngineActor(CONTEXT, Built)
    assert reply_of(actor.call("describe", encode(DescribeRequest()), 1.0)).world_size == 3
    body = actor.call("commit", encode(CommitRequest(session="s")), 1.0)
    with pytest.raises(SyncFailedError) as caught:
        reply_of(body)
    assert isinstance(caught.value.causes["w"], DigestMismatchError)
    assert caught.value.causes["w"].parameter == "p"


@pytest.mark.parametrize(
    ("op", "body"),
    [("explode", b"{}"), ("commit", b"{}"), ("commit", b"\xff"), ("commit", b'{"session": "s", "extra": 1}')],
)
def test_a_request_that_does_not_fit_is_refused(op: str, body: bytes) -> None:
    told = EngineActor(CONTEXT, Built).call(op, body, 1.0)
    with pytest.raises(InvalidRequestError):
        reply_of(told)


def test_only_public_methods_are_asked() -> None:
    actor = EngineActor(CONTEXT, Built)
    body, value = actor.ask("generate", ("ab",), {"times": 2})
    assert (read_answer(body, type(None), peer="e", what="ask"), value) == (None, "abab")
    for name in ("_private", "__class__", "closed", "nothing"):
        body, _ = actor.ask(name, (), {})
        with pytest.raises(InvalidRequestError, match="no public method"):
            read_answer(body, type(None), peer="e", what="ask")


def test_a_factory_that_fails_is_told_to_everybody_who_asks() -> None:
    def broken(context: EngineContext) -> Any:
        raise OSError("no such model")

    actor = EngineActor(CONTEXT, broken)
    for body in (actor.ready(), actor.call("describe", b"{}", 1.0), actor.ask("generate", (), {})[0]):
        with pytest.raises(EngineError, match="building the engine failed: OSError: no such model"):
            read_answer(body, object, peer="e", what="")
    with pytest.raises(ConfigError, match="not a dict"):
        read_answer(EngineActor(CONTEXT, lambda _: {}).ready(), object, peer="e", what="")


def test_closing_twice_closes_once_and_later_calls_are_refused() -> None:
    actor = EngineActor(CONTEXT, Built)
    built = actor._built
    actor.close()
    actor.close()
    assert built.closed >= 1
    with pytest.raises(EngineError, match="closed"):
        reply_of(actor.call("describe", b"{}", 1.0))


def test_a_rank_that_has_not_joined_says_so() -> None:
    rank = TrainerActor(1, 2)
    for body in (rank.initialize(), rank.sync_weights(1), rank.run("step", (), {})[0]):
        with pytest.raises(StateError, match="has not joined") as caught:
            read_answer(body, object, peer="", what="")
        assert caught.value.rank is None or caught.value.rank == 1
    with pytest.raises(InvalidRequestError, match="no engine 'e'"):
        read_answer(rank.replace_engine("e", None), object, peer="", what="")


def test_a_rank_that_is_closed_in_the_middle_of_a_sync_leaves_no_shared_memory() -> None:
    """It is killed next; a driver that was interrupted ends it so. Seen to fail: without the unlinking."""

    class Busy:
        @property
        def push(self) -> Any:
            raise SyncInProgressError("a sync runs")

    rank = TrainerActor(0, 1)
    rank._trainer = Busy()
    with Segment(4096) as segment:
        read_answer(rank.close(), type(None), peer="", what="close")
        with pytest.raises(SharedMemoryError, match="gone"):
            MappedSegment(segment.name, need_bytes=1)


def test_a_controller_that_was_replaced_is_told_so() -> None:
    rank = TrainerActor(0, 1)
    for controller in ("old", "new"):
        assert read_answer(rank.take(controller, 0.01), list[Any], peer="", what="take") == []
    with pytest.raises(StateError, match="another controller"):
        read_answer(rank.take("old", 0.01), object, peer="", what="take")


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

    def fetch(self, controller: str, closed: Any) -> bytes | None:
        return None


def test_a_rank_that_still_owes_an_answer_is_asked_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is in a step that failed on rank 0: what is called now would wait behind it, on one rank alone.

    Seen to fail: without `settle_owed` the second call reached both ranks.
    """

    def settled(refs: Any, *, timeout_s: float) -> list[Any]:
        return list(wait(refs, timeout_s, FIRST_COMPLETED).done)

    monkeypatch.setattr("weightsync.cluster.ranks.wait_any", settled)
    monkeypatch.setattr("weightsync.cluster.ranks._GRACE_S", 0.05)
    ranks = [Rank(0), Rank(1)]
    sync = RayWeightSync(ranks, [], config=config_of(None))
    good = (answer(), 7)
    ranks[0].says = (refusal(ValueError("why"), "step failed", rank=0), None)
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
    ranks[0].says, ranks[1].says = (refusal(ValueError("why"), "", rank=0), None), None
    with pytest.raises(WeightSyncError, match="why"):
        sync.run("step", timeout_s=5)
    ranks[1].last.set_exception(TrainerRankError("gone", rank=1))
    for _ in range(2):
        with pytest.raises(TrainerRankError, match="gone"):
            sync.run("step", timeout_s=5)
    sync.close()


def test_a_rank_is_never_restarted() -> None:
    with pytest.raises(ConfigError, match="max_restarts"):
        start_trainer(0, 1, max_restarts=1)


@given(st.one_of(st.binary(max_size=200), st.text(), st.integers(), st.none(), st.lists(st.binary(), max_size=3)))
def test_whatever_is_answered_is_a_value_or_one_typed_error(body: object) -> None:
    with pytest.raises(WeightSyncError):
        read_answer(body, EngineReply, peer="e", what="describe")


def test_an_answer_is_a_value_or_an_error() -> None:
    assert read_answer(answer([1, "a"]), list[Any], peer="", what="") == [1, "a"]
    with pytest.raises(WeightSyncError, match="it failed: ValueError: why") as caught:
        read_answer(refusal(ValueError("why"), "it failed", rank=3), object, peer="p", what="")
    assert (caught.value.rank, caught.value.peer) == (3, "p")


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


def test_the_interface_of_an_address() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no address") is None


def test_a_config_from_what_users_have() -> None:
    assert config_of("packed_cuda_ipc").transfer.strategy == "packed_cuda_ipc"
    assert config_of(None).transfer.strategy is None
    with pytest.raises(ConfigError):
        config_of("carrier pigeon")


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
from weightsync.cluster import client, launch, manager, placement, post, ranks, trainer_actor
assert "torch" not in sys.modules
"""
    said = printed_by(code + LAUNCH)
    assert said.startswith("MissingDependencyError")
    assert "pip install 'weightsync[ray]'" in said
