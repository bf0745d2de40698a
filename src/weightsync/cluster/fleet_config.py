"""FleetConfig, FleetPlacement: how a fleet on Ray works, and what its actors take of the cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from weightsync.cluster.placement import Spread
from weightsync.config import WeightSyncConfig
from weightsync.control.policy import CommitPolicy
from weightsync.errors import ConfigError
from weightsync.net.auth import checked_token
from weightsync.rollout.settings import RolloutConfig

_OF_THE_FLEET = frozenset(
    {"service_id", "host", "port", "token", "tls", "controller", "controller_token", "advertise", "lease"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """How a fleet works. Plain data: it is sent to every actor.

    Attributes:
        sync: the controller's settings, see `WeightSyncController`.
        retries_s, after_failure: see there.
        lease_s: see `RolloutPool`.
        sets: models that are served together.
        commit_policy: "each", "all" or "quorum(n)".
        method: further arguments of `FleetMethod`, e.g. `prepare_timeout_s`.
        service: further fields of each service's `RolloutConfig`, e.g. `pull_timeout_s`; `sender_token` is `token`
            where it is not given.
        port: where the controller listens on its node; 0: the system chooses. One that Ray may restart needs a port.
        token: bearer token of the controller and of all services; `launch_fleet` makes one where not given.

    Raises:
        ConfigError: a setting that can't be, or that the fleet makes by itself.
    """

    sync: WeightSyncConfig | Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"sync_mode": "fully-async"})
    retries_s: tuple[float, ...] = (1.0, 2.0, 4.0)
    after_failure: Literal["keep", "evict"] = "keep"
    lease_s: float = 10.0
    sets: tuple[tuple[str, ...], ...] = ()
    commit_policy: str = "each"
    method: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    service: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    port: int = 0
    token: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token", checked_token(self.token))
        WeightSyncConfig.load(self.sync)
        CommitPolicy.parse(self.commit_policy)
        known = {field.name for field in dataclasses.fields(RolloutConfig)}
        if wrong := sorted(set(self.service) & _OF_THE_FLEET):
            raise ConfigError(f"a fleet chooses these fields of its services' RolloutConfig itself: {wrong}")
        if wrong := sorted(set(self.service) - known):
            raise ConfigError(f"a RolloutConfig has no fields {wrong}; it has {sorted(known - _OF_THE_FLEET)}")
        RolloutConfig(**self.service)
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"a port is a number from 0 to 65535, not {self.port}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetPlacement:
    """What the actors take, as Ray names it; all of it is Ray's bookkeeping.

    Attributes:
        controller: of the controller.
        service: of each service, e.g. all GPUs of a node.
        spread: how Ray lays the services out; "STRICT_SPREAD": each on a node of its own.

    Raises:
        ConfigError: an amount is negative, or nothing at all is taken (Ray refuses empty bundles).
    """

    controller: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"CPU": 1.0})
    service: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"CPU": 1.0})
    spread: Spread = "STRICT_SPREAD"

    def __post_init__(self) -> None:
        for whose in ("controller", "service"):
            amounts = getattr(self, whose).values()
            if not any(amounts) or min(amounts) < 0:
                raise ConfigError(f"{whose} takes some of the cluster, and nothing negative: {getattr(self, whose)}")


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options of an actor that takes these resources."""
    own = {key: amount for key, amount in resources.items() if key not in ("CPU", "GPU")}
    return {"num_cpus": resources.get("CPU", 0), "num_gpus": resources.get("GPU", 0), "resources": own or None}
