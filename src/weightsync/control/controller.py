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
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from weightsync.config import WeightSyncConfig
from weightsync.control.events import BatchDropped, BatchReady, StartSync, Trained
from weightsync.control.locks import Lockable
from weightsync.control.method import SyncMethod
from weightsync.control.methods.hosted import HostedMethod
from weightsync.control.methods.mock import MockMethod
from weightsync.control.methods.select import method_of
from weightsync.control.methods.tinker import TinkerServiceHolder
from weightsync.control.methods.weaver import WeaverServiceHolder
from weightsync.control.model import ModelControl, Shared
from weightsync.control.state import Policy
from weightsync.errors import ConfigError, InvalidRequestError, StateError, VersionError
from weightsync.handles.fanout import in_thread
from weightsync.observe import LONG_RUN_BYTES, Recorder, now_s
from weightsync.types import Deadline, Version
from weightsync.types.control import (
    ControllerStatus,
    RolloutServiceState,
    SyncRecord,
    ValidationRun,
    check_dropped,
    check_trained,
)
from weightsync.types.deadline import check_wait_s
from weightsync.types.fleet import ModelVersion
from weightsync.types.process import of_one_process

__all__ = ["Lockable", "SyncMethod", "WeightSyncController"]

_NUM_SYNCS = 20
_OF_A_MODEL = (
    "sync_mode",
    "staleness_threshold",
    "validate_freq",
    "fleet.retries_s",
    "fleet.after_failure",
    "inference_service.model_tag",
)
"""Keys that a model may have of its own."""
Answer: TypeAlias = Literal["continue", "block"]


@of_one_process
class WeightSyncController:
    """Decides when weights are synced, for any number of models. Thread-safe.

    Args:
        config: mode, threshold, `validate_freq` and inference service; of every model that `configs` has not.
        method: moves a version; the one that the configuration names where not given, see `method_of`.
        model_tags: the models; the configuration's own where not given.
        configs: by model, where one has a mode, a threshold, a `validate_freq`, retries or an `after_failure` of its
            own; with a `method` that is given, an inference service too, which its state shows.
        retries_s: seconds until each retry of a sync that failed; as the next two, of `fleet` where not given.
        after_failure: "keep" the old version after the last retry, or "evict" whoever failed and try once more.
        validate_timeout_s: a validation that nobody has ended after so long counts as ended; its result is an error.
        step_timeout_s: when rollout has waited for so long for a training step, all batches count as dropped; as
            `validate_timeout_s` of `fleet` where not given, which also has None: never.
        on_validate: told to start a validation; `end_validate` is due when it has ended. Where not given, whoever reads
            `RolloutServiceState.waiting_for_validation` does it.
        on_give_up: told that rollout goes on with an old version.
        recorder: where the phase "sync" goes, with the version.

    Raises:
        ConfigError: no model, or a setting that can't be.
    """

    def __init__(
        self,
        config: WeightSyncConfig | Mapping[str, Any] | str | os.PathLike[str],
        method: SyncMethod | None = None,
        *,
        model_tags: Sequence[str] = (),
        configs: Mapping[str, WeightSyncConfig] | None = None,
        retries_s: tuple[float, ...] | None = None,
        after_failure: Literal["keep", "evict"] | None = None,
        validate_timeout_s: float | None = None,
        step_timeout_s: float | None = None,
        on_validate: Callable[[str, ValidationRun], None] | None = None,
        on_give_up: Callable[[str, Version], None] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        base = WeightSyncConfig.load(config)
        tags = tuple(model_tags) or base.fleet.models or (base.inference_service.model_tag,)
        _check_own(configs or {}, base, services=method is not None)
        self.method = method or method_of(base, tags)
        self.recorder = recorder or Recorder("controller", max_bytes=LONG_RUN_BYTES)
        self._shared = Shared(
            method=self.method,
            recorder=self.recorder,
            validate_timeout_s=check_wait_s(
                "validate_timeout_s",
                base.fleet.validate_timeout_s if validate_timeout_s is None else validate_timeout_s,
            ),
            step_timeout_s=base.fleet.step_timeout_s
            if step_timeout_s is None
            else check_wait_s("step_timeout_s", step_timeout_s),
            on_validate=on_validate,
            on_give_up=on_give_up,
        )
        self._models: dict[str, ModelControl] = {}
        for tag in tags:
            own = (configs or {}).get(tag, base)
            retries = own.fleet.retries_s if retries_s is None else retries_s
            policy = Policy(
                mode=own.sync_mode, staleness_threshold=own.staleness_threshold, validate_freq=own.validate_freq,
                retries_s=retries, after_failure=after_failure or own.fleet.after_failure,
            )  # fmt: skip
            self._models[tag] = ModelControl(tag, own, policy, self._shared)
        self.method.attach(learnt=self._learnt, members=lambda: in_thread(self._try_again, name="weightsync-members"))
        if unknown := set(configs or {}) - set(self._models):
            raise ConfigError(f"there are settings for models that are not in model_tags: {sorted(unknown)}")

    # --- document 5 ---

    def set_module_references(self, dataloader: Lockable, trajectory_pool: Lockable) -> None:
        """What is locked: the pool while a sync is due or running, both while a validation runs."""
        self._shared.dataloader, self._shared.trajectory_pool = dataloader, trajectory_pool
        for model in self._models.values():
            model.apply_locks()

    def set_tinker_service_holder(self, holder: TinkerServiceHolder, model_tag: str | None = None) -> None:
        """Who holds the Tinker service's clients; of all models, or of one. A `MockMethod` leaves it unused.

        Raises:
            StateError: the method is another one.
            ConfigError: the holder lacks a call.
        """
        self._hold("tinker", holder, model_tag)

    def set_weaver_service_holder(self, holder: WeaverServiceHolder, model_tag: str | None = None) -> None:
        """Who holds the Weaver service's clients; of all models, or of one. A `MockMethod` leaves it unused.

        Raises:
            StateError: the method is another one.
            ConfigError: the holder lacks a call.
        """
        self._hold("weaver", holder, model_tag)

    def _learnt(self, versions: Sequence[ModelVersion]) -> None:
        """A pool has learnt from its instances what they serve: as if trainers had told of it, where none has. Those
        that have it not yet are brought there, whatever the mode."""

        def tell() -> None:
            known = [each for each in versions if each.model_id in self._models]
            for each in known:
                event = Trained(
                    worker="fleet", run_id=each.run_id, version=each.version, learnt=True,
                    claimed=self.method.asks_agents,
                )  # fmt: skip
                with contextlib.suppress(VersionError):  # a trainer has, of another run
                    self._models[each.model_id].trained(event, each.sender_endpoint)
            for each in known:
                self._models[each.model_id].sync_now()

        in_thread(tell, name="weightsync-learnt")

    def _try_again(self) -> None:
        """Syncs that were given up, maybe since nobody was there, are tried once more; also one whose last try runs."""
        for model in self._models.values():
            if not model.up_to_date:
                model.sync_now(anyway=self._is_dark(model.tag), again=True)

    def _is_dark(self, model_tag: str) -> bool:
        """Whether nobody takes part any more: whoever comes can have the newest version alone, due or not."""
        pool = self.method.pool
        return pool is not None and pool.current(model_tag) is not None and not pool.members([model_tag])

    def _hold(self, service: str, holder: object, model_tag: str | None) -> None:
        method = self.method
        if not isinstance(method, MockMethod) and not (isinstance(method, HostedMethod) and method.service == service):
            raise StateError(f"this controller's method is {type(method).__name__}, which takes no such holder")
        for tag in self._models if model_tag is None else (model_tag,):
            self._model(tag)
            if isinstance(method, HostedMethod):  # in a dry run nobody uses it
                method.hold(tag, holder)

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

    def trajectory_pool_notify_batch_dropped(self, model_tag: str, num_batches: int | None = None) -> None:
        """Steps of batches that were told of give no version: a step that published nothing, a batch that was told of
        twice, a trainer that died. Nobody waits for them any more. Not for a number that the trainer skips: a version
        ends all steps up to its own.

        Args:
            model_tag: which model's.
            num_batches: how many; None: all whose step has not ended, as one rank of a trainer says that starts again,
                before any batch that it will train is told of.

        Raises:
            InvalidRequestError: there is no such model, or no such number.
        """
        check_dropped(num_batches)
        self._model(model_tag).feed(BatchDropped(num=num_batches))

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
        given_up: threading.Event | None = None,
    ) -> None:
        """Training has new weights. Returns when the sync that this starts has ended, well or not; where a validation
        holds it up, when both have ended. At once in mode "fully-async", and where none is due. Several workers that
        tell the same (run_id, version) count once.

        Args:
            worker_name, model_tag, run_id, version: who has what; see `state.Trained`. Without a run, the agent at
                `sender_endpoint` is asked for its own, where the method is one of agents.
            sender_endpoint: URL of the agent that has it, for methods whose instances fetch it.
            evaluate: sync it everywhere and validate it now, in every mode; returns when that validation has ended.
            timeout_s: it returns after so long in any case; the sync goes on.
            given_up: ends the wait likewise, see `look_again`.

        Raises:
            VersionError: the worker goes back within a run, or another run has taken over. Nothing was changed.
            StateError: too many workers have told, or the controller is closed.
            InvalidRequestError: no such model, version or time. Nothing was changed.
        """
        check_wait_s("timeout_s", timeout_s, may_be_0=True)
        check_trained(worker_name, run_id, version)
        model = self._model(model_tag)
        if run_id is None and version is not None and sender_endpoint is not None:
            run_id = self.method.run_of(model_tag, sender_endpoint)
        event = Trained(
            worker=worker_name, run_id=run_id, version=version, evaluate=evaluate, claimed=self.method.asks_agents
        )
        started = model.trained(event, sender_endpoint)
        if self._is_dark(model_tag):
            model.sync_now()
        if evaluate:
            model.wait(lambda model: model.evaluated, timeout_s, given_up)
        elif model.policy.bound is not None and (model.held_up or any(isinstance(each, StartSync) for each in started)):
            model.wait(lambda model: model.state.syncing is None and not model.held_up, timeout_s, given_up)

    def sync_weight_to_rollout_service(
        self,
        model_tag: str,
        *,
        timeout_s: float = 600.0,
        given_up: threading.Event | None = None,
        of: Version | None = None,
    ) -> bool:
        """Sees to it that rollout serves the newest trained version; whether it does when this returns. It starts a
        sync, or waits for the one that a timer starts; where an older one or a validation runs, the sync comes after
        it, also if nobody waits any more. `given_up` ends the wait early, see `look_again`; `of`, where given, is what
        it waits for, or a newer one of its run, instead of the newest.
        """
        check_wait_s("timeout_s", timeout_s, may_be_0=True)
        model = self._model(model_tag)
        model.sync_now()

        def served(model: ModelControl) -> bool:
            return model.up_to_date if of is None else model.serves(of.run_id, of.number)

        model.wait(lambda model: served(model) or not model.under_way, timeout_s, given_up)
        return served(model)

    def ended_by(self, model_tag: str, report: Callable[[], bool], *, timeout_s: float) -> None:
        """Calls `report`; where that has ended the sync that is under way, waits until the model's state shows it."""
        self._model(model_tag).ended_by(report, timeout_s)

    def look_again(self, model_tag: str) -> None:
        """Who waits for this model looks whether it still has to: a `given_up` was set."""
        self._model(model_tag).look_again()

    def end_validate(
        self, model_tag: str, result: Mapping[str, Any] | None = None, *, version: int | None = None
    ) -> None:
        """The validation that was running has ended; `result` is what `RolloutServiceState.last_validation` says then.
        With a `version`, a validation of another number goes on. Idempotent.
        """
        self._model(model_tag).end_validate(result, version=version)

    # --- the gate of whoever takes batches ---

    def serves(self, run_id: str, model_tag: str, version: int) -> bool:
        """Whether every live instance serves that version of the model, or a newer one of that run."""
        return self._model(model_tag).serves(run_id, version)

    def wait_version(self, run_id: str, model_tag: str, version: int, *, timeout_s: float) -> bool:
        """Waits until it is served, or the time is over; woken, not polling. Whether it is."""
        return self._model(model_tag).wait(lambda model: model.serves(run_id, version), timeout_s)

    # --- what users see ---

    def status(self) -> ControllerStatus:
        syncs = sorted(self.records(), key=_newest_first)
        newest = {record.model_tag: record for record in reversed(syncs)}
        instances = self.method.instances()
        return ControllerStatus(
            models={tag: model.seen(instances) for tag, model in self._models.items()},
            sync_mode={tag: model.policy.mode for tag, model in self._models.items()},
            instances=instances,
            barriers=self.method.barriers(),
            syncs=tuple(each for at, each in enumerate(syncs) if at < _NUM_SYNCS or newest[each.model_tag] is each),
            now_s=now_s(),
        )

    def records(self) -> list[SyncRecord]:
        """The last syncs of each model, model by model, also those that a status leaves out."""
        return [record for model in self._models.values() for record in model.records()]

    @property
    def model_tags(self) -> tuple[str, ...]:
        return tuple(self._models)

    def rollout_service_state(self, model_tag: str, *, counted: bool = True) -> RolloutServiceState:
        """`counted`: with `num_answering`, for which every instance is looked at."""
        return self._model(model_tag).seen(self.method.instances() if counted else None)

    def subscribe(self, changed: Callable[[str], None]) -> Callable[[], None]:
        """Calls `changed(model_tag)` after each change of a model, from any thread; it must be quick. Returns what ends
        it.
        """
        self._shared.listeners.append(changed)
        return lambda: self._shared.listeners.remove(changed)

    def wait_ended(self, *, timeout_s: float) -> bool:
        """Waits until no sync is running; whether none is. Behind `close`, since that ends none: the process that ends
        within one leaves engines of some methods paused, see `SyncMethod.end_within_s`.
        """
        deadline = Deadline(check_wait_s("timeout_s", timeout_s, may_be_0=True))
        return all(model.ended(deadline.remaining_s) for model in self._models.values())

    def close(self) -> None:
        """Starts nothing any more, and unlocks the modules. A sync that is running goes on to its end, see
        `wait_ended`. Idempotent."""
        self._shared.closed.set()
        for model in self._models.values():
            model.close()

    def _model(self, model_tag: str) -> ModelControl:
        try:
            return self._models[model_tag]
        except KeyError:
            raise InvalidRequestError(f"there is no model {model_tag!r} here: {', '.join(self._models)}") from None


def _newest_first(record: SyncRecord) -> tuple[bool, float]:
    """By its end: one that takes long would be gone before it is seen."""
    running = record.outcome == "running"
    return not running, -record.started_s if running else -(record.started_s + record.seconds)


def _check_own(configs: Mapping[str, WeightSyncConfig], base: WeightSyncConfig, *, services: bool) -> None:
    """A model's own settings are read of what a model can have for itself.

    Raises:
        ConfigError: one says something else than the common ones, of a key that is read there alone.
    """
    for tag, own in configs.items():
        wrong = [
            key
            for key, value in own.asked()
            if not (key in _OF_A_MODEL or (services and key.startswith("inference_service.")))
            and (key, value) not in base.asked()
        ]
        if wrong:
            raise ConfigError(
                f"configs of model {tag!r} have {', '.join(wrong)}, which a controller's models have together: say it "
                "in the controller's own configuration",
                keys=wrong,
            )
