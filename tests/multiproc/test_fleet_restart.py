"""Services that are started again beside engines that live on: what those serve is taken over, not fetched again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiproc.fleet_kit import Fleet, Trainers
from tests.multiproc.pull_kit import Actor, _act, wait_until
from tests.standins.processes import Child, children, free_port
from weightsync.clients.host import RolloutClient
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.errors import NotServingError, VersionError
from weightsync.handles.http import HttpEngine
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.load.module import ModuleWeightLoader
from weightsync.memory import LeaseReader, ServingLease
from weightsync.types.service import NotifyRequest

Start = Callable[..., Child]
SOON_S = 20.0
_COMMANDS_S = 60.0  # each look starts a command
LOCAL_LEASE_S = 30.0
"""Longer than the test between the end of one service and the start of the next."""


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


def engine_main(lease: str, port: int, conn: Any) -> None:
    """An engine of its own process, with the weights of a checkpoint: -1."""
    torch.set_num_threads(1)
    module = torch.nn.Module()
    module.register_buffer("weight", torch.full((4096,), -1.0))
    engine = EmbeddedEngine.of(ModuleWeightLoader(module), engine_id="e", model_id="actor", lease=LeaseReader(lease))
    server = EngineServer(engine, port=port)
    url = server.start()

    def answer() -> float | None:
        """What a generation is made of; None: refused."""
        try:
            with engine.generation(timeout_s=0.2):
                return float(module.weight[0])
        except NotServingError:
            return None

    _act(conn, {"url": lambda: url, "answer": answer})


def service_main(
    controller: str | None, lease: str, engine: str, senders: tuple[str, ...], name: str = "one", *, conn: Any
) -> None:
    """The engine's service."""
    torch.set_num_threads(1)
    config = RolloutConfig(
        service_id=name, controller=controller, lease=ServingLease(lease), lease_s=LOCAL_LEASE_S, senders=senders
    )
    service = RolloutService({"actor": HttpEngine(engine, engine_id="e")}, config)
    url = service.start()
    _act(conn, {"url": lambda: url, "status": lambda: service.status().models["actor"].num_pulled})


def make_lease(folder: Path) -> str:
    path = str(folder / "lease")
    ServingLease(path).close()
    return path


def test_a_fleet_whose_trainer_has_ended_survives_the_restart_of_its_service(start: Start, tmp_path: Path) -> None:
    fleet, lease = Fleet(sets=()), make_lease(tmp_path)
    trainers = Trainers(start, models=("actor",))
    engine = Actor(start, engine_main, lease, 0, name="engine")
    service = Actor(start, service_main, fleet.server_url, lease, engine.ask("url"), (), name="service")
    fleet.wait_states({"one": "live"})
    trainers.publish("actor", 1)
    fleet.client.notify_version(trainers.run_of("actor"), "actor", 1, trainers.endpoints["actor"])
    wait_until(lambda: engine.ask("answer") == 1.0, "it is served", SOON_S)
    assert fleet.controller.wait_version(trainers.run_of("actor"), "actor", 1, timeout_s=SOON_S)
    fleet.wait_states({"one": "live"})
    wait_until(lambda: fleet.pool._digests, "the service has said what it serves")
    trainers.child.kill()
    service.child.kill()
    service = Actor(start, service_main, fleet.server_url, lease, engine.ask("url"), (), name="service")
    wait_until(lambda: engine.ask("answer") is None, "the lease of the one before is over", SOON_S)
    wait_until(lambda: engine.ask("answer") == 1.0, "it answers again, and nobody is there to pull from", SOON_S)
    assert service.ask("status") == 0
    fleet.wait_states({"one": "live"})

    engine.child.kill()  # one that has started anew proves nothing
    service.child.kill()
    other = Actor(start, engine_main, lease, 0, name="engine")
    Actor(start, service_main, fleet.server_url, lease, other.ask("url"), (), name="service")
    wait_until(lambda: fleet.states().get("one") == "joining", "it joins", SOON_S)
    wait_until(lambda: "can't connect" in (fleet.client.status().instances[0].why or ""), "it tries", SOON_S)
    assert other.ask("answer") is None
    fleet.close()


def test_a_controller_says_what_it_knows_of_who_is_gone(start: Start, tmp_path: Path) -> None:
    """Seen red: "All 2 instances serve" of an engine that was killed, then "joining" with exit code 0, and the same of
    a service that was killed while it joined."""
    fleet = Fleet(sets=())
    trainers = Trainers(start, models=("actor",))
    engines = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        lease = make_lease(tmp_path / name)
        engines[name] = Actor(start, engine_main, lease, 0, name=f"engine-{name}")
        url = engines[name].ask("url")
        last = Actor(start, service_main, fleet.server_url, lease, url, (), name, name=name)
    fleet.wait_states({"one": "live", "two": "live"})
    trainers.publish("actor", 1)
    fleet.client.notify_version(trainers.run_of("actor"), "actor", 1, trainers.endpoints["actor"])
    assert fleet.controller.wait_version(trainers.run_of("actor"), "actor", 1, timeout_s=SOON_S)

    def says(*words: str) -> bool:
        command = [sys.executable, "-m", "weightsync.cli", "status", fleet.server_url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode == 1 and all(word in done.stdout for word in words)

    engines["two"].child.kill()
    wait_until(lambda: says("two: engine gone: e", "1 of 2 serve actor 1"), "its engine is gone", _COMMANDS_S)
    fleet.wait_states({"one": "live", "two": "joining"})
    last.child.kill()
    wait_until(lambda: says("1 of 2 instances is evicted: two", "not heard for"), "it is gone itself", _COMMANDS_S)
    fleet.close()


def test_a_service_without_a_controller_lends_what_it_has_given(start: Start, tmp_path: Path) -> None:
    lease = make_lease(tmp_path)
    trainers = Trainers(start, models=("actor",))
    senders = tuple(trainers.endpoints.values())
    engine = Actor(start, engine_main, lease, free_port(), name="engine")
    url = engine.ask("url")
    service = Actor(start, service_main, None, lease, url, senders, name="service")
    client = RolloutClient(service.ask("url"))
    assert engine.ask("answer") is None, "before the first version"
    trainers.publish("actor", 1)
    notice = NotifyRequest(
        run_id=trainers.run_of("actor"), model_id="actor", version=1, sender_endpoint=senders[0], wait_s=SOON_S
    )
    assert client.notify_version(notice).version == 1
    wait_until(lambda: engine.ask("answer") == 1.0, "it was given it", SOON_S)

    seen: list[float | None] = []
    over = threading.Event()
    engine.child.kill()
    port = int(url.rsplit(":", 1)[1])
    engine = Actor(start, engine_main, lease, port, name="engine")

    def watch() -> None:
        while not over.is_set() and 1.0 not in seen:
            seen.append(engine.ask("answer"))

    watching = threading.Thread(target=watch)
    watching.start()
    watching.join(SOON_S)
    over.set()
    watching.join()
    assert seen[-1] == 1.0
    assert set(seen) == {None, 1.0}, "never the weights that it was started with"

    os.kill(trainers.pid, 9)
    service.child.kill()
    assert engine.ask("answer") == 1.0, "the lease goes on for a while"
    again = RolloutClient(Actor(start, service_main, None, lease, url, senders, name="service").ask("url"))
    status = wait_until(
        lambda: (seen := again.status().models["actor"]).version == 1 and seen, "it is taken over", SOON_S
    )
    assert (engine.ask("answer"), status.num_pulled) == (1.0, 0)
    for each in (client, again):
        each.close()


def notice_of(trainers: Trainers, version: int) -> NotifyRequest:
    return NotifyRequest(
        run_id=trainers.run_of("actor"), model_id="actor", version=version, wait_s=SOON_S,
        sender_endpoint=trainers.endpoints["actor"],
    )  # fmt: skip


@pytest.mark.parametrize("restarted", [True, False], ids=["service-restarts", "service-lives"])
def test_what_another_life_of_the_trainer_has_published_is_not_served(
    start: Start, tmp_path: Path, restarted: bool
) -> None:
    """Its run_id is the same, and so may be its numbers: what the engine has is no success, and is not answered with.
    A service that was started again takes it over, and does just what the one before would do.
    """
    lease = make_lease(tmp_path)
    trainers, port = Trainers(start, None, models=("actor",)), free_port()
    trainers.begin("r1", port)
    senders = tuple(trainers.endpoints.values())
    engine = Actor(start, engine_main, lease, 0, name="engine")
    service = Actor(start, service_main, None, lease, engine.ask("url"), senders, name="service")
    client = RolloutClient(service.ask("url"))
    trainers.publish("actor", 5)
    client.notify_version(notice_of(trainers, 5))
    wait_until(lambda: engine.ask("answer") == 5.0, "it was given it", SOON_S)

    trainers.begin("r1", port)
    if restarted:
        client.close()
        service.child.kill()
        service = Actor(start, service_main, None, lease, engine.ask("url"), senders, name="service")
        client = RolloutClient(service.ask("url"))
        assert client.status().models["actor"].engines == {"e": f"{trainers.run_of('actor')}/5"}, "it is taken over"
    for version in (4, 5):
        trainers.publish("actor", version, value=55.0)
        with pytest.raises(VersionError, match="published anew"):
            client.notify_version(notice_of(trainers, version))
        wait_until(lambda: engine.ask("answer") is None, "the living trainer never published it", SOON_S)
        assert "published anew" in (client.status().models["actor"].retrying or "")
    trainers.publish("actor", 6)
    assert client.notify_version(notice_of(trainers, 6)).version == 6
    wait_until(lambda: engine.ask("answer") == 6.0, "above them all goes on", SOON_S)
    assert client.status().models["actor"].retrying is None
    client.close()


def test_what_the_living_trainer_has_published_is_taken_over(start: Start, tmp_path: Path) -> None:
    """Its agent says so, by the digest: nothing is moved, and the engine answers all the time."""
    lease = make_lease(tmp_path)
    trainers = Trainers(start, models=("actor",))
    senders = tuple(trainers.endpoints.values())
    engine = Actor(start, engine_main, lease, 0, name="engine")
    service = Actor(start, service_main, None, lease, engine.ask("url"), senders, name="service")
    client = RolloutClient(service.ask("url"))
    trainers.publish("actor", 1)
    client.notify_version(notice_of(trainers, 1))
    wait_until(lambda: engine.ask("answer") == 1.0, "it was given it", SOON_S)
    client.close()
    service.child.kill()
    service = Actor(start, service_main, None, lease, engine.ask("url"), senders, name="service")
    client = RolloutClient(service.ask("url"))
    said = client.notify_version(notice_of(trainers, 1))
    assert (said.version, said.num_pulled, engine.ask("answer")) == (1, 0, 1.0)
    trainers.publish("actor", 2)
    assert client.notify_version(notice_of(trainers, 2)).version == 2
    wait_until(lambda: engine.ask("answer") == 2.0, "it goes on", SOON_S)
    client.close()
