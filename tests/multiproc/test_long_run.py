"""Memory in the long run: trainer, agent, rollout service and controller keep nothing of each version for ever.

What Python allocates is traced. What a process keeps of its past within fixed bytes is made small here, so that it is
full before the look begins. The long form looks at what the processes take of the machine, too.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.multiproc.pull_kit import wait_until
from tests.multiproc.test_pull_memory import anonymous_bytes
from weightsync.clients.controller import ControllerClient
from weightsync.clients.host import RolloutClient
from weightsync.codec import delta, model_digest
from weightsync.control import controller, history
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.control.web import history as plots
from weightsync.engine import embedded as engine
from weightsync.engine import worker
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.host import served_versions, service
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.load.module import ModuleWeightLoader
from weightsync.load.patching import kernels as patch_kernels
from weightsync.memory import LeaseReader, ServingLease
from weightsync.observe import Recorder
from weightsync.trainer import publisher as manager
from weightsync.trainer.publisher import WeightManager
from weightsync.types.service import NotifyRequest

MIB = 1 << 20
PER_VERSION = 64
"""Bytes: less than one string, dict entry or record of each version."""
CONSTANT = 16 << 10
"""Bytes that come and go: a table that doubles, a thread that ends later."""
SERVED_S = 30.0
PAST_BYTES = 8 << 10
PAST = 16
"""Entries of histories that have a number of them."""
WARM = 40
"""Versions until histories with a number of entries are full."""
LOOK = 30
BETWEEN = 5
"""Versions between two moments of a look."""

Step = Callable[[int], None]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(1024))


class World:
    """All of one model, in this process but for the agent."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, *, fleet: bool) -> None:
        self.trained = {"weight": torch.zeros(1024)}
        self.manager = WeightManager("actor")
        stack.callback(self.manager.close)
        self.manager.start()
        self.recorders: list[Recorder] = [self.manager.recorder]
        self.controller: WeightSyncController | None = None
        if fleet:
            lease, pool = ServingLease(str(folder / "lease")), RolloutPool(lease_s=3.0)
            self.controller = WeightSyncController(
                {"sync_mode": "fully-async"}, FleetMethod(pool), model_tags=("actor",)
            )
            stack.callback(self.controller.close)
            server = ControllerServer(self.controller, pool)
            url = server.start()
            stack.callback(server.close)
            self.client = ControllerClient(url)
            stack.callback(self.client.close)
            serves = EmbeddedEngine.of(ModuleWeightLoader(Model()), model_id="actor", lease=LeaseReader(lease.path))
            config = RolloutConfig(controller=url, lease=lease)
            self.recorders.append(self.controller.recorder)
        else:
            serves = EmbeddedEngine.of(ModuleWeightLoader(Model()), model_id="actor")
            config = RolloutConfig(senders=(self.manager.endpoint,))
        self.service = RolloutService({"actor": serves}, config)
        self.host = RolloutClient(self.service.start())
        stack.callback(self.service.close)
        stack.callback(self.host.close)
        self.recorders.append(self.service.recorder)
        if fleet:
            wait_until(lambda: [each.state for each in self.client.status().instances] == ["live"], "it is live")

    def step(self, version: int) -> None:
        """A version, from the trainer to the engine."""
        self.trained["weight"].fill_(float(version))
        if not self.manager.offload(self.trained.items(), version).published:
            return  # a reader was late, as on a busy machine
        self.manager.wait_published(version, timeout_s=SERVED_S)
        run_id, endpoint = self.manager.run_id, self.manager.endpoint
        if self.controller is None:
            notice = NotifyRequest(
                run_id=run_id, model_id="actor", version=version, sender_endpoint=endpoint, wait_s=SERVED_S
            )
            self.host.notify_version(notice)
        else:
            self.client.notify_version(run_id, "actor", version, endpoint)
            assert self.controller.wait_version(run_id, "actor", version, timeout_s=SERVED_S)


@pytest.fixture(params=["service", "fleet"])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for load in (model_digest.warm_up, delta.warm_up, patch_kernels):
        load()  # where no cache has them, a thread would compile them, and hold megabytes within the look
    for module in (controller, manager, service, engine, worker):
        monkeypatch.setattr(module, "LONG_RUN_BYTES", PAST_BYTES)
    for module, name in ((served_versions, "_MAX_PROVED"), (history, "_NUM_RECORDS"), (plots, "_MAX_VERSIONS")):
        monkeypatch.setattr(module, name, PAST)
    with contextlib.ExitStack() as stack:
        yield World(stack, tmp_path, fleet=request.param == "fleet")


def left_behind(step: Step, first: int, num_versions: int, warm: int) -> int:
    """Bytes that `num_versions` versions have left in this process, after `warm` that fill what is bounded.

    Compares the least that was traced in two looks of `LOOK` versions, which begin `num_versions` apart. A thread or a
    connection that lives at one moment of a look does not count. What versions leave is there at each moment.
    """
    versions = itertools.count(first)

    def advance(num: int) -> None:
        for version in itertools.islice(versions, num):
            step(version)

    def look() -> int:
        """The least that was traced at some moments in `LOOK` versions from now."""
        least = traced_bytes()
        for _ in range(LOOK // BETWEEN):
            advance(BETWEEN)
            least = min(least, traced_bytes())
        return least

    tracemalloc.start(1)
    try:
        advance(warm)
        before = look()
        advance(num_versions - LOOK)
        return look() - before
    finally:
        tracemalloc.stop()


def traced_bytes() -> int:
    """What is held now, without what Python's cache of attributes holds: up to 4,096 names, some more each version."""
    gc.collect()
    sys._clear_type_cache()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.alone  # another test's library may have left a thread that allocates (Tinker's heartbeat)
@pytest.mark.timeout(300)
def test_versions_leave_nothing_behind(world: World) -> None:
    threads = threading.active_count()
    left = left_behind(world.step, 1, 60, WARM)
    assert all(recorder.num_dropped for recorder in world.recorders), "the past was full"
    assert left <= CONSTANT + 60 * PER_VERSION, f"{left / 60:.0f} bytes a version"
    assert threading.active_count() <= threads + 4, "nor does a version leave a thread"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_thousand_versions(world: World) -> None:
    num_versions = 20_000 if world.controller is None else 4_000
    pids = (os.getpid(), world.manager.agent_pid or 0)
    before: list[int] = []
    for version in range(1, num_versions):
        world.step(version)
        if version == num_versions // 4:
            gc.collect()
            before = [anonymous_bytes(pid) for pid in pids]
    gc.collect()
    after = [anonymous_bytes(pid) for pid in pids]
    logging.getLogger(__name__).warning(
        "%d versions: %s bytes after a quarter, %s at the end", num_versions, before, after
    )
    assert all(late - early <= 4 * MIB for early, late in zip(before, after, strict=True)), (before, after)
    left = left_behind(world.step, num_versions, 500, WARM)
    assert left <= CONSTANT + 500 * PER_VERSION, f"{left / 500:.0f} bytes a version"
