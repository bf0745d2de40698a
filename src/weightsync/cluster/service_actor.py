"""A rollout service with its engines in a Ray actor on their node, behind the same HTTP server as everywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from weightsync.clients.host import RolloutClient
from weightsync.cluster.actors import ActorHandle, Address, StartedActor
from weightsync.cluster.engine_actor import engine_of
from weightsync.cluster.ray_calls import here
from weightsync.errors import ConfigError
from weightsync.host.settings import RolloutConfig
from weightsync.memory import LeaseReader, ServingLease
from weightsync.types import Deadline
from weightsync.types.service import ServiceStatus

_OF_THE_FLEET = frozenset(
    {"service_id", "host", "port", "token", "tls", "controller", "controller_token", "advertise", "lease"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceContext:
    """Who a service is.

    Attributes:
        service_id: its name in the fleet.
        models: that it serves.
        controller: where the fleet's controller listens. Its token is the service's own as well.
        settings: further fields of its `RolloutConfig`; `sender_token` is the fleet's where it is not given.

    Raises:
        ConfigError: `settings` has what no RolloutConfig has, or what the fleet chooses by itself.
    """

    service_id: str
    models: tuple[str, ...]
    controller: Address
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        fields = {field.name for field in dataclasses.fields(RolloutConfig)} - _OF_THE_FLEET
        if wrong := sorted(set(self.settings) - fields):
            raise ConfigError(
                f"a service of a fleet is given no {wrong}: the fleet chooses {sorted(_OF_THE_FLEET)}, and besides a "
                f"RolloutConfig has {sorted(fields)}"
            )
        RolloutConfig(**self.settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetEngineContext:
    """What a fleet's engine factory is told.

    Attributes:
        engine_id: a name for it; unique in the fleet.
        lease: to be given to the engine: without it, it would answer after it was left behind.
        lease_path: the same, for engines in processes of their own: to be opened before the factory returns, the file
            is gone then.
    """

    service_id: str
    model_id: str
    engine_id: str
    lease: LeaseReader
    lease_path: str


FleetEngineFactory = Callable[[FleetEngineContext], Any]
"""Called in the actor's process, once a model. Gives an `EngineHandle` (e.g. an `EmbeddedEngine`), or an object whose
attribute `engine` is one; `RayService.ask` calls that object's methods."""


class RolloutServiceActor(StartedActor):
    """The actor's class; `start` starts one.

    Args:
        build: builds the engine of a model, in this process's main thread.
    """

    num_asks = 16

    def __init__(self, context: ServiceContext, build: FleetEngineFactory) -> None:
        super().__init__(context.service_id, peer=context.service_id)
        with self._starting(f"{context.service_id} did not start"):
            self._start(context, build)

    def _start(self, context: ServiceContext, build: FleetEngineFactory) -> None:
        from weightsync.host.service import RolloutService

        engines = {}
        with tempfile.TemporaryDirectory(prefix="weightsync-lease-") as folder:  # all who need it map it: see below
            lease = ServingLease(f"{folder}/{context.service_id}")
            self._closing.callback(lease.remove)
            for model_id in context.models:
                built = build(
                    FleetEngineContext(
                        service_id=context.service_id, model_id=model_id, engine_id=f"{context.service_id}-{model_id}",
                        lease=LeaseReader(lease.path), lease_path=lease.path,
                    )
                )  # fmt: skip
                self._keep(model_id, built)
                engines[model_id] = engine_of(built)
        url, token = context.controller
        settings = RolloutConfig(
            **{"sender_token": token, **context.settings}, service_id=context.service_id, host=here()[1], token=token,
            controller=url, controller_token=token, lease=lease,
        )  # fmt: skip
        service = RolloutService(engines, settings)
        self._closing.callback(service.close)
        self._address = Address(service.start(), token)


class RayService(ActorHandle):
    """A service that Ray has started. Thread-safe; may be sent to other actors, as a copy."""

    def status(self, *, timeout_s: float = 10.0) -> ServiceStatus:
        """What it serves.

        Raises:
            EngineUnreachableError: the actor is gone, or its server does not answer.
            DeadlineExceededError: no answer in time.
        """
        deadline = Deadline(timeout_s)
        url, token = self.address(timeout_s=timeout_s)
        with contextlib.closing(RolloutClient(url, token=token)) as client:
            return client.status(timeout_s=deadline.remaining_s)

    def ask(self, model_id: str, method: str, *args: Any, timeout_s: float, **options: Any) -> Any:
        """Calls a public method of what the factory built for a model, e.g. generate; see `RayEngine.ask`."""
        return self._ask(model_id, method, args, options, timeout_s)
