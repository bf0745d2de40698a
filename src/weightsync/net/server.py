"""How every server of ours is guarded and run: an ASGI guard, and uvicorn in a thread or in the foreground."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import threading
from collections.abc import Callable, Collection
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from weightsync.errors import AuthError, ConfigError, InvalidRequestError, WeightSyncError
from weightsync.net.auth import check_exposure, check_token
from weightsync.types.process import closed_in_children, of_one_process

MAX_BODY_BYTES = 256 << 20
"""No request is larger: a manifest of a million tensors fits."""
_HEADERS_WITHIN_S = 10.0
_OPEN_PATHS = frozenset({"/healthz"})
"""Answered without a token; more by `open_paths`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files; a server that has them speaks HTTPS alone."""

    certificate: str
    key: str


class Guard:
    """ASGI middleware: token first, then size, and typed errors as JSON with their status.

    Args:
        app: what is guarded.
        token: None lets everybody in (loopback only, see `check_exposure`).
        on_refused: called for each request without the token.
        open_paths: answered without a token: files that hold no secret and change nothing.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str | None,
        on_refused: Callable[[], None] | None = None,
        open_paths: Collection[str] = (),
    ) -> None:
        self._app = app
        self._token = token
        self._on_refused = on_refused
        self._open_paths = _OPEN_PATHS.union(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it with an error."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # nothing here speaks anything else
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise InvalidRequestError(f"a request body has at most {MAX_BODY_BYTES} bytes")
            return message

        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            if scope["path"] not in self._open_paths:
                self._check_token(headers.get("authorization"))
            length = headers.get("content-length", "0")
            if not (length.isascii() and length.isdigit() and len(length) < 16) or int(length) > MAX_BODY_BYTES:
                raise InvalidRequestError(f"a request body has at most {MAX_BODY_BYTES} bytes, not {length[:30]}")
            await self._app(scope, limited, watched)
        except WeightSyncError as error:
            if started:
                raise
            await send_error(send, error)

    def _check_token(self, header: str | None) -> None:
        try:
            check_token(header, self._token)
        except AuthError:
            if self._on_refused is not None:
                self._on_refused()
            raise


def api_app(title: str) -> FastAPI:
    """A FastAPI app that answers typed errors as JSON, with `/healthz`, and without documentation pages."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None, openapi_url=None)

    async def typed(_request: Request, error: Exception) -> Response:
        assert isinstance(error, WeightSyncError)
        return JSONResponse(error.to_dict(), status_code=error.http_status)

    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    app.add_exception_handler(WeightSyncError, typed)
    app.add_api_route("/healthz", healthz, methods=["GET"])
    return app


async def json_body(request: Request) -> bytes:
    """The body, where it calls itself JSON: a web page that somebody on this host looks at can send anything else, to
    any port of loopback, without asking.

    Raises:
        InvalidRequestError: it does not.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequestError(f"content-type is application/json, not {kind[:100]!r}")
    return await request.body()


async def send_error(send: Send, error: WeightSyncError) -> None:
    """Answers with a typed error as JSON."""
    body = json.dumps(error.to_dict()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _PatientH11(H11Protocol):
    """uvicorn's own protocol, but a connection whose request is not complete after a while is closed: half-sent
    headers cost a file descriptor each, and nobody has shown a token yet."""

    _too_slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._too_slow is not None:
            self._too_slow.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self._too_slow is not None:
            self._too_slow.cancel()
            self._too_slow = None
        elif not answering and self._too_slow is None:
            self._too_slow = self.loop.call_later(_HEADERS_WITHIN_S, self._give_up)

    def _give_up(self) -> None:
        self._too_slow = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


@of_one_process
class ServerThread:
    """A uvicorn server in a thread of this process, from `start` to `close`.

    Args:
        app: the application; it is guarded here.
        host: loopback unless a token is given.
        port: 0 lets the system choose.
        token: bearer token.
        tls: HTTPS where given.
        on_refused: called for each request without the token, in the server's thread.
        open_paths: see `Guard`.
        name: of the thread.

    Raises:
        ConfigError: the host is reachable from elsewhere and there is no token.
    """

    def __init__(
        self,
        app: Any,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        tls: TlsFiles | None = None,
        on_refused: Callable[[], None] | None = None,
        open_paths: Collection[str] = (),
        name: str = "weightsync-http",
    ) -> None:
        check_exposure(host, token)
        config = uvicorn.Config(
            Guard(app, token=token, on_refused=on_refused, open_paths=open_paths),
            http=_PatientH11,
            ws="none",
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
        )
        self._host = host
        self._scheme = "https" if tls else "http"
        self._server = uvicorn.Server(config)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, *, timeout_s: float = 10.0) -> str:
        """Starts to listen.

        Returns:
            The URL.

        Raises:
            ConfigError: it could not listen: the port is taken, or the address is not this host's.
        """
        self._socket = _listen(self._host, self._server.config.port)
        closed_in_children(self, lambda server: server._socket.close())  # the port is free when the parent ends
        self._thread.start()
        if not self._ready.wait(timeout_s) or self._failure is not None:
            self._socket.close()
            why = self._failure or f"nothing happened within {timeout_s:g} s"
            raise ConfigError(f"the server on {self._host} did not start: {why}; check the TLS files, if there are any")
        return self.url

    @property
    def url(self) -> str:
        """Where it listens."""
        port = self._socket.getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{self._scheme}://{host}:{port}"

    def wait(self) -> None:
        """Blocks until the server ends."""
        self._thread.join()

    def close(self) -> None:
        """Stops listening; running requests get a second. Idempotent."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(5)

    def _run(self) -> None:

        async def serve() -> None:
            serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.01)
            if self._server.started:
                self._ready.set()
            await serving

        try:
            asyncio.run(serve())
        except (Exception, SystemExit) as error:  # uvicorn ends so where it can't start
            self._failure = error
        finally:
            if not self._server.started and self._failure is None:
                self._failure = ConfigError("it ended at once")
            self._ready.set()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket whose connections send at once.

    asyncio turns Nagle's algorithm off only where the socket says that it is TCP; uvicorn's own sockets do
    not say so, and every small answer then waits 40 ms for the peer's delayed acknowledgement (seen).
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"can't listen on {host}:{port}: {error}; choose another port or host") from error
    return listener
