"""Since when an engine is known to be the process that serves what its service says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import EngineUnreachableError, NotServingError
from weightsync.handles.fanout import collect, in_thread
from weightsync.host import served_versions
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
        self.called, self.holds = threading.Event(), threading.Event()
        self.holds.set()

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        if self.dead:
            raise EngineUnreachableError("as told", peer=self.engine_id)
        reply = EngineReply(engine_id=self.engine_id, world_size=1, serving=True, version=self.version)
        self.called.set()
        self.holds.wait(LONG_S)
        return reply

    def close(self) -> None: ...


def test_what_a_load_says_of_an_engine_that_answers_stands() -> None:
    """That it could not be reached goes when it answers; that a load broke does not."""
    one = Handle("one")
    group = EngineGroup(
        [one], "m", pause_timeout_s=1.0, recorder=Recorder("t"), metrics=Metrics(), changed=lambda: None
    )
    one.dead = True
    group.look()
    silent = group.gone()
    broke = {"one": "EngineUnreachableError: it broke during a load", "pull": "nobody has it"}
    assert group.standing(silent) == silent, "it is silent still"
    one.dead = False
    group.look()
    assert group.standing(silent) == {}
    assert group.standing(broke) == broke


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


@pytest.mark.parametrize("loaded", [False, True])
def test_an_answer_is_as_old_as_its_question(monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
    """Seen red: what an engine had said before it was started again stood for what it serves since, and it answered
    with what it was started with."""
    one = Handle("one")
    one.holds.clear()
    group = EngineGroup(
        [one], "m", pause_timeout_s=1.0, recorder=Recorder("t"), metrics=Metrics(), changed=lambda: None
    )
    group._proved[V1] = None
    asking = in_thread(group.available, name="ask")
    assert one.called.wait(LONG_S)
    restarted_s = boot_s()
    with group._lock:  # the question is noted by now
        group._engines[0].num_loads += 2 if loaded else 0

    def waits(calls: Mapping[str, Future[EngineReply]], *, timeout_s: float) -> Any:
        if threading.current_thread() is threading.main_thread():  # who looks has asked by now
            one.holds.set()
        return collect(calls, timeout_s=timeout_s)

    monkeypatch.setattr(served_versions, "collect", waits)
    group.look()
    assert asking.result(LONG_S) == {"one": True}
    assert group.served() == {"one": None if loaded else V1}
    assert group.seen_s() < restarted_s
    if not loaded:
        assert group.seen_s() > 0.0
    group.look()
    assert group.seen_s() > restarted_s


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
