"""The engines as training rank 0 sees them: who answers, and who is left out for how long."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from weightsync.errors import (
    DeadlineExceededError,
    EngineUnreachableError,
    NoEnginesError,
    StateError,
    SyncFailedError,
    SyncInProgressError,
    WeightSyncError,
    error_from_dict,
    is_consequence,
)
from weightsync.observe import Recorder, now_s
from weightsync.transfer.base import WeightTransferStrategy
from weightsync.types import Deadline, EngineReply, InferenceEngineClient, PhaseRecord
from weightsync.types.manifest import ArtifactKind
from weightsync.update.group import TransferGroup

DESCRIBE_TIMEOUT_S = 3.0
_SHUN_S, _SHUN_LONGEST_S = 30.0, 600.0  # how long an engine that did not join is left out
_SHUN_BUSY_S = 5.0  # how long one is left out that hangs, or is still busy with an earlier sync

_GOODBYE_S = 1.5  # how long a trainer's end waits for engines

_logger = logging.getLogger(__name__)


class JoinedEngines:
    """Chooses who takes part in each sync. Training rank 0 alone uses it.

    Args:
        client: all engines that are known; None on other ranks.

    Attributes:
        group: that those who take part are in.
    """

    def __init__(
        self,
        client: InferenceEngineClient | None,
        strategy: WeightTransferStrategy,
        *,
        model_id: str,
        join_timeout_s: float,
        recorder: Recorder,
    ) -> None:
        self._all = client
        self._recorder = recorder
        self.group = TransferGroup(strategy, model_id=model_id, join_timeout_s=join_timeout_s, recorder=recorder)
        self._shunned: dict[str, _Shunned] = {}
        self._lost_before: set[str] = set()

    def close(self) -> None:
        """Tells the engines that this trainer ends in order, and leaves the group. Idempotent."""
        if self._all is not None:
            self.group.end(self._all, timeout_s=_GOODBYE_S)

    def took_part(self, engine_ids: Sequence[str]) -> None:
        """These engines began a sync: the next time that one fails it is left out for a short time again."""
        for who in engine_ids:
            self._shunned.pop(who, None)

    def ready(
        self, deadline: Deadline, *, run_id: str, require_all: bool, artifact: ArtifactKind = "model"
    ) -> tuple[InferenceEngineClient, dict[str, EngineReply], dict[str, WeightSyncError]]:
        """Sees to it that the engines that answer are in one transfer group.

        Returns:
            A client of these engines, what each of them says of itself, and why each of the others is left out.

        Raises:
            NoEnginesError: nobody answers, or nobody was asked; `retry_after_s` says when somebody is again.
            SyncFailedError: some don't, and `require_all`.
            GroupJoinError: somebody answered and did not join; it is left out of the next calls for a while.
        """
        if self._all is None:
            raise NoEnginesError("training rank 0 needs a client of the engines")
        left_out = {who: shunned for who, shunned in self._shunned.items() if shunned.left_s}
        lost = {who: shunned.told() for who, shunned in left_out.items()}
        asked = self._all.only([who for who in self._all.engine_ids if who not in lost])
        replies, errors = asked.describe(timeout_s=min(DESCRIBE_TIMEOUT_S, deadline.check("time to ask the engines")))
        for who, error in errors.items():
            if _is_slow(error):  # it would cost every sync that time
                self._shun(who, error, _SHUN_BUSY_S)
        lost.update(errors)
        here = [who for who in asked.engine_ids if who in replies]
        if not here:
            why = "; ".join(f"{who}: {error}" for who, error in lost.items())
            silent = all(isinstance(error, EngineUnreachableError | DeadlineExceededError) for error in lost.values())
            what = "was asked" if lost and not errors else "answers" if silent else "can take part"
            raise NoEnginesError(
                f"no engine {what}: {why or 'none is known'}",
                state_left="nothing was changed: an engine that still runs serves what it did",
                **_retry_after(min, left_out),
            )
        if lost and require_all:
            raise SyncFailedError(
                f"{', '.join(sorted(lost))} can't take part: check address and token, or go on without "
                "(require_all=False)",
                causes=lost,
                state_left="nothing was changed",
                **_retry_after(max, left_out),
            )
        for who in self._lost_before.intersection(here):
            _logger.warning("engine %s takes part again", who)
        for who in lost:
            if who not in self._lost_before:
                _logger.warning("syncing without engine %s: %s", who, lost[who])
            self._recorder.add(PhaseRecord(name="engine lost", start_s=now_s(), end_s=now_s(), track=who))
        self._lost_before = set(lost)
        client = self._all.only(here)
        joining = {who: replies[who] for who in here}
        try:
            self.group.join(client, joining, run_id=run_id, deadline=deadline, artifact=artifact)
        except WeightSyncError as error:
            self._shun_missing(error, joining)
            raise
        for who, reply in joining.items():
            if reply.run_id not in (None, run_id):
                _logger.warning("%s was taken over from run %s, which has not said that it ended", who, reply.run_id)
        return client, joining, lost

    def _shun_missing(self, error: WeightSyncError, joining: Mapping[str, EngineReply]) -> None:
        """Leaves engines that did not join out of the next syncs, for a time that doubles."""
        missing = set(error.details.get("missing_ranks", ()))
        causes = error.causes if isinstance(error, SyncFailedError) else {}
        rank, absent = 1, []
        for who, reply in joining.items():
            ranks = range(rank, rank + reply.world_size)
            rank = ranks.stop
            if missing.intersection(ranks) or (who in causes and not is_consequence(causes[who])):
                self._shun(who, error, _SHUN_S)
            if missing.intersection(ranks):
                absent.append(who)
        if absent:
            error.message += f"; these are of {', '.join(absent)}"

    def leave_out_busy(self, error: WeightSyncError) -> None:
        """Leaves engines out whose loader still sits in an earlier sync: one of them must not fail every sync."""
        for who, cause in (error.causes if isinstance(error, SyncFailedError) else {}).items():
            if isinstance(cause, (SyncInProgressError, StateError)):
                self._shun(who, cause, _SHUN_BUSY_S)

    def _shun(self, who: str, error: WeightSyncError, for_s: float) -> None:
        self._shunned[who] = _Shunned(error=error, before=self._shunned.get(who), for_s=for_s)


class _Shunned:
    """An engine that did not take part: left out for a time that doubles from failure to failure."""

    def __init__(self, *, error: WeightSyncError, before: _Shunned | None, for_s: float) -> None:
        self._error = error
        self._for_s: float = min(_SHUN_LONGEST_S, 2 * before._for_s) if before else for_s
        self._until = Deadline(self._for_s)

    @property
    def left_s(self) -> float:
        return self._until.remaining_s

    def told(self) -> WeightSyncError:
        """Why it is not asked, as an error of the first one's kind."""
        left_s = self.left_s
        error = error_from_dict(self._error.to_dict())
        error.message = (
            f"left out {self._for_s - left_s:.1f} s ago, so it was not asked; it is asked again in {left_s:.1f} s. "
            f"Why: {type(self._error).__name__}: {self._error.message}"
        )
        return error


def _is_slow(error: WeightSyncError) -> bool:
    """Whether it came when the time was over: of an engine that hangs, or of one whose machine is gone without a word,
    at which a connection is tried for as long."""
    return isinstance(error, DeadlineExceededError) or isinstance(error.__cause__, TimeoutError)


def _retry_after(first_or_last: Callable[[Iterable[float]], float], left_out: Mapping[str, _Shunned]) -> dict[str, Any]:
    """The detail of an error that says when those who were not asked are asked again; none where all were."""
    if not left_out:
        return {}
    return {"retry_after_s": math.ceil(10 * first_or_last(each.left_s for each in left_out.values())) / 10}
