"""The method `weaver`: whatever a holder does and says, a sync is a checked answer or a typed error."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.hosted import ServedWeights
from weightsync.control.methods.weaver import WeaverMethod
from weightsync.errors import (
    AuthError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    VersionError,
    WeightSyncError,
)
from weightsync.types import Version

LONG_S = 20.0


class APIConnectionError(Exception):
    """As a foreign client has one."""


class Holder:
    """Serves what it was told to, unless `says` has something else; what fails is put into `fails`."""

    def __init__(self) -> None:
        self.fails: list[Exception] = []
        self.waits = threading.Event()
        self.waits.set()
        self.says: list[Any] = []
        self.served = ServedWeights(run_id=None, version=None, path=None)
        self.timeouts_s: list[float] = []

    def update_weights(self, model_tag: str, run_id: str, version: int, *, timeout_s: float) -> object:
        self.timeouts_s.append(timeout_s)
        assert self.waits.wait(LONG_S)
        if self.fails:
            raise self.fails.pop()
        self.served = ServedWeights(run_id=run_id, version=version, path=f"weaver://{model_tag}/{run_id}/{version}")
        return {"status": "ok"}

    def served_weights(self, model_tag: str, *, timeout_s: float) -> ServedWeights:
        return self.says.pop() if self.says else self.served


def v(number: int, run_id: str = "run") -> Version:
    return Version(run_id=run_id, number=number)


def said(**changes: Any) -> ServedWeights:
    return ServedWeights(**{"run_id": "run", "version": 2, "path": "p", **changes})


def test_a_sync_updates_and_asks() -> None:
    holder = Holder()
    method = WeaverMethod(holder, timeout_s=LONG_S)
    assert method.sync_weights("default", v(1)) == 1
    assert holder.served == ServedWeights(run_id="run", version=1, path="weaver://default/run/1")
    assert 0 < holder.timeouts_s[0] <= LONG_S
    assert method.evict_failed("default") == ()
    method.trained("default", v(2))
    assert holder.served.version == 1, "nothing is done before a sync"


def test_a_newer_version_of_the_run_will_do() -> None:
    holder = Holder()
    holder.says = [said(version=7)]
    assert WeaverMethod(holder).sync_weights("default", v(2)) == 7


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (said(version=1), VersionError),
        (said(run_id="another"), VersionError),
        (said(version=None), VersionError),
        (said(run_id=None, version=None, path=None), VersionError),
        (said(path=None), EngineError),
        (said(path=""), EngineError),
        (said(path=7), EngineError),
        (said(version="2"), EngineError),
        (said(version=True), EngineError),
        (said(version=2.0), EngineError),
        (None, EngineError),
        ({"run_id": "run", "version": 2, "path": "p"}, EngineError),
        (True, EngineError),
    ],
)
def test_an_update_that_went_well_and_an_answer_that_says_otherwise_is_a_failure(
    answer: Any, kind: type[WeightSyncError]
) -> None:
    holder = Holder()
    holder.says = [answer]
    method = WeaverMethod(holder)
    with pytest.raises(kind) as caught:
        method.sync_weights("default", v(2))
    assert type(caught.value) is kind
    assert caught.value.version == "run/2"
    assert method.sync_weights("default", v(2)) == 2


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (APIConnectionError("no route"), EngineUnreachableError),
        (ConnectionRefusedError("no"), EngineUnreachableError),
        (PermissionError("no"), AuthError),
        (TimeoutError("slow"), DeadlineExceededError),
        (ValueError("what"), EngineError),
        (VersionError("older"), VersionError),
    ],
)
def test_what_a_client_raises_is_typed(raised: Exception, kind: type[WeightSyncError]) -> None:
    holder = Holder()
    holder.fails = [raised]
    with pytest.raises(WeightSyncError) as caught:
        WeaverMethod(holder).sync_weights("default", v(1))
    assert type(caught.value) is kind
    assert caught.value.__cause__ is not caught.value
    assert caught.value.version == "run/1"
    assert holder.served.version is None


def test_a_client_that_hangs_is_a_missed_deadline() -> None:
    holder = Holder()
    holder.waits.clear()
    with pytest.raises(DeadlineExceededError, match="update of the samplers"):
        WeaverMethod(holder, timeout_s=0.1).sync_weights("default", v(1))
    holder.waits.set()


def test_each_model_has_its_holder() -> None:
    actor, verifier = Holder(), Holder()
    method = WeaverMethod({"actor": actor, "verifier": verifier})
    method.sync_weights("verifier", v(3))
    assert (actor.served.version, verifier.served.version) == (None, 3)
    with pytest.raises(InvalidRequestError, match="actor, verifier"):
        method.sync_weights("default", v(1))


def test_under_a_controller_a_failure_is_retried() -> None:
    holder = Holder()
    holder.fails = [APIConnectionError("a moment")]
    controller = WeightSyncController({"sync_mode": "sync"}, WeaverMethod(holder), retries_s=(0.01,))
    controller.train_worker_notify_weight_update("worker", "default", "run", 1, timeout_s=LONG_S)
    assert controller.sync_weight_to_rollout_service("default", timeout_s=LONG_S)
    assert controller.rollout_service_state("default").rollout_model_version == 1
    controller.close()
