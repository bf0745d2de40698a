"""launch_fleet: a controller and rollout services on the nodes of a Ray cluster, one service a node."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weightsync.cluster.actors import Address, end
from weightsync.cluster.controller_actor import RayController, launch_controller, settings_of
from weightsync.cluster.placement import FleetPlacement, actor_options, reserved
from weightsync.cluster.ray_calls import kill, running_ray
from weightsync.cluster.service_actor import FleetEngineFactory, RayService, RolloutServiceActor, ServiceContext
from weightsync.config import WeightSyncConfig
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineUnreachableError,
    InvalidRequestError,
    WeightSyncError,
)
from weightsync.host.settings import pull_settings
from weightsync.types import Deadline
from weightsync.types.control import InstanceStatus

_LOOK_S = 0.1
_LEAST_S = 5.0  # that a look has, also at the end of the time
_AGAIN_S = 0.5

_logger = logging.getLogger(__name__)


class RayFleet:
    """A fleet that `launch_fleet` has started. One thread adds and restarts services; the rest is thread-safe.

    Attributes:
        controller: the calls of trainers, trajectory pools and inference clients.
        services: by name: "service-0", "service-1", ...
        url: of the controller, for `ControllerClient`.
        token: that all of its HTTP faces ask for, and that services show to agents.
    """

    def __init__(
        self,
        controller: RayController,
        context: ServiceContext,
        build: FleetEngineFactory,
        placement: FleetPlacement,
        options: Mapping[str, Any],
        stack: contextlib.ExitStack,
        *,
        controller_returns: bool,
    ) -> None:
        self.controller = controller
        self.services: dict[str, RayService] = {}
        self.url, self.token = context.controller
        self._context = context
        self._build = build
        self._placement = placement
        self._options = {**actor_options(placement.service), **options}
        self._stack = stack
        self._controller_returns = controller_returns
        self._bundles: dict[str, tuple[Any, int]] = {}
        self._ended: dict[str, str] = {}  # URLs of processes that were replaced, by name: they have a lease still

    def add_service(self, *, timeout_s: float) -> RayService:
        """One more service, wherever the cluster has room for it. It takes part when it serves what the fleet serves:
        see `wait_live`.

        Raises:
            DeadlineExceededError: no room, or it was not built in time. Nothing is left of it.
            WeightSyncError: what the factory raised. As above.
        """
        deadline = Deadline(timeout_s)
        with contextlib.ExitStack() as stack:
            bundles = (self._placement.service,)
            group = stack.enter_context(reserved(bundles, spread="PACK", timeout_s=deadline.remaining_s))
            service = self._start(f"service-{len(self._bundles)}", (group, 0))
            stack.callback(end, [service])
            service.ready(timeout_s=deadline.check(f"{service.name} built"))
            self.services[service.name] = service
            self._stack.push(stack.pop_all())
        return service

    def restart_service(self, service_id: str, *, timeout_s: float) -> RayService:
        """Ends a service's actor, if there is one, and starts another in its bundle: on another node where its own is
        gone, as soon as there is one. It joins under its name when the old one's lease is over; see `add_service`.

        Ray may put it on a node whose death it has not noticed yet; it is started again then, until the time is over.

        Raises:
            InvalidRequestError: there is no such service.
            EngineUnreachableError: its actor died each time that it was started. Call it again.
            DeadlineExceededError: no room, or it was not built in time. As above.
            WeightSyncError: what the factory raised.
        """
        if service_id not in self.services:
            raise InvalidRequestError(f"there is no service {service_id!r}; there are {', '.join(self.services)}")
        service, deadline = self.services[service_id], Deadline(timeout_s)
        with contextlib.suppress(WeightSyncError):  # a controller that is gone knows nothing of the old one
            if (old := self._instances(deadline).get(service_id)) is not None:
                self._ended[service_id] = old.url
        while True:
            kill(service.actor)
            service.replace(self._start(service_id, self._bundles[service_id]).actor)
            try:
                service.ready(timeout_s=deadline.remaining_s)
                return service
            except EngineUnreachableError as error:
                if deadline.remaining_s < _AGAIN_S:
                    raise
                _logger.warning("%s is started again: %s", service_id, error)
            time.sleep(_AGAIN_S)

    def wait_live(self, service_ids: Sequence[str] = (), *, timeout_s: float) -> None:
        """Returns when these services take part; all of them where none is named.

        Raises:
            DeadlineExceededError: not in time; says who does not, and why.
            EngineUnreachableError: the controller is gone; where Ray may start it again, it did not in time.
        """
        wanted, deadline = service_ids or tuple(self.services), Deadline(timeout_s)
        found: dict[str, InstanceStatus] = {}
        never = "is not known: the controller did not answer"
        while True:
            try:
                found = self._instances(deadline)
                for who in tuple(self._ended):
                    if not self._is_ended(found.get(who)):  # nor is what comes next, at whatever URL
                        self._ended.pop(who, None)
                never = "was never heard"
            except DeadlineExceededError as error:
                _logger.info("the controller is asked again: %s", error)
            except EngineUnreachableError:
                if deadline.expired or not self._controller_returns:
                    raise
                found = {}
            missing = {
                who: found.get(who)
                for who in wanted
                if who not in found or found[who].state != "live" or self._is_ended(found[who])
            }
            if not missing:
                return
            if deadline.expired:
                states = "; ".join(
                    f"{who} {never}"
                    if each is None
                    else f"{who} was started again, and its old process has a lease still"
                    if self._is_ended(each)
                    else f"{who} is {each.state}: {each.why}"
                    for who, each in missing.items()
                )
                raise DeadlineExceededError(f"not all services take part within {timeout_s:g} s: {states}")
            time.sleep(_LOOK_S)

    def _instances(self, deadline: Deadline) -> dict[str, InstanceStatus]:
        status = self.controller.status(timeout_s=max(_LEAST_S, min(10.0, deadline.remaining_s)))
        return {each.instance_id: each for each in status.instances}

    def _is_ended(self, seen: InstanceStatus | None) -> bool:
        """Whether that is a process that was replaced, whose lease is not over."""
        url = None if seen is None else self._ended.get(seen.instance_id)
        return seen is not None and url is not None and seen.state in ("live", "suspect") and seen.url == url

    def _start(self, service_id: str, bundle: tuple[Any, int]) -> RayService:
        self._bundles[service_id] = bundle
        context = dataclasses.replace(self._context, service_id=service_id)
        actor = RolloutServiceActor.start(context, self._build, bundle=bundle, **self._options)
        return RayService(actor, name=service_id)


@contextlib.contextmanager
def launch_fleet(
    num_services: int,
    build: FleetEngineFactory,
    config: WeightSyncConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    token: str | None = None,
    service: Mapping[str, Any] | None = None,
    placement: FleetPlacement | None = None,
    start_timeout_s: float = 120.0,
    controller_options: Mapping[str, Any] | None = None,
    service_options: Mapping[str, Any] | None = None,
) -> Iterator[RayFleet]:
    """Starts a controller and services as actors; ends them, and gives back what they held, at the end.

    Each listens on its node's address as Ray knows it, and asks for the fleet's token.

    Args:
        num_services: how many, "service-0", "service-1", ...
        build: builds the engine of a model; see `FleetEngineFactory`.
        config: what a `weightsync controller` is given; each service serves all of its `fleet.models`. Not said:
            `sync_method` is "pull", the system chooses the port. `fleet.host` and `serve` are refused, and what it says
            of `transfer` the services read, as with `RolloutConfig.from_config`.
        token: bearer token of the controller and of all services; one is made where not given.
        service: further fields of each service's `RolloutConfig`, e.g. `pull_timeout_s`.
        placement: what the actors take; by default a CPU each, and each service on a node of its own.
        start_timeout_s: until everything is there and takes part: room, processes, engines, and a lease.
        controller_options: Ray's own options of the controller's actor, e.g. name, max_restarts.
        service_options: the same for the services.

    Yields:
        The fleet: `fleet.controller.notify_version(...)` after each publication.

    Raises:
        ConfigError: something that can't be. Nothing was started.
        StateError: no ray.init() before this.
        DeadlineExceededError: something was not there in time; says what. Nothing is left running.
        EngineUnreachableError: an actor died while it started. As above.
        WeightSyncError: what the factory raised. As above.
    """
    running_ray()
    settings, placement = config_of(config, controller_options or {}), placement or FleetPlacement()
    models = settings.fleet.models
    if num_services < 1 or not models or len(set(models)) < len(models):
        raise ConfigError(f"a fleet has services and fleet.models, each named once: {num_services} and {list(models)}")
    of_services = {**pull_settings(settings), **(service or {})}
    context = ServiceContext(service_id="", models=models, controller=Address("", ""), settings=of_services)
    deadline = Deadline(start_timeout_s)
    with contextlib.ExitStack() as stack:
        controller = stack.enter_context(
            launch_controller(
                settings, token=token, placement=placement.controller, start_timeout_s=start_timeout_s,
                options=controller_options,
            )
        )  # fmt: skip
        bundles = (placement.service,) * num_services
        group = stack.enter_context(
            reserved(bundles, spread=placement.spread, timeout_s=deadline.check("room for the services"))
        )
        context = dataclasses.replace(context, controller=controller.address)
        fleet = RayFleet(
            controller, context, build, placement, service_options or {}, stack,
            controller_returns=bool((controller_options or {}).get("max_restarts")),
        )  # fmt: skip
        stack.callback(lambda: end(list(fleet.services.values())))
        for index in range(num_services):
            name = f"service-{index}"
            fleet.services[name] = fleet._start(name, (group, index))
        for each in fleet.services.values():
            each.ready(timeout_s=deadline.check(f"{each.name} built"))
        fleet.wait_live(timeout_s=deadline.check("lease for the services"))
        yield fleet


def config_of(
    config: WeightSyncConfig | Mapping[str, Any] | str | os.PathLike[str], controller_options: Mapping[str, Any]
) -> WeightSyncConfig:
    """The fleet's settings, complete; see `settings_of`.

    Raises:
        ConfigError: it is of no pull, or as `settings_of` raises it.
    """
    settings = WeightSyncConfig.load(config)
    if "sync_method" in settings.model_fields_set and settings.sync_method != "pull":
        raise ConfigError(
            f"the services of a fleet pull: sync_method is 'pull', not {settings.sync_method!r}; launch_controller "
            "starts a controller of any method",
            keys=["sync_method"],
        )
    settings = settings.for_method("pull")
    if unread := [key for key, _ in settings.asked() if key.startswith("serve.")]:
        raise ConfigError(
            f"nobody reads {', '.join(unread)} on Ray: service= has the fields of each service's RolloutConfig",
            keys=unread,
        )
    return settings_of(settings, controller_options)
