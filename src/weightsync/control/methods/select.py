"""The method that a configuration names, where it names all that it needs."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.config import WeightSyncConfig
from weightsync.control.method import SyncMethod
from weightsync.control.methods.disk import DiskMethod
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.methods.folder import VersionFolder
from weightsync.control.methods.mock import MockMethod
from weightsync.control.methods.network import NetworkMethod, ToldService
from weightsync.control.methods.push import PushMethod
from weightsync.control.methods.tinker import TinkerMethod
from weightsync.control.methods.weaver import WeaverMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.push_orders import PushOrders
from weightsync.errors import ConfigError
from weightsync.types.deadline import MAX_WAIT_S

_STOCK = ("vllm", "sglang")
"""Backends that have no `/update_weights` of their own."""
_REPORT_S = 30.0
"""So long after its own deadline a push may still report."""


def method_of(
    config: WeightSyncConfig, models: Sequence[str], *, token: str | None = None, verify: bool | str = True
) -> SyncMethod:
    """The method of `config.sync_method`.

    - "pull": a `FleetMethod` with a pool of its own, by `config.fleet`.
    - "disk": a `DiskMethod` over `sync_weight_path`, whose engines are at the inference service's `base_url`.
      That is one engine or router, of one model.
    - "network": that service is told by `POST /update_weights` where the weights are; where its `backend` is "vllm" or
      "sglang", by that engine's own routes, as with "disk".
    - "tinker", "weaver": without a holder until `set_tinker_service_holder` or `set_weaver_service_holder`.
    - "push": training ranks take it as an order, at their next `push.step()`; see `PushOrders`.
    - "mock": moves nothing.

    Args:
        config: see `WeightSyncConfig`.
        models: the models' names.
        token: bearer token of the services that the method calls.
        verify: see `JsonClient`.

    Raises:
        ConfigError: something that the method needs is not in the configuration, or is there once for several models.
    """
    config = config.for_method(config.sync_method)
    service, fleet, timeout_s = config.inference_service, config.fleet, config.transfer.transfer_timeout_s
    match config.sync_method:
        case "pull":
            return FleetMethod(
                RolloutPool(lease_s=fleet.lease_s, models=models),
                sets=fleet.sets,
                commit_policy=fleet.commit_policy,
                token=token,
                verify=verify,
                barrier_timeout_s=fleet.barrier_timeout_s,
                prepare_timeout_s=fleet.prepare_timeout_s,
                commit_timeout_s=fleet.commit_timeout_s,
                straggler_s=fleet.straggler_s,
            )
        case "disk" | "network" if config.sync_method == "disk" or service.backend in _STOCK:
            folder = VersionFolder(_needed(config.sync_weight_path, "sync_weight_path", config.sync_method))
            urls = dict.fromkeys(models, _base_url(config, models))
            return DiskMethod(
                folder, urls, backend=service.backend, served_model=service.model, token=token, verify=verify,
                timeout_s=timeout_s,
            )  # fmt: skip
        case "network":
            each = ToldService(
                base_url=_base_url(config, models),
                model_name=_needed(service.model, "inference_service.model", "network"),
                weights=_needed(config.sync_weight_path, "sync_weight_path", "network"),
                weight_type=service.weight_type,
                token=token,
                verify=verify,
                timeout_s=timeout_s,
            )
            return NetworkMethod(dict.fromkeys(models, each))
        case "tinker":
            return TinkerMethod({}, trainer_waits=config.sync_mode == "sync", **_said(config))
        case "weaver":
            return WeaverMethod({}, **_said(config))
        case "mock":
            return MockMethod()
        case "push":
            push_s = min(timeout_s, MAX_WAIT_S - _REPORT_S) + _REPORT_S
            return PushMethod({tag: PushOrders(take_s=fleet.prepare_timeout_s, push_s=push_s) for tag in models})


def _said(config: WeightSyncConfig) -> dict[str, float]:
    """The deadline of a sync, where the configuration has one of its own."""
    given = "transfer_timeout_s" in config.transfer.model_fields_set
    return {"timeout_s": config.transfer.transfer_timeout_s} if given else {}


def _base_url(config: WeightSyncConfig, models: Sequence[str]) -> str:
    url = _needed(config.inference_service.base_url, "inference_service.base_url", config.sync_method)
    if len(models) > 1:
        raise ConfigError(
            f"sync_method {config.sync_method!r} has one engine or router, inference_service.base_url = {url}, and "
            f"{len(models)} models: {', '.join(models)}. Have a controller for each of them, or give it a DiskMethod "
            "or a NetworkMethod that has an engine of each"
        )
    return url


def _needed(value: str | None, key: str, method: str) -> str:
    if value is None:
        raise ConfigError(f"sync_method {method!r} needs {key}")
    return value
