"""A forked child of a process that publishes, pulls or serves: it can use nothing of its parent's. Whatever it does,
the parent's publication, ports and leases stay what they were."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import torch

from tests.multiproc.pull_kit import wait_until
from tests.multiproc.test_pull_attacks import check_bytes
from tests.standins.processes import children, free_port
from weightsync import EmbeddedEngine, ModuleWeightLoader
from weightsync.codec import delta, model_digest
from weightsync.engine.server import EngineServer
from weightsync.errors import StateError
from weightsync.host.puller import Puller
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.host.staging import Staging
from weightsync.memory import Lock, Segment
from weightsync.memory.serving import ServingLease
from weightsync.trainer.publisher import WeightManager
from weightsync.trainer.sink_process import SinkProcess
from weightsync.transfer.peer_server import PeerServer
from weightsync.types import Deadline
from weightsync.types.closing import Closing
from weightsync.types.process import of_one_process
from weightsync.types.sink import SinkConfig
from weightsync.types.transfer_messages import Transport

SERVED = "m"
FORKS: set[int] = set()
"""Forks that this process had."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.zeros(100_000))


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((100_000,), float(version))}


def published(manager: WeightManager, version: int) -> None:
    assert manager.offload(weights(version).items(), version).published
    manager.wait_published(version, timeout_s=60)


def is_pulled(manager: WeightManager, version: int) -> None:
    with (
        contextlib.closing(
            Puller(manager.endpoint, SERVED, receiver_id="r", transport=Transport.TCP, mode="full")
        ) as puller,
        puller.pull(deadline=Deadline(30)) as got,
    ):
        assert got.version.number == version
        check_bytes(got, weights(version))


def in_a_fork(does: Callable[[], Any], *, ends: Callable[[], Any] = lambda: os._exit(0)) -> int:
    """The exit status of a forked child; 13 where it raised."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            does()
        except BaseException:
            traceback.print_exc()
            os._exit(13)
        ends()
    FORKS.add(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def shm() -> set[str]:
    """What lies in shared memory of this process, of its children, and of the forks that it had."""
    family = {os.getpid(), *FORKS, *(child.pid for child in psutil.Process().children(recursive=True))}
    return {name for name in os.listdir("/dev/shm") if name.startswith(tuple(f"weightsync-{pid}-" for pid in family))}


def refuses_everything(this: Any) -> None:
    """Each public method and property but those that close it."""
    names = [name for name in dir(type(this)) if not name.startswith("_")]
    static = [name for name in names if isinstance(vars(type(this)).get(name), staticmethod | classmethod)]
    checked = 0
    for name in sorted(set(names) - set(static) - {"close", "remove"}):
        try:
            found = getattr(this, name)
            if callable(found):
                found()
        except StateError as error:
            checked += f"this {type(this).__name__} belongs to process {os.getppid()}" in str(error)
        else:
            raise AssertionError(f"{type(this).__name__}.{name} does as if it were its parent's")
    assert checked == len(set(names) - set(static) - {"close", "remove"}) > 0


def publisher_forks() -> None:
    torch.set_num_threads(1)
    with WeightManager(SERVED) as manager:
        for version in (1, 2):
            published(manager, version)
        there, agent = shm(), manager.agent_pid

        def offloads() -> None:
            for version in (100, 200):
                with pytest.raises(StateError, match="forked child"):
                    manager.offload(weights(version).items(), version)

        def raises_out_of_the_block() -> None:
            with contextlib.suppress(KeyError), contextlib.ExitStack() as stack:
                stack.push(manager)
                raise KeyError("its own")

        assert in_a_fork(offloads) == 0
        assert in_a_fork(lambda: refuses_everything(manager)) == 0
        assert in_a_fork(lambda: refuses_everything(manager._agent)) == 0
        assert in_a_fork(manager.close) == 0
        assert in_a_fork(raises_out_of_the_block) == 0
        assert in_a_fork(gc.collect, ends=lambda: sys.exit(7)) == 7
        assert (shm(), manager.agent_pid) == (there, agent)
        is_pulled(manager, 2)
        published(manager, 3)
        is_pulled(manager, 3)
        os.kill(agent or 0, 0)
    assert not there & set(os.listdir("/dev/shm"))


def server_forks(lease_path: str) -> None:
    torch.set_num_threads(1)
    delta.warm_up()  # a child that is forked while LLVM compiles in another thread can't end: LLVM aborts it
    model_digest.warm_up()
    with WeightManager(SERVED) as manager, ServingLease(lease_path) as lease, contextlib.ExitStack() as stack:
        published(manager, 1)
        engine = EmbeddedEngine.of(ModuleWeightLoader(Model()), engine_id="e")
        server = EngineServer(engine)
        stack.callback(server.close)
        server.start()
        service = RolloutService({SERVED: engine}, RolloutConfig(senders=(manager.endpoint,)))
        stack.callback(service.close)
        service.start()
        puller = Puller(manager.endpoint, SERVED, receiver_id="r", transport=Transport.TCP, mode="full")
        stack.callback(puller.close)
        puller.pull(deadline=Deadline(30)).release()
        staging = Staging()
        stack.callback(staging.close)
        lease.renew(lease_until := 2**40)
        wait_until(lambda: service.status().models[SERVED].version == 1, "it serves")
        owned = (engine, server, service, puller, staging, lease)
        there = shm()

        def uses() -> None:
            for each in owned:
                refuses_everything(each)
            for each in owned:
                each.close()
            lease.remove()

        assert in_a_fork(uses) == 0
        assert in_a_fork(gc.collect, ends=lambda: sys.exit(7)) == 7
        assert shm() == there
        assert lease.left_s > lease_until / 2
        assert os.path.exists(lease_path)
        published(manager, 2)
        puller.pull(deadline=Deadline(30)).release()
        service.register_sender(SERVED, manager.endpoint)
        with engine.generation() as version:
            assert version is not None


def closing_forks() -> None:
    @of_one_process
    class Owned(Closing):
        def __init__(self) -> None:
            self.num_closed = 0

        def close(self) -> None:
            self.num_closed += 1

    owned = Owned()

    def leaves() -> None:
        with pytest.raises(StateError, match="belongs to process"):
            owned.__enter__()
        owned.__exit__(None, None, None)
        assert owned.num_closed == 0

    assert in_a_fork(leaves) == 0
    with owned as same:
        assert same is owned
    assert owned.num_closed == 1


def dies_and_leaves_a_fork(lease_path: str, conn: Any) -> None:
    server = EngineServer(EmbeddedEngine.of(ModuleWeightLoader(Model())), port=free_port())
    url, lease = server.start(), ServingLease(lease_path)
    relay = PeerServer("127.0.0.1", free_port())
    relay.start()
    begun, begins = os.pipe()
    if (child := os.fork()) == 0:
        os.write(begins, b"x")
        signal.pause()
    os.read(begun, 1)  # what a fork closes it closes as it begins, which a busy machine may put off
    conn.send((urlsplit(url).port, relay.port, child, lease.left_s))
    signal.pause()


def stores_and_leaves_a_fork(place: str, conn: Any) -> None:
    config = SinkConfig(store=f"file://{place}", model_id=SERVED, run_id="r", agents=("http://127.0.0.1:1",))
    sink = SinkProcess(config)
    sink.start(wait_s=60.0)
    assert sink.wait_claimed(110.0)
    assert sink._process is not None
    assert sink._process.stdin is not None
    writer, pipe = sink.pid, sink._process.stdin.fileno()
    if (child := os.fork()) == 0:
        signal.alarm(120)
        os.closerange(3, pipe)
        os.closerange(pipe + 1, 1024)
        signal.pause()
    conn.send((writer, child))
    signal.pause()


def fork_forks(lease_path: str, taken_again: bool) -> None:
    """Of a parent with a lease: a child takes a lock, and forks a child in which that one has to end, and nothing else.

    Args:
        lease_path: of the parent's.
        taken_again: whether the child gives the number of the lease's descriptor to a file of its own.
    """
    with Segment(4096) as segment:
        lease = ServingLease(lease_path)

        def locks_and_forks() -> None:
            with open(os.devnull) as null:
                os.dup2(null.fileno(), lease._file)
            lock = Lock(segment.name, None)
            if not taken_again:
                os.close(lease._file)

            def looks() -> None:
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.fstat(lock.fileno())
                if taken_again:
                    os.fstat(lease._file)

            assert in_a_fork(looks) == 0

        assert in_a_fork(locks_and_forks) == 0
        lease.remove()


def run(call: str) -> None:
    """In a process of its own, which forks, and whose forks end as Python programs end."""
    script = f"from {__name__} import *; {call}"
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stderr


def test_a_forked_child_does_nothing_to_a_publication() -> None:
    """Seen to fail: `offload` in a child wrote its parent's segment, and told its parent's agent to serve that."""
    run("publisher_forks()")


def test_a_forked_child_does_nothing_to_what_serves(tmp_path: Path) -> None:
    run(f"server_forks({str(tmp_path / 'lease')!r})")


def test_a_forked_child_enters_no_block_of_its_parents() -> None:
    """Whose `with` a class has from `Closing`. Seen red: it was entered."""
    run("closing_forks()")


def test_a_fork_that_outlives_its_parent_holds_no_port_and_no_lease(tmp_path: Path) -> None:
    """Seen to fail: "another process writes the lease file", and an address in use, for a successor. Seen red: of the
    port by which a host relays."""
    path = str(tmp_path / "lease")
    with children() as start:
        parent = start(dies_and_leaves_a_fork, path, talk=True)
        *ports, fork, _ = parent.recv(60)
        try:
            parent.kill()
            os.kill(fork, 0)
            with ServingLease(path):
                pass
            for port in ports:
                with socket.socket() as listener:
                    listener.bind(("127.0.0.1", port))
                    listener.listen()
        finally:
            os.kill(fork, signal.SIGKILL)


def test_a_stores_writer_ends_with_its_trainer_though_a_fork_has_its_pipe(tmp_path: Path) -> None:
    """Seen red: it ran on and renewed its claim, so the trainer that came next was refused for good."""
    with children() as start:
        parent = start(stores_and_leaves_a_fork, str(tmp_path / "run"), talk=True)
        writer, fork = parent.recv(115)
        try:
            parent.kill()
            wait_until(lambda: not os.path.exists(f"/proc/{writer}/exe"), "the writer ends")
            os.kill(fork, 0)
        finally:
            for pid in (writer, fork):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("taken_again", [False, True])
def test_a_fork_of_a_fork_closes_what_its_parent_has_and_nothing_else(tmp_path: Path, taken_again: bool) -> None:
    """Seen red: what the grandparent had was closed once more, by a number that was nobody's (so the lock stayed), or
    another file's by then."""
    run(f"fork_forks({str(tmp_path / 'lease')!r}, {taken_again})")
