"""The guard in front of every app of ours: who may ask, how much they may send, and errors as typed JSON."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weightsync.errors import (
    AuthError,
    BusyError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    WeightSyncError,
)
from weightsync.net.auth import check_token, checked_token
from weightsync.net.log import logger
from weightsync.net.origin import check_page, host_names

MANIFEST_BODY_BYTES = 256 << 20
"""Routes that take a manifest: one of a million tensors fits."""
LIST_BODY_BYTES = 1 << 20
"""Routes that take a list of models, or a result."""
BODY_BYTES = 64 << 10
"""All other routes."""
BODY_WITHIN_S = 60.0
"""How long a body may take to come."""
HEALTH_PATH = "/healthz"
"""Answered to everybody, by whatever name they call: it tells nothing."""
VISIT = "weightsync.visit"
"""Where a request's scope has its `Visit`."""

_JSON = "application/json"
_TRIM_FROM_BYTES, _TRIM_AFTER_S = 8 << 20, 0.2
"""Bodies of less are not worth it; and by then the request's last references are gone, and many that end together are
one."""


class Guard:
    """ASGI middleware: who may ask first, then what they send, and typed errors as JSON with their status.

    With a token: it, on every path that is not open. Without one: no foreign web page, see `origin.check_page`.
    A body is JSON and says so; nothing of it is read before that.

    Args:
        app: what is guarded.
        token: None lets everybody on this host in (loopback only, see `check_exposure`).
        on_refused: called for each request without the token.
        open_paths: answered without a token: files that hold no secret and change nothing.
        hosts: names by which a server without a token may be called, beside those of loopback.
        body_limits: the longest body of a path, in bytes; of "*", that of all others, `BODY_BYTES` where not given.

    Raises:
        ConfigError: the token is none.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        on_refused: Callable[[], None] | None = None,
        open_paths: Collection[str] = (),
        hosts: Collection[str] = (),
        body_limits: Mapping[str, int] | None = None,
    ) -> None:
        self._app = app
        self._token = checked_token(token)
        self._on_refused = on_refused
        self._open_paths = frozenset({HEALTH_PATH, *open_paths})
        self._hosts = host_names(hosts)
        self._limits = dict(body_limits or {})
        self._max_held_bytes = 2 * max((BODY_BYTES * 128, *self._limits.values()))
        self.held_bytes = 0  # of bodies, of requests under way
        self._trim_soon: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # nothing here speaks anything else
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if body.is_on_its_way:
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        body = _Body(self, scope, receive)
        try:
            headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
            self._check_caller(scope, headers)
            self._check_body(scope, headers)
            await self._app(scope, body.receive, watched)
        except ClientDisconnect:
            pass  # nobody is there to be answered
        except WeightSyncError as error:
            if started:
                raise
            await send_error(watched, error)
        except Exception as error:
            if started:
                raise
            logger.error("a request to %s failed", scope["path"][:100], exc_info=error)
            await send_error(watched, unexpected())
        finally:
            self.held_bytes -= body.held_bytes
            if body.held_bytes >= _TRIM_FROM_BYTES and self._trim_soon is None and _malloc_trim() is not None:
                self._trim_soon = asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim)

    def limit_bytes(self, path: str) -> int:
        return self._limits.get(path, self._limits.get("*", BODY_BYTES))

    def hold(self, num_bytes: int) -> None:
        """Counts what is held of bodies.

        Raises:
            BusyError: it is too much, of all requests together.
        """
        self.held_bytes += num_bytes
        if self.held_bytes > self._max_held_bytes:
            raise BusyError(
                f"the requests under way have over {self._max_held_bytes} bytes together: try again",
                state_left="nothing was changed",
            )

    def _trim(self) -> None:
        """Gives memory back to the system: malloc keeps what large bodies took for as long as the process lives."""
        self._trim_soon = None
        trim = _malloc_trim()
        assert trim is not None
        asyncio.get_running_loop().run_in_executor(None, trim, 0)  # some milliseconds

    def _check_caller(self, scope: Scope, headers: Mapping[str, str]) -> None:
        path = scope["path"]
        if self._token is None:
            if path != HEALTH_PATH:
                check_page(headers, self._hosts)
            return
        if path in self._open_paths:
            return
        try:
            check_token(headers.get("authorization"), self._token)
        except AuthError:
            if self._on_refused is not None:
                self._on_refused()
            raise
        visit = scope.get(VISIT)
        if visit is not None:
            visit.know()

    def _check_body(self, scope: Scope, headers: Mapping[str, str]) -> None:
        length, path = headers.get("content-length", "0"), scope["path"]
        limit_bytes = self.limit_bytes(path)
        if not (length.isascii() and length.isdigit() and len(length) < 16) or int(length) > limit_bytes:
            raise InvalidRequestError(f"a request's body has at most {limit_bytes} bytes here, not {length[:30]}")
        if int(length) == 0 and "transfer-encoding" not in headers:
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != _JSON:
            raise InvalidRequestError(f"content-type is {_JSON}, not {kind[:100]!r}")


class _Body:
    """A request's body on its way to the app: counted, and bounded in time."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive) -> None:
        path = scope["path"]
        self._guard = guard
        self._is_large = _is_large(scope)
        self._is_late = False
        self._limit_bytes = guard.limit_bytes(path)
        self._receive = receive
        self._due_s: float | None = None
        self._whole = False
        self._received_bytes = 0
        self.held_bytes = 0

    @property
    def is_on_its_way(self) -> bool:
        """Whether the connection has to end with the answer: what is still to come of it is not read."""
        return not self._whole and (self._is_late or self._is_large)

    async def receive(self) -> Message:
        """As ASGI's.

        Raises:
            InvalidRequestError: it is too long.
            BusyError: see `Guard.hold`.
            DeadlineExceededError: it does not come.
        """
        message = await (self._receive() if self._whole else self._in_time())
        num_bytes = len(message.get("body", b""))
        self._whole = self._whole or not message.get("more_body", False)
        self._received_bytes += num_bytes
        if self._received_bytes > self._limit_bytes:
            raise InvalidRequestError(f"a request's body has at most {self._limit_bytes} bytes here")
        self.held_bytes += num_bytes
        self._guard.hold(num_bytes)
        return message

    async def _in_time(self) -> Message:
        if self._due_s is None:
            self._due_s = asyncio.get_running_loop().time() + BODY_WITHIN_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._due_s):
                return await self._receive()
        self._is_late = True
        raise DeadlineExceededError(f"the request's body did not come within {BODY_WITHIN_S:g} s")


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; other C libraries have none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def _is_large(scope: Scope) -> bool:
    """Whether its body may be longer than what is read and thrown away."""
    fields = dict(scope["headers"])
    return b"transfer-encoding" in fields or len(fields.get(b"content-length", b"")) > len(str(BODY_BYTES)) - 1


def unexpected() -> WeightSyncError:
    """What is said of an error that is not ours: nothing of the inside."""
    return EngineError("this server failed at this request, status 500; its log says why")


async def send_error(send: Send, error: WeightSyncError) -> None:
    body = error_body(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def error_body(error: WeightSyncError, **more: Any) -> bytes:
    return json.dumps({**error.to_dict(), **more}).encode()
