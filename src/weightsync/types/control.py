"""The messages of a controller's HTTP face."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types.deadline import check_wait_s
from weightsync.types.message import Message, learn
from weightsync.types.progress import TransferProgress

_MAX_VERSION = 1 << 53
_MAX_NAME = 512
_MAX_TEXT = 1000
PlainValue: TypeAlias = float | int | str | bool | None

UNNAMED = "unnamed"
"""What a controller calls a run that no trainer has named. Its versions are counted: one more with each call."""


def plain_values(result: Mapping[Any, Any]) -> dict[str, PlainValue]:
    """What JSON can say of a result: numbers of any library become numbers, what is no value becomes a text."""
    return {_text(key): _plain(value) for key, value in result.items()}


def _plain(value: Any) -> PlainValue:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return int(value) if -(1 << 63) <= value < 1 << 63 else _text(value)[:_MAX_TEXT]
    try:
        number = float(value)
    except Exception:  # it is of any library
        return _text(value)[:_MAX_TEXT]
    return number if math.isfinite(number) else str(number)


def _text(value: Any) -> str:
    try:
        text = str(value)
    except Exception:  # an int of too many digits; what has no words
        return f"a {type(value).__name__}"
    return text.encode(errors="backslashreplace").decode()


def check_trained(worker_name: str, run_id: str | None, version: int | None) -> None:
    """What a worker may tell of.

    Raises:
        InvalidRequestError: no such version, or a name that is empty or too long.
    """
    if version is not None and not (type(version) is int and 0 <= version < _MAX_VERSION):
        raise InvalidRequestError(f"a version is a whole number from 0 on, not {version!r}")
    if not all(1 <= len(name) <= _MAX_NAME for name in (worker_name, run_id) if name is not None):
        raise InvalidRequestError(f"worker_name and run_id have 1 to {_MAX_NAME} characters")


def check_dropped(num_batches: int | None) -> None:
    """How many batches may be dropped.

    Raises:
        InvalidRequestError: no such number.
    """
    if num_batches is not None and not (type(num_batches) is int and num_batches >= 1):
        raise InvalidRequestError(f"num_batches is a whole number from 1 on, not {num_batches!r}; leave it out for all")


class ModelRequest(Message, frozen=True, kw_only=True):
    """A call for one model.

    Attributes:
        model_tag: which.
        wait_s: how long to wait for what is asked; None or 0: not at all.
    """

    model_tag: str
    wait_s: float | None = None

    def __post_init__(self) -> None:
        if not self.model_tag:
            raise InvalidRequestError("model_tag has at least one character")
        if self.wait_s:
            check_wait_s("wait_s", self.wait_s)


class TrainedRequest(ModelRequest, frozen=True, kw_only=True):
    """A training worker has new weights.

    Attributes:
        worker_name: who.
        run_id: of the trainer's run; None: the one that is known.
        version: number of the weights; None: the worker's next one.
        sender_endpoint: URL of the agent that has it; None: the one that was told of last.
        evaluate: sync and validate it now; `wait_s` is until that has ended.
    """

    worker_name: str
    run_id: str | None = None
    version: int | None = None
    sender_endpoint: str | None = None
    evaluate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_trained(self.worker_name, self.run_id, self.version)


class BatchDroppedRequest(ModelRequest, frozen=True, kw_only=True):
    """Steps of so many batches give no version; None: of all whose step has not ended."""

    num_batches: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dropped(self.num_batches)


class EndValidateRequest(ModelRequest, frozen=True, kw_only=True, omit_defaults=True):
    """A validation has ended, with this result; of that version, where one is named."""

    result: dict[str, PlainValue] | None = None
    version: int | None = None


class WaitVersionRequest(ModelRequest, frozen=True, kw_only=True):
    """Asks whether rollout serves a version, or a newer one of its run; `wait_s` is how long to wait for that."""

    run_id: str
    version: int


class ValidationRun(Message, frozen=True, kw_only=True):
    """A validation that runs.

    Attributes:
        run_id, version: what is validated.
        stands_for: the multiples of `validate_freq` that it is recorded for, at most the last 1000.
    """

    run_id: str | None
    version: int
    stands_for: tuple[int, ...]


class ValidationResult(Message, frozen=True, kw_only=True):
    """A validation that has ended.

    Attributes:
        of: which.
        result: what `end_validate` was told, by `plain_values`.
    """

    of: ValidationRun
    result: dict[str, PlainValue] | None = None


class RolloutServiceState(Message, frozen=True, kw_only=True):
    """What users see of one model; the words are document 5's.

    Attributes:
        state: "running"; "need_sync": services are being locked; "syncing".
        run_id, train_model_version, rollout_model_version: versions are of this run. A rollout version of -1: rollout
            has none of it yet.
        staleness: versions behind: their difference, with a rollout version of -1, too.
        blocked: whether rollout has to wait.
        pool_locked: whether the trajectory pool is locked: by a sync, or by a validation.
        dataloader_locked: whether the dataloader is locked: by a validation.
        waiting_for_validation: the validation that runs.
        last_validation: the one that ended last.
        num_failed: syncs that have failed in a row.
        retry_in_s: seconds until the next try, where one is scheduled.
        overdue: the retries have ended; rollout goes on with its old version.
        last_error: of the last sync, while it matters.
        step_waited_s: for how long rollout has waited for a training step; None: it waits for none.
        lost_step: no version came for `fleet.step_timeout_s`, and rollout went on; None: since then the trainer has
            told of something.
        num_answering: instances that may answer with this model; None: the method has no fleet, and nobody counts.
        model_name, weight_type, weight_path, backend, base_url: the inference service, as configured.
    """

    state: Literal["need_sync", "syncing", "running"] = "running"
    run_id: str | None = None
    train_model_version: int = 0
    rollout_model_version: int = 0
    staleness: int = 0
    blocked: bool = False
    pool_locked: bool = False
    dataloader_locked: bool = False
    waiting_for_validation: ValidationRun | None = None
    last_validation: ValidationResult | None = None
    num_failed: int = 0
    retry_in_s: float | None = None
    overdue: bool = False
    last_error: str | None = None
    step_waited_s: float | None = None
    lost_step: str | None = None
    num_answering: int | None = None
    model_name: str = ""
    weight_type: str = ""
    weight_path: str = ""
    backend: str = ""
    base_url: str = ""


class GateReply(Message, frozen=True, kw_only=True):
    """Whether a request may proceed.

    Attributes:
        answer: "continue", or "block": ask again.
        run_id, rollout_model_version: what rollout serves; -1: nothing of that run.
    """

    answer: Literal["continue", "block"]
    rollout_model_version: int
    run_id: str | None = None


class SyncReply(Message, frozen=True, kw_only=True):
    """Whether rollout serves the newest trained version."""

    up_to_date: bool


class InstanceStatus(Message, frozen=True, kw_only=True):
    """One rollout service as the pool sees it.

    Attributes:
        instance_id, url: which, and where it is called.
        state: "joining": it catches up before it takes part; "live"; "suspect": live, and its heartbeat is late;
            "evicted": it takes part no more until it has caught up, or is not heard any more.
        models: version that it serves of each model, as "run/number"; None: none of ours.
        lag: versions behind the newest one that the pool was told of, by model; None: of another run, or none.
        heartbeat_age_s: seconds since it was heard last.
        lease_left_s: for so long it may still answer; 0: it refuses.
        why: why it is not live, or what failed last.
        progress: of transfers under way there, by model, as of its last heartbeat.
        adapters: of models that are adapters, rank and base in words.
        gone: engines that do not answer their service, as of its last heartbeat; `why` says more.
        failed: whether `why` is of something that failed; else it only joins, or is late.
    """

    instance_id: str
    url: str
    state: Literal["joining", "live", "suspect", "evicted"]
    models: dict[str, str | None] = msgspec.field(default_factory=dict)
    lag: dict[str, int | None] = msgspec.field(default_factory=dict)
    heartbeat_age_s: float = 0.0
    lease_left_s: float = 0.0
    why: str | None = None
    progress: dict[str, TransferProgress] = msgspec.field(default_factory=dict)
    adapters: dict[str, str] = msgspec.field(default_factory=dict)
    gone: tuple[str, ...] = ()
    failed: bool = False

    def may_answer(self, model_tag: str) -> bool:
        """Whether it takes part, or has a lease of the controller before, and has that model, on engines that answer:
        on others it says no version of it. Before the first version all of its engines have to answer, whose they are
        is not known here."""
        may = self.state in ("live", "suspect") or (self.state == "joining" and self.lease_left_s > 0)
        return may and model_tag in self.models and (not self.gone or self.models[model_tag] is not None)


SPANS = ("trainer", "batch gate", "barrier", "agent", "transfer", "load", "pause", "commit", "retry")
"""What somebody waited for in a sync: a training step's end with rollout locked, the gate, the other models of a set,
an agent that had no such version yet, bytes, engines, running generations, the commit of all, a retry that succeeds."""


class SyncSpan(Message, frozen=True, kw_only=True):
    """A part of a sync.

    Attributes:
        name: one of `SPANS`.
        start_s: seconds after the sync's start; before it where negative.
        seconds: how long.
        who: who was waited for: an instance, a model, a trainer's worker; None: nobody in particular.
        nbytes: of a transfer that has ended: how much came; else 0.
    """

    name: str
    start_s: float
    seconds: float
    who: str | None = None
    nbytes: int = 0


class SyncRecord(Message, frozen=True, kw_only=True):
    """One sync of a model, as the timeline shows it.

    Attributes:
        model_tag, run_id, version: what was synced.
        started_s: seconds since the epoch.
        seconds: how long it took; until now, while it runs.
        outcome: "running", "served" or "failed".
        error: why it failed.
        spans: who was blocked by what.
    """

    model_tag: str
    run_id: str | None
    version: int
    started_s: float
    seconds: float
    outcome: Literal["running", "served", "failed"]
    error: str | None = None
    spans: tuple[SyncSpan, ...] = ()


class BarrierStatus(Message, frozen=True, kw_only=True):
    """A set of models that has to commit together, while somebody waits for it.

    Attributes:
        versions: version that each model's trainer has published; None: none yet.
        waits_for: models that are behind the newest of them.
        version: the number that all have to reach.
        waited_s, timeout_s: since when it waits, and how long it may.
    """

    versions: dict[str, int | None]
    waits_for: tuple[str, ...]
    version: int
    waited_s: float
    timeout_s: float


class ControllerStatus(Message, frozen=True, kw_only=True):
    """What `/status` of a controller answers.

    Attributes:
        models: by tag.
        sync_mode: by tag.
        instances: the pool, by name; empty where the method has none.
        barriers: sets that wait now.
        syncs: the last ones: those that run, then those that have ended, by their end; the newest first. Of
            each model the newest is there, however many models there are.
        now_s: the controller's clock, seconds since the epoch.
    """

    models: dict[str, RolloutServiceState]
    sync_mode: dict[str, str] = msgspec.field(default_factory=dict)
    instances: tuple[InstanceStatus, ...] = ()
    barriers: tuple[BarrierStatus, ...] = ()
    syncs: tuple[SyncRecord, ...] = ()
    now_s: float = 0.0


learn(ModelRequest, BatchDroppedRequest, TrainedRequest, EndValidateRequest, WaitVersionRequest)
learn(RolloutServiceState, GateReply, SyncReply, ControllerStatus)
