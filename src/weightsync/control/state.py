"""When one model is synced, who is blocked meanwhile, and when it is validated: a pure state machine.

`step` takes a state and an event and gives the next state and what is to be done. It knows no clock, no thread and no
network; `control.controller` is around it. Who is blocked follows from the state, so that nothing stays locked.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from weightsync.control.events import (
    Action,
    BatchDropped,
    BatchReady,
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
from weightsync.errors import ConfigError, StateError, VersionError
from weightsync.types.control import ValidationRun
from weightsync.types.deadline import MAX_WAIT_S

Mode: TypeAlias = Literal["sync", "fully-async", "batch-async"]
AfterFailure: TypeAlias = Literal["keep", "evict"]
Phase: TypeAlias = Literal["running", "need_sync", "syncing"]
_MAX_WORKERS = 4096
_MAX_REPLACED = 16
_MAX_CROSSED = 1000
_MAX_LATER = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What a model's controller was told once: by the configuration, which has checked it, but for the last two.

    Attributes:
        mode: "sync": every step ends in a sync; "batch-async": staleness stays below the threshold; "fully-async":
            nobody is blocked.
        staleness_threshold: versions behind at which rollout blocks; "sync" has 1, "fully-async" reads none.
        validate_freq: versions between validations; 0: none.
        retries_s: seconds until each retry of a sync that failed.
        after_failure: what comes after the last retry: "keep" the old version, or "evict" whoever failed and try once
            more.

    Raises:
        ConfigError: a value that can't be.
    """

    mode: Mode = "sync"
    staleness_threshold: int = 2
    validate_freq: int = 0
    retries_s: tuple[float, ...] = (1.0, 2.0, 4.0)
    after_failure: AfterFailure = "keep"

    def __post_init__(self) -> None:
        if not all(0 <= seconds <= MAX_WAIT_S for seconds in self.retries_s):  # NaN fails
            raise ConfigError(f"retries_s are seconds from 0 to {MAX_WAIT_S:g}, not {self.retries_s}")
        if self.after_failure not in ("keep", "evict"):
            raise ConfigError(f"after_failure is 'keep' or 'evict', not {self.after_failure!r}")

    @property
    def bound(self) -> int | None:
        """The staleness that rollout never goes on at; None where there is none."""
        return {"sync": 1, "batch-async": self.staleness_threshold, "fully-async": None}[self.mode]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelState:
    """What is known of one model's versions, and what is under way.

    Attributes:
        phase: "running": nothing is due; "need_sync": one is due, at the end of a step or after a failure; "syncing".
        run_id: the trainer's run; None before its first word.
        train_version: the newest version of that run that was trained.
        rollout_version: the newest of that run that rollout has committed; -1: none of this run yet, and the rollout
            side serves what an earlier run or nobody has given it.
        due: the version whose step ends in a sync; None where none is due, or it has begun.
        num_pending: batches that are ready, and whose step has not ended.
        counts_from: versions of the run up to it ended no step of those batches: they are from before its first word.
        all_dropped: since all batches were dropped nobody has told of a version: what is ready is the next trainer's.
        syncing: what is being synced.
        num_failed: syncs in a row that have failed, of which the next is a retry.
        retry_due: the retry's time is over, and it begins when the validation that is running has ended.
        evicting: after the last retry, and an eviction.
        wanted: what is trained is to be synced, due or not, when nothing stands in the way any more.
        again: what is being synced is tried once more where it is given up.
        overdue: given up after failures: nobody is blocked, however far behind, until a sync succeeds.
        validation: the one that is running.
        validated_to: all multiples of `validate_freq` up to here have had their validation.
        told: by worker: the version that it told of last, in this run.
        evaluate_at: a version that the trainer wants validated; None: none.
        evaluate_later: such versions that their agent has not yet: each is told of once more. The lowest come first.
        evaluated_to: the newest version of this run whose validation was started.
        sure_version, sure_pending: what `train_version` and `num_pending` are without what was only announced, and that
            nobody has fetched yet.
        replaced: the last runs that another took over from. None comes back, but for the last one, and the last one
            that was served, where the run that took over was given up before anything of it was served.
        served_run: the run before this one of which something was served.
    """

    phase: Phase = "running"
    run_id: str | None = None
    train_version: int = 0
    rollout_version: int = 0
    due: int | None = None
    num_pending: int = 0
    counts_from: int = 0
    all_dropped: bool = False
    syncing: StartSync | None = None
    num_failed: int = 0
    retry_due: bool = False
    evicting: bool = False
    wanted: bool = False
    again: bool = False
    overdue: bool = False
    validation: ValidationRun | None = None
    validated_to: int = 0
    told: tuple[tuple[str, int], ...] = ()
    evaluate_at: int | None = None
    evaluate_later: tuple[int, ...] = ()
    evaluated_to: int = -1
    sure_version: int = 0
    sure_pending: int = 0
    replaced: tuple[str, ...] = ()
    served_run: str | None = None

    @property
    def staleness(self) -> int:
        """Versions that rollout is behind; one more than there are where it has none of this run."""
        return self.train_version - self.rollout_version


# --- what follows from a state ---


def services_blocked(state: ModelState, policy: Policy) -> bool:
    """Whether rollout has to wait: from when a sync is due until it has ended, but while a validation runs."""
    waits = state.phase != "running" and state.validation is None and not state.overdue
    return policy.bound is not None and waits


def pool_locked(state: ModelState, policy: Policy) -> bool:
    """Whether the trajectory pool has to wait."""
    return state.validation is not None or services_blocked(state, policy)


def dataloader_locked(state: ModelState) -> bool:
    """Whether the dataloader has to wait: for a validation alone. What it hands out during a sync waits at the pool."""
    return state.validation is not None


def awaits_step(state: ModelState, policy: Policy) -> bool:
    """Whether rollout waits for a training step alone: nothing but a version of it, or word that there is none, ends
    that wait."""
    return services_blocked(state, policy) and state.due is not None and state.train_version < state.due


def held_up(state: ModelState) -> bool:
    """Whether a sync is due that waits for a validation's end."""
    return state.validation is not None and state.due is not None and state.train_version >= state.due


# --- the machine ---


def step(state: ModelState, event: Event, policy: Policy) -> tuple[ModelState, tuple[Action, ...]]:
    """What an event makes of a state, and what is to be done.

    Raises:
        VersionError: a worker tells of an older version than it did before, in the same run; or of a run that another
            has taken over from. The state stays.
        StateError: too many workers have told. The state stays.
    """
    match event:
        case BatchReady():
            return _batch_ready(state, policy)
        case BatchDropped(num=num):
            return _batch_dropped(state, num), ()
        case Trained():
            return _trained(state, event, policy)
        case Synced(version=version):
            return _synced(state, version, policy)
        case SyncFailed(absent=absent):
            return _absent(state, event, policy) if absent else _failed(state, policy)
        case RetryDue():
            if state.phase != "need_sync" or not state.num_failed:
                return state, ()  # of a run that another has taken over from meanwhile
            return _go_on(dataclasses.replace(state, retry_due=True), policy)
        case ValidationEnded():
            if state.validation is None:
                return state, ()
            return _go_on(dataclasses.replace(state, validation=None), policy)
        case SyncWanted(anyway=anyway, again=again):
            idle = state.syncing is None
            wanted, again = state.wanted or anyway or (state.overdue and idle), state.again or (again and not idle)
            return _go_on(dataclasses.replace(state, wanted=wanted, again=again), policy)


def _batch_ready(state: ModelState, policy: Policy) -> tuple[ModelState, tuple[Action, ...]]:
    more = dataclasses.replace(state, num_pending=state.num_pending + 1, sure_pending=state.sure_pending + 1)
    return _with_due(more, policy), ()


def _batch_dropped(state: ModelState, num: int | None) -> ModelState:
    left, sure = (0 if num is None else max(0, each - num) for each in (state.num_pending, state.sure_pending))
    num_ended = (state.sure_pending - state.num_pending) - (sure - left)  # they have gone: their version ends no step
    state = dataclasses.replace(
        state,
        num_pending=left,
        sure_pending=sure,
        counts_from=min(state.train_version, max(state.counts_from, state.sure_version) + num_ended)
        if num_ended > 0
        else state.counts_from,
        all_dropped=num is None or state.all_dropped,
    )
    if state.phase == "need_sync" and state.due is not None and state.train_version + left < state.due:
        return dataclasses.replace(state, phase="running", due=None)
    return state


def _trained(state: ModelState, event: Trained, policy: Policy) -> tuple[ModelState, tuple[Action, ...]]:
    run_id = event.run_id if event.run_id is not None else state.run_id
    assumed = state.rollout_version == 0 and state.served_run is None  # that 0 is served: nothing else was known
    if event.learnt and state.told and run_id != state.run_id and assumed:
        return _go_on(dataclasses.replace(state, rollout_version=-1, served_run=run_id, wanted=True), policy)
    in_vain = state.overdue and state.rollout_version < 0  # nothing of this run was ever served, and nobody tries it
    back = (*state.replaced[-1:], state.served_run) if in_vain else ()
    if run_id in set(state.replaced) - set(back) or (event.learnt and state.told and run_id != state.run_id):
        raise VersionError(
            f"run {run_id} was taken over by {state.run_id}: a trainer that starts again has a new run_id",
            version=f"{run_id}/{event.version}",
            state_left="nothing was changed",
        )
    first_word = run_id != state.run_id or not state.told
    if first_word and (state.told or event.version == 0):
        kept = state.all_dropped  # else batches before it went to a trainer that is gone
        left = (state.run_id,) if state.told and state.run_id is not None else ()
        state = ModelState(
            phase="running" if state.syncing is None else "syncing",
            syncing=state.syncing,
            rollout_version=-1 if state.told else 0,
            num_pending=state.num_pending if kept else 0,
            sure_pending=state.sure_pending if kept else 0,
            all_dropped=kept,
            validation=state.validation,
            replaced=tuple(each for each in (*state.replaced, *left) if each != run_id)[-_MAX_REPLACED:],
            served_run=state.run_id if state.rollout_version >= 0 else state.served_run,
        )
    reports = dict(state.told)
    if event.worker not in reports and len(reports) >= _MAX_WORKERS:
        raise StateError(
            f"{_MAX_WORKERS} workers have told of versions of run {run_id}: one keeps its name from step to step",
            state_left="nothing was changed",
        )
    before = reports.get(event.worker, 0)
    version = before + 1 if event.version is None else event.version
    if version < before and not (event.claimed and version >= state.sure_version):  # else what it told of may not be
        raise VersionError(
            f"worker {event.worker} tells of version {version} of run {run_id} and has told of {before} before: a "
            "trainer that goes back has a new run_id",
            version=f"{run_id}/{version}",
            state_left="nothing was changed",
        )
    if first_word:  # of a run that begins above its batches it is one step's end, at most
        num_ended = 0 if event.learnt else version if version <= state.num_pending else min(1, state.num_pending)
        state = dataclasses.replace(state, counts_from=version - num_ended)
    if first_word and policy.validate_freq:
        state = dataclasses.replace(
            state, validated_to=max(0, version - 1) // policy.validate_freq * policy.validate_freq
        )
    newer = version > state.train_version
    reports[event.worker] = version
    state = _advanced(state, version) if event.claimed else _confirmed(_advanced(state, version), version)
    state = dataclasses.replace(
        state, run_id=run_id, told=tuple(sorted(reports.items())), all_dropped=state.all_dropped and event.learnt
    )
    if event.evaluate and version > state.evaluated_to:  # several workers ask for it once
        state = dataclasses.replace(state, evaluate_at=max(version, state.evaluate_at or 0))
    return _go_on(state, policy) if newer or first_word or event.evaluate else (state, ())


def _advanced(state: ModelState, version: int) -> ModelState:
    """Steps have ended, up to the one that gave `version`."""
    num_ended = max(0, version - max(state.train_version, state.counts_from))
    return dataclasses.replace(
        state, train_version=max(version, state.train_version), num_pending=max(0, state.num_pending - num_ended)
    )


def _confirmed(state: ModelState, version: int) -> ModelState:
    """That version was trained for certain."""
    num_ended = max(0, version - max(state.sure_version, state.counts_from))
    return dataclasses.replace(
        state, sure_version=max(version, state.sure_version), sure_pending=max(0, state.sure_pending - num_ended)
    )


def _with_due(state: ModelState, policy: Policy) -> ModelState:
    """Marks the step that has to end in a sync, where one of those under way has to."""
    if policy.bound is None or state.due is not None or state.phase != "running":
        return state
    due = state.rollout_version + policy.bound if state.rollout_version >= 0 else 0
    if state.train_version + state.num_pending < due:
        return state
    return dataclasses.replace(state, phase="need_sync", due=max(due, state.train_version))


def _go_on(state: ModelState, policy: Policy) -> tuple[ModelState, tuple[Action, ...]]:
    """Starts what is due and what nothing stands in the way of."""
    state = dataclasses.replace(state, wanted=state.wanted and state.rollout_version < state.train_version)
    state, validations = _validate(_with_later(state), policy)
    state = _with_due(state, policy)
    if validations:
        return state, validations
    retries = state.num_failed and not state.retry_due  # its timer runs
    waits = state.phase == "syncing" or state.validation is not None or retries
    if waits or state.rollout_version >= state.train_version:
        return state, ()
    not_due = state.due is None or state.train_version < state.due
    if policy.bound is not None and not_due and state.evaluate_at is None and not state.wanted:
        return state, ()
    return begin(state)


def _with_later(state: ModelState) -> ModelState:
    """The next of the validations whose version was told of too early, where that version is there by now."""
    later = tuple(each for each in state.evaluate_later if each > state.evaluated_to)
    if later and state.evaluate_at is None and later[0] <= state.train_version:
        return dataclasses.replace(state, evaluate_at=later[0], evaluate_later=later[1:])
    return dataclasses.replace(state, evaluate_later=later)


def _validate(state: ModelState, policy: Policy) -> tuple[ModelState, tuple[Action, ...]]:
    """Starts the validation that what is served calls for, where none is running."""
    if state.validation is not None or state.phase == "syncing":
        return state, ()
    freq = policy.validate_freq
    reached = state.rollout_version // freq * freq if freq else 0
    since = max(state.validated_to, reached - _MAX_CROSSED * freq)
    crossed = tuple(range(since + freq, reached + 1, freq)) if freq else ()
    asked = state.evaluate_at is not None and state.evaluate_at <= state.rollout_version
    if not crossed and not asked:
        return state, ()
    validation = ValidationRun(run_id=state.run_id, version=state.rollout_version, stands_for=crossed)
    state = dataclasses.replace(
        state,
        validation=validation,
        validated_to=max(state.validated_to, reached),
        evaluate_at=None if asked else state.evaluate_at,
        evaluated_to=state.rollout_version,
    )
    return state, (StartValidation(validation=validation),)


def begin(state: ModelState) -> tuple[ModelState, tuple[Action, ...]]:
    """Starts a sync of what is trained."""
    goal = StartSync(run_id=state.run_id, version=state.train_version)
    state = dataclasses.replace(state, phase="syncing", due=None, syncing=goal, retry_due=False)
    return dataclasses.replace(state, wanted=False, again=False), (goal,)


def _synced(state: ModelState, version: int, policy: Policy) -> tuple[ModelState, tuple[Action, ...]]:
    if state.syncing is None:
        return state, ()
    current = state.syncing.run_id == state.run_id
    state = dataclasses.replace(state, phase="running", syncing=None, num_failed=0, evicting=False, again=False)
    if not current:  # of a run that another has taken over from meanwhile
        return _go_on(state, policy)
    state = dataclasses.replace(
        _confirmed(_advanced(state, version), version),
        rollout_version=max(version, state.rollout_version),
        overdue=False,
    )
    return _go_on(state, policy)


def _absent(state: ModelState, event: SyncFailed, policy: Policy) -> tuple[ModelState, tuple[Action, ...]]:
    """What was to be synced is not there: what the agent has of the run takes its place, and what was told of since."""
    goal, newest = state.syncing, event.newest
    if goal is None or goal.run_id != state.run_id:
        return _failed(state, policy)
    if newest is None:  # the agent names another run: where nothing of this was ever served, that may come back
        in_vain = dataclasses.replace(state, overdue=state.overdue or state.rollout_version < 0)
        return _failed(in_vain, dataclasses.replace(policy, after_failure="keep"))  # it is nobody's fault on this side
    state = dataclasses.replace(state, phase="running", syncing=None, num_failed=0, evicting=False, again=False)
    newest = max(newest, state.rollout_version)
    reports = tuple((worker, number if number < goal.version else min(number, newest)) for worker, number in state.told)
    if newest >= state.sure_version:
        state = _confirmed(state, newest)
    state = dataclasses.replace(
        state,
        train_version=state.sure_version,
        num_pending=state.sure_pending,
        counts_from=min(state.counts_from, newest),
        told=reports,
    )
    state = _advanced(state, max((number for _, number in reports), default=0))
    state = dataclasses.replace(state, overdue=state.overdue and state.train_version > state.rollout_version)
    if policy.validate_freq:
        reached = state.train_version // policy.validate_freq * policy.validate_freq
        state = dataclasses.replace(state, validated_to=min(state.validated_to, reached))
    if state.evaluate_at is not None and state.evaluate_at > state.train_version:
        later = sorted({*state.evaluate_later, state.evaluate_at})[:_MAX_LATER]
        state = dataclasses.replace(state, evaluate_at=None, evaluate_later=tuple(later))
    if not event.again:
        later = [each for each in state.evaluate_later if each < goal.version]
        state = dataclasses.replace(state, evaluate_later=tuple(later))
    return _go_on(state, policy)


def _failed(state: ModelState, policy: Policy) -> tuple[ModelState, tuple[Action, ...]]:
    if state.syncing is None:
        return state, ()
    tried, current, again = state.syncing, state.syncing.run_id == state.run_id, state.again
    state = dataclasses.replace(state, phase="running", syncing=None, again=False)
    if not current:
        return _go_on(state, policy)
    state = dataclasses.replace(state, num_failed=state.num_failed + 1)
    if state.num_failed <= len(policy.retries_s):
        waits = dataclasses.replace(state, phase="need_sync", due=state.train_version)
        return waits, (RetryAfter(seconds=policy.retries_s[state.num_failed - 1]),)
    if policy.after_failure == "evict" and not state.evicting:
        state, actions = begin(dataclasses.replace(state, evicting=True))
        return state, (EvictFailed(), *actions)
    given_up = dataclasses.replace(state, num_failed=0, evicting=False, overdue=True, wanted=False)
    notice = (GiveUp(run_id=state.run_id, version=tried.version),)
    # who takes part has changed, and not by the eviction alone; or nobody has tried what is newer
    if (again and not state.evicting) or tried.version < state.train_version:
        state, actions = begin(given_up)
        return state, (*notice, *actions)
    return given_up, notice
