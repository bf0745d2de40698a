"""Keys that have nothing to do beside others, and who refuses what he does not read."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest

import weightsync
from tests.unit.config_seen import ENGINE, OTHER, Tree, model
from weightsync import WeightManager, WeightSyncConfig
from weightsync._config_reads import METHODS
from weightsync.cluster.fleet import config_of as fleet_config
from weightsync.cluster.launch import config_of as job_config
from weightsync.config import InferenceServiceConfig
from weightsync.control.build import build_controller
from weightsync.control.controller import WeightSyncController
from weightsync.errors import ConfigError
from weightsync.host.settings import RolloutConfig, pull_settings
from weightsync.verbs.engines import urls_of

PULL, PUSH = {"publish": {"to": [OTHER]}}, {"transfer": {"backend": "nccl"}}
NEEDED: dict[str, Tree] = {"network": {"sync_weight_path": "w"}, "disk": {"sync_weight_path": "w"}}


@pytest.mark.parametrize(
    ("tree", "key", "words"),
    [
        ({"staleness_threshold": 3}, "staleness_threshold", "'batch-async' alone"),
        ({"staleness_threshold": 3, "sync_mode": "fully-async"}, "staleness_threshold", "'batch-async' alone"),
        ({"sync_method": "pull", "fleet": {"straggler_s": 9.0}}, "fleet.straggler_s", "quorum"),
        ({"sync_method": "pull", "fleet": {"barrier_timeout_s": 9.0}}, "fleet.barrier_timeout_s", "in a set"),
        ({"transfer": {"colocated": True, "master_addr": "host"}}, "transfer.master_addr", "no transfer group"),
        ({"transfer": {"strategy": "cuda_ipc", "interface": "lo"}}, "transfer.interface", "no transfer group"),
        (
            {"fleet": {"models": ["a"]}, "inference_service": {"model_tag": "b"}},
            "inference_service.model_tag",
            "no such model",
        ),
        (
            {"sync_method": "disk", "sync_weight_path": "w", "inference_service": {"backend": "embedded"}},
            "inference_service.backend",
            "loads from no path",
        ),
        ({"sync_method": "disk", "sync_weight_path": "w", "extract": {"dtype": None}}, "extract.dtype", "'pull'"),
        ({"sync_method": "mock", "transfer": {"delta": False}}, "transfer.delta", "'push' or 'pull'"),
    ],
)
def test_a_key_that_has_nothing_to_do_beside_another_is_refused(tree: Tree, key: str, words: str) -> None:
    """Seen red with a rule taken out of `_config_reads`."""
    for load in (WeightSyncConfig.load, lambda tree: WeightSyncConfig(**tree)):
        with pytest.raises(ConfigError, match=words) as caught:
            load(tree)
        assert caught.value.details["keys"] == [key]


def test_saying_the_default_asks_for_nothing() -> None:
    """So document 5's whole reference can be read, and a configuration that was written out whole."""
    for method in METHODS:
        tree = {"sync_method": method, **NEEDED.get(method, {})}
        config = WeightSyncConfig.load(tree)
        assert WeightSyncConfig.load(config.model_dump()) == config


@pytest.mark.parametrize(
    ("build", "tree", "key"),
    [
        (lambda tree: weightsync.publish(model(), config=tree), PUSH, "transfer.backend"),
        (
            lambda tree: weightsync.publish(model(), config=tree),
            {"sync_method": "disk", "sync_weight_path": "w"},
            "sync_method",
        ),
        (lambda tree: weightsync.serve({"default": model()}, config=tree), PUSH, "transfer.backend"),
        (lambda tree: weightsync.push(model(), model(), config=tree), PULL, "publish.to"),
        (lambda tree: weightsync.push(model(), model(), config=tree), {"sync_method": "pull"}, "sync_method"),
        (WeightSyncController, PULL, "publish.to"),
        (lambda tree: build_controller(tree), PULL, "publish.to"),
        (WeightManager.from_config, PULL, "publish.to"),
        (WeightManager.from_config, PUSH, "transfer.backend"),
        (RolloutConfig.from_config, PUSH, "transfer.backend"),
        (job_config, {"push": {"engines": [ENGINE]}}, "push.engines"),
        (job_config, {"sync_method": "pull"}, "sync_method"),
        (job_config, PULL, "publish.to"),
        (lambda tree: fleet_config(tree, {}), {"sync_method": "push"}, "sync_method"),
        (lambda tree: fleet_config(tree, {}), {"fleet": {"host": "0.0.0.0"}}, "fleet.host"),
        (lambda tree: fleet_config(tree, {}), {"serve": {"sources": [OTHER]}}, "serve.sources"),
        (
            lambda tree: WeightSyncController({"sync_method": "mock"}, configs={"default": WeightSyncConfig(**tree)}),
            {"fleet": {"validate_timeout_s": 5.0}},
            "fleet.validate_timeout_s",
        ),
        (
            lambda tree: WeightSyncController({"sync_method": "mock"}, configs={"default": WeightSyncConfig(**tree)}),
            {"inference_service": {"base_url": OTHER}},
            "inference_service.base_url",
        ),
    ],
)
def test_who_reads_less_than_a_file_may_say_refuses_the_rest(
    build: Callable[[Tree], Any], tree: Tree, key: str
) -> None:
    """Seen red without a `for_method`: keys of the other path were taken, and nobody's."""
    with pytest.raises(ConfigError) as caught:
        build(tree)
    assert key in caught.value.message


def test_what_a_service_of_a_fleet_on_ray_reads_of_the_transfer() -> None:
    settings = fleet_config({"transfer": {"delta": False, "transfer_timeout_s": 7.0}, "fleet": {"models": ["a"]}}, {})
    assert pull_settings(settings) == {"mode": "full", "pull_timeout_s": 7.0}
    assert settings.fleet.port == 0


def test_false_wins_on_the_pull_path_too() -> None:
    """Seen red where `delta: false` was the same as nothing."""
    never, unsaid = ({"sync_method": "pull", **tree} for tree in ({"transfer": {"delta": False}}, {}))
    assert (RolloutConfig.from_config(never).mode, RolloutConfig.from_config(unsaid).mode) == ("full", "auto")
    budgets = [WeightManager.from_config(tree)._config.delta_budget_bytes for tree in (never, unsaid)]
    assert budgets == [0, None]


def test_services_of_one_host_have_names_of_their_own() -> None:
    """By their ports, so that each has the same name when it is started again."""
    names = [
        RolloutConfig.from_config({"sync_method": "pull", "serve": serve}).service_id
        for serve in ({}, {"port": 9001}, {"port": 9002}, {"port": 9001, "service_id": "mine"})
    ]
    host = socket.gethostname()
    assert names == [host, f"{host}-9001", f"{host}-9002", "mine"]
    assert RolloutConfig.from_config({"sync_method": "pull"}, port=9003).service_id == f"{host}-9003"
    any_port = [RolloutConfig.from_config({"sync_method": "pull"}, port=0).service_id for _ in range(2)]
    assert all(name.startswith(f"{host}-") for name in any_port)
    assert len({*any_port}) == 2, "seen red: all of one process had one name"


def test_engines_are_what_the_inference_service_says() -> None:
    for url in ("sglang+http://host:1", "https://host:1"):
        service = InferenceServiceConfig(backend="vllm", base_url=url if url.startswith("http") else None)
        if url.startswith("sglang"):
            with pytest.raises(ConfigError, match=r"backend is 'vllm', and sglang\+http://host:1 says otherwise"):
                urls_of(service, [url])
        else:
            assert urls_of(service, []) == ["vllm+https://host:1"]
            assert urls_of(service, ["vllm+http://a:1", "http://b:1"]) == ["vllm+http://a:1", "vllm+http://b:1"]
    assert urls_of(InferenceServiceConfig(backend="embedded"), ["http://a:1"]) == ["weightsync+http://a:1"]
