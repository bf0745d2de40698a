"""A controller in a Ray actor, behind the same HTTP server as everywhere, with the method that its configuration names.

`launch_controller` starts one; RayController calls it there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from weightsync.clients.controller import ControllerClient
from weightsync.cluster.actors import ActorHandle, Address, StartedActor, Whereabouts, end
from weightsync.cluster.placement import actor_options, reserved
from weightsync.cluster.ray_calls import here, running_ray
from weightsync.config import WeightSyncConfig
from weightsync.control.build import build_controller, check_stands_alone
from weightsync.errors import ConfigError
from weightsync.net.auth import check_exposure, checked_token
from weightsync.types import Deadline

NAME = "the controller"


class ControllerActor(StartedActor):
    """The actor's class. With max_restarts its config names a port: services know a controller by its URL.

    Args:
        config: of a `WeightSyncConfig`; it listens on its node's address, at `fleet.port`.
        token: of its server and of what its method calls.
    """

    def __init__(self, config: dict[str, Any], token: str) -> None:
        super().__init__(NAME, peer=NAME)
        with self._starting("the controller did not start"):
            config = {**config, "fleet": {**config.get("fleet", {}), "host": here()[1]}}
            built = self._closing.enter_context(build_controller(config, token=token))
            self._address = Address(built.url, token)


class RayController(ControllerClient):
    """A `ControllerClient` of a controller that Ray has started. Thread-safe; other actors may be sent a copy."""

    def __init__(self, handle: ActorHandle, address: Address) -> None:
        super().__init__(address.url, token=address.token)
        self.handle = handle
        self.address = address

    def ready(self, *, timeout_s: float) -> Whereabouts:
        """Where its process is, as Ray knows; see `ActorHandle.ready`."""
        return self.handle.ready(timeout_s=timeout_s)

    def __reduce__(self) -> tuple[Any, ...]:
        return RayController, (self.handle, self.address)


@contextlib.contextmanager
def launch_controller(
    config: WeightSyncConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    token: str | None = None,
    placement: Mapping[str, float] | None = None,
    start_timeout_s: float = 60.0,
    options: Mapping[str, Any] | None = None,
) -> Iterator[RayController]:
    """Starts a controller as an actor, by itself: of training ranks that push (`launch(..., controller=)`), or of
    engines that are told of each version. It ends with its block. Services that pull: `launch_fleet`.

    Args:
        config: what a `weightsync controller` is given. The system chooses the port where it is not said.
        token: bearer token of its server, and of what its method calls; one is made where not given.
        placement: what it takes, as Ray names it; a CPU where not given.
        start_timeout_s: until it is there: room in the cluster, and its process.
        options: Ray's own, e.g. name, max_restarts.

    Raises:
        ConfigError: something that can't be. Nothing was started.
        StateError: no ray.init() before this.
        DeadlineExceededError: it was not there in time; says what. Nothing is left running.
        EngineUnreachableError: its actor died while it started. As above.
        WeightSyncError: what its method refuses. As above.
    """
    running_ray()
    settings, options = settings_of(config, options or {}), options or {}
    token = checked_token(token or secrets.token_hex(32))
    check_exposure("0.0.0.0", token)
    placement, deadline = placement or {"CPU": 1.0}, Deadline(start_timeout_s)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(reserved((placement,), spread="PACK", timeout_s=deadline.remaining_s))
        of_actor = {**actor_options(placement), **options}
        actor = ControllerActor.start(settings.model_dump(exclude_unset=True), token, bundle=(group, 0), **of_actor)
        handle = ActorHandle(actor, name=NAME)
        stack.callback(end, [handle])
        yield RayController(handle, handle.address(timeout_s=deadline.check("controller")))


def settings_of(
    config: WeightSyncConfig | Mapping[str, Any] | str | os.PathLike[str], options: Mapping[str, Any]
) -> WeightSyncConfig:
    """The configuration of a controller that Ray starts, complete.

    Raises:
        ConfigError: it is wrong, says what Ray says, or Ray may restart a controller whose port the system chooses.
    """
    settings = WeightSyncConfig.load(config)
    check_stands_alone(settings)
    fleet = settings.fleet
    if "host" in fleet.model_fields_set:
        raise ConfigError(
            f"fleet.host is {fleet.host!r}, and a controller that Ray starts listens on its node's address: leave it "
            "out",
            keys=["fleet.host"],
        )
    port = fleet.port if "port" in fleet.model_fields_set else 0
    if options.get("max_restarts") and not port:
        raise ConfigError("services know a controller by its URL: with max_restarts, set fleet.port")
    changes = {"port": port, "models": fleet.models or (settings.inference_service.model_tag,)}
    return settings.model_copy(update={"fleet": fleet.model_copy(update=changes)})
