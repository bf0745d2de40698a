"""A fleet on Ray: a controller and services as actors on several nodes, one of which dies; the others go on.

The nodes' processes are on one machine, and speak TCP as if they were not. Seen red: with a pool that admits whoever is
behind, with one waiter at the gate at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.cluster.conftest import STORE_BYTES
from tests.cluster.fleet_actors import Model, broken
from tests.multiproc.fleet_kit import MODELS, Trainers, digest_at
from tests.multiproc.pull_kit import shm_of, wait_until
from tests.standins.processes import children, free_port
from weightsync.clients.async_controller import AsyncControllerClient
from weightsync.clients.controller import ControllerClient
from weightsync.cluster.fleet import RayFleet, launch_fleet
from weightsync.cluster.placement import FleetPlacement
from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    EngineUnreachableError,
    InvalidRequestError,
    LoadError,
    NotServingError,
)
from weightsync.handles.fanout import in_thread

pytestmark = pytest.mark.timeout(600)

NUM_NODES = 3
LEASE_S = 3.0
PLACEMENT = FleetPlacement(controller={"CPU": 0.01}, service={"rollout": 1})
ASK_S = 30.0
GATE_S = 40.0
NUM_WAITERS = 300


SERVICE = {"mode": "full", "patch_limit": 0, "transport": "tcp"}


def config(**options: Any) -> dict[str, Any]:
    """First loads compile, and other tests may run: the times for those are long."""
    fleet = {
        "models": MODELS, "sets": (MODELS,), "lease_s": LEASE_S, "retries_s": (0.2, 0.5, 1.0, 2.0),
        "barrier_timeout_s": 20.0, "prepare_timeout_s": 30.0, "commit_timeout_s": 10.0, **options,
    }  # fmt: skip
    return {"sync_mode": "fully-async", "fleet": fleet}


def add_node(cluster: Any) -> Any:
    """A node that has room for one service and for nothing else."""
    return cluster.add_node(num_cpus=0, resources={"rollout": 1}, object_store_memory=STORE_BYTES)


@pytest.fixture(scope="module")
def nodes(ray_cluster: Any) -> Iterator[list[Any]]:
    """Nodes for services; tests take some away and add others."""
    found = [add_node(ray_cluster) for _ in range(NUM_NODES)]
    yield found
    for node in found:
        ray_cluster.remove_node(node)


class Running:
    """A fleet, its trainers, and what they have published."""

    def __init__(self, fleet: RayFleet, trainers: Trainers) -> None:
        self.fleet = fleet
        self.trainers = trainers
        self.version = 0
        self.pids: set[int] = set()

    def publish(self) -> None:
        """Both trainers publish the next version."""
        self.version += 1
        for model in MODELS:
            self.trainers.publish(model, self.version)

    def tell(self) -> None:
        for model in MODELS:
            self.fleet.controller.notify_version(
                self.trainers.run_of(model), model, self.version, self.trainers.endpoints[model]
            )

    def gate(self, wait_s: float = GATE_S) -> bool:
        """Whether it opens for the newest version of both models."""
        return all(
            self.fleet.controller.wait_version(self.trainers.run_of(model), model, self.version, wait_s=wait_s)
            for model in MODELS
        )

    def step(self) -> None:
        self.publish()
        self.tell()
        assert self.gate(), self.fleet.controller.status()

    def ask(self, name: str, model: str, method: str) -> Any:
        return self.fleet.services[name].ask(model, method, timeout_s=ASK_S)

    def states(self) -> dict[str, str]:
        return {each.instance_id: each.state for each in self.fleet.controller.status().instances}

    def check_serve(self, *names: str) -> None:
        """They answer with the newest version of both models, and their live bytes are those that were published. One
        that is fenced, because its heartbeat came late on a busy machine, answers when it has its lease again."""
        answers: list[Any] = []

        def answered(name: str, model: str) -> bool:
            with contextlib.suppress(NotServingError):
                answers.append((self.ask(name, model, "generate"), self.ask(name, model, "digest")))
                return True
            return False

        for name in names:
            for model in MODELS:
                wait_until(lambda: answered(name, model), "it has its lease")  # noqa: B023
                assert answers.pop() == ((self.version, float(self.version)), digest_at(self.version))

    def check_joined(self, name: str) -> None:
        """A process that has come in has answered with nothing but the version that was current."""
        for model in MODELS:
            wait_until(lambda: self.ask(name, model, "answered"), "it answers")  # noqa: B023
            assert self.ask(name, model, "answered") == [(self.version, float(self.version))]

    def note(self) -> None:
        """The processes that live now."""
        for each in (self.fleet.controller, *self.fleet.services.values()):
            with contextlib.suppress(EngineUnreachableError):
                self.pids.add(each.ready(timeout_s=ASK_S).pid)


@pytest.fixture(scope="module")
def running(nodes: list[Any]) -> Iterator[Running]:
    """Two services on three nodes; at the end nothing is left of them."""
    with children() as start:
        trainers = Trainers(start)
        with launch_fleet(
            NUM_NODES - 1, Model, config(port=free_port()), service=SERVICE, placement=PLACEMENT, start_timeout_s=100,
            controller_options={"max_restarts": 1},
        ) as fleet:  # fmt: skip
            found = Running(fleet, trainers)
            yield found
            found.note()
        wait_until(lambda: not [pid for pid in found.pids if psutil.pid_exists(pid)], "all processes have ended")
        assert shm_of(*found.pids) == []


def test_services_follow_and_one_more_joins(running: Running, nodes: list[Any]) -> None:
    """Each on a node of its own; the one that joins answers nothing before it serves what the fleet serves."""
    fleet = running.fleet
    wait_until(lambda: running.states() == {"service-0": "live", "service-1": "live"}, "both take part")
    for _ in range(2):
        running.step()
        running.check_serve("service-0", "service-1")
    fleet.add_service(timeout_s=100)
    fleet.wait_live(timeout_s=100)
    running.check_joined("service-2")
    running.step()
    running.check_serve(*fleet.services)
    places = {each.ready(timeout_s=ASK_S).node_id for each in fleet.services.values()}
    assert places == {node.node_id for node in nodes}
    with pytest.raises(DeadlineExceededError, match="no room for the 1 bundles asked for"):
        fleet.add_service(timeout_s=0.5)
    assert sorted(fleet.services) == ["service-0", "service-1", "service-2"]
    running.note()


def test_many_wait_at_the_gate_and_hold_up_nobody(running: Running) -> None:
    controller, run_id = running.fleet.controller, running.trainers.run_of("actor")
    client, waiting = AsyncControllerClient(running.fleet.url, token=running.fleet.token), 0

    async def wait(version: int) -> None:
        nonlocal waiting
        waiting += 1
        await client.wait(run_id, "actor", version, wait_s=GATE_S)
        waiting -= 1

    async def wait_all(version: int) -> None:
        await asyncio.gather(*(wait(version) for _ in range(NUM_WAITERS)))
        await client.close()

    waiters = in_thread(lambda version=running.version + 1: asyncio.run(wait_all(version)), name="waiters")  # type: ignore[misc]
    wait_until(lambda: waiting == NUM_WAITERS, "all wait")
    running.publish()
    assert controller.status().models["actor"].rollout_model_version == running.version - 1
    assert controller.wait_version(run_id, "actor", running.version, wait_s=0.0) is False
    assert controller.check_rollout_service_status("actor") == "continue"
    assert waiting == NUM_WAITERS
    running.tell()
    waiters.result(GATE_S)
    assert waiting == 0


def test_many_wait_for_a_validation_and_whoever_ends_it_is_heard(running: Running) -> None:
    controller, run_id = running.fleet.controller, running.trainers.run_of("actor")
    asked = [
        in_thread(
            lambda number=number: controller.train_worker_notify_weight_update(  # type: ignore[misc]
                f"w{number}", "actor", run_id, running.version, evaluate=True, wait_s=GATE_S
            ),
            name="evaluates",
        )
        for number in range(70)
    ]
    wait_until(lambda: controller.status().models["actor"].waiting_for_validation, "it is validated")
    controller.end_validate("actor", {"reward": 0.5}, timeout_s=ASK_S)
    for each in asked:
        done = each.result(GATE_S).last_validation
        assert done is not None
        assert done.of.version == running.version


def test_the_same_calls_over_http_and_refusals_are_typed(running: Running) -> None:
    fleet = running.fleet
    with contextlib.closing(ControllerClient(fleet.url, token=fleet.token)) as client:
        wait_until(lambda: {each.state for each in client.status().instances} == {"live"}, "all take part")
        assert client.check_rollout_service_status("actor") == "continue"
    with contextlib.closing(ControllerClient(fleet.url)) as client, pytest.raises(AuthError):
        client.status()
    for refused in (
        lambda: fleet.controller.wait_version("r", "nobody", 1, wait_s=1.0),
        lambda: fleet.controller.trajectory_pool_notify_batch_ready("nobody"),
        lambda: fleet.controller.end_validate("nobody"),
        lambda: fleet.controller.sync_weight_to_rollout_service("nobody"),
        lambda: running.ask("service-0", "nobody", "generate"),
        lambda: running.ask("service-0", "actor", "_generate_always"),
    ):
        with pytest.raises(InvalidRequestError, match=r"nobody|no public method"):
            refused()
    assert fleet.controller.sync_weight_to_rollout_service("actor") is True
    assert fleet.controller.trajectory_pool_notify_batch_ready("actor").rollout_model_version == running.version
    assert fleet.services["service-0"].status().models["actor"].version == running.version


def test_a_node_dies_and_a_new_one_takes_its_place(running: Running, ray_cluster: Any, nodes: list[Any]) -> None:
    fleet = running.fleet
    places = {name: each.ready(timeout_s=ASK_S) for name, each in fleet.services.items()}
    lost = next(name for name, place in places.items() if place.node_id == nodes[0].node_id)
    others = sorted(set(fleet.services) - {lost})
    os.kill(places[lost].pid, signal.SIGKILL)  # a host that dies takes all at once; Ray's workers linger
    ray_cluster.remove_node(nodes.pop(0), allow_graceful=False)
    for _ in range(2):
        running.step()
        running.check_serve(*others)
    expected = {lost: "evicted", **dict.fromkeys(others, "live")}
    wait_until(lambda: running.states() == expected, "the others take part")
    with pytest.raises(EngineUnreachableError, match=f"the actor of {lost} is gone"):
        running.ask(lost, "actor", "generate")
    with pytest.raises(EngineUnreachableError, match=lost):
        fleet.services[lost].status(timeout_s=ASK_S)
    with pytest.raises(DeadlineExceededError, match=f"{lost} is evicted: not heard for"):
        fleet.wait_live(timeout_s=0.1)

    nodes.append(add_node(ray_cluster))
    fleet.restart_service(lost, timeout_s=100)
    fleet.wait_live(timeout_s=100)
    assert fleet.services[lost].ready(timeout_s=ASK_S).node_id == nodes[-1].node_id
    running.check_joined(lost)
    running.step()
    running.check_serve(*fleet.services)


def test_a_controller_that_is_killed_comes_back_at_its_port_and_learns_what_is_served(running: Running) -> None:
    """Then it dies for good, and the fleet refuses."""
    controller = running.fleet.controller
    running.note()
    pid = controller.ready(timeout_s=ASK_S).pid
    os.kill(pid, signal.SIGKILL)
    running.fleet.wait_live(timeout_s=100)  # seen red: it failed at once, though Ray starts the controller again
    assert controller.ready(timeout_s=ASK_S).pid != pid
    assert running.gate(), "it has learnt what is served"

    def answers() -> bool:
        with contextlib.suppress(NotServingError):  # who came in has its lease with its next heartbeat
            running.check_serve(*running.fleet.services)
            return True
        return False

    wait_until(answers, "the services hold their leases", 30.0)
    running.tell()
    assert running.gate(), "the same told once more changes nothing"
    running.step()
    running.check_serve(*running.fleet.services)

    running.note()
    os.kill(controller.ready(timeout_s=ASK_S).pid, signal.SIGKILL)
    with pytest.raises(EngineUnreachableError, match="the actor of the controller is gone"):
        wait_until(lambda: controller.ready(timeout_s=ASK_S) is None, "it is gone", 60.0)
    with pytest.raises(EngineUnreachableError, match="does a weightsync controller run there"):
        controller.status(timeout_s=ASK_S)

    def refuses() -> bool:
        try:
            running.ask("service-0", "actor", "generate")
        except NotServingError:
            return True
        return False

    wait_until(refuses, "without a controller the leases run out", LEASE_S + 60.0)


def test_what_can_not_be_is_told_before_anything_starts(nodes: list[Any]) -> None:
    wrong: dict[str, Any]
    for wrong in (
        {"service": {"token": "x"}}, {"service": {"pull": 1}}, {"service": {"mode": "half"}}, {"token": "short"},
        {"config": config(commit_policy="most")}, {"config": config(port=70000)},
        {"config": {**config(), "sync_method": "push"}}, {"config": config(models=("actor", "actor"))},
        {"num_services": 0}, {"controller_options": {"max_restarts": 1}},
    ):  # fmt: skip
        with (
            pytest.raises(ConfigError),
            launch_fleet(**{"num_services": 1, "build": Model, "config": config(), **wrong}),
        ):
            pytest.fail("it can't be")
    amounts: dict[str, float]
    for amounts in ({}, {"CPU": -1.0}):
        with pytest.raises(ConfigError, match="takes some of the cluster"):
            FleetPlacement(service=amounts)


def test_a_factory_that_fails_is_told_and_nothing_is_left(ray_cluster: Any) -> None:
    import ray

    small = FleetPlacement(controller={"CPU": 0.01}, service={"CPU": 0.01}, spread="PACK")
    before = ray.available_resources().get("CPU")
    with (
        pytest.raises(LoadError, match="service-0-actor has no model"),
        launch_fleet(1, broken, config(), placement=small, start_timeout_s=120),
    ):
        pytest.fail("it is not there")
    wait_until(lambda: ray.available_resources().get("CPU") == before, "what it took is given back")
