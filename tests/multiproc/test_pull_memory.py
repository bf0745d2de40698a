"""What a version costs in memory beside live weights: on the trainer's host, and on a receiver's.

/dev/shm is counted by file, and a process's own memory by what no file stands for (RssAnon), both again and again while
it works. So a page of /dev/shm that several processes map is counted once.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiproc.pull_kit import wait_until
from tests.standins.processes import children
from weightsync import EmbeddedEngine, ModuleWeightLoader
from weightsync.clients.agent import AgentClient
from weightsync.clients.host import RolloutClient
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.memory import Lock, Reader
from weightsync.trainer.publisher import WeightManager
from weightsync.types.service import NotifyRequest
from weightsync.types.transfer_messages import Transport

MIB = 1 << 20
SLACK = 24 * MIB
"""Threads' stacks, sockets' buffers, what an allocator rounds up."""
CODING = (os.cpu_count() or 1) * 48 * MIB + SLACK
"""What a delta's codec takes beside the blob: for each core a few bytes an element of one unit of 16 MiB."""
SIZES = [pytest.param(256 * MIB, id="256 MiB"), pytest.param(1024 * MIB, id="1 GiB", marks=pytest.mark.soak)]


class Model(torch.nn.Module):
    """So many bytes of bfloat16, in tensors of 16 MiB."""

    def __init__(self, nbytes: int, value: float) -> None:
        super().__init__()
        for index in range(nbytes // (16 * MIB)):
            self.register_buffer(f"t{index}", torch.full((2048, 4096), value + index, dtype=torch.bfloat16))


def segments(*pids: int) -> dict[str, int]:
    """Bytes that each file of these processes takes in /dev/shm."""
    found = {}
    for pid in pids:
        for path in Path("/dev/shm").glob(f"weightsync-{pid}-*"):
            with contextlib.suppress(FileNotFoundError):
                found[path.name] = path.stat().st_blocks * 512
    return found


def anonymous_bytes(pid: int | str) -> int:
    """Of a process: what no file stands for."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    return 0


def newest_of(pid: int, endpoint: str) -> str:
    """The segment that is served now."""
    with contextlib.closing(AgentClient(endpoint)) as client:
        name = client.manifest().publication.sources[0].segment
    assert name in segments(pid)
    return name


class Peak:
    """Looks again and again, from a thread, until its end: the most that processes and their segments took."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._over = threading.Event()
        self.segments_bytes = 0
        self.grown_bytes = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Peak:
        self._before = sum(map(anonymous_bytes, self._pids))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.003):
            self.segments_bytes = max(self.segments_bytes, sum(segments(*self._pids).values()))
            self.grown_bytes = max(self.grown_bytes, sum(map(anonymous_bytes, self._pids)) - self._before)


def trainer(nbytes: int, few: int, conn: Any) -> None:
    """Publishes a version when told so, of which one row in `few` is another than in the one before; 0: all."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # freed blocks go straight back, so that the peak is what is live
    model = Model(nbytes, 0.0)
    with WeightManager("m", run_id="run", guard_s=20.0) as manager:
        manager.start(deltas=bool(few))
        conn.send((manager.endpoint, manager.agent_pid))
        while (version := conn.recv()) is not None:
            with torch.no_grad():
                for tensor in model.buffers():
                    (tensor[version::few] if few else tensor).fill_(float(version))
            report = manager.offload(model.named_buffers(), version)
            if report.published:
                manager.wait_published(version, timeout_s=60)
            conn.send(report.published)


def receiver(nbytes: int, endpoint: str, transport: str, few: int, conn: Any) -> None:
    """A rollout host whose engine loads in place."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    model = Model(nbytes, -1.0)
    engine = EmbeddedEngine.of(ModuleWeightLoader(model, in_place=True))
    service = RolloutService(
        {"m": engine},
        RolloutConfig(senders=(endpoint,), transport=Transport(transport), mode="auto" if few else "full"),
    )
    host = RolloutClient(service.start())
    gc.collect()
    conn.send("ready")
    while (version := conn.recv()) is not None:
        notice = NotifyRequest(run_id="run", model_id="m", version=version, sender_endpoint=endpoint, wait_s=60)
        status = host.notify_version(notice)
        for thread in threading.enumerate():  # numba's code comes beside the first version, and counts with that
            if thread.name == "weightsync-delta-codec":
                thread.join()
        for tensor in model.buffers():
            assert bool(((tensor[version::few] if few else tensor) == float(version)).all())
        conn.send((status.version, str(status.transport), status.num_deltas, status.received_bytes))
    service.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_trainer_holds_two_models_and_a_third_only_under_a_lease(nbytes: int) -> None:
    """Many versions, a lease on one, many more: the third is given back soon after the lease is."""
    with children() as start:
        child = start(trainer, nbytes, 0, talk=True)
        endpoint, agent = child.recv()

        def publish(*versions: int) -> None:
            for version in versions:
                child.conn.send(version)
                assert child.recv() is True

        publish(1)
        whole = nbytes + 64 * 1024
        with Peak(child.pid, agent) as peak:
            publish(2, 3, 4)
        assert nbytes < peak.segments_bytes <= 2 * whole
        assert peak.grown_bytes < SLACK, "the copy goes straight to its place, and the agent reads it there"
        with Lock(newest_of(child.pid, endpoint), Reader.MAPPED):
            with Peak(child.pid, agent) as peak:
                publish(5, 6, 7, 8)
            assert 2 * whole < peak.segments_bytes <= 3 * whole
        publish(9, 10)
        wait_until(lambda: len(segments(child.pid)) == 2, "the third is given back")
        assert sum(segments(child.pid).values()) <= 2 * whole
        child.conn.send(None)
        child.result(30)
        assert not segments(child.pid, agent)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize(
    ("transport", "most", "few"), [("tcp", 1.0, 0), ("shm", 0.0, 0), ("tcp", 1.0, 200), ("tcp", 1.0, 5)]
)
def test_a_receiver_holds_one_model_or_none(nbytes: int, transport: str, most: float, few: int) -> None:
    """Over TCP its staging, which it keeps, and a delta; on the publisher's host nothing, for it loads where the bytes
    lie. The agent holds the delta, and no more than it says. Seen red: where one row in five changes, 8 bytes an
    element were kept for a patch that was too large.
    """
    with children() as start:
        publisher = start(trainer, nbytes, few, talk=True, name="trainer")
        endpoint, agent = publisher.recv()
        rollout = start(receiver, nbytes, endpoint, transport, few, talk=True, name="receiver")
        assert rollout.recv() == "ready"
        warm = False
        for version in (1, 2, 3, 4):
            with Peak(agent) as making:
                publisher.conn.send(version)
                assert publisher.recv() is True
            if few and version > 2:
                assert making.segments_bytes < nbytes // 4, "its budget"
                assert making.grown_bytes < CODING, making.grown_bytes
            with Peak(rollout.pid) as peak:
                rollout.conn.send(version)
                *came, received_bytes = rollout.recv()
                assert came == [version, transport, int(bool(few) and warm)]
            total = peak.segments_bytes + peak.grown_bytes
            assert total >= most * nbytes * (0 if warm else 1), "the measurement sees the staging"
            delta_bytes = CODING + received_bytes if few else SLACK
            assert total <= most * nbytes + (delta_bytes if warm else 6 * SLACK), (
                peak.segments_bytes,
                peak.grown_bytes,
            )
            warm = True  # the first version brings numba's code along
        rollout.conn.send(None)
        rollout.result(30)
        assert not segments(rollout.pid)


def test_the_measurement_sees_memory_that_is_taken_for_a_moment() -> None:
    with Peak(os.getpid()) as peak:
        held = torch.ones(64 * MIB, dtype=torch.uint8)
        end = time.monotonic() + 5
        while peak.grown_bytes < 60 * MIB and time.monotonic() < end:
            threading.Event().wait(0.005)
        del held
    assert peak.grown_bytes > 60 * MIB
