"""Announcements that are not true, and trainers that die after one: a fleet asks the agent and goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.multiproc.fleet_kit import MODELS, Fleet, FleetService, Trainers, check_records, read_records
from tests.multiproc.pull_kit import wait_until
from tests.standins.processes import Child, children, free_port
from weightsync.clients.controller import ControllerClient
from weightsync.errors import WeightSyncError
from weightsync.handles.fanout import in_thread

Start = Callable[..., Child]
FOR_EVER_S = 60.0
"""Of every wait that must not be waited for."""
SOON_S = 15.0
"""A few seconds, on a machine that others keep busy."""


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    found = Fleet(sets=(), prepare_timeout_s=FOR_EVER_S, barrier_timeout_s=FOR_EVER_S)
    yield found
    found.close()


def told(fleet: Fleet, trainers: Trainers, version: int, model: str = "actor") -> None:
    fleet.client.notify_version(trainers.run_of(model), model, version, trainers.endpoints[model])


def served(fleet: Fleet, trainers: Trainers, version: int, model: str = "actor") -> float:
    """Publishes it, tells of it, and waits until it is served: seconds from when it was published."""
    trainers.publish(model, version)
    began_s = time.monotonic()
    told(fleet, trainers, version, model)
    run_id = trainers.run_of(model)
    assert fleet.controller.wait_version(run_id, model, version, timeout_s=SOON_S), fleet.client.status()
    return time.monotonic() - began_s


def test_a_number_that_never_comes_is_given_up_though_it_is_told_again_and_again(
    start: Start, fleet: Fleet, tmp_path: Path
) -> None:
    trainers = Trainers(start, models=("actor",))
    service = FleetService(start, "one", fleet.server_url, tmp_path, models=("actor",))
    fleet.wait_states({"one": "live"})
    served(fleet, trainers, 1)
    told(fleet, trainers, 1001)
    served(fleet, trainers, 2)
    over = threading.Event()

    def lie() -> int:
        client, number = ControllerClient(fleet.server_url), 2000
        while not over.wait(0.05):
            number += 1
            with contextlib.suppress(WeightSyncError):
                client.notify_version(trainers.run_of("actor"), "actor", number, trainers.endpoints["actor"])
        client.close()
        return number

    lies = in_thread(lie, name="lies")
    times = [served(fleet, trainers, version) for version in range(3, 8)]
    over.set()
    assert lies.result(10.0) > 2000
    assert sorted(times)[len(times) // 2] < SOON_S / 3, times
    served(fleet, trainers, 8)
    state = wait_until(
        lambda: (seen := fleet.client.status().models["actor"]).train_model_version == 8 and seen, "it is given up"
    )
    assert (state.rollout_model_version, state.num_failed) == (8, 0)
    assert service.ask("weights") == {"actor": 8.0}


def test_a_number_told_before_anybody_is_there(start: Start, fleet: Fleet, tmp_path: Path) -> None:
    trainers = Trainers(start, models=("actor",))
    trainers.publish("actor", 3)
    told(fleet, trainers, 1003)
    wait_until(lambda: fleet.pool.current("actor") is not None, "it is what newcomers have to serve")
    service = FleetService(start, "one", fleet.server_url, tmp_path, models=("actor",))
    wait_until(lambda: service.ask("weights") == {"actor": 3.0}, "the newcomer serves what is there", SOON_S)
    fleet.wait_states({"one": "live"})
    served(fleet, trainers, 4)


def test_a_number_of_one_model_holds_up_no_set(start: Start, tmp_path: Path) -> None:
    fleet = Fleet(sets=(MODELS,), prepare_timeout_s=FOR_EVER_S, barrier_timeout_s=FOR_EVER_S)
    trainers = Trainers(start)
    FleetService(start, "one", fleet.server_url, tmp_path)
    fleet.wait_states({"one": "live"})
    for version in (1, 2):
        for model in MODELS:
            trainers.publish(model, version)
            told(fleet, trainers, version, model)
            if (version, model) == (1, MODELS[0]):
                told(fleet, trainers, 1001, model)
        for model in MODELS:
            run_id = trainers.run_of(model)
            assert fleet.controller.wait_version(run_id, model, version, timeout_s=SOON_S), fleet.client.status()
    fleet.close()
    check_records(read_records(tmp_path), [])


@pytest.mark.parametrize("same_port", [True, False])
def test_a_trainer_dies_after_its_last_word_and_its_successor_is_served(
    same_port: bool, start: Start, fleet: Fleet, tmp_path: Path
) -> None:
    first, second = Trainers(start, None, models=("actor",)), Trainers(start, None, models=("actor",))
    first.begin("r1", free_port())
    FleetService(start, "one", fleet.server_url, tmp_path, models=("actor",))
    fleet.wait_states({"one": "live"})
    served(fleet, first, 1)
    first.child.kill()
    told(fleet, first, 51)
    wait_until(lambda: fleet.client.status().models["actor"].state == "syncing", "it tries")
    second.begin("r2", (urlsplit(first.endpoints["actor"]).port or 0) if same_port else 0)
    served(fleet, second, 1)
    served(fleet, second, 2)


def test_a_run_that_nobody_has_takes_over_from_none(start: Start, fleet: Fleet, tmp_path: Path) -> None:
    trainers = Trainers(start, models=("actor",))
    FleetService(start, "one", fleet.server_url, tmp_path, models=("actor",))
    fleet.wait_states({"one": "live"})
    served(fleet, trainers, 1)
    fleet.client.notify_version("another-run", "actor", 7, trainers.endpoints["actor"])
    wait_until(lambda: fleet.client.status().models["actor"].overdue, "its agent has denied it", SOON_S)
    served(fleet, trainers, 2)


def test_a_second_trainer_whose_model_nobody_can_load_leaves_the_first_one_as_it_was(
    start: Start, fleet: Fleet, tmp_path: Path
) -> None:
    """Seen red: every service refused the first trainer's versions for good, "run actor-r1 was taken over"."""
    first = Trainers(start, models=("actor",))
    FleetService(start, "one", fleet.server_url, tmp_path, models=("actor",))
    fleet.wait_states({"one": "live"})
    served(fleet, first, 1)
    second = Trainers(start, "r2", models=("actor",), num_elements=7)
    second.publish("actor", 1)
    told(fleet, second, 1)
    wait_until(lambda: fleet.client.status().models["actor"].overdue, "nobody can load it", 2 * SOON_S)
    served(fleet, first, 2)
    served(fleet, first, 3)
