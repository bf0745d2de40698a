"""RayRank: the driver's view of a training rank, and how it waits for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from weightsync.cluster.actors import ASKS, ActorHandle, value_of
from weightsync.cluster.ray_calls import wait_any
from weightsync.errors import SyncInProgressError, TrainerRankError, WeightSyncError, is_consequence
from weightsync.types import Deadline

_T = TypeVar("_T")
_GRACE_S = 5.0  # how long the other ranks may take to say how they ended, once one has failed
_ANSWER_S = 10.0
_BROKEN = "the trainer's process group is broken: restart the job; engines serve what they served"


class RayRank(ActorHandle):
    """One training rank's actor."""

    def __init__(self, actor: Any, rank: int) -> None:
        super().__init__(actor, name=f"training rank {rank}")
        self.rank = rank

    def _lost(self, words: str) -> WeightSyncError:
        return TrainerRankError(f"the actor of {self.name} is gone {words}", rank=self.rank, state_left=_BROKEN)


def ask_all(
    ranks: Sequence[RayRank],
    method: str,
    *args: Any,
    deadline: Deadline,
    kind: type[_T] | None,
    owed: dict[Any, RayRank] | None = None,
) -> list[_T]:
    """Calls a method on all ranks and waits for all, or for a little longer than the first failure.

    Args:
        kind: type of each rank's value; None: the user's own.
        owed: gets the references of the answers that are still to come, however this ends; see `settle_owed`.

    Returns:
        The values, by rank.

    Raises:
        TrainerRankError: a rank is gone or silent, or has lost another: their process group is broken.
        WeightSyncError: the first rank's own error that is not the consequence of another's.
    """
    pending: dict[Any, RayRank] = {} if owed is None else owed
    for rank in ranks:
        pending[rank.submit(method, *args, group=ASKS)] = rank
    values: dict[int, _T] = {}
    errors: dict[int, WeightSyncError] = {}
    gone: list[int] = []
    end = deadline
    while pending:
        settled = wait_any(list(pending), timeout_s=end.remaining_s)
        if not settled:
            break
        for ref in settled:
            rank = pending.pop(ref)
            try:
                reply = rank.get(ref, method, timeout_s=_ANSWER_S)
            except WeightSyncError as error:
                errors[rank.rank] = error
                if isinstance(error, TrainerRankError):  # Ray's word of this rank itself
                    gone.append(rank.rank)
                continue
            try:
                values[rank.rank] = value_of(reply, kind, peer=rank.name, what=method)
            except WeightSyncError as error:  # the rank's own word, perhaps of another
                errors[rank.rank] = error
        if errors and end is deadline:
            end = Deadline(min(_GRACE_S, deadline.remaining_s))
    if errors or pending:
        silent = sorted(rank.rank for rank in pending.values())
        raise _verdict(method, errors, gone=gone, silent=silent, timeout_s=deadline.timeout_s)
    return [values[rank.rank] for rank in ranks]


def settle_owed(owed: dict[Any, RayRank]) -> None:
    """Waits a moment for the answers to an earlier call, and drops them: that call has raised.

    Args:
        owed: as `ask_all` left it; empty when this returns.

    Raises:
        TrainerRankError: a rank that owed one is gone.
        SyncInProgressError: a rank still works on it. Nothing was called.
    """
    end = Deadline(_GRACE_S)
    while owed:
        settled = wait_any(list(owed), timeout_s=end.remaining_s)
        if not settled:
            busy = ", ".join(sorted(rank.name for rank in owed.values()))
            raise SyncInProgressError(
                f"{busy} still works on an earlier call, which has failed or was interrupted; try again later",
                state_left="it goes on; nothing else was called",
            )
        for ref in settled:
            rank = owed.pop(ref)
            try:
                rank.get(ref, "an earlier call", timeout_s=_ANSWER_S)
            except TrainerRankError:
                raise
            except WeightSyncError:
                continue


def _verdict(
    method: str, errors: dict[int, WeightSyncError], *, gone: list[int], silent: list[int], timeout_s: float
) -> WeightSyncError:
    """The one error that says most; a TrainerRankError where the job can't go on."""
    lost = [rank for rank, error in errors.items() if isinstance(error, TrainerRankError)]
    if gone:
        error = errors[gone[0]]
    elif lost and not silent:
        error = errors[lost[0]]
    elif lost or not errors:  # nobody died that Ray knows of: who says nothing is who is missed
        shown = f"{', '.join(map(str, silent))} did not answer {method}"
        why = f"; the others have lost it: {errors[lost[0]].message}" if lost else f" within {timeout_s:g} s"
        error = TrainerRankError(f"training rank {shown}{why}", rank=silent[0], state_left=_BROKEN)
    else:
        error = min((errors[rank] for rank in sorted(errors)), key=is_consequence)  # the first that is none
    others = {f"rank_{rank}": str(other)[:300] for rank, other in errors.items() if other is not error}
    error.details.update(others if isinstance(error, TrainerRankError) else {})
    if silent:
        error.details["silent_ranks"] = silent
    return error
