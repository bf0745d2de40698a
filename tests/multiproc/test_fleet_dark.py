"""A fleet in which nobody is left, and a trainer that waits for nobody: who comes back is soon let in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.multiproc.fleet_kit import Fleet, FleetService, Trainers, read_records
from tests.multiproc.pull_kit import wait_until
from tests.standins.processes import Child, children
from weightsync.errors import WeightSyncError
from weightsync.handles.fanout import in_thread

Start = Callable[..., Child]
MODEL = "actor"
LOAD_S = 4.0
EVERY_S = 0.25
LONG_S = 60.0


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


@contextlib.contextmanager
def training(fleet: Fleet, trainers: Trainers) -> Iterator[None]:
    """Publishes version after version, from 2 on, four times as often as a service can load them."""
    over = threading.Event()

    def train() -> None:
        number = 2
        while not over.wait(EVERY_S):
            if trainers.ask("publish", MODEL, number, None):
                with contextlib.suppress(WeightSyncError):  # the fleet may be behind: a trainer goes on
                    fleet.client.notify_version(trainers.run_of(MODEL), MODEL, number, trainers.endpoints[MODEL])
            number += 1

    trained = in_thread(train, name="trains")
    try:
        yield
    finally:
        over.set()
        trained.result(LONG_S)


def test_who_comes_back_is_let_in_though_the_trainer_is_quicker(start: Start, tmp_path: Path) -> None:
    """Seen red: who came back was to serve what was newest, and was always one behind."""
    fleet = Fleet(sets=())
    try:
        trainers = Trainers(start, models=(MODEL,))
        one = FleetService(start, "one", fleet.server_url, tmp_path, models=(MODEL,))
        fleet.wait_states({"one": "live"})
        trainers.publish(MODEL, 1)
        fleet.client.notify_version(trainers.run_of(MODEL), MODEL, 1, trainers.endpoints[MODEL])
        wait_until(lambda: one.ask("weights") == {MODEL: 1.0}, "the first version is served", LONG_S)
        with training(fleet, trainers):
            one.child.kill()
            wait_until(lambda: fleet.states().get("one") != "live", "it is missed", LONG_S)
            for name in ("two", "three"):
                FleetService(start, name, fleet.server_url, tmp_path, models=(MODEL,), slow_s=LOAD_S)
            wait_until(lambda: "live" in fleet.states().values(), "one of them is let in", LONG_S)
            first = next(name for name, state in fleet.states().items() if state == "live")

            def num_answered() -> int:
                return len({each.version for each in read_records(tmp_path) if each.instance == first})

            wait_until(lambda: num_answered() >= 3, "it goes on with the trainer", LONG_S)
        for each in read_records(tmp_path):
            assert each.value == each.version or not each.run_id
    finally:
        fleet.close()
