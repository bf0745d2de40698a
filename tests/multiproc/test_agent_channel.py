"""The channel between a trainer and its agent: kill -9 of either in each phase, strangers, words that come in time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
import zmq

from tests.multiproc.pull_hook import Hook
from tests.multiproc.pull_kit import RefusedError, Trainer, shm_of, wait_until
from tests.standins.processes import Child, ChildFailedError, children, free_port
from weightsync.errors import ConfigError
from weightsync.memory import reclaim_dead
from weightsync.observe import now_s
from weightsync.trainer.publisher import WeightManager
from weightsync.types import PhaseRecord
from weightsync.types.agent_messages import Ready

Start = Callable[..., Child]
AGENT = {
    "connects": ("weightsync.net.host_channel:HostChannel.__init__", False),
    "has connected": ("weightsync.net.host_channel:HostChannel.__init__", True),
    "starts": ("weightsync.agent.api:TransferAgent.start", False),
    "tells that it has started": ("weightsync.agent.main:_Outbox.send", False),
    "waits for orders": ("weightsync.agent.main:_obey", False),
    "takes an order": ("weightsync.agent.main:_publish", False),
    "has taken an order": ("weightsync.agent.main:_publish", True),
}
TRAINER = {
    "has made the folder": "weightsync.memory:PrivateFolder.__init__",
    "has started the agent": "weightsync.trainer.agent_run:started_beside",
    "listens": "weightsync.net.host_channel:HostChannel.__init__",
    "has the agent's word": "weightsync.trainer.agent_run:AgentRun.ready",
    "has told it of a version": "weightsync.trainer.agent_run:AgentRun.publish",
}


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as start:
        yield start


def folders_of(pid: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"weightsync-ipc-{pid}-*"))


def agents_of(tmp_path: Path) -> list[int]:
    """Agents that were started with a hook in this folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(tmp_path) in process.environ().get("PULL_HOOK", "") and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.mark.parametrize("phase", AGENT)
def test_an_agent_is_killed_and_the_next_one_serves(start: Start, tmp_path: Path, phase: str) -> None:
    at, after = AGENT[phase]
    hook = Hook(at=at, do="kill", path=str(tmp_path / "agent"), after=after)
    trainer = Trainer(start, 1, agent_hooks=[hook])
    trainer.publish(0)
    hook.set()
    os.kill(trainer.agent_pid, 9)
    hook.reached()
    trainer.publish(1)
    assert trainer.ask("agent") not in (trainer.agent_pid, None)
    assert folders_of(trainer.pid) == []


def test_while_no_agent_runs_its_ports_are_nobody_elses(start: Start, tmp_path: Path) -> None:
    """Any connection of this host may be given a free port of that range, and the next agent could not listen then."""
    hook = Hook(at="weightsync.agent.api:TransferAgent.__init__", do="wait", path=str(tmp_path / "agent"))
    trainer = Trainer(start, 1, agent_hooks=[hook])
    sockets = psutil.Process(trainer.agent_pid).net_connections(kind="tcp")
    ports = [each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN]
    assert len(ports) == 2, "of HTTP, and of blocks"
    hook.set()
    os.kill(trainer.agent_pid, 9)
    hook.reached()
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):  # at once, and not when a time is over
            socket.create_connection(("127.0.0.1", port))
    hook.check_cancelled()
    trainer.publish(0)


@pytest.mark.parametrize("phase", ["connects", "starts"])
def test_the_first_agent_is_killed_and_its_trainer_is_told_at_once(start: Start, tmp_path: Path, phase: str) -> None:
    at, after = AGENT[phase]
    hook = Hook(at=at, do="kill", path=str(tmp_path / "agent"), after=after).set()
    began_s = time.monotonic()
    with pytest.raises(RefusedError, match="ended before it could serve") as caught:
        Trainer(start, 1, agent_hooks=[hook])
    assert caught.value.kind == "EngineUnreachableError"
    assert time.monotonic() - began_s < 40.0, "and not when its time to start is over"


@pytest.mark.parametrize("phase", TRAINER)
def test_a_trainer_is_killed_and_nothing_is_left(start: Start, tmp_path: Path, phase: str) -> None:
    tells = phase == "has told it of a version"
    hook = Hook(at=TRAINER[phase], do="kill", path=str(tmp_path / "trainer"), after=True).set()
    idle = Hook(at="weightsync.agent.main:_obey", do="wait", path=str(tmp_path / "never"))
    trainer = Trainer(start, 1 if tells else None, hook=hook, agent_hooks=[idle])
    if tells:
        trainer.tell("publish", 0)
    else:
        trainer.tell("start", 1, {})
    with pytest.raises(ChildFailedError):
        trainer.answer()
    hook.reached()
    wait_until(lambda: not agents_of(tmp_path), "its agent has ended")
    if phase == "has made the folder":  # there was no agent yet: whoever makes a segment next removes it
        reclaim_dead()
    wait_until(lambda: not folders_of(trainer.pid), "its folder has gone")
    wait_until(lambda: not shm_of(trainer.pid), "its segments have gone")


def test_a_stranger_of_the_same_user_says_nothing_to_a_trainer(start: Start, tmp_path: Path) -> None:
    """It finds the socket while the agent starts, before the agent has connected. Another user can't even look."""
    hook = Hook(at="weightsync.net.host_channel:HostChannel.__init__", do="wait", path=str(tmp_path / "agent")).set()
    trainer = Trainer(start, None, agent_hooks=[hook])
    trainer.tell("start", 1, {"guard_s": 0.4})
    hook.reached()
    (path,) = [folder / "agent" for folder in folders_of(trainer.pid)]
    forged = Ready(endpoint="http://127.0.0.1:1", port=1, blocks_port=1, host_nonce="0" * 32)
    with zmq.Context() as context, context.socket(zmq.PAIR) as stranger, socket.socket(socket.AF_UNIX) as raw:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"ipc://{path}")
        stranger.send(msgspec.json.encode(forged))
        raw.settimeout(20)
        raw.connect(str(path))
        with contextlib.suppress(ConnectionError):
            raw.sendall(b"\xff" * 100_000)
            assert raw.recv(1) == b""
        hook.check_cancelled()
        said = trainer.answer()
        assert said["endpoint"] != forged.endpoint
        assert not folders_of(trainer.pid), "from now on nobody finds it"
        trainer.publish(0)


def test_why_an_agent_can_not_start_is_what_its_trainer_raises() -> None:
    port, others = free_port(), set(folders_of(os.getpid()))
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match=f"can't listen on .*:{port}"):
        WeightManager("m", port=port).start()
    assert set(folders_of(os.getpid())) <= others


def test_a_phase_that_can_not_be_told_is_dropped_and_the_agent_lives() -> None:
    """A name of the caller's own: the agent was started again (seen)."""
    with WeightManager("m", agent_timeout_s=1.0) as manager:
        manager.start()
        manager.offload([("w", torch.zeros(3))], 0)
        manager.wait_published(0, timeout_s=30.0)  # one that loads numba may be silent for so long
        pid = manager.agent_pid
        at = now_s()
        for version in range(1, 4):
            manager.recorder.add(PhaseRecord(name="\ud800", start_s=at, end_s=at, track="mine"))
            wait_until(lambda: not manager._agent._phases, "it was told, or not")
            manager.offload([("w", torch.full((3,), float(version)))], version)
            manager.wait_published(version, timeout_s=30.0)
        assert manager.agent_pid == pid


EARLY = """
import os, sys, threading
import psutil
from weightsync import WeightManager
from weightsync.trainer import agent_run
if sys.argv[1] == "before a word":  # it is killed between the start of the process and the line that it writes
    agent_run.AgentStart = lambda **_: threading.Event().wait()
threading.Thread(target=WeightManager("m").start, daemon=True).start()
while not (found := psutil.Process().children()):
    pass
child = os.fork()  # it keeps the agent's input open
if child == 0:
    threading.Event().wait()
print(found[0].pid, child, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("killed", ["before a word", "at any time"])
def test_an_agent_that_is_still_starting_ends_with_its_trainer_though_a_forked_child_lives(killed: str) -> None:
    """It took whoever was its parent by then for its trainer, and waited for ever for a line (both seen)."""
    with subprocess.Popen([sys.executable, "-c", EARLY, killed], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        agent, child = map(int, trainer.stdout.readline().split())
        try:
            wait_until(lambda: not is_alive(agent), "the agent has ended", 60.0)  # it imports torch first
        finally:
            os.kill(child, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
