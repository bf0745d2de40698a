"""Training ranks that agree: every rank learns of every other rank's failure at the same chunk.

Extraction is collective. If one rank stops and the others do not, they hang in a collective for ever. So all
ranks exchange a byte before each chunk's collectives, on a small gloo group of their own. Its collectives run in a
thread of their own (`transfer.native`): they may come back later than their time-out.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weightsync.errors import (
    StateError,
    TrainerRankError,
    WeightSyncError,
    as_weightsync_error,
    error_from_dict,
    is_consequence,
)
from weightsync.net.auth import is_loopback
from weightsync.net.routes import interface_towards, name_leads_here
from weightsync.transfer.native import NativeThread, clear_frames
from weightsync.types import Deadline

_GROUP = "group"  # what the thread holds
_OR_SLOW = (
    "it may only be slow (raise timeout_s= of publish; join_timeout_s, transfer_timeout_s of push), or have failed "
    "before the ranks met: see its log"
)
_INTERFACE = "GLOO_SOCKET_IFNAME"
_ROUND_S = 1.0  # after so long ranks that wait tell each other that they are still there
_GOES_ON, _STOPS = -1, -2
"""What a rank says that agrees; one that exchanges says how long its text is."""

_T = TypeVar("_T")


class TrainingRanks:
    """The ranks of the trainer's job. Every rank makes one, at the same point, and calls in the same order.

    The ranks are those of `torch.distributed`'s default group; a process without one stands alone.

    Args:
        timeout_s: how long one exchange may take.
        alone: whether this process stands alone though there is such a group.

    Attributes:
        alone: as above.

    Raises:
        TrainerRankError: a rank did not come in time.
    """

    def __init__(self, *, timeout_s: float, alone: bool = False) -> None:
        self.alone = alone
        self._timeout_s = timeout_s
        self._thread: NativeThread | None = None
        self._lost_error: TrainerRankError | None = None
        self.agreed_error: WeightSyncError | None = None
        self.told: tuple[WeightSyncError, ...] = ()
        self.rank, self.world_size = 0, 1
        if not alone and dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if self.world_size > 1:
                self._thread = NativeThread("weightsync-ranks", last=_destroy)
                self._native(self._make_group)

    def _make_group(self, held: dict[str, Any]) -> None:
        with _where_others_reach_it():
            held[_GROUP] = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))

    def _native(self, job: Callable[[dict[str, Any]], _T]) -> _T:
        """What `job` returns, in time.

        Raises:
            TrainerRankError: a rank is gone, or did not answer in time. The group is given up.
        """
        assert self._thread is not None
        if self._lost_error is not None:  # a group that lost a rank never works again: say so at once
            raise self._lost_error
        try:
            return self._thread.call(job, deadline=Deadline(self._timeout_s))
        except RuntimeError as error:
            raise self._lost(str(error)) from error
        except TimeoutError as error:
            raise self._lost(f"no answer within {self._timeout_s:g} s; {_OR_SLOW}") from error
        except BaseException as error:
            if not isinstance(error, Exception) or self._thread.closed.is_set():  # nobody pairs with that call any more
                self._lost("it was interrupted inside an agreement")
            raise

    def agree(self, failed: bool) -> bool:
        """Whether any rank failed. One that is in an `exchange` instead has: it left what the others agree on, and they
        are to follow it there.

        Raises:
            TrainerRankError: a rank is gone, or did not answer in time.
        """
        if self._thread is None:
            return failed
        return bool((self._native(lambda held: self._said(held, _STOPS if failed else _GOES_ON)) != _GOES_ON).any())

    def exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Gives every rank what every rank said, by rank, as JSON.

        Raises:
            TrainerRankError: a rank is gone, or did not answer in time.
        """
        if self._thread is None:
            return [mine]
        text = json.dumps(mine).encode()

        def job(held: dict[str, Any]) -> list[bytes]:
            while ((sizes := self._said(held, len(text))) < 0).any():
                pass  # some ranks agree: they hear from this that one has left, and come
            longest = int(sizes.max())
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
            dist.all_gather(gathered, padded, group=held[_GROUP])
            return [bytes(part[: int(size)].numpy()) for part, size in zip(gathered, sizes, strict=True)]

        return [json.loads(reply) for reply in self._native(job)]

    def _said(self, held: dict[str, Any], mine: int) -> torch.Tensor:
        """What each rank says in a number. `agree` and `exchange` both begin with it, so that they pair: gloo ends the
        process where two collectives of other sizes meet."""
        numbers = torch.zeros(self.world_size, dtype=torch.int64)
        numbers[self.rank] = mine
        dist.all_reduce(numbers, group=held[_GROUP])
        return numbers

    def settle(self, error: WeightSyncError | None, **mine: Any) -> list[dict[str, Any]]:
        """`exchange` that raises on every rank if any rank has an error: its own, else the first other's, typed.

        What it raised is kept as `agreed_error`: every rank knows it, so nobody tells it again. What every rank said is
        kept as `told`, the same on all of them: what is decided by that is decided alike everywhere.

        Raises:
            WeightSyncError: as said.
        """
        self.told = ()
        if error is not None:
            clear_frames(error)  # it is kept until the next settling
        try:
            replies = self.exchange({**mine, "error": None if error is None else error.to_dict()})
        except TrainerRankError as lost:
            self.agreed_error = error or lost
            raise self.agreed_error from None
        failures = [
            (rank, error_from_dict(what["error"])) for rank, what in enumerate(replies) if what["error"] is not None
        ]
        causes = [(rank, other) for rank, other in failures if not is_consequence(other)]
        self.told = tuple(other for _, other in failures)
        if error is not None and (not is_consequence(error) or not causes):
            self.agreed_error = error
        elif failures:
            rank, self.agreed_error = (causes or failures)[0]
            self.agreed_error.message += f" (told by training rank {rank})"
        else:
            self.agreed_error = None
            return replies
        raise self.agreed_error

    def wait_together(self, done: Callable[[float], bool], *, what: str) -> None:
        """Every rank calls it; returns on all of them when `done` has said so on each. Waits as long as that takes: in
        rounds, so that nobody takes a rank that waits for one that is gone.

        Args:
            done: whether there is nothing to wait for here; waits for that, at most the seconds that it is given. It is
                not asked again after that.
            what: has failed where `done` raises what is not typed.

        Raises:
            WeightSyncError: `done` raised it, here or on another rank.
            TrainerRankError: a rank is gone.
        """
        is_done, are_done, error = False, False, None
        while not are_done:
            try:
                is_done = is_done or done(_ROUND_S)
            except Exception as caught:
                error = as_weightsync_error(caught, StateError, what)
            are_done = all(reply["done"] for reply in self.settle(error, done=is_done))

    def give_up(self, why: str) -> None:
        """A thread is left inside an exchange: from here on every exchange fails at once instead of pairing with it."""
        if self._lost_error is None:
            self._lost(why)

    def close(self) -> None:
        """Lets go of the group. Its thread destroys it: a dead rank may hang that, and hangs nobody."""
        if self._thread is not None:
            self._thread.close()
            self._lost_error = self._lost_error or TrainerRankError("the ranks' group was closed", rank=self.rank)

    def _lost(self, why: str) -> TrainerRankError:
        words = why.strip().splitlines()[0][:200] if why.strip() else "connection lost"
        self._lost_error = TrainerRankError(
            f"another training rank is gone or does not answer: {words}",
            rank=self.rank,
            state_left="weightsync's own group of these ranks is given up: restart the job, or publish or push anew on "
            "all ranks",
        )
        return self._lost_error


def _destroy(held: dict[str, Any]) -> None:
    """torch keeps the threads and sockets of a group that nobody has destroyed."""
    if (group := held.pop(_GROUP, None)) is not None:
        with contextlib.suppress(ValueError, RuntimeError, KeyError):  # the trainer has destroyed all, or does
            dist.destroy_process_group(group)


@contextlib.contextmanager
def _where_others_reach_it() -> Iterator[None]:
    """Gloo listens where this host's own name leads: on many hosts to loopback, where no rank of another host meets it.
    There it is given the interface that leads to where the default group has met, unless one is named."""
    met = None if _INTERFACE in os.environ or name_leads_here() else _meeting_host()
    interface = None if met is None or is_loopback(met) else interface_towards(met)
    if interface is None:
        yield
        return
    os.environ[_INTERFACE] = interface
    try:
        yield
    finally:
        os.environ.pop(_INTERFACE, None)


def _meeting_host() -> str | None:
    """Where the ranks met for the default group; None where torch does not say."""
    store: Any = dist.distributed_c10d._get_default_store()
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return getattr(store, "host", None) or os.environ.get("MASTER_ADDR")
