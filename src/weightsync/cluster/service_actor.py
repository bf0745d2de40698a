"""RolloutServiceActor: a rollout service with its engines, in a Ray actor on their node."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable
from typing import Any

from weightsync.cluster.engine_actor import ASKS, URGENT, engine_of, user_method
from weightsync.cluster.fleet_config import FleetConfig
from weightsync.cluster.peer import RayPeer
from weightsync.cluster.ray_calls import here, start_actor
from weightsync.cluster.wire import answer, refusal
from weightsync.errors import EngineError, InvalidRequestError, WeightSyncError, as_weightsync_error
from weightsync.memory import LeaseReader, ServingLease, reclaim_dead
from weightsync.types.publication import ServiceStatus

_GROUPS = {ASKS: 16, URGENT: 8}
"""Threads by kind of call: generation holds up nothing else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceContext:
    """Who a service is.

    Attributes:
        service_id: its name in the fleet.
        models: that it serves.
        controller: URL of the fleet's controller.
        config: of the fleet.
    """

    service_id: str
    models: tuple[str, ...]
    controller: str
    config: FleetConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetEngineContext:
    """What a fleet's engine factory is told.

    Attributes:
        service_id: the service whose engine it is.
        model_id: the model that it serves.
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


class RolloutServiceActor:
    """The actor's class; `start_service` starts one. A factory that fails is told, typed, to everybody who asks.

    Args:
        context: who it is.
        build: builds the engine of a model, in this process's main thread.
    """

    def __init__(self, context: ServiceContext, build: FleetEngineFactory) -> None:
        self._context = context
        self._failed: bytes | None = None
        self._built: dict[str, Any] = {}
        self._closing: contextlib.ExitStack = contextlib.ExitStack()
        self._service: Any = None
        self._url = ""
        try:
            self._start(build)
        except Exception as error:
            what = f"{context.service_id} did not start"
            self._failed = refusal(as_weightsync_error(error, EngineError, what, peer=context.service_id), "")
            self.close()

    def ready(self) -> bytes:
        """Answers node id, IP address and process id once the service listens."""
        return self._failed or answer([*here(), os.getpid()])

    def url(self) -> bytes:
        """Answers where it listens."""
        return self._failed or answer(self._url)

    def status(self) -> bytes:
        """`RolloutService.status`."""
        if self._failed is not None:
            return self._failed
        try:
            return answer(self._service.status())
        except Exception as error:
            return refusal(error, "status failed", peer=self._context.service_id)

    def ask(self, model_id: str, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[bytes, Any]:
        """Calls a method of what the factory built for a model; an answer without a value (or with the error), and what
        it returned."""
        if self._failed is not None:
            return self._failed, None
        try:
            if model_id not in self._built:
                raise InvalidRequestError(f"there is no model {model_id!r} here: {', '.join(self._built) or 'closed'}")
            return answer(), user_method(self._built[model_id], method)(*args, **options)
        except Exception as error:
            facts = {"peer": self._context.service_id}
            return refusal(as_weightsync_error(error, EngineError, f"{method} failed", **facts), ""), None

    def close(self) -> bytes:
        """Engines answer no more; closes what the factory built, where it can be closed. Idempotent."""
        closing, self._closing = self._closing, contextlib.ExitStack()
        self._built = {}
        with contextlib.suppress(Exception):  # the process is about to end
            closing.close()
        with contextlib.suppress(OSError, WeightSyncError):
            reclaim_dead()
        return answer()

    def _start(self, build: FleetEngineFactory) -> None:
        from weightsync.rollout.service import RolloutService
        from weightsync.rollout.settings import RolloutConfig

        context, config = self._context, self._context.config
        engines = {}
        with tempfile.TemporaryDirectory(prefix="weightsync-lease-") as folder:  # all who need it map it: see below
            lease = ServingLease(f"{folder}/{context.service_id}")
            self._closing.callback(lease.remove)
            for model_id in context.models:
                built = self._built[model_id] = build(
                    FleetEngineContext(
                        service_id=context.service_id, model_id=model_id, engine_id=f"{context.service_id}-{model_id}",
                        lease=LeaseReader(lease.path), lease_path=lease.path,
                    )
                )  # fmt: skip
                self._closing.callback(_close, built)
                engines[model_id] = engine_of(built)
        settings = RolloutConfig(
            **{"sender_token": config.token, **config.service},
            service_id=context.service_id, host=here()[1], token=config.token, controller=context.controller,
            controller_token=config.token, lease=lease,
        )  # fmt: skip
        self._service = RolloutService(engines, settings)
        self._closing.callback(self._service.close)
        self._url = self._service.start()


class RayService(RayPeer):
    """A service's actor as its callers see it. Thread-safe; may be sent to other actors, as a copy.

    Args:
        actor: its handle.
        service_id: its name in the fleet.
    """

    def __init__(self, actor: Any, *, service_id: str) -> None:
        super().__init__(actor, name=service_id)

    def url(self, *, timeout_s: float = 10.0) -> str:
        """Where it listens; see `RayPeer.call` for errors."""
        return self.call("url", group=URGENT, kind=str, timeout_s=timeout_s)

    def status(self, *, timeout_s: float = 10.0) -> ServiceStatus:
        """What it serves; see `RayPeer.call` for errors."""
        return self.call("status", group=URGENT, kind=ServiceStatus, timeout_s=timeout_s)

    def ask(self, model_id: str, method: str, *args: Any, timeout_s: float, **options: Any) -> Any:
        """Calls a public method of what the factory built for a model, e.g. generate.

        Arguments and result cross as Ray sends them; an error comes back typed.

        Raises:
            EngineUnreachableError: the actor is gone.
            DeadlineExceededError: no answer within `timeout_s`; the method goes on over there.
            WeightSyncError: what the method raised; an `EngineError` with its words where that was not one of ours.
        """
        return self.call_user(method, model_id, method, args, options, timeout_s=timeout_s)


def start_service(
    context: ServiceContext, build: FleetEngineFactory, *, bundle: tuple[Any, int] | None = None, **options: Any
) -> RayService:
    """Starts a service's actor, at once; `ready` says when it listens, the controller when it takes part.

    Args:
        context: who it is.
        build: see `FleetEngineFactory`. A function of a module that Ray's workers can import, or one of `__main__`.
        bundle: placement group and number of a bundle.
        options: Ray's own; num_cpus is 0 unless told otherwise. With max_restarts Ray starts it anew when it dies, and
            it joins the fleet again under its name.
    """
    options.setdefault("num_cpus", 0)
    actor = start_actor(RolloutServiceActor, context, build, groups=_GROUPS, bundle=bundle, **options)
    return RayService(actor, service_id=context.service_id)


def _close(built: Any) -> None:
    for part in (built, getattr(built, "engine", None)):
        with contextlib.suppress(Exception):
            getattr(part, "close", lambda: None)()
