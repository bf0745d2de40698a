"""Document 5's constructor: a controller from its configuration alone."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from weightsync.config import WeightSyncConfig
from weightsync.control.build import build_controller, waits_for
from weightsync.control.controller import WeightSyncController
from weightsync.control.methods.disk import DiskMethod
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.methods.hosted import ServedWeights
from weightsync.control.methods.mock import MockMethod
from weightsync.control.methods.network import NetworkMethod
from weightsync.control.methods.push import PushMethod
from weightsync.control.methods.select import method_of
from weightsync.control.methods.tinker import TinkerMethod
from weightsync.control.methods.weaver import WeaverMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.push_orders import PushOrders
from weightsync.errors import ConfigError, InvalidRequestError

SERVICE = {"model": "m", "base_url": "http://127.0.0.1:1", "model_tag": "actor"}


@pytest.mark.parametrize(
    ("named", "kind"),
    [
        ({"sync_method": "mock"}, MockMethod),
        ({"sync_method": "pull"}, FleetMethod),
        ({"sync_method": "tinker"}, TinkerMethod),
        ({"sync_method": "push"}, PushMethod),
        ({"sync_method": "weaver"}, WeaverMethod),
        ({"sync_method": "disk", "inference_service": SERVICE}, DiskMethod),
        ({"sync_method": "network", "inference_service": SERVICE}, NetworkMethod),
        ({"sync_method": "network", "inference_service": {**SERVICE, "backend": "vllm"}}, DiskMethod),
        ({"sync_method": "network", "inference_service": {**SERVICE, "backend": "sglang"}}, DiskMethod),
    ],
)
def test_the_method_that_is_named(named: dict[str, Any], kind: type, tmp_path: Path) -> None:
    config = {**named, **({"sync_weight_path": str(tmp_path)} if named["sync_method"] in ("disk", "network") else {})}
    controller = WeightSyncController({"weight_sync_controller": {"type": "weight_sync_controller", **config}})
    assert type(controller.method) is kind
    assert controller.model_tags == (("actor",) if "inference_service" in named else ("default",))
    controller.close()


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"sync_method": "disk", "sync_weight_path": "w"}, "inference_service.base_url"),
        ({"sync_method": "network", "sync_weight_path": "w", "inference_service": {"model_tag": "a"}}, "base_url"),
        (
            {"sync_method": "pull", "fleet": {"commit_timeout_s": 1e6}},
            "fleet.commit_timeout_s = 1000000.0: must be at most 604800 seconds, a week",
        ),
        ({"sync_method": "pull", "fleet": {"barrier_timeout_s": 1e10}}, "fleet.barrier_timeout_s = .* a week"),
        ({"sync_method": "push", "fleet": {"prepare_timeout_s": 1e6}}, "fleet.prepare_timeout_s = .* a week"),
        ({"sync_method": "pull", "fleet": {"models": ["a", "b"], "sets": [["a", "c"]]}}, "fleet.models has not: c"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(config: dict[str, Any], missing: str, tmp_path: Path) -> None:
    if "sync_weight_path" in config:
        config = {**config, "sync_weight_path": str(tmp_path)}
    with pytest.raises(ConfigError, match=missing):
        build_controller({**config, "fleet": {"port": 0, **config.get("fleet", {})}})


@pytest.mark.parametrize("service", [{}, {"backend": "vllm"}, {"backend": "sglang"}])
@pytest.mark.parametrize("method", ["disk", "network"])
def test_one_engine_is_not_given_the_weights_of_two_models(
    method: str, service: dict[str, Any], tmp_path: Path
) -> None:
    """Seen red: each model's versions went to the one base_url, and its state said that they are served."""
    config = {
        "sync_method": method, "sync_weight_path": str(tmp_path), "inference_service": {**SERVICE, **service},
        "fleet": {"models": ["actor", "critic"], "port": 0},
    }  # fmt: skip
    words = (
        f"sync_method '{method}' has one engine or router, inference_service.base_url = http://127.0.0.1:1, and "
        "2 models: actor, critic. Have a controller for each of them, or give it a DiskMethod or a NetworkMethod"
    )
    with pytest.raises(ConfigError, match=re.escape(words)):
        build_controller(config)
    alone = {**config, "fleet": {"models": ["actor"]}}
    with pytest.raises(ConfigError, match=re.escape(words)):
        WeightSyncController(alone, model_tags=("actor", "critic"))
    WeightSyncController(alone).close()


def test_methods_take_times_that_can_be_waited() -> None:
    """Seen red: no sync ever committed, since no service takes such a message; or a timer overflowed."""
    pool = RolloutPool(models=("actor",))
    for name in ("barrier_timeout_s", "prepare_timeout_s", "commit_timeout_s", "straggler_s"):
        with pytest.raises(InvalidRequestError, match=name):
            FleetMethod(pool, **{name: 1e6})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="take_s"):
        PushOrders(take_s=1e10, push_s=1.0)
    with pytest.raises(InvalidRequestError, match="push_s"):
        PushOrders(take_s=1.0, push_s=1e10)


def test_a_weaver_service_is_held_by_the_documents_call() -> None:
    class Holder:
        def update_weights(self, model_tag: str, run_id: str, version: int, *, timeout_s: float) -> None:
            self.served = ServedWeights(run_id=run_id, version=version, path="weights/1")

        def served_weights(self, model_tag: str, *, timeout_s: float) -> ServedWeights:
            return self.served

    controller = WeightSyncController({"sync_method": "weaver", "sync_mode": "sync"}, retries_s=())
    controller.train_worker_notify_weight_update("w", "default", "r", 1, timeout_s=5.0)
    assert "set_weaver_service_holder" in str(controller.rollout_service_state("default").last_error)
    controller.set_weaver_service_holder(Holder())
    controller.train_worker_notify_weight_update("w", "default", "r", 2, timeout_s=5.0)
    assert controller.rollout_service_state("default").rollout_model_version == 2
    with pytest.raises(InvalidRequestError):
        controller.set_weaver_service_holder(Holder(), "stranger")
    controller.close()


@pytest.mark.parametrize(
    ("service", "lacks"),
    [("tinker", "no save_weights_for_sampler, no create_sampling_client, no served_path, no use;"),
     ("weaver", "no update_weights, no served_weights;")],
)  # fmt: skip
def test_a_holder_without_its_calls_is_refused_when_it_is_set(service: str, lacks: str) -> None:
    """Seen red: it was taken, and the sync ended in an AttributeError."""
    controller = WeightSyncController({"sync_method": service})
    with pytest.raises(ConfigError, match=f"object can't hold {service}'s clients of model 'default': it has {lacks}"):
        getattr(controller, f"set_{service}_service_holder")(object())
    controller.close()


def test_giving_up_is_logged_under_the_runs_name(caplog: pytest.LogCaptureFixture) -> None:
    """Seen red: of a run without a name it said None."""
    logged = threading.Event()  # rollout goes on before the line is there
    controller = WeightSyncController(
        {"sync_method": "weaver", "sync_mode": "sync"}, retries_s=(), on_give_up=lambda *_: logged.set()
    )
    controller.train_worker_notify_weight_update("w", "default", timeout_s=5.0)
    assert logged.wait(20.0)
    assert controller.await_rollout_service("default", timeout_s=5.0) == "continue"
    controller.close()
    (given_up,) = (each.getMessage() for each in caplog.records if "after all retries" in each.message)
    assert given_up.startswith("model default: unnamed/1 is not served")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "training ranks that push: .* push.controller: http://c; their file has to name push.engines"),
        ({"push": {"engines": ["http://e:1"]}}, "push.controller: http://c$"),
        (
            {"sync_method": "pull"},
            r"rollout services \(weightsync serve --controller http://c --lease FILE .* trainers",
        ),
        ({"sync_method": "mock"}, "trainers that tell of a version"),
    ],
)
def test_a_controller_says_what_it_waits_for(config: dict[str, Any], words: str) -> None:
    """Seen red where it was silent of engines that an empty file does not name."""
    assert re.search(words, waits_for(WeightSyncConfig.load(config), "http://c"))


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_nobody_is_told_to_call_an_address_that_is_each_machine_s_own(host: str) -> None:
    """Seen red: serve --controller http://0.0.0.0:8700, which works on the controller's machine alone."""
    said = waits_for(WeightSyncConfig.load({"sync_method": "pull"}), f"https://{host}:8700")
    assert (said.count("https://THIS-HOST:8700"), host in said) == (2, False), said


def test_a_controller_with_its_server_is_closed_as_one() -> None:
    with build_controller(
        {"sync_method": "mock", "sync_mode": "sync", "fleet": {"models": ["a", "b"], "port": 0}}
    ) as it:
        it.controller.train_worker_notify_weight_update("w", "b", "r", 1, timeout_s=5.0)
        assert it.controller.rollout_service_state("b").rollout_model_version == 1


@pytest.mark.parametrize("named", [{"sync_method": "disk"}, {"sync_method": "network"}])
def test_the_authority_that_is_given_is_read(named: dict[str, Any], tmp_path: Path) -> None:
    """Seen red: it was given to rollout services alone; these failed each sync at the certificate."""
    service = {**SERVICE, "base_url": "https://127.0.0.1:1"}
    config = WeightSyncConfig.load({**named, "inference_service": service, "sync_weight_path": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"verify is 'ca\.pem'"):
        method_of(config, ["actor"], verify="ca.pem").initialize()
