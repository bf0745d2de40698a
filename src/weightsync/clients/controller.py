"""ControllerClient, AsyncControllerClient: how pools, workers and inference clients reach a controller. No torch."""

from __future__ import annotations

from typing import Literal

import httpx

from weightsync.clients.agent import JsonClient
from weightsync.clients.http_edge import MAX_REPLY_BYTES, checked_url, told_error, typed_errors
from weightsync.errors import EngineError
from weightsync.net.auth import bearer_headers
from weightsync.net.messages import decode, encode
from weightsync.types import Deadline
from weightsync.types.control import (
    ControllerStatus,
    GateReply,
    ModelRequest,
    RolloutServiceState,
    SyncReply,
    TrainedRequest,
)

_RUNS = "a weightsync controller"
_MARGIN_S = 5.0
_ROUND_S = 60.0  # a wait at the gate is asked for in rounds of so many seconds, so that no proxy ends it

Answer = Literal["continue", "block"]


class ControllerClient(JsonClient):
    """Document 5's calls; see `JsonClient` for arguments and errors."""

    def __init__(self, url: str, *, token: str | None = None, verify: bool | str = True) -> None:
        super().__init__(url, runs=_RUNS, token=token, verify=verify)

    def check_rollout_service_status(self, model_tag: str, *, wait_s: float = 0.0, timeout_s: float = 10.0) -> Answer:
        """Whether a request may proceed; waits up to `wait_s` for that. The controller wakes it: nothing is polled."""
        deadline = Deadline(wait_s)
        while True:
            this_s = min(deadline.remaining_s, _ROUND_S)
            message = ModelRequest(model_tag=model_tag, wait_s=this_s or None)
            reply = self.call(
                "POST", "/check_rollout_service_status", GateReply, message=message, timeout_s=timeout_s + this_s
            )
            if reply.answer == "continue" or deadline.expired:
                return reply.answer

    def trajectory_pool_notify_batch_ready(self, model_tag: str, *, timeout_s: float = 10.0) -> RolloutServiceState:
        """A batch is ready: a training step starts with it."""
        message = ModelRequest(model_tag=model_tag)
        return self.call(
            "POST", "/trajectory_pool_notify_batch_ready", RolloutServiceState, message=message, timeout_s=timeout_s
        )

    def train_worker_notify_weight_update(
        self,
        worker_name: str,
        model_tag: str,
        run_id: str | None = None,
        version: int | None = None,
        *,
        wait_s: float = 0.0,
    ) -> RolloutServiceState:
        """Training has new weights; waits up to `wait_s` for the end of the sync that this starts."""
        message = TrainedRequest(
            worker_name=worker_name, model_tag=model_tag, run_id=run_id, version=version, wait_s=wait_s or None
        )
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

    def end_validate(self, model_tag: str, *, timeout_s: float = 10.0) -> RolloutServiceState:
        """The validation that was running has ended."""
        message = ModelRequest(model_tag=model_tag)
        return self.call("POST", "/end_validate", RolloutServiceState, message=message, timeout_s=timeout_s)

    def status(self, *, timeout_s: float = 10.0) -> ControllerStatus:
        """How every model is."""
        return self.call("GET", "/status", ControllerStatus, timeout_s=timeout_s)


class AsyncControllerClient:
    """The gate for inference clients that are coroutines. One event loop.

    Args:
        url, token, verify: see `JsonClient`.
    """

    def __init__(self, url: str, *, token: str | None = None, verify: bool | str = True) -> None:
        self.url = checked_url(url, whose=f"{_RUNS}'s")
        self._client = httpx.AsyncClient(
            base_url=self.url, headers=bearer_headers(token), verify=verify, trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )  # fmt: skip

    async def check_rollout_service_status(
        self, model_tag: str, *, wait_s: float = 0.0, timeout_s: float = 10.0
    ) -> Answer:
        """See `ControllerClient.check_rollout_service_status`."""
        deadline = Deadline(wait_s)
        while True:
            this_s = min(deadline.remaining_s, _ROUND_S)
            message = ModelRequest(model_tag=model_tag, wait_s=this_s or None)
            exchange = Deadline(timeout_s + this_s)
            with typed_errors(exchange, url=self.url, what="the gate", peer=self.url, runs=_RUNS):
                response = await self._client.post(
                    "/check_rollout_service_status", content=encode(message), timeout=timeout_s + this_s
                )
            if len(response.content) > MAX_REPLY_BYTES or response.status_code != 200:
                error = told_error(response.content, peer=self.url)
                raise error or EngineError(f"it answered with status {response.status_code}", peer=self.url)
            reply = decode(response.content, GateReply, what="the answer of a controller")
            if reply.answer == "continue" or deadline.expired:
                return reply.answer

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        await self._client.aclose()
