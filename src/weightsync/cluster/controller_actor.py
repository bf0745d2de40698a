"""ControllerActor: a fleet's controller in a Ray actor. `RayController` calls it; `ControllerClient(url)` may as well.

Every call runs in a thread of the actor; who waits at a gate is a coroutine and costs none.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weightsync.clients.controller import AsyncControllerClient
from weightsync.cluster.engine_actor import URGENT
from weightsync.cluster.fleet_config import FleetConfig
from weightsync.cluster.peer import RayPeer
from weightsync.cluster.ray_calls import here, start_actor
from weightsync.cluster.wire import answer, refusal
from weightsync.control.controller import Answer, WeightSyncController
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.pool import RolloutPool
from weightsync.control.server import ControllerServer
from weightsync.errors import ConfigError, DeadlineExceededError
from weightsync.types.control import ControllerStatus, RolloutServiceState

CALLS, WAITS, GATES = "calls", "waits", "gates"
_GROUPS = {CALLS: 64, WAITS: 64, GATES: 1024, URGENT: 8}
"""Calls under way at once, by kind; Ray lets others wait for their turn. Who waits for a validation holds up nobody who
may end it. `status` is urgent: it is answered though all others wait."""
_MARGIN_S = 5.0
_NAME = "the controller"

Result = dict[str, float | int | str | bool | None]


class ControllerActor:
    """The actor's class; `start_controller` starts one. Every method answers with JSON bytes and raises nothing.

    Args:
        models: of the fleet.
        config: how it works; its token guards what listens on the node's address.
    """

    def __init__(self, models: tuple[str, ...], config: FleetConfig) -> None:
        self._failed: bytes | None = None
        self._threads = ThreadPoolExecutor(
            _GROUPS[CALLS] + _GROUPS[WAITS] + _GROUPS[URGENT], thread_name_prefix="weightsync-controller"
        )
        try:
            pool = RolloutPool(lease_s=config.lease_s)
            method = FleetMethod(
                pool, sets=config.sets, commit_policy=config.commit_policy, token=config.token, **config.method
            )
            self._controller = WeightSyncController(
                config.sync, method, model_tags=models, retries_s=config.retries_s, after_failure=config.after_failure
            )
            self._server = ControllerServer(
                self._controller, pool, host=here()[1], port=config.port, token=config.token
            )
            self._url = self._server.start()
            self._gates = AsyncControllerClient(self._url, token=config.token)
        except Exception as error:
            self._failed = refusal(error, "the controller did not start", peer=_NAME)

    async def ready(self) -> bytes:
        """Answers node id, IP address and process id."""
        return self._failed or answer([*here(), os.getpid()])

    async def url(self) -> bytes:
        """Answers where it listens, for heartbeats and `ControllerClient`."""
        return self._failed or answer(self._url)

    async def status(self) -> bytes:
        """`WeightSyncController.status`."""
        return await self._done("status", lambda controller: controller.status())

    async def check_rollout_service_status(self, model_tag: str, wait_s: float) -> bytes:
        """`AsyncControllerClient.check_rollout_service_status`."""
        if self._failed is not None:
            return self._failed
        try:
            return answer(await self._gates.check_rollout_service_status(model_tag, wait_s=wait_s))
        except Exception as error:
            return refusal(error, "the gate failed", peer=_NAME)

    async def wait_version(self, run_id: str, model_tag: str, version: int, wait_s: float) -> bytes:
        """Answers whether every live instance serves it, as soon as they do, or when the time is over."""
        if self._failed is not None:
            return self._failed
        try:
            await self._gates.wait(run_id, model_tag, version, wait_s=wait_s)
            return answer(True)
        except DeadlineExceededError:
            return answer(False)
        except Exception as error:
            return refusal(error, "the gate failed", peer=_NAME)

    async def trajectory_pool_notify_batch_ready(self, model_tag: str) -> bytes:
        """`WeightSyncController.trajectory_pool_notify_batch_ready`; answers the model's state."""

        def step(controller: WeightSyncController) -> RolloutServiceState:
            controller.trajectory_pool_notify_batch_ready(model_tag)
            return controller.rollout_service_state(model_tag)

        return await self._done("trajectory_pool_notify_batch_ready", step)

    async def train_worker_notify_weight_update(
        self, worker_name: str, model_tag: str, run_id: str | None, version: int | None, options: dict[str, Any]
    ) -> bytes:
        """`WeightSyncController.train_worker_notify_weight_update` with these keyword arguments; answers the model's
        state."""

        def step(controller: WeightSyncController) -> RolloutServiceState:
            controller.train_worker_notify_weight_update(worker_name, model_tag, run_id, version, **options)
            return controller.rollout_service_state(model_tag)

        return await self._done("train_worker_notify_weight_update", step)

    async def sync_weight_to_rollout_service(self, model_tag: str, wait_s: float) -> bytes:
        """`WeightSyncController.sync_weight_to_rollout_service`."""
        return await self._done(
            "sync_weight_to_rollout_service",
            lambda controller: controller.sync_weight_to_rollout_service(model_tag, timeout_s=wait_s),
        )

    async def end_validate(self, model_tag: str, result: Result | None) -> bytes:
        """`WeightSyncController.end_validate`; answers the model's state."""

        def step(controller: WeightSyncController) -> RolloutServiceState:
            controller.end_validate(model_tag, result)
            return controller.rollout_service_state(model_tag)

        return await self._done("end_validate", step)

    async def close(self) -> bytes:
        """Stops listening; the fleet's leases run out. Idempotent."""

        def step(controller: WeightSyncController) -> None:
            self._server.close()
            controller.close()

        return await self._done("close", step)

    async def _done(self, what: str, step: Callable[[WeightSyncController], Any]) -> bytes:
        if self._failed is not None:
            return self._failed
        try:
            loop = asyncio.get_running_loop()
            return answer(await loop.run_in_executor(self._threads, step, self._controller))
        except Exception as error:
            return refusal(error, f"{what} failed", peer=_NAME)


class RayController(RayPeer):
    """Document 5's calls on a `ControllerActor`, as `ControllerClient` has them. Thread-safe; may be sent on.

    Every call raises EngineUnreachableError where the actor is gone, DeadlineExceededError where it says nothing, and
    otherwise what `WeightSyncController` raises.

    Args:
        actor: the actor's handle.
    """

    def __init__(self, actor: Any) -> None:
        super().__init__(actor, name=_NAME)

    def url(self, *, timeout_s: float = 10.0) -> str:
        """Where it listens."""
        return self.call("url", group=URGENT, kind=str, timeout_s=timeout_s)

    def status(self, *, timeout_s: float = 10.0) -> ControllerStatus:
        """How every model and every instance is."""
        return self.call("status", group=URGENT, kind=ControllerStatus, timeout_s=timeout_s)

    def check_rollout_service_status(self, model_tag: str, *, wait_s: float = 0.0, timeout_s: float = 10.0) -> Answer:
        """Whether a request may proceed; waits up to `wait_s` for that."""
        said = self.call(
            "check_rollout_service_status", model_tag, wait_s, group=GATES, kind=str, timeout_s=wait_s + timeout_s
        )
        return "continue" if said == "continue" else "block"

    def wait_version(
        self, run_id: str, model_tag: str, version: int, *, wait_s: float, timeout_s: float = 10.0
    ) -> bool:
        """Whether every live instance serves that version of the model, or a newer one of its run; waits up to `wait_s`
        for that.
        """
        return self.call(
            "wait_version", run_id, model_tag, version, wait_s, group=GATES, kind=bool, timeout_s=wait_s + timeout_s
        )

    def trajectory_pool_notify_batch_ready(self, model_tag: str, *, timeout_s: float = 10.0) -> RolloutServiceState:
        """A batch is ready: a training step starts with it."""
        return self.call(
            "trajectory_pool_notify_batch_ready", model_tag, group=CALLS, kind=RolloutServiceState, timeout_s=timeout_s
        )

    def train_worker_notify_weight_update(
        self,
        worker_name: str,
        model_tag: str,
        run_id: str | None = None,
        version: int | None = None,
        *,
        sender_endpoint: str | None = None,
        evaluate: bool = False,
        wait_s: float = 0.0,
    ) -> RolloutServiceState:
        """Training has new weights; see `ControllerClient.train_worker_notify_weight_update`."""
        options = {"sender_endpoint": sender_endpoint, "evaluate": evaluate, "timeout_s": wait_s}
        return self.call(
            "train_worker_notify_weight_update", worker_name, model_tag, run_id, version, options,
            group=WAITS if wait_s else CALLS, kind=RolloutServiceState, timeout_s=wait_s + _MARGIN_S,
        )  # fmt: skip

    def notify_version(
        self, run_id: str, model_id: str, version: int, sender_endpoint: str, *, evaluate: bool = False,
        wait_s: float = 0.0,
    ) -> RolloutServiceState:  # fmt: skip
        """A trainer has published a version; see `ControllerClient.notify_version`."""
        return self.train_worker_notify_weight_update(
            "trainer", model_id, run_id, version, sender_endpoint=sender_endpoint, evaluate=evaluate, wait_s=wait_s
        )

    def sync_weight_to_rollout_service(self, model_tag: str, *, wait_s: float = 60.0) -> bool:
        """Whether rollout serves the newest trained version after at most `wait_s`."""
        return self.call(
            "sync_weight_to_rollout_service", model_tag, wait_s, group=WAITS if wait_s else CALLS, kind=bool,
            timeout_s=wait_s + _MARGIN_S,
        )  # fmt: skip

    def end_validate(
        self, model_tag: str, result: Result | None = None, *, timeout_s: float = 10.0
    ) -> RolloutServiceState:
        """The validation that was running has ended, with this result."""
        return self.call("end_validate", model_tag, result, group=CALLS, kind=RolloutServiceState, timeout_s=timeout_s)


def start_controller(
    models: tuple[str, ...], config: FleetConfig, *, bundle: tuple[Any, int] | None = None, **options: Any
) -> RayController:
    """Starts a controller's actor, at once; `ready` says when it listens.

    Args:
        models: of the fleet.
        config: how it works.
        bundle: placement group and number of a bundle.
        options: Ray's own; num_cpus is 0 unless told otherwise.

    Raises:
        ConfigError: it would be restarted at another port, where no heartbeat reaches it.
    """
    check_restarts(config, options)
    options.setdefault("num_cpus", 0)
    return RayController(start_actor(ControllerActor, models, config, groups=_GROUPS, bundle=bundle, **options))


def check_restarts(config: FleetConfig, options: Mapping[str, Any]) -> None:
    """Raises ConfigError where Ray may restart a controller whose port the system chooses."""
    if options.get("max_restarts") and not config.port:
        raise ConfigError("services know a controller by its URL: with max_restarts, give FleetConfig a port")
