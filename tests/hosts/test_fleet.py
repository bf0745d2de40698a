"""A fleet across hosts: the controller, the trainers and two services each on a host of their own, and partitions.

Services generate all the time and write down every answer; what they may have answered is checked afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.kit import Start, starter_in
from tests.multiproc.fleet_kit import MODELS, Fleet, FleetService, Trainers, check_records, read_records
from tests.multiproc.pull_kit import TOKEN, Actor, _act, wait_until
from tests.standins.processes import children
from weightsync.testing.hosts import Host, Hosts

SOON_S = 60.0
LEASE_S, PREPARE_S = 3.0, 8.0


def controller_main(host: str, conn: Any) -> None:
    """The controller, and what a trainer asks of it."""
    fleet = Fleet(host=host, token=TOKEN, lease_s=LEASE_S, prepare_timeout_s=PREPARE_S)

    def wait(run_id: str, model: str, version: int) -> float | None:
        """When the gate had opened; None: not in time."""
        opened = fleet.controller.wait_version(run_id, model, version, timeout_s=SOON_S)
        return time.monotonic() if opened else None

    _act(
        conn,
        {"url": lambda: fleet.server_url, "states": fleet.states, "notify": fleet.client.notify_version, "wait": wait},
    )


class Site:
    """The four hosts, and what runs on them."""

    def __init__(self, hosts: Hosts, start: Start, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        control, trainer = hosts["control"], hosts["trainer"]
        self.controller = Actor(starter_in(control, start), controller_main, control.address, name="controller")
        url = self.controller.ask("url")
        self.trainers = Trainers(starter_in(trainer, start), host=trainer.address, token=TOKEN)
        self.services = {}
        for name in ("one", "two"):
            host = hosts[name]
            self.services[name] = FleetService(
                starter_in(host, start), name, url, folder,
                host=host.address, token=TOKEN, controller_token=TOKEN, sender_token=TOKEN,
            )  # fmt: skip
        self.gates: list[tuple[str, str, int, float]] = []
        self.wait_states({"one": "live", "two": "live"})

    def wait_states(self, expected: dict[str, str]) -> None:
        wait_until(lambda: self.controller.ask("states") == expected, f"states {expected}", SOON_S)

    def step(self, version: int) -> None:
        """Both models are published, and the gate of each has opened."""
        for model in MODELS:
            self.trainers.publish(model, version)
            run_id = self.trainers.run_of(model)
            self.controller.ask("notify", run_id, model, version, self.trainers.endpoints[model])
        for model in MODELS:
            run_id = self.trainers.run_of(model)
            opened_s = self.controller.ask("wait", run_id, model, version)
            assert opened_s is not None, self.controller.ask("states")
            self.gates.append((model, run_id, version, opened_s))

    def weights(self, name: str) -> set[float]:
        return set(self.services[name].ask("weights").values())

    def answers_of(self, name: str, since_s: float, until_s: float = float("inf")) -> set[int]:
        """The versions of what it answered to requests that began in that time."""
        return {
            answer.version
            for answer in read_records(self.folder)
            if answer.instance == name and since_s < answer.began_s < until_s
        }


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


def test_a_service_that_is_cut_off_fences_itself_and_catches_up(
    bench: Callable[..., Hosts], start: Start, tmp_path: Path
) -> None:
    """Cut off from the controller it answers nothing once its lease is over, though it sees the trainer; healed, it has
    the fleet's version before it answers. Cut off from the trainer alone it does not hold up the others.
    """
    hosts = bench(["control", "trainer", "one", "two"])
    site = Site(hosts, start, tmp_path)
    site.step(1)
    assert site.weights("one") == site.weights("two") == {1.0}

    def parted_from(other: Host, version: int) -> None:
        hosts.part([hosts["two"]], [other])
        site.step(version)
        assert site.weights("one") == {float(version)}
        if other is hosts["control"]:
            site.wait_states({"one": "live", "two": "evicted"})
        cut_s = time.monotonic()
        refused = sum(site.services["two"].ask("refused").values())
        wait_until(lambda: sum(site.services["two"].ask("refused").values()) > refused + 2, "it refuses", SOON_S)
        healed_s = time.monotonic()
        assert site.answers_of("two", cut_s, healed_s) == set()
        hosts.heal()
        site.wait_states({"one": "live", "two": "live"})
        wait_until(lambda: site.answers_of("two", healed_s), "it answers again", SOON_S)
        assert site.answers_of("two", healed_s) == {version}
        assert site.weights("two") == {float(version)}

    parted_from(hosts["control"], 2)
    parted_from(hosts["trainer"], 3)
    site.step(4)
    assert site.weights("one") == site.weights("two") == {4.0}
    check_records(read_records(tmp_path), site.gates)
