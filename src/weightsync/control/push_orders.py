"""PushOrders: a push that a controller orders, and training ranks elsewhere make. See design/0024."""

from __future__ import annotations

import secrets
import threading

from weightsync.errors import (
    DeadlineExceededError,
    StateError,
    SyncInProgressError,
    TransferAbortedError,
    VersionError,
    WeightSyncError,
)
from weightsync.types import Deadline, SyncReport
from weightsync.types.deadline import check_wait_s
from weightsync.types.push_orders import PushOrder


class _Order:
    """One order, as it is known here."""

    def __init__(self, version: int, run_id: str | None) -> None:
        self.told = PushOrder(order_id=secrets.token_hex(8), version=version)
        self.run_id = run_id
        self.taken = False
        self.taker: str | None = None  # who took it, where that has a name
        self.outcome: SyncReport | Exception | None = None


class PushOrders:
    """The pushes of one model's ranks; a `types.Push`. Thread-safe.

    Args:
        take_s: within so long a rank has to take an order: at its next step.
        push_s: within so long from then on it has to report.

    Raises:
        InvalidRequestError: a time that nobody can wait.
    """

    def __init__(self, *, take_s: float, push_s: float) -> None:
        self._take_s = check_wait_s("take_s", take_s)
        self._push_s = check_wait_s("push_s", push_s)
        self._changed = threading.Condition()
        self._order: _Order | None = None
        self._reported: tuple[str, object] | None = None  # the last order that was, and what was said of it
        self._run_id: str | None = None  # whose ranks push
        self._closed = False

    def initialize(self) -> None:
        """Nothing: the ranks meet their engines themselves."""

    def trained(self, run_id: str) -> None:
        """The ranks of this run push from now on: an order of another run's is given up, taken or not."""
        with self._changed:
            self._run_id = run_id
            self._changed.notify_all()
            if (order := self._order) is not None and order.outcome is None:
                order.outcome = self._taken_over(order.run_id)

    def sync_weights(self, version: int, run_id: str | None = None) -> SyncReport:
        """Orders a push of that version or a newer one, and waits for its report.

        Args:
            version: its number.
            run_id: of the trainer; None: of whoever takes the order.

        Raises:
            VersionError: another run has taken over.
            DeadlineExceededError: no rank took it, or none reported, in time.
            SyncInProgressError: another order is under way.
            TransferAbortedError: it was closed.
            WeightSyncError: what the ranks' push raised.
        """
        with self._changed:
            if self._order is not None:
                raise SyncInProgressError("a push is ordered already")
            if self._closed:
                raise TransferAbortedError("this controller is closing")
            order = self._order = _Order(version, run_id)
            order.outcome = self._taken_over(run_id)
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(
                    lambda: order.taken or order.outcome is not None or self._closed, self._take_s
                ):
                    raise DeadlineExceededError(
                        f"no training rank took the order to push within {self._take_s:g} s: does the trainer call "
                        "push.step(), with this controller?",
                        state_left="engines serve what they served",
                    )
                if not self._changed.wait_for(lambda: order.outcome is not None or self._closed, self._push_s):
                    raise DeadlineExceededError(
                        f"the training ranks did not report within {self._push_s:g} s how their push ended",
                        state_left="unknown: engines serve their old version, or the new one, or refuse to serve",
                    )
                if order.outcome is None:
                    raise TransferAbortedError("this controller is closing")
            finally:
                self._order = None
        if isinstance(order.outcome, Exception):
            raise order.outcome
        return order.outcome

    def next(
        self,
        version: int | None,
        run_id: str | None = None,
        *,
        taker: str | None = None,
        wait_s: float = 0.0,
        given_up: threading.Event | None = None,
    ) -> PushOrder | None:
        """The order that ranks with that version are to take; nobody else gets it then. None: there is none.

        A taker gets it again until it has reported: an answer may have been lost on its way. It asks for one thing at a
        time, and pushes no order twice.

        Args:
            version: number of what they have; None: they take none.
            run_id: theirs; None: they take orders of no named run.
            taker: what nobody else calls itself; None: no order is given again.
            wait_s: how long to wait for one.
            given_up: ends the wait likewise; see `look_again`.

        Raises:
            VersionError: another run has taken over, before or meanwhile.
        """
        deadline = Deadline(wait_s)
        with self._changed:

            def ended() -> bool:
                if (taken_over := self._taken_over(run_id)) is not None:
                    raise taken_over
                return self._closed or (given_up is not None and given_up.is_set())

            def found() -> _Order | None:
                order = self._order
                if order is None or order.outcome is not None:
                    return None
                if order.taken and (taker is None or taker != order.taker):
                    return None
                if version is None or version < order.told.version or order.run_id not in (None, run_id):
                    return None
                return order

            self._changed.wait_for(lambda: ended() or found() is not None, deadline.remaining_s)
            order = found()
            if ended() or order is None:
                return None
            order.taken, order.taker = True, taker
            self._changed.notify_all()
            return order.told

    def look_again(self) -> None:
        """Who waits looks whether it still has to."""
        with self._changed:
            self._changed.notify_all()

    def done(self, order_id: str, outcome: SyncReport | Exception) -> bool:
        """The ranks have pushed, or failed. The last report may be said again: the answer to it may have been lost.

        Returns:
            Whether an order has ended by that; False where it was said again.

        Raises:
            StateError: nobody waits for that order's report any more.
        """
        said = (order_id, outcome.to_dict() if isinstance(outcome, WeightSyncError) else outcome)
        with self._changed:
            if said == self._reported:
                return False
            order = self._order
            if order is None or not order.taken or order.told.order_id != order_id or order.outcome is not None:
                raise StateError("nobody waits for the report of that order: it was given up, or is over")
            order.outcome, self._reported = outcome, said
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """Ends what waits. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _taken_over(self, run_id: str | None) -> VersionError | None:
        """Why an order of this run's is not to be waited for; None where it is."""
        if run_id is None or self._run_id in (None, run_id):
            return None
        return VersionError(
            f"run {self._run_id} has taken over from {run_id}, whose ranks were to push",
            state_left="engines serve what they served",
        )
