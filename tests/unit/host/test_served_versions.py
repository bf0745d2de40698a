"""Since when an engine is known to be the process that serves what its service says."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import EngineUnreachableError, NotServingError
from weightsync.host.engine_group import EngineGroup
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.load.module import ModuleWeightLoader
from weightsync.memory import LeaseReader, ServingLease, boot_s
from weightsync.observe import Metrics, Recorder
from weightsync.types import Deadline, EngineOp, EngineReply, EngineRequest, Version

V1 = Version(run_id="r", number=1)
LONG_S = 10.0


class Handle:
    """Says that it serves `version`."""

    def __init__(self, name: str) -> None:
        self.engine_id = name
        self.version: Version | None = V1
        self.dead = False

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        if self.dead:
            raise EngineUnreachableError("as told", peer=self.engine_id)
        return EngineReply(engine_id=self.engine_id, world_size=1, serving=True, version=self.version)

    def close(self) -> None: ...


def test_an_engine_that_has_something_else_was_not_seen_to_serve() -> None:
    one, two = Handle("one"), Handle("two")
    group = EngineGroup(
        [one, two], "m", pause_timeout_s=1.0, recorder=Recorder("t"), metrics=Metrics(), changed=lambda: None
    )
    began_s = boot_s()
    assert group.seen_s() >= began_s, "before the first version all serve what they were started with"
    group._proved[V1] = None
    assert group.seen_s() == 0.0
    began_s = boot_s()
    group.look()
    seen_s = group.seen_s()
    assert began_s <= seen_s <= boot_s()
    two.version = None
    for _ in range(2):
        group.look()
        assert group.seen_s() == seen_s
    two.version = V1
    group.look()
    assert group.seen_s() > seen_s
    assert group.gone() == {}
    two.dead = True
    group.look()
    assert group.gone().keys() == {"two"}
    assert "as told" in group.gone()["two"]


def test_before_the_first_version_engines_answer_with_what_they_were_started_with(tmp_path: Path) -> None:
    """Rollout comes before training: without it there would be no first version."""
    pool = RolloutPool(lease_s=1.0)
    controller = WeightSyncController({}, FleetMethod(pool), model_tags=["m"])
    face = ControllerServer(controller, pool)
    lease = ServingLease(str(tmp_path / "lease"))
    engine = EmbeddedEngine.of(ModuleWeightLoader(torch.nn.Linear(2, 2)), lease=LeaseReader(lease.path))
    config = RolloutConfig(service_id="one", controller=face.start(), lease=lease)
    service = RolloutService({"m": engine}, config)
    service.start()
    deadline, answered = Deadline(LONG_S), False
    while not answered and not deadline.expired:
        with contextlib.suppress(NotServingError), engine.generation(timeout_s=0.1):
            answered = True
    assert answered
    service.close()
    face.close()
    controller.close()
