"""OrderTaker: training ranks ask a controller at each step whether they are to push. See design/0024."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from weightsync.clients.controller import ControllerClient
from weightsync.errors import (
    AuthError,
    BusyError,
    ConfigError,
    DeadlineExceededError,
    EngineUnreachableError,
    InvalidRequestError,
    StateError,
    VersionError,
    WeightSyncError,
)
from weightsync.net.http_edge import OF_A_PROXY
from weightsync.trainer.ranks import TrainingRanks
from weightsync.types import Deadline, SyncReport
from weightsync.types.push_orders import PushOrder

_WORKER = "trainer"
_ORDER_S = 10.0
"""So long rank 0 waits for the order of a sync that is under way; and, before the last one, for a validation's end."""
_LOOK_S = 0.2
_RETRY_S = 15.0
"""A retry that comes later than in so long is not waited for: the other ranks wait meanwhile."""
_AGAIN_S = 5.0
"""So long a call is made again where nobody knows whether the controller has heard it."""
_ANSWER_S = 5.0
_UNKNOWN = (BusyError, DeadlineExceededError, EngineUnreachableError)
_T = TypeVar("_T")

_logger = logging.getLogger(__name__)


class OrderTaker:
    """Every rank has one, and calls `next` and `close` in the same order. Rank 0 alone talks to the controller.

    Args:
        url: of the controller; rank 0 alone reads it.
        model_id: which model.
        token, verify: see `JsonClient`.
        timeout_s: how long the ranks wait for each other.
        alone: see `TrainingRanks`.

    Raises:
        ConfigError: the URL is none, or the controller has no such model, or orders no pushes. On rank 0 alone.
        AuthError: it refuses the token. On rank 0 alone.
        TrainerRankError: a rank did not come.
    """

    def __init__(
        self, url: str, model_id: str, *, token: str | None, verify: bool | str, timeout_s: float, alone: bool = False
    ) -> None:
        self._ranks = TrainingRanks(timeout_s=timeout_s, alone=alone)
        self._model_id = model_id
        self._trouble: str | None = None
        self._name = secrets.token_hex(8)
        self._taken: str | None = None  # the last order's id
        self._unreported: tuple[PushOrder, SyncReport | WeightSyncError] | None = None
        self._client = ControllerClient(url, token=token, verify=verify) if self._ranks.rank == 0 else None

    def meet(self) -> None:
        """Asks the controller whether it orders pushes of this model; every rank. Who does not answer may come later.

        Raises:
            ConfigError: it has no such model, or orders no pushes.
            AuthError: it refuses the token.
        """

        def ask(client: ControllerClient) -> None:
            try:
                client.next_push(self._model_id, None)
            except (InvalidRequestError, StateError) as error:
                raise ConfigError(f"{client.url} orders no pushes of model {self._model_id!r}: {error}") from error

        self._told(ask)

    def next(self, run_id: str | None, version: int, *, last: bool = False, again: bool = False) -> PushOrder | None:
        """Tells the controller of a version, and asks whether the ranks are to push it; every rank, which are all told
        the same.

        Args:
            run_id, version: which.
            last: it was told of it already, and no other will come: a push of it is due.
            again: an order of it has failed. Where rollout waits for the next try, that is waited for: these ranks may
                wait for rollout's next batch behind this step.

        Raises:
            VersionError: another run has taken over.
            WeightSyncError: the controller refuses what it is told, or a rank is gone.
        """
        taken: list[PushOrder] = []

        def ask(client: ControllerClient) -> PushOrder | None:
            self._report(client)
            wait_s = _ORDER_S
            if again:
                state = _surely(lambda: client.rollout_service_state(self._model_id, timeout_s=_ANSWER_S))
                retry_in_s = state.retry_in_s or 0.0
                if not (state.blocked and state.num_failed and retry_in_s <= _RETRY_S):
                    return None
                due, wait_s = True, _ORDER_S + retry_in_s
            elif last:
                if not self._is_validated(client):
                    return None  # a sync would come behind it, when these ranks may have gone
                due = not _surely(lambda: client.sync_weight_to_rollout_service(self._model_id, wait_s=0.0))
            else:
                tell = partial(client.train_worker_notify_weight_update, _WORKER, self._model_id, run_id, version)
                state = _surely(tell) if self._trouble is None else tell()
                due = state.state == "syncing"
            waits = Deadline(wait_s if due else 0.0)
            order = _surely(
                lambda: client.next_push(
                    self._model_id, version, run_id, taker=self._name, wait_s=waits.remaining_s, timeout_s=_ANSWER_S
                )
            )
            if order is None or order.order_id == self._taken:
                return None  # there is none; or it was made, and the controller refused the report
            self._taken = order.order_id
            taken.append(order)
            return order

        try:
            return self._told(ask)
        except WeightSyncError as error:  # a rank is gone: nobody will push
            for order in taken:
                self.done(order, error)
            raise

    def _is_validated(self, client: ControllerClient) -> bool:
        """Whether no validation runs; waits for its end for some seconds."""
        deadline = Deadline(_ORDER_S)
        while _surely(lambda: client.rollout_service_state(self._model_id)).waiting_for_validation is not None:
            if deadline.expired:
                return False
            time.sleep(_LOOK_S)
        return True

    def done(self, order: PushOrder, outcome: SyncReport | WeightSyncError) -> None:
        """Reports how an order ended; every rank may call it. A controller that does not take it orders again; one that
        does not answer is told before the next question.
        """
        if (client := self._client) is None:
            return
        self._unreported = (order, outcome)
        try:
            _surely(lambda: self._report(client))
        except WeightSyncError as error:
            _logger.warning("the controller was not told how its push ended, and may order another one: %s", error)

    def _report(self, client: ControllerClient) -> None:
        """Says how the last order ended, where that was not heard yet."""
        if self._unreported is None:
            return
        try:
            client.push_done(self._model_id, *self._unreported, timeout_s=_ANSWER_S)
        except WeightSyncError as error:
            if _is_unknown(error):
                raise
            _logger.warning("the controller takes no report of its push, and will order another one: %s", error)
        self._unreported = None

    def close(self) -> None:
        """Gives back connections and the ranks' group; a report that was not heard is said once more. Idempotent."""
        if self._client is not None:
            with contextlib.suppress(WeightSyncError):
                self._report(self._client)
            self._unreported = None
            self._client.close()
        self._ranks.close()

    def _told(self, ask: Callable[[ControllerClient], PushOrder | None]) -> PushOrder | None:
        """What rank 0's `ask` returns, on every rank; None where the controller can't be asked now."""
        order: PushOrder | None = None
        refused: WeightSyncError | None = None
        if self._client is not None:
            try:
                order = ask(self._client)
                self._trouble = None
            except (AuthError, ConfigError, InvalidRequestError, StateError, VersionError) as error:
                refused = error
            except WeightSyncError as error:
                if self._trouble != type(error).__name__:
                    _logger.warning("no pushes are ordered while the controller does not answer: %s", error)
                self._trouble = type(error).__name__
        message = self._ranks.settle(refused, order=msgspec.to_builtins(order))[0]["order"]
        return None if message is None else msgspec.convert(message, PushOrder)


def _is_unknown(error: WeightSyncError) -> bool:
    """Whether nobody knows what became of a call; a proxy may answer while the controller behind it is away."""
    return isinstance(error, _UNKNOWN) or error.details.get("status") in OF_A_PROXY


def _surely(call: Callable[[], _T]) -> _T:
    """What `call` returns; it is called again for some seconds, once at least, while nobody knows what became of it."""
    deadline, is_last = Deadline(_AGAIN_S), False
    while True:
        try:
            return call()
        except WeightSyncError as error:
            if is_last or not _is_unknown(error):
                raise
            is_last = deadline.expired
        time.sleep(_LOOK_S)
