"""Fleets that could stay dark: nobody is left and the trainer waits for nobody, or the version was given up, or the
controller dies while all of them commit. Whoever is there answers again soon."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.fleet_kit import LEASE_S, Fleet, FleetService, Trainers, read_records
from tests.multiproc.pull_kit import wait_until
from tests.standins.processes import Child, children, free_port
from weightsync.clients.controller import ControllerClient
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


def serving(start: Start, fleet: Fleet, folder: Path) -> tuple[Trainers, FleetService]:
    """A trainer, and a service that serves its first version."""
    trainers = Trainers(start, models=(MODEL,))
    one = FleetService(start, "one", fleet.server_url, folder, models=(MODEL,))
    fleet.wait_states({"one": "live"})
    trainers.publish(MODEL, 1)
    fleet.client.notify_version(trainers.run_of(MODEL), MODEL, 1, trainers.endpoints[MODEL])
    wait_until(lambda: one.ask("weights") == {MODEL: 1.0}, "the first version is served", LONG_S)
    return trainers, one


def test_who_comes_back_is_let_in_though_the_trainer_is_quicker(start: Start, tmp_path: Path) -> None:
    """Seen red: who came back was to serve what was newest, and was always one behind."""
    fleet = Fleet(sets=())
    try:
        trainers, one = serving(start, fleet, tmp_path)
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


def test_a_version_that_was_given_up_is_what_comes_back(start: Start, tmp_path: Path) -> None:
    """The only service can't load it; somebody starts another one. Seen red: it was to serve the version before, which
    no agent has any more, and nobody answered again."""
    fleet = Fleet(sets=())
    try:
        trainers, one = serving(start, fleet, tmp_path)
        one.ask("arm", MODEL, {"at": "begin", "do": "raise", "always": True})
        trainers.publish(MODEL, 2)
        fleet.client.notify_version(trainers.run_of(MODEL), MODEL, 2, trainers.endpoints[MODEL])
        wait_until(lambda: fleet.client.status().models[MODEL].overdue, "the second one is given up", LONG_S)
        one.child.kill()
        two = FleetService(start, "two", fleet.server_url, tmp_path, models=(MODEL,))
        wait_until(lambda: fleet.states().get("two") == "live", "the new one is let in", LONG_S)
        assert two.ask("weights") == {MODEL: 2.0}
    finally:
        fleet.close()


def test_a_controller_dies_during_a_commit_that_outlasts_its_successors_patience(start: Start, tmp_path: Path) -> None:
    """Seen red: the new one had learnt the version before; all had committed the next one, and were evicted for it."""
    port = free_port()
    first = start(controller_main, port, talk=True, name="controller")
    url = first.recv()
    client = ControllerClient(url)
    trainers = Trainers(start, models=(MODEL,))
    services = [FleetService(start, name, url, tmp_path, models=(MODEL,)) for name in ("one", "two")]

    def states(version: int) -> bool:
        seen = client.status().instances
        return [each.state for each in seen] == ["live"] * 2 and {each.models[MODEL] for each in seen} == {
            f"{trainers.run_of(MODEL)}/{version}"
        }

    trainers.publish(MODEL, 1)
    client.notify_version(trainers.run_of(MODEL), MODEL, 1, trainers.endpoints[MODEL])
    wait_until(lambda: states(1), "both serve the first version", LONG_S)
    for each in services:
        each.ask("arm", MODEL, {"at": "commit", "do": "slow", "seconds": 8.0})
    trainers.publish(MODEL, 2)
    client.notify_version(trainers.run_of(MODEL), MODEL, 2, trainers.endpoints[MODEL])
    wait_until(lambda: all(each.ask("weights") == {MODEL: 2.0} for each in services), "they commit", LONG_S)
    first.kill()
    second = Fleet(sets=(), port=port, commit_timeout_s=30.0)
    try:
        wait_until(lambda: states(2), "both serve the second version", LONG_S)
        late_s = time.monotonic() + 3 * LEASE_S

        def answering() -> set[str]:
            return {each.instance for each in read_records(tmp_path) if each.ended_s > late_s and each.version == 2}

        wait_until(lambda: answering() == {"one", "two"}, "both go on answering with it", LONG_S)
    finally:
        second.close()
        client.close()


def controller_main(port: int, conn: Any) -> None:
    """A controller that is going to be killed."""
    conn.send(Fleet(sets=(), port=port, commit_timeout_s=30.0).server_url)
    threading.Event().wait()
