"""RayRank: the driver's view of a training rank, and how it waits for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from weightsync.cluster.client import Whereabouts
from weightsync.cluster.ray_calls import get, load_ray, submit, wait_any
from weightsync.cluster.trainer_actor import POST, WORK
from weightsync.cluster.wire import read_answer
from weightsync.errors import SyncInProgressError, TrainerRankError, WeightSyncError, is_consequence
from weightsync.types import Deadline

_T = TypeVar("_T")
_GRACE_S = 5.0  # how long the other ranks may take to say how they ended, once one has failed
_POLL_S = 0.2
_FETCH_S = 30.0
_ANSWER_S = 10.0
_BROKEN = "the trainer's process group is broken: restart the job; engines serve what they served"


class RayRank:
    """One training rank's actor.

    Args:
        actor: its handle.
        rank: of the job.
    """

    def __init__(self, actor: Any, rank: int) -> None:
        self.actor = actor
        self.rank = rank
        self.name = f"training rank {rank}"

    def submit(self, method: str, *args: Any, group: str = WORK) -> Any:
        """Calls a method of the actor; the reference of its answer."""
        return submit(self.actor, method, *args, group=group, peer=self.name)

    def get(self, ref: Any, what: str, *, timeout_s: float) -> Any:
        """What a method returned.

        Raises:
            TrainerRankError: the actor is gone.
            DeadlineExceededError: no answer in time.
        """
        return get(ref, timeout_s=timeout_s, peer=self.name, what=what, lost=self._lost)

    def where(self, *, timeout_s: float) -> Whereabouts:
        """Waits until the actor runs."""
        ref = self.submit("where", group=POST)
        return read_answer(self.get(ref, "where", timeout_s=timeout_s), Whereabouts, peer=self.name, what="where")

    def fetch(self, controller: str, closed: Callable[[], bool]) -> bytes | None:
        """Waits for init requests; see `post.Rank0`."""
        if not load_ray().is_initialized():
            return None
        ref = self.submit("take", controller, _FETCH_S, group=POST)
        while not closed() and load_ray().is_initialized():
            if wait_any([ref], timeout_s=_POLL_S):
                return self.get(ref, "take", timeout_s=_ANSWER_S)  # type: ignore[no-any-return]
        return None

    def deliver(self, number: int, body: bytes) -> None:
        """Brings the answer to an init request."""
        self.submit("deliver", number, body, group=POST)

    def _lost(self, words: str) -> WeightSyncError:
        return TrainerRankError(f"the actor of {self.name} is gone {words}", rank=self.rank, state_left=_BROKEN)


class RanksFailedError(Exception):
    """Inside this package alone: what went wrong on the ranks, and whether their process group survived it.

    Args:
        error: to be raised.
        broken: whether no further call can succeed.
    """

    def __init__(self, error: WeightSyncError, *, broken: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.broken = broken


def ask_all(
    ranks: Sequence[RayRank],
    method: str,
    *args: Any,
    deadline: Deadline,
    read: Callable[[RayRank, Any], _T],
    owed: dict[Any, RayRank] | None = None,
) -> list[_T]:
    """Calls a method on all ranks and waits for all, or for a little longer than the first failure.

    Args:
        ranks: all of the job.
        method: of the actors.
        args: the same for all.
        deadline: of the whole.
        read: turns what a rank returned into its value, or raises.
        owed: gets the references of the answers that are still to come, however this ends; see `settle_owed`.

    Returns:
        The values, by rank.

    Raises:
        RanksFailedError: its error is a TrainerRankError where a rank is gone or silent; else the first rank's own
            error that is not the consequence of another's.
    """
    pending: dict[Any, RayRank] = {} if owed is None else owed
    for rank in ranks:
        pending[rank.submit(method, *args)] = rank
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
                told = rank.get(ref, method, timeout_s=_ANSWER_S)
            except WeightSyncError as error:
                errors[rank.rank] = error
                if isinstance(error, TrainerRankError):  # Ray's word of this rank itself
                    gone.append(rank.rank)
                continue
            try:
                values[rank.rank] = read(rank, told)
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
) -> RanksFailedError:
    """The one error that says most, and whether the job can go on."""
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
    return RanksFailedError(error, broken=isinstance(error, TrainerRankError))
