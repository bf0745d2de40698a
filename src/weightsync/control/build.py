"""A controller as its configuration says, for `weightsync controller`, Ray and users' own processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from weightsync.config import FleetConfig, WeightSyncConfig
from weightsync.control.controller import WeightSyncController
from weightsync.control.method import ModelSync
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.methods.select import method_of
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.errors import ConfigError
from weightsync.net.server import TlsFiles
from weightsync.types import Version
from weightsync.types.control import ValidationRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """A controller and what is around it; a context manager that closes all of it.

    Attributes:
        controller: document 5's calls.
        pool: where its method has one.
        server: started; `url` is its address.
        url: see there.
    """

    controller: WeightSyncController
    pool: RolloutPool | None
    server: ControllerServer
    url: str

    def __enter__(self) -> Built:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.controller.close)
            stack.callback(self.server.close)


def build_controller(
    config: WeightSyncConfig | Mapping[str, Any],
    *,
    method: ModelSync | None = None,
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
    method = method or method_of(settings, models, token=service_token or token, verify=verify)
    pool = method.pool if isinstance(method, FleetMethod) else None
    controller = WeightSyncController(
        settings,
        method,
        model_tags=models,
        retries_s=fleet.retries_s,
        after_failure=fleet.after_failure,
        validate_timeout_s=fleet.validate_timeout_s,
        on_validate=on_validate,
        on_give_up=on_give_up,
    )
    server = ControllerServer(controller, pool, host=fleet.host, port=fleet.port, token=token, tls=tls)
    return Built(controller=controller, pool=pool, server=server, url=server.start())


def _check_sets(fleet: FleetConfig, models: Sequence[str]) -> None:
    strangers = {tag for each in fleet.sets for tag in each} - set(models)
    if strangers:
        raise ConfigError(f"fleet.sets names models that fleet.models has not: {', '.join(sorted(strangers))}")
