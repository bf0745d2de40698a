"""The method that a configuration names, where it names all that it needs."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.config import WeightSyncConfig
from weightsync.control.method import ModelSync
from weightsync.control.methods.disk import DiskMethod
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.methods.folder import VersionFolder
from weightsync.control.methods.mock import MockMethod
from weightsync.control.methods.network import NetworkMethod, ToldService
from weightsync.control.methods.tinker import TinkerMethod
from weightsync.control.methods.weaver import WeaverMethod
from weightsync.control.pool import RolloutPool
from weightsync.errors import ConfigError


def method_of(
    config: WeightSyncConfig, models: Sequence[str], *, token: str | None = None, verify: bool | str = True
) -> ModelSync:
    """The method of `config.sync_method`.

    - "pull": a `FleetMethod` with a pool of its own, by `config.fleet`.
    - "disk": a `DiskMethod` over `sync_weight_path`, whose engines are at the inference service's `base_url`.
    - "network": that service is told by `POST /update_weights` where the weights are. The push through a process group
      needs a trainer: give its method yourself.
    - "tinker", "weaver": without a holder until `set_tinker_service_holder` or `set_weaver_service_holder`.
    - "mock": moves nothing.

    Args:
        config: see `WeightSyncConfig`.
        models: the models' names.
        token: bearer token of the services that the method calls.
        verify: see `JsonClient`.

    Raises:
        ConfigError: something that the method needs is not in the configuration.
    """
    service, fleet = config.inference_service, config.fleet
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
        case "disk":
            folder = VersionFolder(_needed(config.sync_weight_path, "sync_weight_path", "disk"))
            return DiskMethod(folder, dict.fromkeys(models, _base_url(config)), token=token)
        case "network":
            told = ToldService(
                base_url=_base_url(config),
                model_name=_needed(service.model, "inference_service.model", "network"),
                weights=_needed(config.sync_weight_path, "sync_weight_path", "network"),
                weight_type=service.weight_type,
                token=token,
            )
            return NetworkMethod(dict.fromkeys(models, told))
        case "tinker":
            return TinkerMethod({}, trainer_waits=config.sync_mode == "sync")
        case "weaver":
            return WeaverMethod({})
        case "mock":
            return MockMethod()
        case "push":
            raise ConfigError(
                "sync_method 'push' needs the training ranks: give WeightSyncController a method around PushSync, see "
                "docs/control.md, in a process of theirs"
            )


def _base_url(config: WeightSyncConfig) -> str:
    return _needed(config.inference_service.base_url, "inference_service.base_url", config.sync_method)


def _needed(value: str | None, key: str, method: str) -> str:
    if value is None:
        raise ConfigError(f"sync_method {method!r} needs {key}")
    return value
