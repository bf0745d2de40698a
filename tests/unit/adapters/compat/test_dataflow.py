"""RaaSPool: what `notify_version` says of each instance. The rest is in tests/documents/test_document_3.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.control.fleet_instances import LONG_S, SENDER, World, raises, until, v
from weightsync.adapters.compat.dataflow import AstraFlowService, RaaSPool
from weightsync.adapters.compat.weight_manager import TransferStatus
from weightsync.control.controller import WeightSyncController
from weightsync.errors import LoadError
from weightsync.types import Version

SUCCESS, FAILURE = TransferStatus.SUCCESS, TransferStatus.FAILURE


class Fleet:
    """Two instances, and the pool that tells them of versions. From a trainer of the run `run_id`."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.instances = [world.instance(name).beat() for name in ("a", "b")]
        self.run_id = "r"
        method = world.method("each")
        monkeypatch.setattr(method, "run_of", lambda model_tag, endpoint: self.run_id)
        config = {"sync_mode": "fully-async", "fleet": {"retries_s": [0.05]}}
        self.controller = WeightSyncController(config, method, model_tags=("actor",))
        self.pool = RaaSPool(self.controller)

    def notify(self, version: int) -> dict[str, TransferStatus]:
        return self.pool.notify_version("actor", version, SENDER, timeout_s=LONG_S)

    def serve(self, version: Version) -> bool:
        """Whether every instance has said that it serves that."""
        return all(each.models["actor"] == str(version) for each in self.controller.status().instances)

    async def publish(self, version: Version) -> None:
        """The trainer's next one, told."""
        await asyncio.to_thread(
            self.controller.train_worker_notify_weight_update,
            "trainer", "actor", version.run_id, version.number, sender_endpoint=SENDER,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("said", "sets"),
    [
        ({"models": ["actor", "verifier"]}, (("actor", "verifier"),)),
        ({"models": ["actor", "verifier"], "sets": []}, ()),
        ({"models": ["actor"]}, ()),
    ],
)
def test_all_models_pass_the_barrier_together_where_nothing_else_is_said(said: Any, sets: Any) -> None:
    """As the document has it. Seen red: each was loaded by itself, and a service served a mixture."""
    with AstraFlowService({"sync_method": "pull", "fleet": {**said, "port": 0}}) as service:
        assert tuple(map(tuple, service.controller.method.barrier.sets)) == sets


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    world = World()
    made = Fleet(world, monkeypatch)
    yield made
    made.controller.close()
    world.close()


@pytest.mark.parametrize("newer", [v(2), v(0, "another")])
def test_success_is_about_the_version_that_was_asked_for(fleet: Fleet, newer: Version) -> None:
    """The trainer publishes a newer one meanwhile, or starts anew, and that sync fails: the asked one is served.

    Seen red: it failed everywhere, since the newest was looked at.
    """

    def prepare(asked: Any) -> None:
        if asked.versions[0].of == newer:
            until(lambda: fleet.serve(v(1)), "heartbeats say so")
            raise LoadError("no room")

    for each in fleet.instances:
        each.on_prepare = prepare
    fleet.instances[0].on_commit = lambda _: fleet.publish(newer)
    assert fleet.notify(1) == {"a": SUCCESS, "b": SUCCESS}
    assert [each.served["actor"].of for each in fleet.instances] == [v(1), v(1)]


def test_a_newer_one_of_its_run_will_do_and_an_older_one_will_not(fleet: Fleet) -> None:
    """Seen red with any version of its run."""
    a, b = fleet.instances
    a.learns = False  # it is left out then, and stays so
    assert fleet.notify(3) == fleet.notify(3) == {"a": SUCCESS, "b": SUCCESS}
    a.on_prepare = raises(LoadError("no room"))
    assert fleet.notify(4) == {"a": FAILURE, "b": SUCCESS}
    b.on_prepare = raises(LoadError("no room"))
    assert fleet.notify(5) == {"a": FAILURE, "b": FAILURE}
