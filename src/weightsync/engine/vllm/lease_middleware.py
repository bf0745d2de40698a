"""LeaseMiddleware: a vLLM server of a fleet answers while its rollout service holds a lease, and never else.

    vllm ... --middleware weightsync.engine.vllm.lease_middleware.LeaseMiddleware     with WEIGHTSYNC_LEASE_FILE=PATH

    request --> no lease: 503 --> a set is being committed: wait --> vLLM --> lease still there? --> the answer
                                                                                    └ no: 503, or the stream is cut

What passes without a lease is a list of routes that can't answer with what the model says; all else is guarded, what
later releases of vLLM add included. Its control routes among them obey no web page. Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable

from weightsync.engine.vllm.asgi import (
    App,
    Message,
    Receive,
    Scope,
    Send,
    answer,
    foreign,
    is_of_another_page,
    refuse,
    route_of,
)
from weightsync.errors import ConfigError, NotServingError, WeightSyncError
from weightsync.memory import LeaseReader
from weightsync.net.origin import host_names
from weightsync.types import Deadline
from weightsync.types.fleet import LEASE_PATH

LEASE_FILE_VARIABLE = "WEIGHTSYNC_LEASE_FILE"
_HELD_S = 30.0
_HELD_LOOK_S = 0.005
"""A hold is ended by another process, in shared memory."""
_LEAVES_S = 1.0
"""How long an application may take to notice that its client has left."""
_TURNS = 64
_TRY_AGAIN_LATER = 1013
"""The websocket's word for 503."""

_READS = frozenset(
    {
        "/docs", "/fault_tolerance/status", "/get_world_size", "/health", "/is_paused", "/is_sleeping",
        "/kv_event_sources", "/load", "/metrics", "/metrics/", "/openapi.json", "/ping", "/server_info",
        "/tokenizer_info", "/v1/models", "/version", "/weight_info",
        # vLLM has none of these: who asks what a server is gets its 404, and not a refusal
        "/get_model_info", "/model_info", "/status", "/workers",
        "/weightsync/adapters",  # our `lora_middleware`'s
    }
)  # fmt: skip
_CONTROLS = frozenset(
    {
        "/abort_requests", "/collective_rpc", "/fault_tolerance/apply", "/finish_weight_update",
        "/inference/v1/abort_requests", "/init_weight_transfer_engine", "/is_scaling_elastic_ep", "/pause", "/ping",
        "/release_kv_cache_memory", "/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache", "/resume",
        "/scale_elastic_ep", "/shutdown_weight_transfer_engine", "/sleep", "/start_draft_weight_update",
        "/start_profile", "/start_weight_update", "/stop_profile", "/update_weight_version", "/update_weights",
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/wake_up", "/weight_checker",
        "/weightsync/adapters/commit", "/weightsync/adapters/drop", "/weightsync/adapters/load",
        "/weightsync/adapters/score",
    }
)  # fmt: skip
UNGUARDED = {"GET": _READS, "HEAD": _READS, "POST": _CONTROLS}
"""Routes that pass without a lease, by method."""

_logger = logging.getLogger(__name__)


class LeaseMiddleware:
    """ASGI middleware. One event loop.

    Without a lease file the server is not to start: the application's start fails. Where a server does not ask for
    that, everything is refused but what is `UNGUARDED`.

    Args:
        app: what is guarded.
        path: of the lease file; what `WEIGHTSYNC_LEASE_FILE` says where not given.
        held_s: how long a request waits for a set of models to be committed.
    """

    def __init__(self, app: App, *, path: str | None = None, held_s: float = _HELD_S) -> None:
        self._app = app
        self._held_s = held_s
        self._lifted: asyncio.Task[None] | None = None
        self._lease: LeaseReader | None = None
        self._why_not: ConfigError | None = None
        self._names: frozenset[str] = frozenset()
        try:
            self._names = host_names((socket.gethostname(),))
            self._lease = _lease(path)
        except ConfigError as error:
            self._why_not = error  # raised here it would be taken for an application that needs no start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets it pass, refuses it, or cuts its answer off.

        Raises:
            NotServingError: the lease was lost when part of the answer had been sent. The server closes the connection
                before the answer's end.
        """
        if scope["type"] == "lifespan":
            await self._start(scope, receive, send)
        elif scope["type"] == "http" and (scope["method"], route_of(scope)) == ("GET", LEASE_PATH):
            await answer(send, 200, json.dumps({"refuses": self._refusal()}).encode())
        elif scope["type"] == "http" and route_of(scope) in UNGUARDED.get(scope["method"], ()):
            if scope["method"] == "POST" and is_of_another_page(scope, self._names):
                await _Answer(self._refusal, "http", receive, send).refuse(foreign())
            else:
                await self._app(scope, receive, send)
        elif scope["type"] in ("http", "websocket"):
            its = _Answer(self._refusal, scope["type"], receive, send)
            try:
                await self._admit()
            except NotServingError as error:
                await its.refuse(error)
                return
            await its.of(self._app, scope)

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._why_not is None:
            await self._app(scope, receive, send)
            return
        _logger.error("this server does not start: %s", self._why_not)
        await receive()
        await send({"type": "lifespan.startup.failed", "message": f"ConfigError: {self._why_not}"})

    def _refusal(self) -> str | None:
        return str(self._why_not) if self._lease is None else self._lease.refusal()

    async def _admit(self) -> None:
        """Returns when it may be answered.

        Raises:
            NotServingError: it may not.
        """
        deadline = Deadline(self._held_s)
        while True:
            if (refused := self._refusal()) is not None:
                raise _fenced(refused)
            assert self._lease is not None
            if not self._lease.held:
                return
            if deadline.expired:
                raise NotServingError(
                    f"a set of models has been under way for over {self._held_s:g} s", state_left="held"
                )
            if self._lifted is None or self._lifted.done():  # one look for all that wait
                self._lifted = asyncio.ensure_future(self._until_lifted(self._lease))
            await asyncio.wait({self._lifted}, timeout=deadline.remaining_s)

    async def _until_lifted(self, lease: LeaseReader) -> None:
        while lease.held and lease.refusal() is None:
            await asyncio.sleep(_HELD_LOOK_S)


class _LostError(Exception):
    """Ends the application's work on an answer that may not be given. No handler of its own knows it."""


class _Answer:
    """One answer on its way out: each part leaves under the lease, or not at all.

    When the lease was lost, what the application sends goes nowhere, and it is told that its client has left: so it
    ends the generation. One that does not listen is ended by `_LostError`.
    """

    def __init__(self, refusal: Callable[[], str | None], kind: str, receive: Receive, send: Send) -> None:
        self._refusal = refusal
        self._kind = kind
        self._receive = receive
        self._send = send
        self._head: Message | None = None  # kept until there is something to answer
        self._begun = False
        self._lost: str | None = None
        self._left = asyncio.Event()
        self._patience = Deadline(0.0)
        self._num_dropped = 0

    async def of(self, app: App, scope: Scope) -> None:
        """What the application answers.

        Raises:
            NotServingError: the lease was lost when a part of it had been sent.
        """
        try:
            await app(scope, self._heard, self._checked)
        except Exception:
            if self._lost is None:
                raise
        if self._lost is None:
            return
        error = _fenced(self._lost)
        if self._begun and self._kind == "http":
            raise error
        await self.refuse(error)

    async def refuse(self, error: WeightSyncError) -> None:
        """Answers with an error."""
        if self._kind == "websocket":
            await self._send({"type": "websocket.close", "code": _TRY_AGAIN_LATER, "reason": error.message[:100]})
            return
        await refuse(self._send, error)

    async def _heard(self) -> Message:
        if not self._left.is_set():
            real, left = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._left.wait())
            try:
                await asyncio.wait({real, left}, return_when=asyncio.FIRST_COMPLETED)
                if real.done():
                    return real.result()
            finally:
                real.cancel()
                left.cancel()
        return {"type": f"{self._kind}.disconnect", "code": _TRY_AGAIN_LATER}

    async def _checked(self, message: Message) -> None:
        if self._lost is None and (refused := self._refusal()) is not None:
            self._lost, self._patience = refused, Deadline(_LEAVES_S)
            self._left.set()
        if self._lost is not None:
            if self._patience.expired:
                raise _LostError
            self._num_dropped += 1
            if self._num_dropped % _TURNS == 0:  # one that never waits is told, too; others in their own wait
                await asyncio.sleep(0)
        elif message["type"] == "http.response.start":
            self._head = message
        else:
            head, self._head = self._head, None
            self._begun = True
            if head is not None:
                await self._send(head)
            await self._send(message)


def _lease(path: str | None) -> LeaseReader:
    path = path or os.environ.get(LEASE_FILE_VARIABLE)
    if not path:
        raise ConfigError(
            f"{LEASE_FILE_VARIABLE} is not set: give it the path of the lease file of this host's rollout service"
        )
    try:
        return LeaseReader(path)
    except WeightSyncError as error:
        raise ConfigError(f"{LEASE_FILE_VARIABLE}: {error.message}") from error


def _fenced(why: str) -> NotServingError:
    return NotServingError(f"this engine refuses to serve: {why}", state_left="fenced")
