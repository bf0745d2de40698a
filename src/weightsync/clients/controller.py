"""ControllerClient, AsyncControllerClient: how pools, workers and inference clients reach a controller. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import httpx

from weightsync.clients.agent import JsonClient
from weightsync.clients.http_edge import NO_ENCODING, checked_url, told_error, typed_errors
from weightsync.errors import DeadlineExceededError, EngineError, InvalidRequestError
from weightsync.net.auth import bearer_headers
from weightsync.net.messages import decode, encode
from weightsync.types import Deadline
from weightsync.types.control import (
    ControllerStatus,
    EndValidateRequest,
    GateReply,
    ModelRequest,
    RolloutServiceState,
    SyncReply,
    TrainedRequest,
    WaitVersionRequest,
)
from weightsync.types.fleet import HeartbeatReply, HeartbeatRequest

_RUNS = "a weightsync controller"
_MARGIN_S = 5.0
_MAX_ANSWER_BYTES = 1 << 20  # of a gate
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
        self, run_id: str, model_id: str, version: int, sender_endpoint: str, *, evaluate: bool = False,
        wait_s: float = 0.0,
    ) -> RolloutServiceState:  # fmt: skip
        """A trainer has published a version: what document 3's trainer calls, once a step. It waits for nobody but
        with `evaluate`, where it waits up to `wait_s` until that version is served everywhere and was validated.

        Raises:
            DeadlineExceededError: with `evaluate`: it was not, in time.
        """
        if evaluate and not wait_s:
            raise InvalidRequestError("an evaluation is waited for: give wait_s")
        said = self.train_worker_notify_weight_update(
            "trainer", model_id, run_id, version, sender_endpoint=sender_endpoint, evaluate=evaluate, wait_s=wait_s
        )
        done = said.last_validation
        if evaluate and (done is None or done.of.run_id != run_id or done.of.version < version):
            waits = "nobody called end_validate" if said.waiting_for_validation else "it is not served everywhere"
            raise DeadlineExceededError(
                f"version {version} of model {model_id} was not validated within {wait_s:g} s: {waits}"
                + (f" ({said.last_error})" if said.last_error else ""),
                version=f"{run_id}/{version}",
            )
        return said

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
        deadline = Deadline(wait_s)
        while True:
            this_s = min(deadline.remaining_s, _ROUND_S)
            message = WaitVersionRequest(model_tag=model_id, run_id=run_id, version=version, wait_s=this_s or None)
            reply = self.call("POST", "/wait_version", GateReply, message=message, timeout_s=timeout_s + this_s)
            if reply.answer == "continue" or deadline.expired:
                return reply.answer == "continue"

    def end_validate(
        self, model_tag: str, result: dict[str, float | int | str | bool | None] | None = None, *,
        timeout_s: float = 10.0,
    ) -> RolloutServiceState:  # fmt: skip
        """The validation that was running has ended, with this result."""
        message = EndValidateRequest(model_tag=model_tag, result=result)
        return self.call("POST", "/end_validate", RolloutServiceState, message=message, timeout_s=timeout_s)

    def heartbeat(self, request: HeartbeatRequest, *, timeout_s: float = 5.0) -> HeartbeatReply:
        """A rollout service is there; whether it may answer.

        Raises:
            StateError: the controller has no pool, or another process has taken this instance's name.
        """
        return self.call("POST", "/heartbeat", HeartbeatReply, message=request, timeout_s=timeout_s)

    def status(self, *, timeout_s: float = 10.0) -> ControllerStatus:
        """How every model is."""
        return self.call("GET", "/status", ControllerStatus, timeout_s=timeout_s)


class AsyncControllerClient:
    """The gates for coroutines: of inference clients, and of whoever takes batches. One event loop.

    Args:
        url, token, verify: see `JsonClient`.
    """

    def __init__(self, url: str, *, token: str | None = None, verify: bool | str = True) -> None:
        self.url = checked_url(url, whose=f"{_RUNS}'s")
        self._client = httpx.AsyncClient(
            base_url=self.url, headers={**bearer_headers(token), **NO_ENCODING}, verify=verify, trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )  # fmt: skip

    async def check_rollout_service_status(
        self, model_tag: str, *, wait_s: float = 0.0, timeout_s: float = 10.0
    ) -> Answer:
        """See `ControllerClient.check_rollout_service_status`."""
        return await self._gate(
            "/check_rollout_service_status",
            lambda this_s: ModelRequest(model_tag=model_tag, wait_s=this_s or None),
            Deadline(wait_s),
            timeout_s,
        )

    async def wait(
        self, run_id: str, model_id: str, version: int, *, wait_s: float = 600.0, timeout_s: float = 10.0
    ) -> None:
        """Returns when every live instance serves that version of the model, or a newer one of its run: what
        `get_batch` waits for before it serves a batch to a trainer that is at `version`. Woken, not polling.

        Raises:
            DeadlineExceededError: not within `wait_s`.
        """
        deadline = Deadline(wait_s)
        answer = await self._gate(
            "/wait_version",
            lambda this_s: WaitVersionRequest(
                model_tag=model_id, run_id=run_id, version=version, wait_s=this_s or None
            ),
            deadline,
            timeout_s,
        )
        if answer != "continue":
            raise DeadlineExceededError(
                f"model {model_id}: version {version} is not served by every live instance within {wait_s:g} s",
                version=f"{run_id}/{version}",
            )

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        await self._client.aclose()

    async def _gate(
        self, path: str, asks: Callable[[float], ModelRequest], deadline: Deadline, timeout_s: float
    ) -> Answer:
        while True:
            this_s = min(deadline.remaining_s, _ROUND_S)
            exchange = Deadline(timeout_s + this_s)
            with typed_errors(exchange, url=self.url, what="the gate", peer=self.url, runs=_RUNS):
                try:
                    async with asyncio.timeout(timeout_s + this_s):  # httpx's own begins anew with each byte
                        status, body = await self._exchange(path, encode(asks(this_s)), exchange)
                except TimeoutError as late:
                    raise DeadlineExceededError(
                        f"{self.url} did not answer {path} within {exchange.timeout_s:g} s", peer=self.url
                    ) from late
            if status != 200:
                error = told_error(body, peer=self.url)
                raise error or EngineError(
                    f"{self.url} answered {path} with status {status}; is {_RUNS} there?", peer=self.url
                )
            try:
                reply = decode(body, GateReply, what="the answer of a controller")
            except InvalidRequestError as odd:
                raise EngineError(f"{self.url} answered {path} with what is no answer: {odd}", peer=self.url) from odd
            if reply.answer == "continue" or deadline.expired:
                return reply.answer

    async def _exchange(self, path: str, content: bytes, deadline: Deadline) -> tuple[int, bytes]:
        """The status and the body of the answer; not more of it than an answer has."""
        headers, timeout_s = {"content-type": "application/json"}, deadline.remaining_s
        async with self._client.stream("POST", path, content=content, timeout=timeout_s, headers=headers) as response:
            body = bytearray()
            async for part in response.aiter_raw():
                body += part
                if len(body) > _MAX_ANSWER_BYTES:
                    raise EngineError(
                        f"{self.url}'s answer to {path} has over {_MAX_ANSWER_BYTES} bytes", peer=self.url
                    )
            return response.status_code, bytes(body)
