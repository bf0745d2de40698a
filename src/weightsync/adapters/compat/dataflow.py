"""Document 3's Dataflow service, its pool of rollout services, and a trainer's client of it, by their names over ours.

service = AstraFlowService({"sync_method": "pull", "fleet": {"models": ["actor", "verifier"], ...}})
service.catchup_raas("raas-3")                       # it joined: it serves what is current, and takes part

client = AstraFlowClient(service.url, wm)            # training rank 0
client.notify_version_async(version)                 # waits for nobody
client.notify_version(version, run_eval=True)        # waits until it is served and was validated
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from weightsync.adapters.compat.weight_manager import TransferStatus
from weightsync.clients.controller import ControllerClient
from weightsync.config import WeightSyncConfig
from weightsync.control.build import build_controller
from weightsync.control.controller import WeightSyncController
from weightsync.errors import ConfigError, DeadlineExceededError
from weightsync.trainer.notifier import Notifier
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Deadline, Version
from weightsync.types.closing import Closing
from weightsync.types.control import ValidationRun

_TAKES_PART = ("live", "suspect")


class RaaSPool:
    """The rollout services of a controller, which come and go by their heartbeats: our `RolloutPool`.

    Args:
        controller: whose they are; its method has a pool.

    Raises:
        ConfigError: it has none.
    """

    def __init__(self, controller: WeightSyncController) -> None:
        pool = controller.method.pool
        if pool is None:
            raise ConfigError("this controller's method has no pool of rollout services: set sync_method to 'pull'")
        self._controller = controller
        self._waiting: set[threading.Event] = set()
        pool.subscribe(self._wake)

    def notify_version(
        self, model_id: str, version: int, sender_endpoint: str, *, timeout_s: float = 600.0
    ) -> dict[str, TransferStatus]:
        """Has every rollout service pull, pause, load and resume, all at once; returns when those that take part serve
        the version, or a newer one of its run.

        Args:
            model_id, version, sender_endpoint: what, and URL of the agent that has it, which is asked for its run.
            timeout_s: how long to wait; it goes on.

        Returns:
            By instance, whether it takes part and serves that version, or a newer one of its run; what becomes of one
            that the trainer publishes meanwhile does not count.

        Raises:
            NotPublishedError: the agent has nothing yet.
        """
        deadline = Deadline(timeout_s)
        run_id = self._controller.method.run_of(model_id, sender_endpoint)
        asked = None if run_id is None else Version(run_id=run_id, number=version)
        self._controller.train_worker_notify_weight_update(
            "trainer", model_id, run_id, version, sender_endpoint=sender_endpoint, timeout_s=deadline.remaining_s
        )
        served = self._controller.sync_weight_to_rollout_service(model_id, timeout_s=deadline.remaining_s, of=asked)
        return {
            each.instance_id: TransferStatus.SUCCESS
            if each.state in _TAKES_PART and model_id in each.models and (served or _has(each.models[model_id], asked))
            else TransferStatus.FAILURE
            for each in self._controller.status().instances
        }

    def wait_live(self, uid: str, *, timeout_s: float) -> dict[str, str | None]:
        """Returns when that instance takes part; what it serves of each model, as "run/number".

        Raises:
            DeadlineExceededError: it does not, in time; says why.
        """
        deadline, changed = Deadline(timeout_s), threading.Event()
        self._waiting.add(changed)
        try:
            while True:
                changed.clear()  # before the look: nothing is missed
                found = {each.instance_id: each for each in self._controller.status().instances}.get(uid)
                if found is not None and found.state in _TAKES_PART:
                    return dict(found.models)
                if deadline.expired:
                    why = "nobody of that name has sent a heartbeat" if found is None else found.why or found.state
                    raise DeadlineExceededError(f"{uid} does not take part within {timeout_s:g} s: {why}", peer=uid)
                changed.wait(deadline.remaining_s)
        finally:
            self._waiting.discard(changed)

    def _wake(self) -> None:
        for each in tuple(self._waiting):
            each.set()


def _has(served: str | None, asked: Version | None) -> bool:
    """Whether an instance has said that it serves this version, or a newer one of its run."""
    run_id, _, number = (served or "").rpartition("/")
    return asked is not None and run_id == asked.run_id and int(number) >= asked.number


class AstraFlowService(Closing):
    """A controller of rollout services, and its HTTP face; from here on it listens. A context manager.

    Args:
        config: see `WeightSyncConfig`: `sync_method` is "pull"; `fleet` has models, sets (the barrier), port. Where it
            says no sets, all models are one, as the document has it.
        token: of its own face, and of the services and agents that it calls.
        on_validate: told to start an evaluation; `controller.end_validate` is due when it has ended.

    Attributes:
        controller, raas_pool, url: what is inside, and where it listens.
    """

    def __init__(
        self,
        config: WeightSyncConfig | Mapping[str, Any],
        *,
        token: str | None = None,
        on_validate: Callable[[str, ValidationRun], None] | None = None,
    ) -> None:
        settings = WeightSyncConfig.load(config)
        if "sets" not in settings.fleet.model_fields_set and len(settings.fleet.models) > 1:
            fleet = settings.fleet.model_copy(update={"sets": (tuple(settings.fleet.models),)})
            settings = settings.model_copy(update={"fleet": fleet})
        self._built = build_controller(settings, token=token, on_validate=on_validate)
        self.controller, self.url = self._built.controller, self._built.url
        try:
            self.raas_pool = RaaSPool(self.controller)
        except BaseException:
            self.close()
            raise

    def catchup_raas(self, uid: str, *, timeout_s: float = 120.0) -> dict[str, str | None]:
        """Returns when an instance that joins has caught up and takes part; what it serves. It catches up by itself:
        the answers to its heartbeats say what is current. See `RaaSPool.wait_live`.
        """
        return self.raas_pool.wait_live(uid, timeout_s=timeout_s)

    def close(self) -> None:
        """Stops listening, and starts nothing any more."""
        self._built.close()


class AstraFlowClient:
    """A trainer's line to the service: of training rank 0 alone.

    Args:
        service_url: of an `AstraFlowService`, or any controller.
        weight_manager: whose versions are told, after its first `offload` or `start`.
        token, verify: see `JsonClient`.
    """

    def __init__(
        self, service_url: str, weight_manager: WeightManager, *, token: str | None = None, verify: bool | str = True
    ) -> None:
        self._manager = weight_manager
        self._client = ControllerClient(service_url, token=token, verify=verify)
        self._notifier = Notifier([service_url], model_id=weight_manager.model_id, token=token, verify=verify)
        self._begun = False

    def notify_version(
        self, version: int, run_eval: bool = False, *, timeout_s: float = 600.0
    ) -> Mapping[str, Any] | None:
        """Tells of a version. With `run_eval` it returns when that is served everywhere and was validated.

        Returns:
            The validation's result; None without one.

        Raises:
            DeadlineExceededError: the service does not answer; or the validation has not ended within `timeout_s`.
        """
        wm = self._manager
        state = self._client.notify_version(
            wm.run_id, wm.model_id, version, wm.endpoint, evaluate=run_eval, wait_s=timeout_s if run_eval else 0.0
        )
        return state.last_validation.result if run_eval and state.last_validation is not None else None

    def notify_version_async(self, version: int) -> None:
        """Tells of a version in a thread of its own, and returns at once, whatever the service does. While that stands
        still or is gone it is tried again, and a newer version takes the place of one that was not told yet.
        """
        if not self._begun:
            self._begun = True
            self._notifier.start(self._manager.endpoints)
        self._notifier.announce(Version(run_id=self._manager.run_id, number=version))

    def wait_version(self, version: int, *, timeout_s: float) -> bool:
        """Whether every live rollout service serves the version within that time: what `get_batch` waits for."""
        return self._client.wait_version(self._manager.run_id, self._manager.model_id, version, wait_s=timeout_s)

    def close(self) -> None:
        """Ends what is under way. Idempotent."""
        self._notifier.close()
        self._client.close()
