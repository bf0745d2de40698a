"""ModelControl: one model of a controller. Its state has a lock of its own, under which nothing foreign is called."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weightsync.config import WeightSyncConfig
from weightsync.control.alarm import Alarm
from weightsync.control.denials import Denials
from weightsync.control.events import (
    Action,
    BatchDropped,
    Event,
    EvictFailed,
    GiveUp,
    RetryAfter,
    RetryDue,
    StartSync,
    StartValidation,
    Synced,
    SyncFailed,
    SyncWanted,
    Trained,
    ValidationEnded,
)
from weightsync.control.history import SyncHistory
from weightsync.control.locks import Lockable, ModuleLocks
from weightsync.control.method import SyncMethod
from weightsync.control.state import ModelState, Policy, dataloader_locked, held_up, pool_locked, services_blocked, step
from weightsync.control.step_watch import Awaited, StepWatch
from weightsync.control.sync_log import SyncLog
from weightsync.errors import NotPublishedError, StateError, SyncFailedError, VersionError, as_weightsync_error
from weightsync.handles.fanout import in_thread
from weightsync.observe import Recorder
from weightsync.types import Deadline, Version
from weightsync.types.control import (
    UNNAMED,
    InstanceStatus,
    RolloutServiceState,
    SyncRecord,
    ValidationResult,
    ValidationRun,
    plain_values,
)
from weightsync.types.deadline import check_wait_s

_logger = logging.getLogger(__name__)
_MAX_ERROR = 4000


@dataclasses.dataclass(kw_only=True)
class Shared:
    """What the models of one controller share.

    Attributes:
        method, recorder, validate_timeout_s, step_timeout_s, on_validate, on_give_up: see `WeightSyncController`.
        dataloader: what is locked while a validation runs.
        trajectory_pool: what is locked then, and while rollout is.
        listeners: told of each change of a model.
        closed: nothing is started any more.
    """

    method: SyncMethod
    recorder: Recorder
    validate_timeout_s: float
    step_timeout_s: float | None
    on_validate: Callable[[str, ValidationRun], None] | None
    on_give_up: Callable[[str, Version], None] | None
    dataloader: Lockable | None = None
    trajectory_pool: Lockable | None = None
    listeners: list[Callable[[str], None]] = dataclasses.field(default_factory=list)
    closed: threading.Event = dataclasses.field(default_factory=threading.Event)


_NEVER = threading.Event()


class ModelControl:
    """One model: its state, under a lock of its own."""

    def __init__(self, tag: str, config: WeightSyncConfig, policy: Policy, shared: Shared) -> None:
        self.tag = tag
        self.policy = policy
        self.state = ModelState()
        self._config = config
        self._shared = shared
        self._changed = threading.Condition()
        self._trained = threading.Lock()
        self._locks = ModuleLocks(tag, self._to_lock, shared.closed)
        self._retry, self._late = Alarm(), Alarm()
        self._step = StepWatch(shared.step_timeout_s, self._step_lost)
        self._retry_at_s: float | None = None  # monotonic
        self._running: concurrent.futures.Future[None] | None = None  # the sync that was started last
        self._last_error: str | None = None
        self._last_validation: ValidationResult | None = None
        self._history = SyncHistory(tag, lambda: shared.method.spans(tag))
        self._denials, self._log = Denials(), SyncLog(tag)

    @property
    def blocked(self) -> bool:
        """Whether rollout has to wait."""
        return services_blocked(self.state, self.policy)

    @property
    def up_to_date(self) -> bool:
        """Whether rollout serves the newest trained version."""
        return self.state.rollout_version >= self.state.train_version

    @property
    def evaluated(self) -> bool:
        """Whether no validation that a trainer asked for is running, or to come; or it was given up."""
        state = self.state
        return (state.evaluate_at is None and not state.evaluate_later and state.validation is None) or state.overdue

    def serves(self, run_id: str, version: int) -> bool:
        """Whether rollout serves that version, or a newer one of its run."""
        with self._changed:
            return self.state.run_id == run_id and self.state.rollout_version >= version

    @property
    def held_up(self) -> bool:
        """Whether a sync is due, and waits for a validation's end."""
        return held_up(self.state)

    @property
    def under_way(self) -> bool:
        """Whether a sync is running, or will be by itself."""
        return self.state.syncing is not None or self.state.num_failed > 0 or self.state.wanted

    def feed(self, event: Event) -> tuple[Action, ...]:
        """One event; what it starts is started when this returns."""
        return self._started(self._stepped(event))

    def trained(self, event: Trained, sender_endpoint: str | None = None) -> tuple[Action, ...]:
        """Feeds it, and tells the method before: it has to know a version before a sync of it starts, and nothing of
        one that is refused. No other run takes over in between. What is not named is told as a sync would ask for it.
        """
        with self._trained:
            before = self.state
            after, _ = step(before, event, self.policy)
            moves = (after.run_id, after.train_version) != (before.run_id, before.train_version)
            number = after.train_version if event.run_id is None or event.version is None else event.version
            if moves or (number == event.version and event.run_id in (None, after.run_id)):
                version = Version(run_id=after.run_id or UNNAMED, number=number)
                self._shared.method.trained(self.tag, version, sender_endpoint)
            actions = self._stepped(event)
        return self._started(actions)

    def _stepped(self, event: Event) -> tuple[Action, ...]:
        with self._changed:
            if self._shared.closed.is_set() and not isinstance(event, Synced | SyncFailed | ValidationEnded):
                raise StateError("this controller is closed")
            self.state, actions = step(self.state, event, self.policy)
            if isinstance(event, Trained | BatchDropped):
                self._step.lost = None
            if isinstance(event, Trained) and actions:
                self._history.step_ended(actions[-1], event.worker)
            for action in actions:
                if isinstance(action, RetryAfter):  # whoever sees the failure sees it, too
                    self._retry_at_s = time.monotonic() + action.seconds
            self._mark()
            self._changed.notify_all()
        return actions

    def _started(self, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        self._told()
        if not self._shared.closed.is_set():
            for action in actions:
                try:
                    self._act(action)
                except Exception:  # the others are not to be lost with it
                    _logger.exception("model %s: %s was not carried out", self.tag, action)
        return actions

    def sync_now(self, *, anyway: bool = True, again: bool = False) -> None:
        """Starts a sync of what is trained, or sees to one when nothing stands in the way; see `SyncWanted`."""
        with self._changed:
            if self._shared.closed.is_set():
                return
            before, actions = self.state, self._stepped(SyncWanted(anyway=anyway, again=again))
            changed = self.state != before
        if changed:
            self._started(actions)

    def wait(
        self, condition: Callable[[ModelControl], bool], timeout_s: float, given_up: threading.Event | None = None
    ) -> bool:
        """Until it holds, or the time is over, or it is given up; whether it holds.

        Raises:
            InvalidRequestError: no such time.
        """
        deadline = Deadline(check_wait_s("timeout_s", timeout_s, may_be_0=True))
        ends = [self._shared.closed, given_up or _NEVER]
        with self._changed:
            return self._changed.wait_for(
                lambda: condition(self) or any(end.is_set() for end in ends), deadline.remaining_s
            ) and condition(self)

    def ended_by(self, report: Callable[[], bool], timeout_s: float) -> None:
        """Calls `report`; where that has ended the sync that is under way, waits until the state shows it."""
        with self._changed:
            goal = self.state.syncing
        if report():
            self.wait(lambda model: goal is None or model.state.syncing is not goal, timeout_s)

    def ended(self, timeout_s: float) -> bool:
        """Waits until the sync that runs has ended, also of a controller that is closed; whether it has."""
        running = self._running
        return running is None or not concurrent.futures.wait([running], timeout_s).not_done

    def look_again(self) -> None:
        """Who waits looks whether it still has to."""
        with self._changed:
            self._changed.notify_all()

    def _mark(self) -> None:
        """Under the lock: who is waited for in this state."""
        blocked, failed = self.blocked, self.state.num_failed > 0
        waits = blocked and self.state.phase == "need_sync" and not failed
        self._history.note_waits({"batch gate": blocked, "retry": failed, "trainer": waits})
        if not self._shared.closed.is_set():
            self._step.look(self.state, self.policy)

    def _told(self) -> None:
        """The state has changed."""
        for listener in tuple(self._shared.listeners):
            self._tell(lambda tag, _, listener=listener: listener(tag), None)  # type: ignore[misc]
        self._tell(lambda *_: self.apply_locks(), None)

    def apply_locks(self) -> None:
        """Locks or unlocks the modules, as the state wants it now."""
        self._locks.apply()

    def _to_lock(self) -> list[Lockable]:
        """What the state wants locked."""
        if self._shared.closed.is_set():
            return []
        state, shared = self.state, self._shared
        locked = (
            shared.dataloader if dataloader_locked(state) else None,
            shared.trajectory_pool if pool_locked(state, self.policy) else None,
        )
        return [module for module in locked if module is not None]

    def seen(self, instances: Sequence[InstanceStatus] | None) -> RolloutServiceState:
        """What users see of it; `instances` are the method's, None where they are not to be counted."""
        service = self._config.inference_service
        with self._changed:
            state, error, retry_at_s = self.state, self._last_error, self._retry_at_s
            lost_step, step_waited_s = self._step.lost, self._step.waited_s
        return RolloutServiceState(
            state=state.phase,
            run_id=state.run_id,
            train_model_version=state.train_version,
            rollout_model_version=state.rollout_version,
            staleness=state.staleness,
            blocked=services_blocked(state, self.policy),
            pool_locked=pool_locked(state, self.policy),
            dataloader_locked=dataloader_locked(state),
            waiting_for_validation=state.validation,
            last_validation=self._last_validation,
            num_failed=state.num_failed,
            retry_in_s=None if retry_at_s is None or not state.num_failed else max(0.0, retry_at_s - time.monotonic()),
            overdue=state.overdue,
            last_error=error,
            lost_step=lost_step,
            step_waited_s=step_waited_s,
            num_answering=None if instances is None else self._num_answering(instances),
            model_name=service.model or "",
            weight_type=service.weight_type,
            weight_path=self._config.sync_weight_path or "",
            backend=service.backend or "",
            base_url=service.base_url or "",
        )

    def _num_answering(self, instances: Sequence[InstanceStatus]) -> int | None:
        """See `RolloutServiceState`."""
        return None if self._shared.method.pool is None else sum(each.may_answer(self.tag) for each in instances)

    def end_validate(
        self, result: Mapping[str, Any] | None, *, version: int | None = None, of: ValidationRun | None = None
    ) -> None:
        """The validation that was running has ended: of that version, or that very one, where one is named."""
        values = None if result is None else plain_values(result)
        with self._changed:
            running = self.state.validation
            if running is not None and not (version in (None, running.version) and of in (None, running)):
                return
            if running is not None:
                self._last_validation = ValidationResult(of=running, result=values)
            self._late.cancel()
            actions = self._stepped(ValidationEnded())  # with its result: nobody sees the one without the other
        self._started(actions)

    def records(self) -> list[SyncRecord]:
        """The last syncs, the newest first."""
        with self._changed:
            return self._history.records()

    def close(self) -> None:
        """Ends the timers, wakes whoever waits, and unlocks the modules."""
        with self._changed:
            self._changed.notify_all()
            self._step.close()
        for alarm in (self._retry, self._late):
            alarm.cancel()
        self._told()

    def _act(self, action: Action) -> None:
        match action:
            case StartSync():
                running = in_thread(lambda: self._sync(action), name=f"weightsync-sync-{self.tag}")
                self._running = running
                running.add_done_callback(lambda done: self._lost(action, done.exception()))
            case RetryAfter(seconds=seconds):
                try:
                    self._retry.set(seconds, self._retry_now)  # in place of one of a run that was taken over from
                except RuntimeError:  # there is no thread to wait in; retries are counted
                    self._retry_now()
            case EvictFailed():
                evicted: Sequence[str] = ()
                try:
                    evicted = self._shared.method.evict_failed(self.tag)
                except Exception:
                    _logger.exception("model %s: nobody could be evicted", self.tag)
                _logger.warning("model %s: evicted after retries: %s", self.tag, ", ".join(evicted) or "nobody")
            case GiveUp(run_id=run_id, version=number):
                version = Version(run_id=run_id or UNNAMED, number=number)
                dark = False
                with contextlib.suppress(Exception):  # it is only asked for the message
                    dark = self._num_answering(self._shared.method.instances()) == 0
                self._log.given_up(version, self._last_error, dark=dark)
                self._tell(self._shared.on_give_up, version)
            case StartValidation(validation=validation):
                try:
                    with self._changed:
                        if self.state.validation is not validation or self._shared.closed.is_set():
                            return  # it has been ended already
                        self._late.set(self._shared.validate_timeout_s, lambda: self._too_late(validation))
                except RuntimeError as error:  # nobody would end one that is not ended
                    self.end_validate({"error": f"it was not started: {error}"}, of=validation)
                    return
                if not self._tell(self._shared.on_validate, validation):
                    self.end_validate({"error": "on_validate failed"}, of=validation)

    def _tell(self, callback: Callable[[str, Any], None] | None, what: Any) -> bool:
        """Calls it, where there is one; whether nothing failed."""
        if callback is not None:
            try:
                callback(self.tag, what)
            except Exception:
                _logger.exception("model %s: a callback failed for %s", self.tag, what)
                return False
        return True

    def _sync(self, goal: StartSync) -> None:
        version = Version(run_id=goal.run_id or UNNAMED, number=goal.version)
        event: Event
        again_s: float | None = None
        with self._changed:
            self._history.begin(goal)
        try:
            with self._shared.recorder.phase("sync", detail=f"{self.tag} {version}"):
                served = self._shared.method.sync_weights(self.tag, version)
            if type(served) is not int or served < goal.version:
                raise SyncFailedError(f"the method says that version {served!r} is served, {version} was asked for")
            event, error = Synced(version=served), None
        except BaseException as caught:  # whatever it is: a model must not stay in "syncing"
            typed = as_weightsync_error(caught, SyncFailedError, "the sync failed")
            self._log.failed(version, typed)
            event = SyncFailed()
            if isinstance(typed, NotPublishedError):
                with self._changed:
                    again_s = self._denials.again_after_s(goal, self.state.run_id, self.state.rollout_version)
                event = SyncFailed(absent=True, newest=typed.newest, again=again_s is not None)
            error = f"{type(typed).__name__}: {typed}"[:_MAX_ERROR]
        with self._changed:
            self._last_error = error
            seconds = self._history.end(error)
        if error is None:
            self._log.served(version, seconds)
        self.feed(event)
        if again_s is not None and not self._shared.closed.is_set():
            self._try_again_later(goal, again_s)

    def _try_again_later(self, goal: StartSync, after_s: float) -> None:
        """One that its agent had not."""
        timer = threading.Timer(after_s, self._claim_again, [goal])
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # no thread
            with self._changed:
                self._denials.was_no_try(goal)

    def _claim_again(self, goal: StartSync) -> None:
        with self._changed:
            if self.state.run_id != goal.run_id or self.state.rollout_version >= goal.version:
                return
        again = Trained(worker="announced", run_id=goal.run_id, version=goal.version, claimed=True)
        with contextlib.suppress(VersionError, StateError):  # another run has taken over, or it is closed
            self.trained(again)

    def _too_late(self, validation: ValidationRun) -> None:
        """Nobody has ended it: rollout does not wait for a validator that is gone."""
        with self._changed:
            if self.state.validation is not validation or self._shared.closed.is_set():
                return
        _logger.error("model %s: nobody called end_validate for %s in time", self.tag, validation)
        self.end_validate({"error": f"not ended within {self._shared.validate_timeout_s:g} s"}, of=validation)

    def _step_lost(self, awaited: Awaited) -> None:
        """The trainer gives nothing: rollout does not wait for one that is gone."""
        with self._changed:
            if self._step.awaited is not awaited or self._shared.closed.is_set():
                return
            self.state, actions = step(self.state, BatchDropped(), self.policy)
            why = self._step.lose()
            self._mark()
            self._changed.notify_all()
        _logger.error("model %s: %s: its trainer is gone, or slow; rollout goes on", self.tag, why)
        self._started(actions)

    def _lost(self, goal: StartSync, error: BaseException | None) -> None:
        """A sync that could not even be started, or told of: it has failed like any other."""
        if error is None:
            return
        self._log.lost(goal.version, error)
        with self._changed:
            if self.state.syncing is not goal:
                return
            self._last_error = f"{type(error).__name__}: {error}"
            self._history.forget()
        self.feed(SyncFailed())

    def _retry_now(self) -> None:
        with self._changed:
            self._retry_at_s = None
        if not self._shared.closed.is_set():
            self.feed(RetryDue())
