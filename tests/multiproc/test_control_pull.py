"""The controller over real rollout services: a trainer that publishes, services in processes of their own, kill -9."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.multiproc.pull_kit import MODEL, Service, Trainer, run_of, wait_until
from tests.standins.processes import Child, children
from weightsync.clients.controller import ControllerClient
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.pull import PullMethod
from weightsync.control.server import ControllerServer
from weightsync.errors import InvalidRequestError, NoEnginesError, SyncFailedError
from weightsync.types import Version

Start = Callable[..., Child]
SEED = 7


@pytest.fixture
def start() -> Iterator[Start]:
    with children() as starter:
        yield starter


def test_services_follow_and_one_that_is_killed_is_evicted(start: Start) -> None:
    """All serve each version before rollout goes on; of three one is killed, and the others go on without it."""
    trainer = Trainer(start, SEED)
    services = {name: Service(start, ["e"], senders=(trainer.endpoint,)) for name in ("a", "b", "c")}
    method = PullMethod(
        {name: service.client for name, service in services.items()}, {MODEL: trainer.endpoint}, timeout_s=8.0
    )
    controller = WeightSyncController(
        {"inference_service": {"model_tag": MODEL}}, method, retries_s=(0.05,), after_failure="evict"
    )
    server = ControllerServer(controller)
    client = ControllerClient(server.start())

    def a_step(version: int) -> None:
        assert client.trajectory_pool_notify_batch_ready(MODEL).blocked
        assert trainer.publish(version)["published"]
        client.train_worker_notify_weight_update("trainer", MODEL, run_of(SEED), version)
        assert client.check_rollout_service_status(MODEL, wait_s=30.0) == "continue"
        for name in method.live(MODEL):
            assert services[name].serving("e") == (f"{run_of(SEED)}/{version}", True)

    for version in (1, 2):
        a_step(version)
    services["b"].child.kill()
    a_step(3)
    assert method.live(MODEL) == ("a", "c")
    state = client.status().models[MODEL]
    assert (state.rollout_model_version, state.overdue, state.last_error) == (3, False, None)
    a_step(4)
    services["b"] = Service(start, ["e"], senders=(trainer.endpoint,))
    method._services["b"] = services["b"].client
    method.peers.readmit(MODEL, "b")
    a_step(5)
    assert method.live(MODEL) == ("a", "b", "c")
    client.close()
    server.close()
    controller.close()


def test_what_a_pull_can_not_do_is_told_by_service(start: Start) -> None:
    trainer, service = Trainer(start, SEED), Service(start, ["e"])
    method = PullMethod({"a": service.client}, {MODEL: trainer.endpoint}, timeout_s=20.0)
    with pytest.raises(InvalidRequestError, match="no agent of model 'other'"):
        method.sync_weights("other", Version(run_id="r", number=1))
    with pytest.raises(SyncFailedError) as caught:
        method.sync_weights(MODEL, Version(run_id=run_of(SEED), number=1))
    assert type(caught.value.causes["a"]).__name__ == "NotRegisteredError"
    assert method.evict_failed(MODEL) == ["a"]
    assert method.evict_failed(MODEL) == []
    with pytest.raises(NoEnginesError):
        method.sync_weights(MODEL, Version(run_id=run_of(SEED), number=1))
    with pytest.raises(NoEnginesError):
        PullMethod({}, {})
    service.register(trainer.endpoint)
    method.peers.readmit(MODEL, "a")
    trainer.publish(1)
    assert method.sync_weights(MODEL, Version(run_id=run_of(SEED), number=1)) == 1
    trainer.publish(3)
    wait_until(lambda: service.notify(trainer.endpoint, SEED, 3).version == 3, "the newest")
    assert method.sync_weights(MODEL, Version(run_id=run_of(SEED), number=2)) == 3, "a newer one of its run is as good"


def test_a_number_that_is_not_there_is_given_up_and_true_ones_are_served(start: Start) -> None:
    trainer = Trainer(start, SEED)
    service = Service(start, ["e"], senders=(trainer.endpoint,), patience_s=0.5)
    method = PullMethod({"a": service.client}, {MODEL: trainer.endpoint}, timeout_s=60.0)
    controller = WeightSyncController({"sync_mode": "fully-async"}, method, model_tags=(MODEL,))
    trainer.publish(1)
    controller.train_worker_notify_weight_update("trainer", MODEL, run_of(SEED), 1001)
    trainer.publish(2)
    controller.train_worker_notify_weight_update("trainer", MODEL, run_of(SEED), 2)
    assert controller.wait_version(run_of(SEED), MODEL, 2, timeout_s=20.0), controller.status()
    wait_until(lambda: controller.rollout_service_state(MODEL).train_model_version == 2, "it is given up")
    controller.close()
