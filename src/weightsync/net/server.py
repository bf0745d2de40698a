"""How every server of ours is run: an app behind the guard, by uvicorn in a thread."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypedDict

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route as StarletteRoute

from weightsync.errors import ConfigError, UnsupportedError, WeightSyncError
from weightsync.net.auth import check_exposure
from weightsync.net.door import Door, Visit
from weightsync.net.guard import HEALTH_PATH, Guard, unexpected
from weightsync.net.log import logger
from weightsync.net.messages import encode
from weightsync.net.protocol import GuardedH11
from weightsync.net.routes import listening
from weightsync.types.process import closed_in_children, of_one_process


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files; a server that has them speaks HTTPS alone."""

    certificate: str
    key: str

    def context(self) -> ssl.SSLContext:
        """What a server speaks by.

        Raises:
            ConfigError: they are no certificate and its key.
        """
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            made.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            raise ConfigError(
                f"no TLS with {self.certificate} and {self.key}: {error}; check the certificate and the key"
            ) from error
        return made


class ServerOptions(TypedDict, total=False):
    """The fields of `ServerSettings`, as arguments of a server."""

    host: str
    port: int
    token: str | None
    tls: TlsFiles | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where a server listens, and who may call it.

    Attributes:
        host: "127.0.0.1" unless a token is given.
        port: 0 lets the system choose; `start` returns the URL.
        token: bearer token of at least 16 characters, asked for on every path but /healthz.
        tls: HTTPS where given.

    Raises:
        ConfigError: the host is reachable from elsewhere and there is no token, or the token is none.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = dataclasses.field(default=None, repr=False)
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "token", check_exposure(self.host, self.token))


Route = tuple[str, str, Callable[..., Any]]
"""Of an app: GET or POST, the path, and who answers."""


class Api(Starlette):
    """An app that answers every error as JSON of a typed one, with `/healthz`, and without redirects.

    Args:
        title: what it is, in errors.
        routes: what it answers.
    """

    def __init__(self, title: str, *routes: Route) -> None:
        async def typed(_request: Request, error: Exception) -> Response:
            assert isinstance(error, WeightSyncError)
            return JSONResponse(error.to_dict(), status_code=error.http_status)

        async def no_route(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            asked = f"{request.method[:20]} {request.url.path[:200]}"
            refusal = UnsupportedError(f"there is no {asked} here, this is a {title}", status=error.status_code)
            return JSONResponse(refusal.to_dict(), status_code=error.status_code, headers=error.headers)

        async def failed(_request: Request, _error: Exception) -> Response:
            return JSONResponse(unexpected().to_dict(), status_code=unexpected().http_status)

        async def healthz() -> dict[str, str]:
            return {"status": "ok"}

        super().__init__(exception_handlers={WeightSyncError: typed, HTTPException: no_route, Exception: failed})
        self.router.redirect_slashes = False
        for method, path, handler in (("GET", HEALTH_PATH, healthz), *routes):
            self.answer(method, path, handler)

    def answer(self, method: str, path: str, handler: Callable[..., Any]) -> None:
        """Adds a route.

        Args:
            method, path: of the requests; what stands in braces in the path is in the request's `path_params`.
            handler: takes the request, or nothing, and gives the answer: a `Response`, or what JSON can hold. One that
                is no coroutine function is called in a thread.
        """
        takes = [each for each in inspect.signature(handler).parameters.values() if each.default is each.empty]
        is_async = inspect.iscoroutinefunction(inspect.unwrap(handler))

        async def endpoint(request: Request) -> Response:
            given = (request,) if takes else ()
            called = handler(*given) if is_async else await run_in_threadpool(handler, *given)
            reply = await called if inspect.isawaitable(called) else called
            return reply if isinstance(reply, Response) else JSONResponse(reply)

        route = StarletteRoute(path, endpoint, methods=[method])
        route.methods = {method}  # and no HEAD of itself
        self.router.routes.append(route)


def json_of(message: msgspec.Struct | Mapping[str, Any]) -> Response:
    return Response(encode(message), media_type="application/json")


class _Server(uvicorn.Server):
    """uvicorn, with our own door."""

    has_token = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        config, loop = self.config, asyncio.get_running_loop()
        loop.set_exception_handler(_told)

        def protocol(visit: Visit) -> GuardedH11:
            return GuardedH11(
                config=config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                loop=loop,
                visit=visit,
                has_token=self.has_token,
            )

        doors: list[Any] = [Door(listener, protocol, config.ssl) for listener in sockets]
        self.servers = doors
        self.started = True


def _told(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What goes wrong in the loop itself, not a traceback for each time."""
    logger.error("the server's loop: %s", context.get("message"), exc_info=context.get("exception"))


@of_one_process
class ServerThread:
    """A uvicorn server in a thread of this process, from `start` to `close`.

    Args:
        app: the application; it is guarded here.
        on_refused: called for each request without the token, in the server's thread.
        open_paths, hosts, body_limits: see `Guard`; the settings' `host` is one of `hosts`.
    """

    def __init__(
        self,
        app: Any,
        settings: ServerSettings | None = None,
        *,
        on_refused: Callable[[], None] | None = None,
        open_paths: Collection[str] = (),
        hosts: Collection[str] = (),
        body_limits: Mapping[str, int] | None = None,
        name: str = "weightsync-http",
    ) -> None:
        settings = settings or ServerSettings()
        tls = settings.tls
        self.guard = Guard(
            app, token=settings.token, on_refused=on_refused, open_paths=open_paths, hosts=(settings.host, *hosts),
            body_limits=body_limits,
        )  # fmt: skip
        config = uvicorn.Config(
            self.guard,
            ws="none",
            host=settings.host,
            port=settings.port,
            log_level="warning",
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            timeout_graceful_shutdown=1,
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
        )
        self._host = settings.host
        self._tls = tls
        self._scheme = "https" if tls else "http"
        self._server = _Server(config)
        self._server.has_token = settings.token is not None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self, *, timeout_s: float = 10.0) -> str:
        """Starts to listen.

        Returns:
            The URL.

        Raises:
            ConfigError: it could not listen: the port is taken, or the address is not this host's; or there is no TLS
                with these files.
        """
        if self._tls is not None:
            self._tls.context()
        self._socket = listening(self._host, self._server.config.port)
        closed_in_children(self, lambda server: server._socket.close())  # the port is free when the parent ends
        self._thread.start()
        if not self._ready.wait(timeout_s) or self._failure is not None:
            self._socket.close()
            why = self._failure or f"nothing happened within {timeout_s:g} s"
            raise ConfigError(f"the server on {self._host} did not start: {why}")
        return self.url

    @property
    def url(self) -> str:
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
