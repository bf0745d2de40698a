"""The fleet: real services with leases, sets of models, kills, stops and joins; the record is read afterwards."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multiproc.fleet_kit import MODELS, FleetService, Trainers, check_records, read_records
from tests.multiproc.pull_kit import wait_until
from weightsync.clients.controller import ControllerClient
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.testing.processes import Child, children
from weightsync.types.publication import Transport

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


class Chaos:
    """Kills, stops, resumes and starts services anew, by a seed; one instance is left alone."""

    def __init__(self, seed: int, start: Start, fleet: Fleet, folder: Path, names: list[str]) -> None:
        self.random = random.Random(seed)
        self._start, self._fleet, self._folder = start, fleet, folder
        self.services = {name: self._service(name, 0) for name in names}
        self.done: list[str] = []
        self._stopped: set[str] = set()

    def _service(self, name: str, life: int) -> FleetService:
        """As on a host of its own: a stopped process that maps the publisher's memory can't be made to let go."""
        url = self._fleet.server_url
        return FleetService(self._start, name, url, self._folder, life=life, transport=Transport.TCP)

    def act(self) -> None:
        name = self.random.choice(list(self.services)[1:])
        service = self.services[name]
        if name in self._stopped:
            what = "resume"
            self._stopped.remove(name)
            os.kill(service.pid, signal.SIGCONT)
        elif self.random.random() < 0.5:
            what = "stop"
            self._stopped.add(name)
            os.kill(service.pid, signal.SIGSTOP)
        else:
            what = "kill"
            service.child.kill()
            self.services[name] = self._service(name, service.life + 1)
        self.done.append(f"{what} {name}")

    def end(self) -> None:
        for name in self._stopped:
            os.kill(self.services[name].pid, signal.SIGCONT)


def storm(seed: int, start: Start, fleet: Fleet, folder: Path, *, num_services: int, num_versions: int) -> list[str]:
    """So many versions with something done to some service every other one; what was done."""
    trainers = Trainers(start)
    chaos = Chaos(seed, start, fleet, folder, [f"s{index}" for index in range(num_services)])
    fleet.wait_states(dict.fromkeys(chaos.services, "live"))
    gates, offloads_s = [], []
    for version in range(1, num_versions + 1):
        for model in MODELS:
            began_s = time.monotonic()
            trainers.publish(model, version)
            run_id = trainers.run_of(model)
            fleet.client.notify_version(run_id, model, version, trainers.endpoints[model])
            offloads_s.append(time.monotonic() - began_s)
        if chaos.random.random() < 0.5:
            chaos.act()
        for model in MODELS:
            run_id = trainers.run_of(model)
            assert fleet.controller.wait_version(run_id, model, version, timeout_s=40.0), (
                f"{version} after {chaos.done}: {fleet.client.status()}"
            )
            gates.append((model, run_id, version, time.monotonic()))
    chaos.end()
    fleet.wait_states(dict.fromkeys(chaos.services, "live"))
    for service in chaos.services.values():
        assert service.ask("weights") == dict.fromkeys(MODELS, float(num_versions))
    answers = read_records(folder)
    assert {answer.instance for answer in answers} == set(chaos.services)
    check_records(answers, gates)
    assert max(offloads_s) < 5.0, "a trainer waits for its own publication, and for no instance"
    return chaos.done


@pytest.mark.timeout(300)
def test_a_storm(start: Start, fleet: Fleet, tmp_path: Path) -> None:
    """3 services, 2 models, 30 versions; services are killed, stopped and resumed at random."""
    done = storm(11, start, fleet, tmp_path, num_services=3, num_versions=30)
    assert {each.split()[0] for each in done} >= {"kill", "stop"}, done


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_long_storm(start: Start, fleet: Fleet, tmp_path: Path) -> None:
    """8 services, 2 models, 200 versions."""
    storm(5, start, fleet, tmp_path, num_services=8, num_versions=200)


def test_a_service_that_was_stopped_answers_nothing_before_it_has_caught_up(
    start: Start, fleet: Fleet, tmp_path: Path
) -> None:
    """It holds a lease that has ended when it wakes up; the others went on without it."""
    trainers = Trainers(start)
    services = {name: FleetService(start, name, fleet.server_url, tmp_path) for name in ("one", "two")}
    fleet.wait_states({"one": "live", "two": "live"})
    step(fleet, trainers, 1)
    wait_until(lambda: [a for a in read_records(tmp_path) if a.instance == "two" and a.version == 1], "it answers")
    os.kill(services["two"].pid, signal.SIGSTOP)
    step(fleet, trainers, 2)
    assert fleet.states()["two"] == "evicted"
    step(fleet, trainers, 3)
    resumed_s = time.monotonic()
    os.kill(services["two"].pid, signal.SIGCONT)
    fleet.wait_states({"one": "live", "two": "live"})
    wait_until(lambda: [a for a in read_records(tmp_path) if a.instance == "two" and a.version == 3], "it answers")
    two = [answer for answer in read_records(tmp_path) if answer.instance == "two"]
    assert {answer.version for answer in two if answer.began_s > resumed_s} == {3}
