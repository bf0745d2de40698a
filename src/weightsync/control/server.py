"""ControllerServer: a `WeightSyncController` over HTTP.

Who waits at the gate costs no thread and no polling: a waiter is a coroutine, woken when its model changes. Who waits
for the end of a sync or of a validation costs a thread: only so many may.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from weightsync.clients.fanout import in_thread
from weightsync.control.controller import WeightSyncController
from weightsync.control.metrics import ControllerMetrics
from weightsync.control.pool import RolloutPool
from weightsync.control.web.page import OPEN_PATHS, add_page
from weightsync.errors import StateError
from weightsync.net.guard import LIST_BODY_BYTES
from weightsync.net.messages import decode, encode
from weightsync.net.server import ServerThread, TlsFiles, api_app
from weightsync.observe.metrics import CONTENT_TYPE
from weightsync.types import Deadline
from weightsync.types.control import (
    EndValidateRequest,
    GateReply,
    ModelRequest,
    SyncReply,
    TrainedRequest,
    WaitVersionRequest,
)
from weightsync.types.fleet import HeartbeatRequest
from weightsync.types.process import of_one_process

_MAX_WAITING = 256
_T = TypeVar("_T")


@of_one_process
class ControllerServer:
    """Serves document 5's calls under their names, `/notify_version`, `/wait_version`, `/heartbeat`, `/status` and
    `/healthz`, from `start` to `close`.

    Args:
        controller: whose calls these are. It stays the caller's.
        pool: whose heartbeats are taken; None: nobody's.
        host, port, token, tls: see `ServerThread`.

    Raises:
        ConfigError: the host is reachable from elsewhere and there is no token.
    """

    def __init__(
        self,
        controller: WeightSyncController,
        pool: RolloutPool | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self._controller = controller
        self._pool = pool
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._changed: dict[str, asyncio.Event] = {}
        self._num_waiting = 0
        self._unsubscribe: Callable[[], None] = lambda: None
        self.app: FastAPI = api_app("weightsync controller")
        for method, path, handler in (
            ("POST", "/check_rollout_service_status", self._check),
            ("POST", "/trajectory_pool_notify_batch_ready", self._batch_ready),
            ("POST", "/train_worker_notify_weight_update", self._trained),
            ("POST", "/notify_version", self._trained),
            ("POST", "/wait_version", self._wait_version),
            ("POST", "/heartbeat", self._heartbeat),
            ("POST", "/sync_weight_to_rollout_service", self._sync),
            ("POST", "/end_validate", self._end_validate),
            ("GET", "/status", self._status),
            ("GET", "/metrics", self._get_metrics),
        ):
            self.app.add_api_route(path, handler, methods=[method])
        add_page(self.app, controller.status)
        self._metrics = ControllerMetrics(controller.status)
        self._server = ServerThread(
            self.app,
            host=host,
            port=port,
            token=token,
            tls=tls,
            open_paths=OPEN_PATHS,
            body_limits={"/heartbeat": LIST_BODY_BYTES, "/end_validate": LIST_BODY_BYTES},
            name="weightsync-controller",
        )

    def start(self) -> str:
        """Starts to listen; the URL."""
        self._unsubscribe = self._controller.subscribe(self._changed_model)
        return self._server.start()

    def wait(self) -> None:
        """Blocks until the server ends."""
        self._server.wait()

    def close(self) -> None:
        """Stops listening; who waits at the gate is told to ask again. Idempotent."""
        self._closed = True
        self._unsubscribe()
        self._unsubscribe = lambda: None
        for model_tag in self._controller.model_tags:
            self._wake(model_tag)
        self._server.close()

    def _changed_model(self, model_tag: str) -> None:
        self._wake(model_tag)
        self._metrics.look()

    def _wake(self, model_tag: str) -> None:
        """From any thread: those who wait for this model look again."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(self._wake_here, model_tag)

    def _wake_here(self, model_tag: str) -> None:
        event = self._changed.pop(model_tag, None)
        if event is not None:
            event.set()

    async def _check(self, request: Request) -> Response:
        asked = decode(await request.body(), ModelRequest, what="a check")
        return await self._gate(
            asked, lambda: self._controller.check_rollout_service_status(asked.model_tag) == "continue"
        )

    async def _wait_version(self, request: Request) -> Response:
        asked = decode(await request.body(), WaitVersionRequest, what="a wait for a version")
        return await self._gate(asked, lambda: self._controller.serves(asked.run_id, asked.model_tag, asked.version))

    async def _gate(self, asked: ModelRequest, opened: Callable[[], bool]) -> Response:
        """Answers when it has opened, or the caller's time is over."""
        self._controller.rollout_service_state(asked.model_tag)  # there is such a model
        self._loop = asyncio.get_running_loop()
        deadline = Deadline(asked.wait_s or 0.0)
        while True:
            changed = self._changed.setdefault(asked.model_tag, asyncio.Event())  # before the look: nothing is missed
            through = opened()
            if through or deadline.expired or self._closed:
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), deadline.remaining_s)
        state = self._controller.rollout_service_state(asked.model_tag)
        return _json(
            GateReply(
                answer="continue" if through else "block", run_id=state.run_id,
                rollout_model_version=state.rollout_model_version,
            )
        )  # fmt: skip

    async def _batch_ready(self, request: Request) -> Response:
        asked = decode(await request.body(), ModelRequest, what="a notification")
        await asyncio.to_thread(self._controller.trajectory_pool_notify_batch_ready, asked.model_tag)
        return await self._of(asked)

    async def _trained(self, request: Request) -> Response:
        asked = decode(await request.body(), TrainedRequest, what="a notification")
        await self._in_a_thread_of_its_own(
            asked,
            lambda: self._controller.train_worker_notify_weight_update(
                asked.worker_name, asked.model_tag, asked.run_id, asked.version, sender_endpoint=asked.sender_endpoint,
                evaluate=asked.evaluate, timeout_s=asked.wait_s or 0.0,
            ),
        )  # fmt: skip
        return await self._of(asked)

    async def _sync(self, request: Request) -> Response:
        asked = decode(await request.body(), ModelRequest, what="a request")
        done = await self._in_a_thread_of_its_own(
            asked,
            lambda: self._controller.sync_weight_to_rollout_service(asked.model_tag, timeout_s=asked.wait_s or 0.0),
        )
        return _json(SyncReply(up_to_date=done))

    async def _in_a_thread_of_its_own(self, asked: ModelRequest, call: Callable[[], _T]) -> _T:
        """For calls that wait: those of the loop's own executor are few, and what ends the wait needs one.

        Raises:
            StateError: too many wait already.
        """
        waits = bool(asked.wait_s)
        if waits and self._num_waiting >= _MAX_WAITING:
            raise StateError(
                f"the controller is busy, try again: {_MAX_WAITING} calls wait already; with wait_s=0 none waits",
                state_left="nothing was changed",
            )
        self._num_waiting += waits
        try:
            return await asyncio.wrap_future(in_thread(call, name="weightsync-waits"))
        finally:
            self._num_waiting -= waits

    async def _end_validate(self, request: Request) -> Response:
        asked = decode(await request.body(), EndValidateRequest, what="a notification")
        await asyncio.to_thread(self._controller.end_validate, asked.model_tag, asked.result)
        return await self._of(asked)

    async def _heartbeat(self, request: Request) -> Response:
        asked = decode(await request.body(), HeartbeatRequest, what="a heartbeat")
        if self._pool is None:
            raise StateError("this controller has no pool: its method calls services that it was given")
        return _json(self._pool.heartbeat(asked))

    async def _of(self, asked: ModelRequest) -> Response:
        return _json(self._controller.rollout_service_state(asked.model_tag))

    async def _status(self) -> Response:
        return _json(self._controller.status())

    async def _get_metrics(self) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)


def _json(message: msgspec.Struct | Any) -> Response:
    return Response(encode(message), media_type="application/json")
