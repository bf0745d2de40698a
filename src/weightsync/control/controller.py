"""WeightSyncController: document 5's controller. Decides when each model is synced, validated, and who waits meanwhile.

One call, and who waits for whom:

    trainer: train_worker_notify_weight_update ─┐
    pool: trajectory_pool_notify_batch_ready ───┤  state.step, under the model's lock
    timer: a retry is due ──────────────────────┘      └─ actions, without it: a sync in a thread of its own, a timer,
                                                          a validation, dataloader and pool locked or unlocked
    rollout: check_rollout_service_status, await_rollout_service: woken when the model's state changes

Nothing is locked while a method, a callback or a foreign module runs, and each model has its own lock: a model that
hangs holds up nobody else. Whatever a method raises is a sync that failed, and is retried by a timer.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from weightsync.clients.fanout import in_thread
from weightsync.config import WeightSyncConfig
from weightsync.control.state import (
    Action,
    BatchReady,
    Event,
    EvictFailed,
    GiveUp,
    ModelState,
    Policy,
    RetryAfter,
    RetryDue,
    StartSync,
    StartValidation,
    Synced,
    SyncFailed,
    Trained,
    ValidationEnded,
    pool_locked,
    services_blocked,
    step,
)
from weightsync.errors import ConfigError, InvalidRequestError, StateError, SyncFailedError, as_weightsync_error
from weightsync.observe import Recorder
from weightsync.types import Deadline, Version
from weightsync.types.control import MAX_VERSION, RolloutServiceState, ValidationRun

_logger = logging.getLogger(__name__)


class ModelSync(Protocol):
    """How a controller asks for a model's version to be served."""

    def sync(self, model_tag: str, version: Version) -> int:
        """Sees to it that the rollout side serves this version of the model, or a newer one of its run.

        Runs in a thread of its own, never twice at once for one model.

        Returns:
            The number of the version that is served now.

        Raises:
            Exception: nothing was committed, or only by some; it will be tried again.
        """
        ...

    def evict_failed(self, model_tag: str) -> Sequence[str]:
        """Takes whoever failed the last sync out of the pool; their names."""
        ...


class Lockable(Protocol):
    """A dataloader or a trajectory pool, as the controller sees it. Both calls are idempotent and soon over."""

    def lock(self, model_tag: str) -> None: ...
    def unlock(self, model_tag: str) -> None: ...


Answer: TypeAlias = Literal["continue", "block"]


class WeightSyncController:
    """Decides when weights are synced, for any number of models. Thread-safe.

    Args:
        config: mode, threshold, `validate_freq` and inference service; of every model that `configs` has not.
        method: moves a version.
        model_tags: the models; the config's own where not given.
        configs: by model, where one has settings of its own.
        retries_s: seconds until each retry of a sync that failed.
        after_failure: "keep" the old version after the last retry, or "evict" whoever failed and try once more.
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
        method: ModelSync,
        *,
        model_tags: Sequence[str] = (),
        configs: Mapping[str, WeightSyncConfig] | None = None,
        retries_s: tuple[float, ...] = (1.0, 2.0, 4.0),
        after_failure: Literal["keep", "evict"] = "keep",
        on_validate: Callable[[str, ValidationRun], None] | None = None,
        on_give_up: Callable[[str, Version], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        base = WeightSyncConfig.load(config)
        self.recorder = recorder or Recorder("controller")
        self._method = method
        self._on_validate = on_validate
        self._on_give_up = on_give_up
        self._modules: tuple[Lockable, ...] = ()
        self._holders: dict[str, Any] = {}
        self._closed = threading.Event()
        self._listeners: list[Callable[[str], None]] = []
        self._models: dict[str, _Model] = {}
        for tag in model_tags or (base.inference_service.model_tag,):
            own = (configs or {}).get(tag, base)
            policy = Policy(
                mode=own.sync_mode, staleness_threshold=own.staleness_threshold, validate_freq=own.validate_freq,
                retries_s=retries_s, after_failure=after_failure,
            )  # fmt: skip
            self._models[tag] = _Model(tag, own, policy, self)
        if unknown := set(configs or {}) - set(self._models):
            raise ConfigError(f"there are settings for models that are not in model_tags: {sorted(unknown)}")

    # --- document 5 ---

    def set_module_references(self, dataloader: Lockable, trajectory_pool: Lockable) -> None:
        """What is locked while a sync is due or running, and while a validation runs."""
        self._modules = (dataloader, trajectory_pool)
        for model in self._models.values():
            model.apply_locks()

    def set_tinker_service_holder(self, holder: Any) -> None:
        """The Tinker service that method "tinker" uses."""
        self._holders["tinker"] = holder

    def set_weaver_service_holder(self, holder: Any) -> None:
        """The Weaver service that method "weaver" uses."""
        self._holders["weaver"] = holder

    def service_holder(self, backend: str) -> Any:
        """What a service-holder was set to.

        Raises:
            StateError: nobody has set it.
        """
        if backend not in self._holders:
            raise StateError(f"call set_{backend}_service_holder first: method {backend!r} needs it")
        return self._holders[backend]

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
        timeout_s: float = 600.0,
    ) -> None:
        """Training has new weights. Returns when the sync that this starts has ended, well or not; at once in mode
        "fully-async", and where none is due. Several workers that tell the same (run_id, version) count once.

        Raises:
            VersionError: the worker goes back within a run. Nothing was changed.
            InvalidRequestError: no such model, or no such version.
        """
        if version is not None and not (type(version) is int and 0 <= version < MAX_VERSION):
            raise InvalidRequestError(f"a version is a whole number from 0 on, not {version!r}")
        if not worker_name or (run_id is not None and not run_id):
            raise InvalidRequestError("worker_name and run_id have at least one character")
        model = self._model(model_tag)
        started = model.feed(Trained(worker=worker_name, run_id=run_id, version=version))
        if model.policy.bound is not None and any(isinstance(action, StartSync) for action in started):
            model.wait(lambda model: model.state.syncing is None, timeout_s)

    def sync_weight_to_rollout_service(self, model_tag: str, *, timeout_s: float = 600.0) -> bool:
        """Sees to it that rollout serves the newest trained version; whether it does when this returns. It starts a
        sync where none is running or due by a timer.
        """
        model = self._model(model_tag)
        model.sync_now()
        model.wait(lambda model: model.up_to_date or not model.under_way, timeout_s)
        return model.up_to_date

    def end_validate(self, model_tag: str) -> None:
        """The validation that was running has ended. Idempotent."""
        self._model(model_tag).feed(ValidationEnded())

    # --- what users see ---

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

    def _model(self, model_tag: str) -> _Model:
        try:
            return self._models[model_tag]
        except KeyError:
            raise InvalidRequestError(f"there is no model {model_tag!r} here: {', '.join(self._models)}") from None


class _Model:
    """One model: its state, under a lock of its own."""

    def __init__(self, tag: str, config: WeightSyncConfig, policy: Policy, controller: WeightSyncController) -> None:
        self.tag = tag
        self.policy = policy
        self.state = ModelState()
        self._config = config
        self._controller = controller
        self._changed = threading.Condition()
        self._applying = threading.Lock()
        self._locked = False
        self._timer: threading.Timer | None = None
        self._last_error: str | None = None

    @property
    def blocked(self) -> bool:
        """Whether rollout has to wait."""
        return services_blocked(self.state, self.policy)

    @property
    def up_to_date(self) -> bool:
        """Whether rollout serves the newest trained version."""
        return self.state.rollout_version >= self.state.train_version

    @property
    def under_way(self) -> bool:
        """Whether a sync is running, or will be by itself."""
        return self.state.syncing is not None or self.state.num_failed > 0

    def feed(self, event: Event) -> tuple[Action, ...]:
        """One event; what it starts is started when this returns."""
        with self._changed:
            if self._controller._closed.is_set() and not isinstance(event, Synced | SyncFailed | ValidationEnded):
                raise StateError("this controller is closed")
            self.state, actions = step(self.state, event, self.policy)
            self._changed.notify_all()
        self._told()
        if not self._controller._closed.is_set():
            for action in actions:
                self._act(action)
        return actions

    def sync_now(self) -> None:
        """Starts a sync of what is trained, where nothing stands in the way."""
        with self._changed:
            free = self.state.syncing is None and self.state.validation is None and not self.state.num_failed
            if self._controller._closed.is_set() or not free or self.up_to_date:
                return
            goal = StartSync(run_id=self.state.run_id, version=self.state.train_version)
            self.state = dataclasses.replace(self.state, phase="syncing", due=None, syncing=goal)
            self._changed.notify_all()
        self._told()
        self._act(goal)

    def wait(self, condition: Callable[[_Model], bool], timeout_s: float) -> bool:
        """Until it holds, or the time is over; whether it holds."""
        deadline = Deadline(timeout_s)
        with self._changed:
            return self._changed.wait_for(
                lambda: condition(self) or self._controller._closed.is_set(), deadline.remaining_s
            ) and condition(self)

    def _told(self) -> None:
        """The state has changed."""
        for listener in tuple(self._controller._listeners):
            self._tell(lambda tag, _, listener=listener: listener(tag), None)  # type: ignore[misc]
        self.apply_locks()

    def apply_locks(self) -> None:
        """Locks or unlocks the modules, as the state wants it now. Whoever comes last applies the last state."""
        with self._applying:
            wanted = pool_locked(self.state, self.policy) and not self._controller._closed.is_set()
            modules = self._controller._modules
            if not modules or wanted == self._locked:
                return
            for module in modules:
                try:
                    (module.lock if wanted else module.unlock)(self.tag)
                except Exception:
                    _logger.exception("model %s: %r can't be %s", self.tag, module, "locked" if wanted else "unlocked")
            self._locked = wanted

    def seen(self) -> RolloutServiceState:
        """See `RolloutServiceState`."""
        service = self._config.inference_service
        with self._changed:
            state, error = self.state, self._last_error
        return RolloutServiceState(
            state=state.phase,
            run_id=state.run_id,
            train_model_version=state.train_version,
            rollout_model_version=state.rollout_version,
            staleness=state.staleness,
            blocked=services_blocked(state, self.policy),
            pool_locked=pool_locked(state, self.policy),
            waiting_for_validation=state.validation,
            num_failed=state.num_failed,
            overdue=state.overdue,
            last_error=error,
            model_name=service.model or "",
            weight_type=service.weight_type,
            weight_path=self._config.sync_weight_path or "",
            backend=service.backend or "",
            base_url=service.base_url or "",
        )

    def close(self) -> None:
        """Ends the timer, wakes whoever waits, and unlocks the modules."""
        with self._changed:
            timer, self._timer = self._timer, None
            self._changed.notify_all()
        if timer is not None:
            timer.cancel()
        self._told()

    def _act(self, action: Action) -> None:
        match action:
            case StartSync():
                in_thread(lambda: self._sync(action), name=f"weightsync-sync-{self.tag}")
            case RetryAfter(seconds=seconds):
                timer = threading.Timer(seconds, self._retry)
                timer.daemon = True
                with self._changed:
                    self._timer = timer
                timer.start()
            case EvictFailed():
                evicted: Sequence[str] = ()
                try:
                    evicted = self._controller._method.evict_failed(self.tag)
                except Exception:
                    _logger.exception("model %s: nobody could be evicted", self.tag)
                _logger.warning("model %s: evicted after retries: %s", self.tag, ", ".join(evicted) or "nobody")
            case GiveUp(run_id=run_id, version=version):
                _logger.error(
                    "model %s: %s/%d is not served after all retries: rollout goes on with version %d (%s)",
                    self.tag, run_id, version, self.state.rollout_version, self._last_error,
                )  # fmt: skip
                self._tell(self._controller._on_give_up, Version(run_id=run_id or "unnamed", number=version))
            case StartValidation(validation=validation):
                self._tell(self._controller._on_validate, validation)

    def _tell(self, callback: Callable[[str, Any], None] | None, what: Any) -> None:
        if callback is not None:
            try:
                callback(self.tag, what)
            except Exception:
                _logger.exception("model %s: a callback failed for %s", self.tag, what)

    def _sync(self, goal: StartSync) -> None:
        version = Version(run_id=goal.run_id or "unnamed", number=goal.version)
        event: Event
        try:
            with self._controller.recorder.phase("sync", detail=f"{self.tag} {version}"):
                served = self._controller._method.sync(self.tag, version)
            if type(served) is not int or served < goal.version:
                raise SyncFailedError(f"the method says that version {served!r} is served, {version} was asked for")
            event, error = Synced(version=served), None
        except BaseException as caught:  # whatever it is: a model must not stay in "syncing"
            typed = as_weightsync_error(caught, SyncFailedError, "the sync failed")
            _logger.warning("model %s: the sync of %s failed: %s", self.tag, version, typed)
            event, error = SyncFailed(), f"{type(typed).__name__}: {typed}"
        with self._changed:
            self._last_error = error
        self.feed(event)

    def _retry(self) -> None:
        with self._changed:
            self._timer = None
        if not self._controller._closed.is_set():
            self.feed(RetryDue())
