"""The weight-transfer backend itself, without a vLLM: who may join, and which of several workers raises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.host.fakes import init as init_request
from weightsync.engine.vllm import version_board
from weightsync.engine.vllm.plugin import BackendError, WeightSyncTransferEngine
from weightsync.errors import InvalidRequestError, StateError, UnsupportedError, VersionError
from weightsync.handles.vllm_messages import VllmInitMessage, VllmState, VllmUpdateMessage, as_info, error_in_text
from weightsync.types import BeginRequest, CommitRequest, Manifest, TensorSpec, Version

FOREIGN = {"master_address": "192.0.2.1", "world_size": 2}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in weights}


def backend() -> WeightSyncTransferEngine:
    """One worker whose groups are of nobody else."""
    engine = WeightSyncTransferEngine(object(), SimpleNamespace(world_size=1), Model())
    receiver = SimpleNamespace(close=lambda: None, end_session=lambda: None)
    strategy: Any = SimpleNamespace(create_receiver=lambda info, rank: receiver)
    engine._worker._strategies = lambda name: strategy
    return engine


def join(engine: WeightSyncTransferEngine, run_id: str, *, in_place: bool = False) -> None:
    message = VllmInitMessage(init=init_request(run_id), in_place=in_place)
    engine.init_transfer_engine(engine.parse_init_info(as_info(message)))  # type: ignore[arg-type]


def begin_request(run_id: str) -> BeginRequest:
    manifest = Manifest(
        version=Version(run_id=run_id, number=1),
        model_id="default",
        tensors=(TensorSpec(name="weight", dtype="float32", shape=(4,)),),
    )
    return BeginRequest(session="s", manifest=manifest, deadline_s=60)


def begin(engine: WeightSyncTransferEngine, run_id: str) -> None:
    engine.start_weight_update()
    engine.update_weights(as_info(VllmUpdateMessage(begin=begin_request(run_id))))


def test_a_run_that_is_over_changes_nothing() -> None:
    engine = backend()
    join(engine, "old", in_place=True)
    join(engine, "new")
    begin(engine, "new")
    before = engine._state()
    assert (before.session, before.writes_live, before.run_id) == ("s", False, "new")
    with pytest.raises(BackendError) as caught:
        join(engine, "old", in_place=True)
    assert isinstance(error_in_text(str(caught.value)), VersionError)
    assert engine._state() == before


def test_one_worker_refuses_a_finish_that_cuts_a_session() -> None:
    engine = backend()
    join(engine, "run")
    begin(engine, "run")
    with pytest.raises(BackendError) as caught:
        engine.finish_weight_update()
    assert isinstance(error_in_text(str(caught.value)), StateError)
    assert engine._worker.session == "s"


class Pair:
    """What two workers tell each other, in one process."""

    size = 2
    alone = False

    def __init__(self, rank: int, told: dict[int, bytes], meet: threading.Barrier) -> None:
        self.rank, self._told, self._meet = rank, told, meet
        self.speaks = rank == 1

    def exchange(self, said: bytes, *, wait_s: float) -> list[bytes]:
        self._told[self.rank] = said
        self._meet.wait(10)
        told = [self._told[0], self._told[1]]
        self._meet.wait(10)
        return told


def pair() -> list[WeightSyncTransferEngine]:
    told: dict[int, bytes] = {}
    meet = threading.Barrier(2)
    engines = [backend(), backend()]
    for rank, engine in enumerate(engines):
        engine._peers = Pair(rank, told, meet)  # type: ignore[assignment]
    return engines


def on_both(engines: list[WeightSyncTransferEngine], call: Callable[[Any], None]) -> list[BaseException | None]:
    """What each worker raised."""
    raised: list[BaseException | None] = [None, None]

    def run(rank: int) -> None:
        try:
            call(engines[rank])
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return raised


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda engine: engine.init_transfer_engine(engine.parse_init_info(FOREIGN)), InvalidRequestError),
        (lambda engine: engine.update_weights(FOREIGN), InvalidRequestError),
        (lambda engine: engine.set_weight_update_target(object()), UnsupportedError),
    ],
    ids=["init", "update", "draft"],
)
def test_of_several_workers_the_last_alone_raises(call: Callable[[Any], None], kind: type[Exception]) -> None:
    """vLLM's executor stops to listen at the first failure, and takes what it has not heard for the next answers."""
    first, last = on_both(pair(), call)
    assert first is None
    assert isinstance(last, BackendError)
    assert isinstance(error_in_text(str(last)), kind)


def test_of_several_workers_none_raises_at_a_strangers_start_and_finish_and_the_session_goes_on() -> None:
    """A worker that raises keeps vLLM's update active and one that returns does not: they would never agree again."""
    engines = pair()
    assert on_both(engines, lambda engine: join(engine, "run")) == [None, None]
    step = as_info(VllmInitMessage(step=VllmUpdateMessage(begin=begin_request("run"))))
    assert on_both(engines, lambda engine: engine.init_transfer_engine(engine.parse_init_info(step))) == [None, None]
    assert on_both(engines, lambda engine: engine.start_weight_update()) == [None, None]
    assert on_both(engines, lambda engine: engine.finish_weight_update()) == [None, None]
    assert [engine._worker.session for engine in engines] == ["s", "s"]


def test_a_commit_that_some_workers_made_leaves_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the next one that all have made: tokens of a model that is two versions are neither's.

    Seen red with what one worker knows of itself."""
    engines, version = pair(), Version(run_id="r", number=1)
    fails = [False, False]
    for rank, engine in enumerate(engines):
        monkeypatch.setattr(type(engine._worker), "live_version", property(lambda _: version))

        def commit(name: str, rank: int = rank) -> Version:
            if fails[rank]:
                raise StateError("no")
            return version

        monkeypatch.setattr(engine._worker, "commit", commit)
    message = as_info(VllmUpdateMessage(commit=CommitRequest(session="s")))
    for failing in (None, 1, None, 0, None):
        fails[:] = [rank == failing for rank in (0, 1)]
        raised = on_both(engines, lambda engine: engine.update_weights(message))
        assert (raised[1] is None) == (failing is None)
        assert [engine._served() for engine in engines] == [version if failing is None else None] * 2
    on_both(engines, lambda engine: engine.update_weights(FOREIGN))
    assert [engine._served() for engine in engines] == [version] * 2, "nothing was written"


def test_workers_that_all_took_a_failed_patch_back_name_their_version_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are asked for their state behind it: where that is one version, tokens are of that one.

    Seen red: the versions of tokens were unknown until the next commit."""
    engines, version = pair(), Version(run_id="r", number=1)
    served = [version, version]
    for rank, engine in enumerate(engines):
        monkeypatch.setattr(type(engine._worker), "live_version", property(lambda _: version))
        monkeypatch.setattr(
            engine, "_state", lambda rank=rank, **_: VllmState(version=served[rank], digest="d", healthy=True)
        )
        engine._split = True

    def asked() -> list[Version | None]:
        expect = as_info(VllmInitMessage(expect=VllmState()))
        on_both(engines, lambda engine: engine.init_transfer_engine(engine.parse_init_info(expect)))
        return [engine._served() for engine in engines]

    served[1] = Version(run_id="r", number=2)
    assert asked() == [None, None]
    served[1] = version
    assert asked() == [version, version]


def test_the_hook_is_the_engines_until_it_shuts_down() -> None:
    engine = backend()
    assert version_board.served == engine._served
    assert version_board.served() is None
    engine.shutdown()
    assert version_board.served is None
    join(engine, "run")
    assert version_board.served == engine._served, "seen red: vLLM's route that lets a trainer go calls `shutdown`, too"
    engine.shutdown()


def test_a_worker_that_can_not_tell_its_state_is_no_reason_for_silence() -> None:
    engines = pair()
    engines[0]._worker._stuck = "planted"
    expect = as_info(VllmInitMessage(expect=engines[1]._state()))
    first, last = on_both(engines, lambda engine: engine.init_transfer_engine(engine.parse_init_info(expect)))
    assert first is None
    assert "planted" in str(last)
