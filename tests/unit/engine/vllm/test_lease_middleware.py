"""LeaseMiddleware: a real server with it answers under a real lease file's lease, and never else."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from weightsync.engine.vllm.lease_middleware import UNGUARDED, LeaseMiddleware
from weightsync.handles.fanout import in_thread
from weightsync.memory import LeaseReader, ServingLease, boot_s
from weightsync.net.origin import ALLOWED_HOSTS_VARIABLE
from weightsync.net.server import ServerThread

SAID = "the model says this"
LEASE_S = 60.0
WRITER = """
import sys, time
from weightsync.memory import ServingLease, boot_s
lease = ServingLease(sys.argv[1])
while True:
    lease.renew(boot_s() + 6.0, seen_s=float("inf"))
    print("renewed", flush=True)
    time.sleep(0.05)
"""


class Engine:
    """A server that answers as vLLM does, and can be kept from going on.

    Args:
        path: of the lease file.
        wraps: put around the application, inside the middleware.
    """

    def __init__(self, path: str, *, wraps: Callable[[Any], Any] | None = None, **options: Any) -> None:
        self._reader = LeaseReader(path)
        self.num_come = 0
        self.waits = False
        self.ran_held: list[bool] = []
        self.under_way = threading.Event()
        self.go = threading.Event()
        self.closed = threading.Event()
        app = FastAPI()
        app.add_api_route("/v1/completions", self._complete, methods=["POST"])
        app.add_api_route("/v1/late", self._late, methods=["POST"])
        app.add_api_route("/v1/stream/{kind}", self._stream, methods=["POST"])
        app.add_api_route("/{path:path}", self._any, methods=["GET", "POST", "PUT", "HEAD"])
        app.add_exception_handler(Exception, self._handler)  # vLLM has one of everything, too
        if wraps is not None:
            app.add_middleware(wraps)
        app.add_middleware(LeaseMiddleware, path=path, **options)

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            self.num_come += 1
            await app(scope, receive, send)

        self._server = ServerThread(counted)
        self.url = self._server.start()
        self.http = httpx.Client(base_url=self.url, timeout=20.0, trust_env=False)

    def complete(self) -> httpx.Response:
        return self.http.post("/v1/completions", json={})

    def when_come(self, number: int) -> None:
        end = time.monotonic() + 10
        while self.num_come < number:
            assert time.monotonic() < end, self.num_come
            time.sleep(0.005)  # between two looks

    def close(self) -> None:
        self.go.set()
        self.http.close()
        self._server.close()

    async def _complete(self) -> PlainTextResponse:
        self.ran_held.append(self._reader.held)
        return PlainTextResponse(SAID)

    async def _late(self) -> PlainTextResponse:
        self.under_way.set()
        await asyncio.to_thread(self.go.wait, 20)
        return PlainTextResponse(SAID)

    async def _stream(self, kind: str) -> StreamingResponse:
        headers = {"content-length": str(10 + len(SAID))} if kind == "sized" else {}

        async def parts() -> AsyncIterator[str]:
            try:
                if kind != "late":
                    yield "0123456789"
                self.under_way.set()
                await asyncio.to_thread(self.go.wait, 20)
                yield SAID
                if self.waits:  # for what the engine would say next
                    await asyncio.Event().wait()
                while kind == "endless":
                    yield "and so on"
                    await asyncio.sleep(0.01)
            finally:
                self.closed.set()

        return StreamingResponse(parts(), headers=headers)

    async def _any(self, path: str) -> PlainTextResponse:
        return PlainTextResponse(path)

    async def _handler(self, _request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"handled": str(error)}, status_code=500)


class Deaf:
    """An application that never notices that its client has left."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        first = True

        async def once() -> Any:
            nonlocal first
            if not first:
                await asyncio.Event().wait()
            first = False
            return await receive()

        await self._app(scope, once, send)


class Swallows:
    """An application that goes on whatever happens, and ends each answer in good order."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def anyhow(message: Any) -> None:
            try:
                await send(message)
            except Exception:
                await asyncio.sleep(0)

        await self._app(scope, receive, anyhow)


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[ServingLease]:
    with ServingLease(str(tmp_path / "lease")) as made:
        yield made


@pytest.fixture
def serve(lease: ServingLease) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def start(**options: Any) -> Engine:
        made.append(Engine(lease.path, **options))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def engine(serve: Callable[..., Engine], lease: ServingLease) -> Engine:
    lease.renew(boot_s() + LEASE_S, seen_s=math.inf)
    return serve()


def check_refused(response: httpx.Response, state_left: str = "fenced") -> None:
    assert response.status_code == 503, response.text
    assert int(response.headers["retry-after"]) >= 1
    body = response.json()
    assert body["error"]["type"] == "NotServingError"
    assert (body["error"]["code"], body["error"]["param"]) == (503, None)
    assert body["error"]["message"]
    assert (body["weightsync"]["error"], body["weightsync"]["state_left"]) == ("NotServingError", state_left)
    assert SAID not in response.text


def test_it_answers_under_a_lease_alone(serve: Callable[..., Engine], lease: ServingLease) -> None:
    engine = serve()
    check_refused(engine.complete())
    lease.renew(boot_s() + LEASE_S, seen_s=math.inf)
    assert engine.complete().text == SAID
    lease.revoke()
    check_refused(engine.complete())
    assert len(engine.ran_held) == 1, "what is refused does not run"


def test_it_refuses_when_the_service_was_stopped(serve: Callable[..., Engine], lease: ServingLease) -> None:
    """Nobody tells it: the lease's end comes by itself."""
    engine = serve()
    lease.close()
    writer = subprocess.Popen([sys.executable, "-c", WRITER, lease.path], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "renewed\n"
        assert engine.complete().status_code == 200
        os.kill(writer.pid, signal.SIGSTOP)
        end, asked_s = time.monotonic() + 6.0, time.monotonic()
        while (response := engine.complete()).status_code == 200:
            assert asked_s < end, "it goes on"
            asked_s = time.monotonic()
        check_refused(response)
        os.kill(writer.pid, signal.SIGCONT)
        end = time.monotonic() + 10
        while engine.complete().status_code != 200:
            assert time.monotonic() < end
    finally:
        writer.kill()
        writer.wait(10)


def test_a_request_waits_while_a_set_is_being_committed(engine: Engine, lease: ServingLease) -> None:
    """Many wait, and hold up nothing else."""
    lease.hold(boot_s() + 20)
    waiting = [in_thread(lambda: engine.http.post("/v1/completions", timeout=20.0), name="w") for _ in range(20)]
    engine.when_come(20)
    assert engine.http.get("/health").status_code == 200
    assert not any(each.done() for each in waiting)
    lease.lift()
    assert {each.result(10).text for each in waiting} == {SAID}
    assert engine.ran_held == [False] * 20


def test_a_hold_is_waited_for_no_longer_than_said(serve: Callable[..., Engine], lease: ServingLease) -> None:
    lease.renew(boot_s() + LEASE_S, seen_s=math.inf)
    lease.hold(boot_s() + 20)
    engine = serve(held_s=0.2)
    check_refused(engine.complete(), "held")


@pytest.mark.parametrize("ends", ["the set failed", "the lease was lost"])
def test_who_waits_is_refused_when_it_ends_badly(engine: Engine, lease: ServingLease, ends: str) -> None:
    lease.hold(boot_s() + 20)
    waiting = in_thread(engine.complete, name="waiting")
    engine.when_come(1)
    if ends == "the set failed":
        lease.hold(boot_s())
    else:
        lease.revoke()
    check_refused(waiting.result(10))
    assert engine.ran_held == []


def test_a_hold_that_begins_later_lets_an_answer_out(engine: Engine, lease: ServingLease) -> None:
    """The engine's pause, inside the hold, waits for what is under way: it is the old set's."""
    answer = in_thread(lambda: engine.http.post("/v1/late"), name="late")
    assert engine.under_way.wait(10)
    lease.hold(boot_s() + 20)
    engine.go.set()
    assert answer.result(10).text == SAID


@pytest.mark.parametrize("path", ["/v1/late", "/v1/stream/late"])
@pytest.mark.parametrize("wraps", [None, Swallows])
def test_an_answer_that_has_not_begun_becomes_a_refusal(
    serve: Callable[..., Engine], lease: ServingLease, path: str, wraps: Any
) -> None:
    """A stream's status, too, is kept until its first part."""
    lease.renew(boot_s() + LEASE_S, seen_s=math.inf)
    engine = serve(wraps=wraps)
    answer = in_thread(lambda: engine.http.post(path), name="late")
    assert engine.under_way.wait(10)
    lease.revoke()
    engine.go.set()
    check_refused(answer.result(10))


@pytest.mark.parametrize("kind", ["chunked", "sized"])
@pytest.mark.parametrize("wraps", [None, Swallows])
def test_a_stream_is_cut_off_as_an_error(
    serve: Callable[..., Engine], lease: ServingLease, kind: str, wraps: Any
) -> None:
    lease.renew(boot_s() + LEASE_S, seen_s=math.inf)
    engine = serve(wraps=wraps)
    engine.waits = True
    got = ""
    with engine.http.stream("POST", f"/v1/stream/{kind}") as response:
        assert response.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012
            for part in response.iter_text():
                got += part
                lease.revoke()
                engine.go.set()
    assert got == "0123456789"
    assert engine.closed.wait(10), "the application generates on"


def test_an_application_that_hears_nothing_is_ended(serve: Callable[..., Engine], lease: ServingLease) -> None:
    lease.renew(boot_s() + LEASE_S, seen_s=math.inf)
    engine = serve(wraps=Deaf)
    with engine.http.stream("POST", "/v1/stream/endless") as response:
        parts = response.iter_text()
        assert next(parts) == "0123456789"
        lease.revoke()
        engine.go.set()
        with pytest.raises(httpx.RemoteProtocolError):
            "".join(parts)


def test_a_stream_ends_well_under_a_lease(engine: Engine) -> None:
    engine.go.set()
    for kind in ("chunked", "sized", "late"):
        assert engine.http.post(f"/v1/stream/{kind}").text.endswith(SAID)


def test_what_controls_an_engine_passes_without_a_lease(serve: Callable[..., Engine]) -> None:
    engine = serve()
    for method, paths in UNGUARDED.items():
        for path in sorted(paths):
            if path not in ("/docs", "/openapi.json"):
                response = engine.http.request(method, path)
                assert response.status_code == 200, (method, path, response.text)


def test_whether_it_stands_there_is_told_with_a_lease_or_without(
    serve: Callable[..., Engine], lease: ServingLease
) -> None:
    """Red where it is guarded, or asked of the application."""
    engine = serve()
    assert engine.http.get("/weightsync/lease").json()["refuses"]
    lease.renew(boot_s() + LEASE_S, seen_s=math.inf)
    assert engine.http.get("/weightsync/lease").json() == {"refuses": None}
    lease.revoke()
    check_refused(engine.http.post("/weightsync/lease"))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/invocations"),
        ("POST", "/what/comes/with/a/later/release"),
        ("POST", "/pause/"),
        ("POST", "/health/../v1/completions"),
        ("POST", "/%2568ealth"),
        ("POST", "/health"),
        ("GET", "/pause"),
        ("GET", "/v1/responses/resp_1"),
        ("PUT", "/update_weights"),
        ("OPTIONS", "/v1/completions"),
    ],
)
def test_everything_else_is_guarded(serve: Callable[..., Engine], method: str, path: str) -> None:
    check_refused(serve().http.request(method, path))


def test_a_root_path_opens_nothing(lease: ServingLease) -> None:
    """The route counts, as the application's router finds it behind its root path."""

    async def status(path: str, root: str) -> int:
        sent: list[Any] = []

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "root_path": root}
        await LeaseMiddleware(app, path=lease.path)(scope, send, send)  # type: ignore[arg-type]
        return int(sent[0]["status"])

    assert asyncio.run(status("/api/pause", "/api")) == 200
    assert asyncio.run(status("/pause/v1/completions", "/pause")) == 503
    assert asyncio.run(status("/api/v1/completions", "/api")) == 503
    assert asyncio.run(status("/apipause", "/api")) == 503


@pytest.mark.parametrize(
    ("host", "origin", "passes"),
    [
        ("engine-0:8000", None, True), ("engine-0:8000", "http://engine-0:8000", True),
        ("engine-0:8000", "http://evil.example", False), ("engine-0:8000", "null", False),
        ("engine-0:8000", "http://engine-0", False), ("10.0.0.7:8000", "http://10.0.0.7:8000", True),
        ("[::1]:8000", "http://[::1]:8000", True), ("localhost:8000", "http://LOCALHOST:8000", True),
        ("evil.example:8000", "http://evil.example:8000", False), ("", "http://evil.example", False),
        ("service.namespace.svc:8000", None, True),
    ],
)  # fmt: skip
def test_control_routes_obey_no_page_of_somebody_else(
    lease: ServingLease, host: str, origin: str | None, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page can send a POST without asking, and `/pause` takes all it needs from the address. Seen red: a page whose
    name was made to lead here is of the same origin as what it posts to."""
    monkeypatch.setenv(ALLOWED_HOSTS_VARIABLE, "engine-0")
    came: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        came.append(scope["path"])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", host.encode())] + ([] if origin is None else [(b"origin", origin.encode())])
    middleware = LeaseMiddleware(app, path=lease.path)
    for path in UNGUARDED["POST"]:
        asyncio.run(middleware({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send))
    assert came == (list(UNGUARDED["POST"]) if passes else [])
    refused = [message["status"] for message in sent if "status" in message]
    assert refused == ([] if passes else [403] * len(UNGUARDED["POST"]))


def test_who_asks_whether_it_is_a_controller_is_answered_without_a_lease(serve: Callable[..., Engine]) -> None:
    """vLLM says 404 there. Seen red: 503, as a controller that is not there yet, and its URL was waited for."""
    assert serve().http.get("/status").status_code == 200
