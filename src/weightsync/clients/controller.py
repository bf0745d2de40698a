"""ControllerClient: how pools, workers and inference clients reach a controller. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from weightsync.errors import DeadlineExceededError, InvalidRequestError, WeightSyncError
from weightsync.net.client import JsonClient
from weightsync.types import Deadline, SyncReport
from weightsync.types.control import (
    BatchDroppedRequest,
    ControllerStatus,
    EndValidateRequest,
    GateReply,
    ModelRequest,
    RolloutServiceState,
    SyncReply,
    TrainedRequest,
    WaitVersionRequest,
    plain_values,
)
from weightsync.types.fleet import HeartbeatReply, HeartbeatRequest
from weightsync.types.push_orders import NextPushReply, NextPushRequest, PushDoneReply, PushDoneRequest, PushOrder
from weightsync.types.service import NotifyRequest

RUNS = "a weightsync controller"
"""What answers, for messages."""
_MARGIN_S = 5.0
_ROUND_S = 25.0  # a wait at the gate is asked for in rounds of so many seconds, so that no proxy ends it: many wait 60

Answer = Literal["continue", "block"]
_M = TypeVar("_M", bound=ModelRequest)


class ControllerClient(JsonClient):
    """Document 5's calls; see `JsonClient` for arguments and errors."""

    def __init__(self, url: str, *, token: str | None = None, verify: bool | str = True) -> None:
        super().__init__(url, runs=RUNS, token=token, verify=verify)

    def check_rollout_service_status(self, model_tag: str, *, wait_s: float = 0.0, timeout_s: float = 10.0) -> Answer:
        """Whether a request may proceed; waits up to `wait_s` for that. The controller wakes it: nothing is polled."""
        return self._gate("/check_rollout_service_status", ModelRequest(model_tag=model_tag), wait_s, timeout_s)

    def trajectory_pool_notify_batch_ready(self, model_tag: str, *, timeout_s: float = 10.0) -> RolloutServiceState:
        """A batch is ready: a training step starts with it."""
        message = ModelRequest(model_tag=model_tag)
        return self.call(
            "POST", "/trajectory_pool_notify_batch_ready", RolloutServiceState, message=message, timeout_s=timeout_s
        )

    def trajectory_pool_notify_batch_dropped(
        self, model_tag: str, num_batches: int | None = None, *, timeout_s: float = 10.0
    ) -> RolloutServiceState:
        """Steps of so many batches that were told of give no version; None: of all whose step has not ended. See
        `WeightSyncController.trajectory_pool_notify_batch_dropped`.
        """
        message = BatchDroppedRequest(model_tag=model_tag, num_batches=num_batches)
        return self.call(
            "POST", "/trajectory_pool_notify_batch_dropped", RolloutServiceState, message=message, timeout_s=timeout_s
        )

    def train_worker_notify_weight_update(
        self,
        worker_name: str,
        model_tag: str,
        run_id: str | None = None,
        version: int | None = None,
        *,
        sender_endpoint: str | None = None,
        evaluate: bool = False,
        wait_s: float = 0.0,
    ) -> RolloutServiceState:
        """Training has new weights; waits up to `wait_s` for the end of the sync that this starts, and with `evaluate`
        of its validation. See `WeightSyncController.train_worker_notify_weight_update`.
        """
        message = TrainedRequest(
            worker_name=worker_name, model_tag=model_tag, run_id=run_id, version=version, wait_s=wait_s or None,
            sender_endpoint=sender_endpoint, evaluate=evaluate,
        )  # fmt: skip
        return self.call(
            "POST", "/train_worker_notify_weight_update", RolloutServiceState, message=message,
            timeout_s=wait_s + _MARGIN_S,
        )  # fmt: skip

    def sync_weight_to_rollout_service(self, model_tag: str, *, wait_s: float = 60.0) -> bool:
        """Whether rollout serves the newest trained version after at most `wait_s`."""
        message = ModelRequest(model_tag=model_tag, wait_s=wait_s or None)
        reply = self.call(
            "POST", "/sync_weight_to_rollout_service", SyncReply, message=message, timeout_s=wait_s + _MARGIN_S
        )
        return reply.up_to_date

    def notify_version(
        self, run_id: str | None, model_id: str, version: int, sender_endpoint: str, *, evaluate: bool = False,
        wait_s: float = 0.0,
    ) -> RolloutServiceState:  # fmt: skip
        """A trainer has published a version: what document 3's trainer calls, once a step. It waits for the answer of
        the controller, some seconds at most; with `evaluate` up to `wait_s` more, until that version is served
        everywhere and was validated. Where no run is named, the controller asks the agent for its own.

        Raises:
            DeadlineExceededError: with `evaluate`: it was not, in time.
        """
        if evaluate and not wait_s:
            raise InvalidRequestError("an evaluation is waited for: give wait_s")
        message = NotifyRequest(
            model_id=model_id, version=version, sender_endpoint=sender_endpoint, run_id=run_id, wait_s=wait_s or None,
            evaluate=evaluate,
        )  # fmt: skip
        timeout_s = wait_s + _MARGIN_S
        state = self.call("POST", "/notify_version", RolloutServiceState, message=message, timeout_s=timeout_s)
        run_id, done = run_id or state.run_id, state.last_validation
        if evaluate and (done is None or done.of.run_id != run_id or done.of.version < version):
            waits = "nobody called end_validate" if state.waiting_for_validation else "it is not served everywhere"
            raise DeadlineExceededError(
                f"version {version} of model {model_id} was not validated within {wait_s:g} s: {waits}"
                + (f" ({state.last_error})" if state.last_error else ""),
                version=f"{run_id}/{version}",
            )
        return state

    def rollout_service_state(self, model_tag: str, *, timeout_s: float = 10.0) -> RolloutServiceState:
        """How a model is.

        Raises:
            InvalidRequestError: there is no such model.
        """
        models = self.status(timeout_s=timeout_s).models
        if model_tag not in models:
            raise InvalidRequestError(f"there is no model {model_tag!r} there: {', '.join(models)}")
        return models[model_tag]

    def wait_version(self, run_id: str, model_id: str, version: int, *, wait_s: float, timeout_s: float = 10.0) -> bool:
        """Whether every live instance serves that version, or a newer one of its run, after at most `wait_s`."""
        message = WaitVersionRequest(model_tag=model_id, run_id=run_id, version=version)
        return self._gate("/wait_version", message, wait_s, timeout_s) == "continue"

    def end_validate(
        self, model_tag: str, result: Mapping[str, Any] | None = None, *,
        version: int | None = None, timeout_s: float = 10.0,
    ) -> RolloutServiceState:  # fmt: skip
        """The validation that was running has ended, with this result; see `WeightSyncController.end_validate`. Numbers
        of numpy and torch become numbers, and what is no value becomes a text.
        """
        values = None if result is None else plain_values(result)
        message = EndValidateRequest(model_tag=model_tag, result=values, version=version)
        return self.call("POST", "/end_validate", RolloutServiceState, message=message, timeout_s=timeout_s)

    def heartbeat(self, request: HeartbeatRequest, *, timeout_s: float = 5.0) -> HeartbeatReply:
        """A rollout service is there; whether it may answer.

        Raises:
            StateError: the controller has no pool, another process has taken this instance's name, or a later word of
                this process was heard before.
        """
        return self.call("POST", "/heartbeat", HeartbeatReply, message=request, timeout_s=timeout_s)

    def next_push(
        self,
        model_tag: str,
        version: int | None,
        run_id: str | None = None,
        *,
        taker: str | None = None,
        wait_s: float = 0.0,
        timeout_s: float = 10.0,
    ) -> PushOrder | None:
        """The order that training ranks with that version are to take, after at most `wait_s`; None: there is none. See
        `NextPushRequest`.

        Raises:
            StateError: the controller's method is not "push".
            VersionError: another run has taken over.
        """
        message = NextPushRequest(
            model_tag=model_tag, version=version, run_id=run_id, taker=taker, wait_s=wait_s or None
        )
        reply = self.call("POST", "/push/next", NextPushReply, message=message, timeout_s=wait_s + timeout_s)
        return reply.order

    def push_done(
        self, model_tag: str, order: PushOrder, outcome: SyncReport | WeightSyncError, *, timeout_s: float = 10.0
    ) -> None:
        """How that order ended. It may be said again.

        Raises:
            StateError: nobody waits for it any more.
        """
        report, error = (None, outcome.to_dict()) if isinstance(outcome, WeightSyncError) else (outcome, None)
        message = PushDoneRequest(model_tag=model_tag, order_id=order.order_id, report=report, error=error)
        self.call("POST", "/push/done", PushDoneReply, message=message, timeout_s=timeout_s)

    def status(self, *, timeout_s: float = 10.0) -> ControllerStatus:
        """How every model is."""
        return self.call("GET", "/status", ControllerStatus, timeout_s=timeout_s)

    def _gate(self, path: str, message: ModelRequest, wait_s: float, timeout_s: float) -> Answer:
        for asked, this_s in rounds(message, wait_s):
            reply = self.call("POST", path, GateReply, message=asked, timeout_s=timeout_s + this_s)
            if reply.answer == "continue":
                break
        return reply.answer


def rounds(message: _M, wait_s: float) -> Iterator[tuple[_M, float]]:
    """A wait at a gate, in rounds, at least one: what is asked, and how long the controller may wait with it."""
    deadline = Deadline(wait_s)
    while True:
        this_s = min(deadline.remaining_s, _ROUND_S)
        yield msgspec.structs.replace(message, wait_s=this_s or None), this_s
        if deadline.expired:
            return
