"""Every method under the call as document 5 has it: `train_worker_notify_weight_update(worker_name, model_tag)`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.pull_kit import wait_until
from tests.standins.sglang_server import SGLangRouterServer, SGLangServer
from tests.unit.control.methods.test_tinker import Holder as TinkerHolder
from tests.unit.control.methods.test_weaver import Holder as WeaverHolder
from tests.unit.handles.sglang_kit import weights, write_checkpoint
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.methods.folder import VersionFolder
from weightsync.control.methods.mock import MockMethod
from weightsync.control.pool import RolloutPool
from weightsync.types import Version
from weightsync.types.control import UNNAMED

LONG_S = 20.0
NUM = 4
MODES = {"sync": [1, 2, 3, 4], "batch-async": [0, 2, 2, 4], "fully-async": None}
"""By mode: what rollout serves after each step; None: it follows."""
Serves = Callable[[], Any]


class Place:
    """A controller of a configuration, and what its method's engines serve."""

    def __init__(self, tmp_path: Path, opened: contextlib.ExitStack) -> None:
        self._start, self._root, self._opened = write_checkpoint(tmp_path / "start", 0), tmp_path / "versions", opened
        self.publish: Callable[[int], object] = lambda number: None

    def controller(self, method: str, mode: str, **keys: Any) -> WeightSyncController:
        config = {"sync_method": method, "sync_mode": mode, "fleet": {"retries_s": []}, **keys}
        return self._opened.enter_context(contextlib.closing(WeightSyncController(config)))

    def mock(self, mode: str) -> tuple[WeightSyncController, Serves, object]:
        controller = self.controller("mock", mode)
        method = controller.method
        assert isinstance(method, MockMethod)
        return controller, lambda: method.served("default"), Version(run_id=UNNAMED, number=NUM)

    def tinker(self, mode: str) -> tuple[WeightSyncController, Serves, object]:
        controller, holder = self.controller("tinker", mode), TinkerHolder()
        controller.set_tinker_service_holder(holder)
        return controller, lambda: (holder.saves, holder.used[-1][0]), (
            [f"{UNNAMED}-v{number}" for number in range(1, NUM + 1)], f"tinker://m/{UNNAMED}-v{NUM}",
        )  # fmt: skip

    def weaver(self, mode: str) -> tuple[WeightSyncController, Serves, object]:
        controller, holder = self.controller("weaver", mode), WeaverHolder()
        controller.set_weaver_service_holder(holder)
        return controller, lambda: holder.served.path, f"weaver://default/{UNNAMED}/{NUM}"

    def disk(self, mode: str, method: str = "disk", num: int = 2) -> tuple[WeightSyncController, Serves, object]:
        servers = [SGLangServer(self._start) for _ in range(num)]
        urls = [self._started(server) for server in servers]
        service = {
            "base_url": self._started(SGLangRouterServer(urls)) if method == "disk" else urls[0],
            "backend": "sglang", "model": "m",
        }  # fmt: skip
        keys = {"sync_weight_path": str(self._root), "inference_service": service}
        folder = VersionFolder(self._root)
        self.publish = lambda number: folder.publish(
            "default", Version(run_id=UNNAMED, number=number), lambda into: write_checkpoint(into, number)
        )
        return self.controller(method, mode, **keys), lambda: [
            (server.weight_version, server.paused, {name: each.tobytes() for name, each in server.weights.items()})
            for server in servers
        ], [(f"{UNNAMED}/{NUM}", None, weights(NUM))] * num  # fmt: skip

    def network(self, mode: str) -> tuple[WeightSyncController, Serves, object]:
        return self.disk(mode, "network", 1)

    def _started(self, server: SGLangServer | SGLangRouterServer) -> str:
        server.start()
        self._opened.callback(server.close)
        return server.url


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with contextlib.ExitStack() as opened:
        yield Place(tmp_path, opened)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["mock", "disk", "network", "tinker", "weaver"])
def test_rollout_reaches_what_was_trained(place: Place, method: str, mode: str) -> None:
    """Seen red: `tinker` was told of no version, saved none, and synced in no mode but `sync`."""
    controller, serves, expected = getattr(place, method)(mode)
    state, served = lambda: controller.rollout_service_state("default"), []
    for number in range(1, NUM + 1):
        controller.trajectory_pool_notify_batch_ready("default")
        place.publish(number)
        controller.train_worker_notify_weight_update("worker-0", "default")
        assert state().train_model_version == number
        served.append(state().rollout_model_version)
    wait_until(lambda: state().rollout_model_version == NUM or state().last_error, "it is served", LONG_S)
    assert (state().rollout_model_version, state().last_error) == (NUM, None)
    assert MODES[mode] in (None, served)
    assert serves() == expected


class Remembers(MockMethod):
    """Remembers of what it was told before each sync."""

    @property
    def told(self) -> list[str]:
        return [str(call.version) for call in self.asked if call.call == "trained"]


@pytest.mark.parametrize(("run_id", "told_as"), [(None, UNNAMED), ("run", "run")])
def test_a_method_is_told_when_the_trained_version_moves(run_id: str | None, told_as: str) -> None:
    """By the first of two workers of a step; the other one moves nothing. Seen red: it was told of none."""
    method = Remembers()
    with contextlib.closing(WeightSyncController({"sync_mode": "sync"}, method)) as controller:
        for number in (1, 2):
            for worker in ("worker-0", "worker-1"):
                controller.train_worker_notify_weight_update(worker, "default", run_id)
                assert method.told == [f"{told_as}/{each}" for each in range(1, number + 1)]
                assert method.served("default") == Version(run_id=told_as, number=number)


def test_a_run_that_was_named_once_keeps_its_name() -> None:
    """What the method is told and what it is asked for agree."""
    method = Remembers()
    with contextlib.closing(WeightSyncController({"sync_mode": "sync"}, method)) as controller:
        controller.train_worker_notify_weight_update("worker", "default", "run", 7)
        controller.train_worker_notify_weight_update("worker", "default")
        controller.train_worker_notify_weight_update("worker", "default", version=12)
        controller.train_worker_notify_weight_update("other", "default", version=11)
    assert method.told == ["run/7", "run/8", "run/12"]
    assert method.served("default") == Version(run_id="run", number=12)


def test_the_barrier_of_a_fleet_notes_no_run_without_a_name() -> None:
    """Seen red: an agent was asked for a run of that name."""
    method = FleetMethod(RolloutPool(models=("actor",)))
    method.trained("actor", Version(run_id=UNNAMED, number=1), "http://agent:1")
    assert method.barrier.published() == {}
    method.trained("actor", Version(run_id="run", number=1), "http://agent:1")
    assert method.barrier.published()["actor"].of == Version(run_id="run", number=1)
