"""What the guard lets through: whose page, what kind of body, how much of it; over real sockets."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import psutil
import pytest
from starlette.requests import Request
from starlette.responses import Response

from weightsync.net import guard as guard_module
from weightsync.net.origin import ALLOWED_HOSTS_VARIABLE
from weightsync.net.server import Api, ServerSettings, ServerThread

TOKEN = "0123456789abcdef"
JSON = {"content-type": "application/json"}
EVIL = "http://evil.example"


def app(done: list[bytes]) -> Api:
    made = Api("test")

    async def act(request: Request) -> Response:
        body = await request.body()
        done.append(body[:100])
        return Response(str(len(body)))

    async def manifest() -> Response:
        return Response("a manifest")

    async def late(request: Request) -> Response:
        return Response("answered without a look at the body")

    for path in ("/act", "/large"):
        for method in ("POST", "PUT", "DELETE"):
            made.answer(method, path, act)
    made.answer("GET", "/manifest", manifest)
    made.answer("POST", "/late", late)
    return made


class Face:
    """A server, what it did, and raw access to it."""

    def __init__(self, *, hosts: Sequence[str] = (), **settings: Any) -> None:
        self.done: list[bytes] = []
        self.server = ServerThread(
            app(self.done), ServerSettings(**settings), hosts=hosts, body_limits={"/large": 32 << 20, "/late": 32 << 20}
        )
        self.url = self.server.start()
        self.port = httpx.URL(self.url).port or 0

    def ask(self, method: str, path: str, headers: dict[str, str], content: bytes | None = None) -> httpx.Response:
        return httpx.request(method, self.url + path, headers=headers, content=content, trust_env=False, timeout=10)

    def raw(self, text: str) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        connection.sendall(text.encode())
        return connection


def answer_of(raw: socket.socket) -> bytes:
    """Head and body; what there is of it where the connection ends."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while more := raw.recv(65536):
            answer += more
            start, found, body = answer.partition(b"\r\n\r\n")
            if found and len(body) >= int(start.partition(b"content-length: ")[2].partition(b"\r")[0] or 0):
                break
    return answer


@pytest.fixture(scope="module")
def tokenless() -> Iterator[Face]:
    face = Face()
    yield face
    face.server.close()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Face]:
    face = Face(token=TOKEN)
    yield face
    face.server.close()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_a_body_that_a_page_can_send_unasked_is_refused(tokenless: Face, method: str, kind: str | None) -> None:
    """Whatever route: no face looks at it itself."""
    before = len(tokenless.done)
    answer = tokenless.ask(method, "/act", {} if kind is None else {"content-type": kind}, b'{"do": "it"}')
    assert (answer.status_code, answer.json()["error"]) == (422, "InvalidRequestError")
    assert len(tokenless.done) == before
    assert tokenless.ask(method, "/act", {"content-type": "application/json; charset=utf-8"}, b"{}").status_code == 200


@pytest.mark.parametrize(
    "origin", [EVIL, "null", "http://127.0.0.1", "http://localhost:1", "", "http://127.0.0.1:{port}.x"]
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/act"), ("GET", "/manifest"), ("OPTIONS", "/act")])
def test_a_page_of_somebody_else_is_refused(tokenless: Face, method: str, path: str, origin: str) -> None:
    headers = {"origin": origin.format(port=tokenless.port), **JSON}
    before = len(tokenless.done)
    answer = tokenless.ask(method, path, headers)
    assert (answer.status_code, answer.json()["error"]) == (403, "ForbiddenError")
    assert len(tokenless.done) == before


def test_a_page_of_its_own_goes_on_working(tokenless: Face) -> None:
    assert tokenless.ask("POST", "/act", {"origin": tokenless.url, **JSON}, b"{}").status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1",
        "x@localhost", "localhost/", "[::1", "", "0.0.0.0",
    ],
)  # fmt: skip
@pytest.mark.parametrize(("method", "path"), [("POST", "/act"), ("GET", "/manifest"), ("GET", "/nothing")])
def test_a_name_that_is_not_ours_gets_nothing(tokenless: Face, method: str, path: str, host: str) -> None:
    """DNS rebinding: the page's own name leads to 127.0.0.1, and its requests count as of its own origin."""
    host = host.format(port=tokenless.port)
    with tokenless.raw(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\n\r\n") as raw:
        answer = answer_of(raw)
    assert answer.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400")), answer
    assert b"a manifest" not in answer


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:{port}", "127.0.0.1:{port}", "127.0.0.2", "[::1]:{port}", "localhost."]
)
def test_names_of_loopback_are_ours(tokenless: Face, host: str) -> None:
    assert tokenless.ask("GET", "/manifest", {"host": host.format(port=tokenless.port)}).text == "a manifest"


def test_a_request_without_a_host_is_refused(tokenless: Face) -> None:
    with tokenless.raw("GET /manifest HTTP/1.0\r\n\r\n") as raw:
        assert b" 403 " in answer_of(raw)


def test_further_names_are_given_or_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED_HOSTS_VARIABLE, "sync.corp, Other.corp.,")
    face = Face(hosts=("trainer-0",))
    try:
        for host in ("trainer-0:80", "sync.corp", "other.corp:8443"):
            assert face.ask("GET", "/manifest", {"host": host}).status_code == 200
        assert face.ask("GET", "/manifest", {"host": "corp"}).status_code == 403
    finally:
        face.server.close()


def test_health_is_told_to_whoever_asks_by_whatever_name(tokenless: Face, guarded: Face) -> None:
    """A kubelet asks by the pod's address."""
    for face in (tokenless, guarded):
        assert face.ask("GET", "/healthz", {"host": "10.1.2.3:80", "origin": EVIL}).status_code == 200


def test_with_the_token_a_request_is_no_pages(guarded: Face) -> None:
    """Behind a proxy, or under a service's name."""
    headers = {"authorization": f"Bearer {TOKEN}", "host": "sync.svc.cluster.local", "origin": EVIL, **JSON}
    assert guarded.ask("POST", "/act", headers, b"{}").status_code == 200
    for kind in ("text/plain", ""):
        assert guarded.ask("POST", "/act", {**headers, "content-type": kind}, b"{}").status_code == 422


def head(path: str, length: int | None, *, token: str | None = None, host: str = "localhost") -> str:
    fields = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
    fields += [] if token is None else [f"Authorization: Bearer {token}"]
    fields.append("Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}")
    return "\r\n".join([*fields, "\r\n"])


@pytest.mark.parametrize("path", ["/act", "/nothing"])
def test_most_bodies_have_kilobytes_at_most(tokenless: Face, path: str) -> None:
    limit = guard_module.BODY_BYTES
    with tokenless.raw(head(path, limit + 1)) as raw:
        answer = answer_of(raw)
    assert answer.startswith(b"HTTP/1.1 422")
    assert b"InvalidRequestError" in answer
    assert tokenless.ask("POST", "/act", JSON, b"x" * limit).text == str(limit)
    assert tokenless.ask("POST", "/large", JSON, b"x" * (4 << 20)).text == str(4 << 20)


@pytest.mark.parametrize("path", ["/act", "/large", "/late"])
@pytest.mark.parametrize("length", [20 << 20, None], ids=["declared", "chunked"])
def test_without_the_token_nothing_of_a_body_is_read(guarded: Face, path: str, length: int | None) -> None:
    """The answer comes before the body, and the connection ends with it."""
    part = b"x" * (1 << 20) if length else b"%x\r\n%b\r\n" % (1 << 20, b"x" * (1 << 20))
    sent = 0
    with guarded.raw(head(path, length)) as raw:
        with contextlib.suppress(OSError):
            while sent < 200:
                raw.sendall(part)
                sent += 1
        answer = answer_of(raw)
    assert answer.startswith(b"HTTP/1.1 401"), answer
    assert sent < 20, "it reads on: what the kernel takes is some megabytes"


def test_a_body_that_its_route_does_not_read_is_not_read_on(tokenless: Face) -> None:
    sent = 0
    with tokenless.raw(head("/late", None)) as raw, contextlib.suppress(OSError):
        while sent < 200:
            raw.sendall(b"%x\r\n%b\r\n" % (1 << 20, b"x" * (1 << 20)))
            sent += 1
    assert sent < 20


def test_bodies_together_have_a_limit_and_are_given_back() -> None:
    """In a process of its own: what other tests' threads take and free of this one's memory is no body."""
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        processes.submit(_hold_and_give_back_bodies).result(120)


def _hold_and_give_back_bodies() -> None:
    """64 MiB here: twice the longest body. Half-sent ones of 20 MiB each."""
    tokenless = Face()
    part, size = b"x" * (1 << 20), 20
    process, held = psutil.Process(), tokenless.server.guard
    answers: list[bytes] = []
    over = threading.Event()

    def send() -> None:
        with tokenless.raw(head("/large", (size << 20) + 1)) as raw:
            with contextlib.suppress(OSError):
                for _ in range(size):
                    raw.sendall(part)
                while not over.is_set() and not select.select([raw], [], [], 0.05)[0]:
                    pass
            if not over.is_set():
                answers.append(answer_of(raw))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 30
    while len(answers) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(answers) == 5, "three fit"
    assert all(answer.startswith(b"HTTP/1.1 503") and b"BusyError" in answer for answer in answers)
    assert held.held_bytes <= 64 << 20
    assert tokenless.ask("POST", "/act", JSON, b"").status_code == 200
    assert held.held_bytes > 40 << 20, "or nothing can be given back"
    most = process.memory_info().rss - held.held_bytes + (24 << 20)
    over.set()
    for thread in threads:
        thread.join(10)
    until = time.monotonic() + 10
    while (held.held_bytes or process.memory_info().rss > most) and time.monotonic() < until:
        time.sleep(0.02)
    assert held.held_bytes == 0
    assert (rss_bytes := process.memory_info().rss) <= most, f"{rss_bytes} bytes, at most {most}"
    tokenless.server.close()


def test_a_body_that_does_not_come_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "BODY_WITHIN_S", 0.2)
    face = Face()
    try:
        with face.raw(head("/act", 100) + "{") as raw:
            answer = answer_of(raw)
            assert raw.recv(10) == b"", "and the connection ends"
        assert answer.startswith(b"HTTP/1.1 504")
        assert b"DeadlineExceededError" in answer
    finally:
        face.server.close()


def test_a_refusal_of_a_large_body_is_what_our_clients_see() -> None:
    """And not the broken connection that it comes with."""
    from weightsync.errors import AuthError
    from weightsync.handles.http import HttpEngine
    from weightsync.net.client import JsonClient
    from weightsync.types import BeginRequest, EngineOp, Manifest, TensorSpec, Version

    face = Face(token=TOKEN)
    names = [TensorSpec(name=f"{number:09}" * 20, dtype="int8", shape=(1,)) for number in range(40_000)]
    manifest = Manifest(version=Version(run_id="r", number=1), model_id="m", tensors=tuple(names))
    request = BeginRequest(session="s", manifest=manifest, deadline_s=1.0)
    try:
        with pytest.raises(AuthError):
            HttpEngine(face.url, token="another-token-0123").call(EngineOp.BEGIN, request, timeout_s=10)
        with pytest.raises(AuthError):
            JsonClient(face.url, runs="it", token=None).call("POST", "/large", dict, message=request, timeout_s=10)
    finally:
        face.server.close()
