"""The fleet: real services with leases, sets of models, kills, stops and joins; the record is read afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multiproc.fleet_kit import MODELS, FleetService, Trainers, read_records
from tests.multiproc.pull_kit import wait_until
from weightsync.clients.controller import ControllerClient
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.testing.processes import Child, children

Start = Callable[..., Child]
LEASE_S = 1.5


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


class Fleet:
    """A controller of a pool, as a user sets it up."""

    def __init__(
        self, *, sets: tuple[tuple[str, ...], ...] = (MODELS,), policy: str = "each", **options: object
    ) -> None:
        self.pool = RolloutPool(lease_s=LEASE_S)
        self.method = FleetMethod(
            self.pool, sets=sets, commit_policy=policy, barrier_timeout_s=20.0, prepare_timeout_s=8.0,
            commit_timeout_s=5.0, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        self.controller = WeightSyncController(
            {"sync_mode": "fully-async"}, self.method, model_tags=MODELS, retries_s=(0.2, 0.5, 1.0, 2.0)
        )
        self.server = ControllerServer(self.controller, self.pool)
        self.server_url = self.server.start()
        self.client = ControllerClient(self.server_url)

    def states(self) -> dict[str, str]:
        return {each.instance_id: each.state for each in self.client.status().instances}

    def wait_states(self, expected: dict[str, str]) -> None:
        wait_until(lambda: self.states() == expected, f"states {expected}, not {self.states()}", 20.0)

    def close(self) -> None:
        self.client.close()
        self.server.close()
        self.controller.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    found = Fleet()
    yield found
    found.close()


def step(fleet: Fleet, trainers: Trainers, version: int) -> None:
    """Both trainers publish, tell, and wait at the gate."""
    for model in MODELS:
        trainers.publish(model, version)
        fleet.client.notify_version(trainers.run_of(model), model, version, trainers.endpoints[model])
    for model in MODELS:
        assert fleet.controller.wait_version(trainers.run_of(model), model, version, timeout_s=30.0)


def test_services_join_follow_and_catch_up(start: Start, fleet: Fleet, tmp_path: Path) -> None:
    trainers = Trainers(start)
    one, two = (FleetService(start, name, fleet.server_url, tmp_path) for name in ("one", "two"))
    fleet.wait_states({"one": "live", "two": "live"})
    for version in (1, 2, 3):
        step(fleet, trainers, version)
        for service in (one, two):
            assert service.ask("weights") == dict.fromkeys(MODELS, float(version))
    three = FleetService(start, "three", fleet.server_url, tmp_path)
    fleet.wait_states({"one": "live", "two": "live", "three": "live"})
    assert three.ask("weights") == dict.fromkeys(MODELS, 3.0)
    assert {answer.version for answer in read_records(tmp_path) if answer.instance == "three"} <= {3}
    step(fleet, trainers, 4)
    assert three.ask("weights") == dict.fromkeys(MODELS, 4.0)
