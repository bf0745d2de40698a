"""The guard, and the server as it stands on a socket: limits, typed errors, latency, slow and hostile clients."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.standins.processes import free_port
from weightsync.errors import ConfigError, LoadError, StateError, error_from_dict
from weightsync.net.guard import Guard
from weightsync.net.server import Api, ServerSettings, ServerThread, TlsFiles

TOKEN = "0123456789abcdef"


def app() -> Api:
    made = Api("test")

    async def echo(request: Request) -> Response:
        return Response(await request.body())

    @functools.wraps(echo)
    def wrapped(request: Request) -> Any:
        return echo(request)

    class Answers:
        async def __call__(self, request: Request) -> Response:
            return await echo(request)

    def slow() -> dict[str, bool]:
        return {"in the loop": threading.current_thread().name == "weightsync-http"}

    async def thread() -> dict[str, int]:
        return {"ident": threading.get_ident()}

    async def fail(request: Request) -> Response:
        raise LoadError("it broke", parameter="w", version="r/1")

    async def crash(request: Request) -> Response:
        raise RuntimeError("a secret of the inside")

    made.answer("POST", "/echo", echo)
    made.answer("POST", "/wrapped", wrapped)
    made.answer("POST", "/object", Answers())
    made.answer("POST", "/partial", functools.partial(Answers()))
    made.answer("GET", "/slow", slow)
    made.answer("GET", "/thread", thread)
    made.answer("POST", "/fail", fail)
    made.answer("POST", "/crash", crash)
    return made


@contextlib.contextmanager
def serving(*, body_limits: dict[str, int] | None = None, **settings: Any) -> Iterator[str]:
    server = ServerThread(app(), ServerSettings(**settings), body_limits=body_limits)
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    with serving(token=TOKEN) as url:
        yield url


def client(url: str, token: str | None = TOKEN) -> httpx.Client:
    headers = {"content-type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    return httpx.Client(base_url=url, headers=headers, timeout=10, trust_env=False)


def address(url: str) -> tuple[str, int]:
    parsed = httpx.URL(url)
    assert parsed.port is not None
    return parsed.host, parsed.port


def head(length: int) -> bytes:
    fields = ["POST /echo HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN}", f"Content-Length: {length}"]
    fields.append("Content-Type: application/json")
    return "\r\n".join([*fields, "\r\n"]).encode()


@pytest.mark.parametrize("token", [None, "fedcba9876543210"])
@pytest.mark.parametrize(
    "path", ["/echo", "/nothing-here", "/healthz/", "//healthz", "/healthz/../echo", "/openapi.json"]
)
def test_without_the_token_every_path_is_a_typed_401(guarded: str, path: str, token: str | None) -> None:
    """Paths that don't exist too: nobody learns what is there."""
    with client(guarded, token) as http:
        answer = http.post(path, content=b"x")
    assert answer.status_code == 401
    assert answer.json()["error"] == "AuthError"
    assert answer.headers["content-type"] == "application/json"


def test_health_is_open(guarded: str) -> None:
    with client(guarded, None) as http:
        assert http.get("/healthz").json() == {"status": "ok"}


def test_with_the_token_it_works_and_has_no_documentation_pages(guarded: str) -> None:
    with client(guarded) as http:
        assert http.post("/echo", content=b"abc").content == b"abc"
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert http.get(path).status_code == 404


def test_what_a_handler_may_be(guarded: str) -> None:
    """Seen red: one that wraps a coroutine's was called in a thread, and its coroutine was the answer; so was that of
    an object that is called."""
    with client(guarded) as http:
        for path in ("/echo", "/wrapped", "/object", "/partial"):
            assert http.post(path, content=b"abc").content == b"abc"
        assert http.get("/slow").json() == {"in the loop": False}
        assert http.head("/slow").status_code == 405


def test_typed_errors_cross_with_their_status(guarded: str) -> None:
    with client(guarded) as http:
        answer = http.post("/fail")
    error = error_from_dict(answer.json())
    assert answer.status_code == 500
    assert type(error) is LoadError
    assert (error.parameter, error.version) == ("w", "r/1")


def test_an_error_that_is_not_ours_is_typed_and_tells_nothing_of_the_inside(guarded: str) -> None:
    with client(guarded) as http:
        answer = http.post("/crash")
    assert answer.status_code == 500
    assert answer.json()["error"] == "EngineError"
    assert "secret" not in answer.text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/echo", 405)])
def test_a_route_that_is_not_there_is_a_typed_error(guarded: str, method: str, path: str, status: int) -> None:
    with client(guarded) as http:
        answer = http.request(method, path)
        assert http.get("/healthz/").status_code == 404, "no redirect to where the Host header says"
    assert answer.status_code == status
    assert answer.json()["error"] == "UnsupportedError"


def test_a_declared_size_above_the_limit_is_refused_before_a_byte_is_read(guarded: str) -> None:
    with socket.create_connection(address(guarded), timeout=5) as raw:
        raw.sendall(head(1 << 40))
        answer = b""
        while b"InvalidRequestError" not in answer and (more := raw.recv(4000)):
            answer += more
    assert answer.startswith(b"HTTP/1.1 422")
    assert b"InvalidRequestError" in answer


def test_a_body_of_undeclared_size_is_cut_at_the_limit() -> None:
    """Chunked encoding declares nothing, so the bytes are counted."""
    with serving(token=TOKEN, body_limits={"/echo": 1000}) as url, client(url) as http:
        assert http.post("/echo", content=iter([b"x" * 500] * 2)).content == b"x" * 1000
        answer = http.post("/echo", content=iter([b"x" * 500] * 3))
    assert answer.status_code == 422
    assert answer.json()["error"] == "InvalidRequestError"


def asgi(guard: Guard, scope: dict[str, Any], body: bytes = b"") -> list[Any]:
    """Calls a guard without a server, which would turn some of this away first."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), *scope.pop("headers", [])]
    asyncio.run(guard({"path": "/x", "headers": headers, "type": "http", **scope}, receive, send))  # type: ignore[arg-type]
    return sent


async def passed(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "passed"})


@pytest.mark.parametrize(
    "length", [b"-1", b"1e3", b"", b"0x10", b"\xb2", b"9" * 5000, b"12, 12"], ids=lambda value: repr(value[:8])
)
def test_a_length_that_is_no_number(length: bytes) -> None:
    """b"\\xb2" is a digit to `str.isdigit` and none to `int`; 5000 digits are too many for `int`."""
    sent = asgi(Guard(passed, token=None), {"headers": [(b"content-length", length)]})
    assert sent[0]["status"] == 422


def test_a_websocket_needs_the_token_like_everything_else() -> None:
    """A page that any site opens in a browser may open websockets to loopback."""
    for headers in ([], [(b"authorization", b"Bearer wrong")]):
        sent = asgi(Guard(passed, token=TOKEN), {"type": "websocket", "headers": headers})
        assert {"type": "passed"} not in sent


def test_an_error_after_the_answer_began_is_not_a_second_answer() -> None:
    async def late(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise StateError("too late")

    with pytest.raises(StateError):
        asgi(Guard(late, token=None), {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_no_server_beyond_loopback_without_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        ServerSettings(host=host)
    with pytest.raises(ConfigError, match="16 characters"):
        ServerSettings(host=host, token="short")


def test_a_taken_port_is_a_clear_error(guarded: str) -> None:
    _, port = address(guarded)
    with pytest.raises(ConfigError, match=str(port)):
        ServerThread(app(), ServerSettings(port=port)).start()


@pytest.mark.parametrize("options", [{"host": "192.0.2.1", "token": TOKEN}, {"port": 70000}, {"port": -1}], ids=str)
def test_where_nobody_can_listen(options: dict[str, Any]) -> None:
    """192.0.2.1 is not ours; 70000 is no port."""
    with pytest.raises(ConfigError, match="listen"):
        ServerThread(app(), ServerSettings(**options)).start()


def test_a_server_that_could_not_start_does_not_claim_that_it_did(tmp_path: Path) -> None:
    tls = TlsFiles(certificate=str(tmp_path / "no.pem"), key=str(tmp_path / "no.key"))
    server = ServerThread(app(), ServerSettings(tls=tls))
    with pytest.raises(ConfigError, match=r"no TLS with .*no\.pem and .*no\.key"):
        server.start(timeout_s=5)


def test_a_closed_server_gives_its_port_back() -> None:
    port = free_port()
    with serving(port=port):
        pass
    with serving(port=port) as again, client(again, None) as http:
        assert http.get("/healthz").status_code == 200


def test_closing_twice_or_unstarted_is_harmless() -> None:
    ServerThread(app()).close()
    server = ServerThread(app())
    server.start()
    server.close()
    server.close()
    server.wait()


@pytest.mark.alone
def test_small_answers_do_not_wait_for_delayed_acknowledgements() -> None:
    """Seen to fail (41 ms): with the listening socket made without IPPROTO_TCP."""
    with serving(token=TOKEN) as url, client(url) as http:
        for _ in range(3):
            http.post("/echo", content=b"x")
        took = []
        for _ in range(20):
            started = time.perf_counter()
            http.post("/echo", content=b"x" * 200)
            took.append(time.perf_counter() - started)
    assert statistics.median(took) < 0.020, took


def test_clients_that_never_finish_a_request_hold_up_nobody(guarded: str) -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(address(guarded), timeout=5)) for _ in range(80)]
        for number, raw in enumerate(slow):
            raw.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\n"[: 1 + number % 30])
        for raw in slow[:5]:
            raw.sendall(head(9) + b"x")
        with client(guarded) as http:
            for byte in b"X-Slow: 1":
                for raw in slow[10:15]:
                    raw.sendall(bytes([byte]))
                started = time.perf_counter()
                assert http.post("/echo", content=b"abc").content == b"abc"
                assert time.perf_counter() - started < 8


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"\x00" * 300, b"POST / HTTP/9.9\r\n\r\n", b"\r\n" * 50],
    ids=["tls", "no path", "zeros", "version", "empty lines"],
)
def test_garbage_on_the_wire_ends_that_connection_alone(guarded: str, garbage: bytes) -> None:
    with socket.create_connection(address(guarded), timeout=5) as raw:
        raw.sendall(garbage)
        raw.shutdown(socket.SHUT_WR)
        answer = b""
        while more := raw.recv(4000):
            answer += more
    assert answer == b"" or (answer.startswith(b"HTTP/1.1 4") and b'"error": ' in answer)
    with client(guarded) as http:
        assert http.post("/echo", content=b"abc").status_code == 200


@pytest.mark.parametrize("method", ["POST", "HEAD", "GET"])
def test_a_body_that_breaks_off_in_its_framing_is_a_typed_400(
    guarded: str, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """Found by the fuzzer: the answer to a HEAD has no body, and the protocol broke at it."""
    with socket.create_connection(address(guarded), timeout=5) as raw:
        asked = f"{method} /echo HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nTransfer-Encoding: chunked"
        raw.sendall(f"{asked}\r\nContent-Type: application/json\r\n\r\n1\r\nx\r\nzz\r\n".encode())
        answer = b""
        with contextlib.suppress(ConnectionError):
            while more := raw.recv(4000):
                answer += more
    assert answer.startswith(b"HTTP/1.1 400")
    assert (b'"error": ' in answer) == (method != "HEAD")
    with client(guarded) as http:
        servers = http.get("/thread").json()["ident"]
    assert not [record for record in caplog.records if record.exc_info and record.thread == servers]
