"""A fleet of two real vLLMs whose live weights take changes: all commit a version together, or none does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.engines import vllm_faults
from tests.engines.conftest import Versions
from tests.engines.test_pull_vllm import SYNC_S, publisher_main
from tests.engines.vllm_support import DIFFERENT, NEEDS_VLLM, SAME, START_S, Server, distance, vllm_is_there
from tests.engines.vllm_unpacked import VARIABLE
from tests.standins.processes import Child, children
from weightsync.cli import app
from weightsync.clients.controller import ControllerClient
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.handles.vllm import VllmEngine, VllmHttpApi
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.memory import ServingLease
from weightsync.types.transfer_messages import Transport

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(not vllm_is_there, reason=NEEDS_VLLM)]


@pytest.fixture
def servers(versions: Versions, tmp_path: Path) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        found = []
        for name in ("one", "other"):
            server = Server(versions.checkpoints[0], tmp_path / name, env={VARIABLE: "1"})
            stack.callback(server.stop)
            stack.callback(server.http.close)
            server.start()
            found.append(server)
        for server in found:
            server.wait_until_ready()
        yield found


class Fleet:
    """A trainer, a controller that asks for all, and a service for each server."""

    def __init__(self, stack: contextlib.ExitStack, servers: list[Server], folder: Path, trainer: Child) -> None:
        pool = RolloutPool(lease_s=10.0)
        method = FleetMethod(pool, commit_policy="all", prepare_timeout_s=SYNC_S, commit_timeout_s=SYNC_S)
        controller = WeightSyncController({"sync_mode": "fully-async"}, method, model_tags=("m",), retries_s=())
        stack.callback(controller.close)
        face = ControllerServer(controller, pool)
        url = face.start()
        stack.callback(face.close)
        self.client = ControllerClient(url)
        stack.callback(self.client.close)
        self.trainer = trainer
        self.run_id, self.endpoint = trainer.recv(START_S)
        for number, server in enumerate(servers):
            engine = VllmEngine(VllmHttpApi(server.url), engine_id=f"vllm-{number}", pause_mode="keep")
            lease = ServingLease(str(folder / f"lease-{number}"))
            config = RolloutConfig(
                service_id=f"s{number}", controller=url, lease=lease, transport=Transport.TCP, mode="delta"
            )
            service = RolloutService({"m": engine}, config)
            service.start()
            stack.callback(service.close)

    def publish(self, version: int, *, few: bool) -> None:
        self.trainer.conn.send((version, 1, few))
        assert self.trainer.recv(60) == version
        self.client.notify_version(self.run_id, "m", version, self.endpoint)

    def wait(self, done: Callable[[], bool], *, at_most_s: float = SYNC_S) -> None:
        end = time.monotonic() + at_most_s
        while not done():
            assert time.monotonic() < end, self.client.status()
            time.sleep(0.05)  # between two looks

    @property
    def version(self) -> int | None:
        return self.client.status().models["m"].rollout_model_version


def test_one_that_fails_behind_its_staging_keeps_all_on_the_old_bits(servers: list[Server], tmp_path: Path) -> None:
    """The other one has staged the change as well, and drops it; the next version is served, and proved, by both."""

    def proved() -> bool:  # unknown while a version is staged: services try again what has failed, until a newer one
        return [CliRunner().invoke(app, ["verify", f"vllm+{each.url}"]).exit_code for each in servers] == [0, 0]

    with children() as start, contextlib.ExitStack() as stack:
        fleet = Fleet(stack, servers, tmp_path, start(publisher_main, talk=True, name="publisher"))
        fleet.wait(lambda: [each.state for each in fleet.client.status().instances] == ["live", "live"])
        fleet.publish(1, few=False)
        fleet.wait(lambda: fleet.version == 1)
        old = [each.logprobs() for each in servers]
        vllm_faults.arm(servers[1].folder, {"at": "stage", "do": "raise", "always": True})
        fleet.publish(2, few=True)
        fleet.wait(lambda: "planted at stage" in str(fleet.client.status().models["m"]))
        for server in servers:  # services try again: a version that is staged keeps `verify` from an answer
            vllm_faults.arm(server.folder, {"at": "begin", "do": "raise", "always": True})
        for server, before in zip(servers, old, strict=True):
            assert server.get("/weight_info")["weight_version"] == f"{fleet.run_id}/1"
            assert distance(server.logprobs(), before) <= SAME
        fleet.wait(proved, at_most_s=2 * SYNC_S)  # also the failed one, though it tried it in full too
        for server in servers:
            vllm_faults.disarm(server.folder)
        fleet.publish(3, few=True)
        fleet.wait(lambda: fleet.version == 3)
        for server, before in zip(servers, old, strict=True):
            assert server.get("/weight_info")["weight_version"] == f"{fleet.run_id}/3"
            assert distance(server.logprobs(), before) >= DIFFERENT
        assert distance(servers[0].logprobs(), servers[1].logprobs()) <= SAME
        fleet.wait(proved)
