"""WeightSyncController: document 5's controller. Decides when each model is synced, validated, and who waits meanwhile.

One call, and who waits for whom:

    trainer: train_worker_notify_weight_update ─┐
    pool: trajectory_pool_notify_batch_ready ───┤  state.step, under the model's lock
    timer: a retry is due ──────────────────────┘      └─ actions, without it: a sync in a thread of its own, a timer,
                                                          a validation, dataloader and pool locked or unlocked
    rollout: check_rollout_service_status, await_rollout_service: woken when the model's state changes

Nothing is locked while a method, a callback or a foreign module runs, but that the workers of one model tell one after
the other, and each model has its own lock: a model that hangs holds up nobody else. Whatever a method raises is a sync
that failed, and is retried by a timer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from weightsync.clients.fanout import in_thread
from weightsync.config import WeightSyncConfig
from weightsync.control.method import ModelSync
from weightsync.control.methods.fleet import FleetMethod
from weightsync.control.methods.hosted import HostedMethod
from weightsync.control.methods.select import method_of
from weightsync.control.methods.tinker import TinkerMethod, TinkerServiceHolder
from weightsync.control.methods.weaver import WeaverMethod, WeaverServiceHolder
from weightsync.control.model import Lockable, ModelControl
from weightsync.control.state import Action, BatchReady, Policy, StartSync, Trained
from weightsync.errors import ConfigError, InvalidRequestError, StateError, VersionError
from weightsync.observe import LONG_RUN_BYTES, Recorder
from weightsync.types import Version
from weightsync.types.control import MAX_VERSION, ControllerStatus, RolloutServiceState, ValidationRun
from weightsync.types.deadline import check_wait_s
from weightsync.types.fleet import ModelVersion
from weightsync.types.process import of_one_process

__all__ = ["Lockable", "ModelSync", "WeightSyncController"]

_NUM_SYNCS = 20
_MAX_NAME = 512
Answer: TypeAlias = Literal["continue", "block"]


@of_one_process
class WeightSyncController:
    """Decides when weights are synced, for any number of models. Thread-safe.

    Args:
        config: mode, threshold, `validate_freq` and inference service; of every model that `configs` has not.
        method: moves a version; the one that the configuration names where not given, see `method_of`.
        model_tags: the models; the configuration's own where not given.
        configs: by model, where one has settings of its own.
        retries_s: seconds until each retry of a sync that failed.
        after_failure: "keep" the old version after the last retry, or "evict" whoever failed and try once more.
        validate_timeout_s: a validation that nobody has ended after so long counts as ended; its result is an error.
        on_validate: told to start a validation; `end_validate` is due when it has ended. Where not given, whoever reads
            `RolloutServiceState.waiting_for_validation` does it.
        on_give_up: told that rollout goes on with an old version.
        recorder: where the phase "sync" goes, with the version.

    Raises:
        ConfigError: no model, or a setting that can't be.
    """

    def __init__(
        self,
        config: WeightSyncConfig | Mapping[str, Any],
        method: ModelSync | None = None,
        *,
        model_tags: Sequence[str] = (),
        configs: Mapping[str, WeightSyncConfig] | None = None,
        retries_s: tuple[float, ...] = (1.0, 2.0, 4.0),
        after_failure: Literal["keep", "evict"] = "keep",
        validate_timeout_s: float = 3600.0,
        on_validate: Callable[[str, ValidationRun], None] | None = None,
        on_give_up: Callable[[str, Version], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        base = WeightSyncConfig.load(config)
        self.recorder = recorder or Recorder("controller", max_bytes=LONG_RUN_BYTES)
        tags = tuple(model_tags) or base.fleet.models or (base.inference_service.model_tag,)
        self.method = method or method_of(base, tags)
        self._on_validate = on_validate
        self.validate_timeout_s = check_wait_s("validate_timeout_s", validate_timeout_s)
        self._on_give_up = on_give_up
        self._modules: tuple[Lockable, ...] = ()
        self._closed = threading.Event()
        self._listeners: list[Callable[[str], None]] = []
        self._models: dict[str, ModelControl] = {}
        for tag in tags:
            own = (configs or {}).get(tag, base)
            policy = Policy(
                mode=own.sync_mode, staleness_threshold=own.staleness_threshold, validate_freq=own.validate_freq,
                retries_s=retries_s, after_failure=after_failure,
            )  # fmt: skip
            self._models[tag] = ModelControl(tag, own, policy, self)
        if isinstance(self.method, FleetMethod):
            self.method.pool.on_learnt = self._learnt
            self.method.pool.on_live = lambda: in_thread(self._somebody_is_live, name="weightsync-live")
        if unknown := set(configs or {}) - set(self._models):
            raise ConfigError(f"there are settings for models that are not in model_tags: {sorted(unknown)}")

    # --- document 5 ---

    def set_module_references(self, dataloader: Lockable, trajectory_pool: Lockable) -> None:
        """What is locked while a sync is due or running, and while a validation runs."""
        self._modules = (dataloader, trajectory_pool)
        for model in self._models.values():
            model.apply_locks()

    def set_tinker_service_holder(self, holder: TinkerServiceHolder, model_tag: str | None = None) -> None:
        """Who holds the Tinker service's clients; of all models, or of one.

        Raises:
            StateError: the method is another one.
        """
        self._hold(TinkerMethod, holder, model_tag)

    def set_weaver_service_holder(self, holder: WeaverServiceHolder, model_tag: str | None = None) -> None:
        """Who holds the Weaver service's clients; of all models, or of one.

        Raises:
            StateError: the method is another one.
        """
        self._hold(WeaverMethod, holder, model_tag)

    def _learnt(self, versions: Sequence[ModelVersion]) -> None:
        """A pool has learnt from its instances what they serve: as if trainers had told of it, where none has."""

        def tell() -> None:
            for each in versions:
                if each.model_id in self._models:
                    event = Trained(worker="fleet", run_id=each.run_id, version=each.version, learnt=True)
                    with contextlib.suppress(VersionError):  # a trainer has, of another run
                        self._trained(each.model_id, event, each.sender_endpoint)

        in_thread(tell, name="weightsync-learnt")

    def _somebody_is_live(self) -> None:
        """Syncs that were given up, maybe since nobody was there, are tried once more."""
        for model in self._models.values():
            if model.state.overdue:
                model.sync_now()

    def _hold(self, kind: type[HostedMethod[Any]], holder: object, model_tag: str | None) -> None:
        if not isinstance(self.method, kind):
            raise StateError(f"this controller's method is {type(self.method).__name__}, which takes no such holder")
        for tag in self._models if model_tag is None else (model_tag,):
            self._model(tag)
            self.method.hold(tag, holder)

    def check_rollout_service_status(self, model_tag: str) -> Answer:
        """Whether a request to this model's rollout service may proceed now.

        Raises:
            InvalidRequestError: there is no such model.
        """
        return "block" if self._model(model_tag).blocked else "continue"

    def await_rollout_service(self, model_tag: str, *, timeout_s: float) -> Answer:
        """Waits until it may proceed, or `timeout_s` is over; woken, not polling."""
        return "continue" if self._model(model_tag).wait(lambda model: not model.blocked, timeout_s) else "block"

    def trajectory_pool_notify_batch_ready(self, model_tag: str) -> None:
        """A batch is ready: a training step starts with it, which may have to end in a sync."""
        self._model(model_tag).feed(BatchReady())

    def train_worker_notify_weight_update(
        self,
        worker_name: str,
        model_tag: str,
        run_id: str | None = None,
        version: int | None = None,
        *,
        sender_endpoint: str | None = None,
        evaluate: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        """Training has new weights. Returns when the sync that this starts has ended, well or not; at once in mode
        "fully-async", and where none is due. Several workers that tell the same (run_id, version) count once.

        Args:
            worker_name, model_tag, run_id, version: who has what; see `state.Trained`.
            sender_endpoint: URL of the agent that has it, for methods whose instances fetch it.
            evaluate: sync it everywhere and validate it now, in every mode; returns when that validation has ended.
            timeout_s: it returns after so long in any case; the sync goes on.

        Raises:
            VersionError: the worker goes back within a run, or another run has taken over. Nothing was changed.
            StateError: too many workers have told, or the controller is closed.
            InvalidRequestError: no such model, or no such version.
        """
        if version is not None and not (type(version) is int and 0 <= version < MAX_VERSION):
            raise InvalidRequestError(f"a version is a whole number from 0 on, not {version!r}")
        if not all(1 <= len(name) <= _MAX_NAME for name in (worker_name, run_id) if name is not None):
            raise InvalidRequestError(f"worker_name and run_id have 1 to {_MAX_NAME} characters")
        model = self._model(model_tag)
        event = Trained(
            worker=worker_name, run_id=run_id, version=version, evaluate=evaluate, claimed=self.method.asks_agents
        )
        started = self._trained(model_tag, event, sender_endpoint)
        if evaluate:
            model.wait(lambda model: model.evaluated, timeout_s)
        elif model.policy.bound is not None and any(isinstance(action, StartSync) for action in started):
            model.wait(lambda model: model.state.syncing is None, timeout_s)

    def _trained(self, model_tag: str, event: Trained, sender_endpoint: str | None) -> tuple[Action, ...]:
        def tell() -> None:
            if event.run_id is not None and event.version is not None:
                self.method.trained(model_tag, Version(run_id=event.run_id, number=event.version), sender_endpoint)

        return self._model(model_tag).trained(event, tell)

    def sync_weight_to_rollout_service(self, model_tag: str, *, timeout_s: float = 600.0) -> bool:
        """Sees to it that rollout serves the newest trained version; whether it does when this returns. It starts a
        sync where none is running or due by a timer.
        """
        model = self._model(model_tag)
        model.sync_now()
        model.wait(lambda model: model.up_to_date or not model.under_way, timeout_s)
        return model.up_to_date

    def end_validate(self, model_tag: str, result: Mapping[str, Any] | None = None) -> None:
        """The validation that was running has ended; `result` is what `RolloutServiceState.last_validation` says then.
        Idempotent.
        """
        self._model(model_tag).end_validate(result)

    # --- the gate of whoever takes batches ---

    def serves(self, run_id: str, model_tag: str, version: int) -> bool:
        """Whether every live instance serves that version of the model, or a newer one of that run."""
        return self._model(model_tag).serves(run_id, version)

    def wait_version(self, run_id: str, model_tag: str, version: int, *, timeout_s: float) -> bool:
        """Waits until it is served, or the time is over; woken, not polling. Whether it is."""
        return self._model(model_tag).wait(lambda model: model.serves(run_id, version), timeout_s)

    # --- what users see ---

    def status(self) -> ControllerStatus:
        """Everything."""
        syncs = [record for model in self._models.values() for record in model.records()]
        return ControllerStatus(
            models={tag: model.seen() for tag, model in self._models.items()},
            sync_mode={tag: model.policy.mode for tag, model in self._models.items()},
            instances=self.method.instances(),
            barriers=self.method.barriers(),
            syncs=tuple(sorted(syncs, key=lambda record: -record.started_s)[:_NUM_SYNCS]),
            now_s=time.time(),
        )

    @property
    def model_tags(self) -> tuple[str, ...]:
        """All models."""
        return tuple(self._models)

    def rollout_service_state(self, model_tag: str) -> RolloutServiceState:
        """How this model is."""
        return self._model(model_tag).seen()

    def subscribe(self, changed: Callable[[str], None]) -> Callable[[], None]:
        """Calls `changed(model_tag)` after each change of a model, from any thread; it must be quick. Returns what ends
        it.
        """
        self._listeners.append(changed)
        return lambda: self._listeners.remove(changed)

    def close(self) -> None:
        """Starts nothing any more, and unlocks the modules. A sync that is running goes on to its end. Idempotent."""
        self._closed.set()
        for model in self._models.values():
            model.close()

    def _model(self, model_tag: str) -> ModelControl:
        try:
            return self._models[model_tag]
        except KeyError:
            raise InvalidRequestError(f"there is no model {model_tag!r} here: {', '.join(self._models)}") from None
