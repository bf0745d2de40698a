"""A controller as its configuration says, for `weightsync controller`, Ray and users' own processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from weightsync.config import FleetConfig, WeightSyncConfig
from weightsync.control.controller import WeightSyncController
from weightsync.control.method import SyncMethod
from weightsync.control.methods.select import method_of
from weightsync.control.push_orders import PushOrders
from weightsync.control.server import ControllerServer
from weightsync.errors import ConfigError
from weightsync.net.routes import ANY_ADDRESS
from weightsync.net.server import TlsFiles
from weightsync.types import Version
from weightsync.types.closing import Closing
from weightsync.types.control import ValidationRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built(Closing):
    """A controller and what is around it; a context manager that closes all of it.

    Attributes:
        controller: document 5's calls.
        server: started; `url` is its address.
        url: see there.
        orders: of the method that was made for it: nobody can take or report them without the server.
    """

    controller: WeightSyncController
    server: ControllerServer
    url: str
    orders: Sequence[PushOrders] = ()

    def close(self) -> None:
        """Closes the server, then the controller; pushes that are ordered are given up. Idempotent."""
        with contextlib.ExitStack() as stack:
            for each in self.orders:
                stack.callback(each.close)
            stack.callback(self.controller.close)
            stack.callback(self.server.close)


def build_controller(
    config: WeightSyncConfig | Mapping[str, Any] | str | os.PathLike[str],
    *,
    method: SyncMethod | None = None,
    token: str | None = None,
    service_token: str | None = None,
    verify: bool | str = True,
    tls: TlsFiles | None = None,
    on_validate: Callable[[str, ValidationRun], None] | None = None,
    on_give_up: Callable[[str, Version], None] | None = None,
) -> Built:
    """Makes a controller and starts its server.

    Args:
        config: see `WeightSyncConfig`; `fleet` says where it listens.
        method: moves versions; `method_of(config)` where not given.
        token: of the controller's own face.
        service_token: of the rollout services that it calls; `token` where not given.
        verify: see `JsonClient`.
        tls: of its own face.
        on_validate, on_give_up: see `WeightSyncController`.

    Raises:
        ConfigError: a contradiction, or a method that has to be given and is not; see `method_of`.
    """
    settings = WeightSyncConfig.load(config)
    fleet = settings.fleet
    models = fleet.models or (settings.inference_service.model_tag,)
    _check_sets(fleet, models)
    if service_token is not None and token is None:
        raise ConfigError(
            "a service_token, and no token of the controller's own: whoever sends a heartbeat would be given it"
        )
    orders: Sequence[PushOrders] = ()
    if method is None:
        method = method_of(settings, models, token=service_token or token, verify=verify)
        orders = tuple(method.orders.values())
    controller = WeightSyncController(
        settings, method, model_tags=models, on_validate=on_validate, on_give_up=on_give_up
    )
    server = ControllerServer(controller, host=fleet.host, port=fleet.port, token=token, tls=tls)
    return Built(controller=controller, server=server, url=server.start(), orders=orders)


def waits_for(config: WeightSyncConfig, url: str) -> str:
    """Who has to come to a controller at `url` before anything is synced, in words."""
    if (parts := urlsplit(url)).hostname in ANY_ADDRESS:  # on another machine it would be that machine's own
        url = f"{parts.scheme}://THIS-HOST:{parts.port}"
    match config.sync_method:
        case "push":
            engines = "" if config.push.engines else "; their file has to name push.engines, which this one does not"
            return f"training ranks that push: weightsync.push(model, config=FILE) with push.controller: {url}{engines}"
        case "pull":
            return (
                f"rollout services (weightsync serve --controller {url} --lease FILE ...) and trainers "
                f'(weightsync.publish(model, to=["{url}"]))'
            )
        case _:
            return "trainers that tell of a version: ControllerClient.train_worker_notify_weight_update"


def check_stands_alone(config: WeightSyncConfig) -> None:
    """For a controller's own process, which nobody can give an object to.

    Raises:
        ConfigError: the method needs one.
    """
    method = config.sync_method
    if method in ("tinker", "weaver"):
        raise ConfigError(
            f"sync_method {method!r} needs the clients of that service, which another process has: call "
            f"build_controller(config) there, and set_{method}_service_holder(...) of its controller"
        )


def _check_sets(fleet: FleetConfig, models: Sequence[str]) -> None:
    strangers = {tag for each in fleet.sets for tag in each} - set(models)
    if strangers:
        raise ConfigError(f"fleet.sets names models that fleet.models has not: {', '.join(sorted(strangers))}")
