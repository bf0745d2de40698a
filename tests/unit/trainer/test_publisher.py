"""WeightManager: what it refuses before anything is started, and how its ranks start together. The rest is in
`multiproc/test_offload*.py`."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import weightsync
from tests.standins.processes import run_ranks
from weightsync.errors import ConfigError, EngineUnreachableError, InvalidRequestError, StateError
from weightsync.trainer import publisher
from weightsync.trainer.agent_run import AgentRun
from weightsync.trainer.notifier import Notifier
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Version
from weightsync.types.agent_messages import TransferBegun


def test_an_agent_that_was_started_again_has_cut_off_who_was_at_a_pull() -> None:
    """Seen red: its receivers counted as at it, also when they came no more."""
    with contextlib.closing(WeightManager("m")) as manager:
        manager._heard(TransferBegun(version=Version(run_id="r", number=1), receiver="host"))
        for event in ("hung", "restarted"):
            manager._heard(event)  # type: ignore[arg-type]
        assert (manager._tracker._at_it, manager._tracker._cut_off) == ({}, {"host"})


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -1.0, 1e9])
def test_a_wait_that_nobody_can_wait_is_refused(timeout_s: float) -> None:
    """Seen to fail: NaN was taken for a time that is over, and infinity for one that no lock can wait."""
    with contextlib.closing(WeightManager("m")) as manager:
        for wait in (manager.wait_published, manager.wait_delta_ready):
            with pytest.raises(InvalidRequestError, match="timeout_s is a number of seconds from 0 to"):
                wait(1, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("version", "error"),
    [(0, StateError), (-1, InvalidRequestError), (1.5, InvalidRequestError), (True, InvalidRequestError)],
)
def test_a_version_is_a_whole_number_and_0_seconds_are_a_look(version: Any, error: type[Exception]) -> None:
    with contextlib.closing(WeightManager("m")) as manager, pytest.raises(error):
        manager.wait_published(version, timeout_s=0)


# --- one rank alone ---


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group in which nobody answers."""
    for name, answer in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda *_, answer=answer: answer)


@pytest.mark.usefixtures("rank_1")
def test_a_rank_that_is_not_the_first_publishes_alone() -> None:
    """A module and a mapping. Seen red: "the parts hold 0 of 4 elements"."""
    whole = torch.arange(4.0)
    module = torch.nn.Module()
    module.register_buffer("w", whole)
    for weights in ({"w": whole}, module):
        with WeightManager("m", alone=True) as manager:
            assert manager.offload(weights, 1).published
            assert manager._steps is not None
            assert manager._steps.buffer is not None
            assert manager._steps.buffer._current is not None
            assert torch.equal(load_file(Path("/dev/shm") / manager._steps.buffer._current.name)["w"], whole)


@pytest.mark.usefixtures("rank_1")
def test_a_rank_that_is_not_the_first_meets_those_that_it_tells_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def met(notifier: Notifier) -> None:
        raise ConfigError("is met")

    monkeypatch.setattr(Notifier, "meet", met)
    with pytest.raises(ConfigError, match="is met"):
        weightsync.publish({"w": torch.ones(4)}, "m", alone=True, port=0)


@pytest.mark.usefixtures("rank_1")
def test_a_rank_that_is_not_the_first_pushes_alone() -> None:
    """Seen red: all bytes moved, and the trainer's sum was that of nothing: DigestMismatchError."""
    model, served = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with weightsync.push(model, [served], dtype="float32", alone=True) as push:
        assert push.step().digests_equal
    assert torch.equal(served.weight, model.weight)


# --- ranks that start together ---


def outcome(manager: WeightManager) -> str:
    try:
        manager.start()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        manager.close()
    return "started"


def _one_can_not(rank: int, world_size: int, what: str) -> str:
    def refused() -> str:
        raise OSError("Read-only file system")

    if what == "memory" and rank == 1:
        publisher.host_nonce = refused
    return outcome(WeightManager("m", run_id="" if what == "name" and rank == 1 else None))


def test_a_run_has_no_name_that_a_controller_gives_to_none() -> None:
    """Seen red: its fleet was told of nothing, and each sync failed: nobody had said which agent has the model."""
    with pytest.raises(ConfigError, match="run_id 'unnamed' is what a controller calls a run that nobody has named"):
        WeightManager("m", run_id="unnamed").start()


@pytest.mark.parametrize(
    "advertise", ["trainer-0:8765", "10.0.0.5:8765", "10.0.0.500", "http://trainer-0", "[::1]", ""]
)
def test_an_agent_advertises_no_more_than_a_host(advertise: str) -> None:
    """Seen red: a port was taken, and receivers were told http://[trainer-0:8765]:8765, which none of them reads."""
    with pytest.raises(ConfigError, match="a host name or an address alone, without a port"):
        WeightManager("m", advertise=advertise)


@pytest.mark.parametrize("advertise", ["trainer-0", "trainer_0.cluster.local", "10.0.0.5", "fd00::5", "fe80::1%eth0"])
def test_an_agent_advertises_a_host_of_any_kind(advertise: str) -> None:
    WeightManager("m", advertise=advertise).close()


@pytest.mark.parametrize(
    ("what", "why"), [("name", "ConfigError: run_id"), ("memory", "StateError: .*Read-only file system")]
)
def test_what_one_rank_finds_before_the_first_agreement_is_told_to_all(what: str, why: str) -> None:
    """Seen red: that rank raised, once untyped, and the others waited for it, and then said that it was gone."""
    for said in run_ranks(_one_can_not, 2, what):
        assert re.match(why, said)


def _no_text(rank: int, world_size: int) -> str:
    return outcome(WeightManager("m", run_id=uuid.UUID(int=7), timeout_s=20.0))  # type: ignore[arg-type]


def test_a_run_id_that_is_no_text_is_refused_on_every_rank() -> None:
    """Seen red: TypeError, from `json`."""
    for said in run_ranks(_no_text, 2):
        assert said.startswith("ConfigError: "), said


def _slow_agent(rank: int, world_size: int) -> str:
    ready = AgentRun.ready

    def slow(run: AgentRun, timeout_s: float) -> Any:
        run._closed.wait(12.0)
        return ready(run, timeout_s)

    AgentRun.ready = slow  # type: ignore[method-assign]
    return outcome(WeightManager("m", timeout_s=9.0))


def test_an_agent_may_take_longer_to_start_than_ranks_wait_for_each_other() -> None:
    """Seen red: the other rank took rank 0, which waited for its agent, for one that is gone."""
    assert run_ranks(_slow_agent, 2) == ["started", "started"]


def _interrupted(rank: int, world_size: int) -> list[bool]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pids: list[int] = []

    def interrupts(run: AgentRun, timeout_s: float) -> Any:
        pids.append(run.pid)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        run._closed.wait(60.0)
        raise EngineUnreachableError("it was closed")

    AgentRun.ready = interrupts  # type: ignore[method-assign]
    manager = WeightManager("m")
    with pytest.raises(KeyboardInterrupt):
        manager.start()
    there = [Path(f"/proc/{pid}").exists() for pid in pids]
    with pytest.raises(StateError, match="closed"):
        manager.offload({}, 1)
    return there


def test_ctrl_c_while_the_agent_starts_leaves_no_agent() -> None:
    """Seen red: the agent and its ports stayed, and the next call made another one."""
    assert run_ranks(_interrupted, 1) == [[False]]
