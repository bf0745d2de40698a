"""What the machine of `control.state` is told, and what it says is to be done: plain values."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from weightsync.types.control import ValidationRun

# --- events ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchReady:
    """The trajectory pool has a batch: a training step starts with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchDropped:
    """Steps of batches give no version: nobody waits for one any more. `num`: how many; None: of all batches whose step
    has not ended.
    """

    num: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A training worker has new weights.

    Attributes:
        worker: its name.
        run_id: the trainer's run; None: the one that is known.
        version: number of the weights; None: the worker's next one.
        evaluate: they are to be synced and validated, whatever the mode and `validate_freq` say.
        learnt: nobody has trained them now: it is what the rollout side serves. It takes over from no run; where
            that run's 0 was taken for served, it is no more, and what is trained is synced.
        claimed: the method asks an agent for them, which may not have them: see `SyncFailed.absent`.
    """

    worker: str
    run_id: str | None = None
    version: int | None = None
    evaluate: bool = False
    learnt: bool = False
    claimed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synced:
    """A sync has committed. `version` is what it committed, as the method says: maybe newer than was asked for."""

    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncFailed:
    """A sync has failed.

    Attributes:
        absent: since the agent says that it has no such version.
        newest: what it has of that run instead, or is about to have; None: it names another run, or `absent` is False.
        again: it is told of once more, soon: its trainer may have told too early.
    """

    absent: bool = False
    newest: int | None = None
    again: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryDue:
    """The time until the next retry is over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationEnded:
    """The validation that was running has ended, well or not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncWanted:
    """What is trained is to be served. Where a sync or a validation runs, as soon as it has ended.

    Attributes:
        anyway: due or not; else where it was given up.
        again: who takes part has changed: what is being synced is tried once more where it is given up.
    """

    anyway: bool = True
    again: bool = False


Event: TypeAlias = BatchReady | BatchDropped | Trained | Synced | SyncFailed | RetryDue | ValidationEnded | SyncWanted

# --- actions ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartSync:
    """Sync now; tell `Synced` or `SyncFailed`."""

    run_id: str | None
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetryAfter:
    """Tell `RetryDue` after so many seconds."""

    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvictFailed:
    """Take whoever failed the last sync out of the pool; a `StartSync` comes with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GiveUp:
    """Operators should know: rollout goes on with an old version."""

    run_id: str | None
    version: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartValidation:
    """Validate now; `ValidationEnded` when it has ended."""

    validation: ValidationRun


Action: TypeAlias = StartSync | RetryAfter | EvictFailed | GiveUp | StartValidation
