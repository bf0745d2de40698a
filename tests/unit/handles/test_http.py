"""HttpEngine: against a real engine server, and against everything else that may sit behind a URL."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.standins.processes import free_port
from weightsync.clients.async_controller import AsyncControllerClient
from weightsync.engine.server import EngineServer
from weightsync.errors import (
    AuthError,
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    LoadError,
    SyncFailedError,
    WeightSyncError,
)
from weightsync.handles.http import HttpEngine
from weightsync.net.client import JsonClient
from weightsync.types import (
    CommitRequest,
    Deadline,
    DescribeRequest,
    EngineOp,
    EngineReply,
    EngineRequest,
    PauseRequest,
    PhaseRecord,
    Version,
)

TOKEN = "0123456789abcdef"
REPLY = EngineReply(
    engine_id="inside",
    world_size=3,
    version=Version(run_id="r", number=4),
    phases=(PhaseRecord(name="load", start_s=1.0, end_s=2.0, track="t"),),
)


class Handle:
    """An engine that does what a test says."""

    engine_id = "inside"

    def __init__(self, does: Callable[[EngineOp, EngineRequest], EngineReply]) -> None:
        self._does = does

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        return self._does(op, request)


@contextlib.contextmanager
def serving(does: Callable[[EngineOp, EngineRequest], EngineReply]) -> Iterator[str]:
    server = EngineServer(Handle(does), token=TOKEN)
    try:
        yield server.start()
    finally:
        server.close()


def test_requests_arrive_and_replies_come_back_as_they_were() -> None:
    seen: list[tuple[EngineOp, EngineRequest]] = []

    def does(op: EngineOp, request: EngineRequest) -> EngineReply:
        seen.append((op, request))
        return REPLY

    sent = PauseRequest(session="sitzung ü", timeout_s=1.5, lease_s=2.0)
    with serving(does) as url:
        engine = HttpEngine(url + "/", engine_id="outside", token=TOKEN)
        assert engine.call(EngineOp.PAUSE, sent, timeout_s=5) == REPLY
        assert engine.engine_id == "outside"
        assert HttpEngine(url).engine_id == url
        engine.close()
        engine.close()
    assert seen == [(EngineOp.PAUSE, sent)]


def test_a_typed_error_arrives_typed_with_its_facts() -> None:
    def does(op: EngineOp, request: EngineRequest) -> EngineReply:
        raise SyncFailedError("both", causes={"w0": LoadError("bad", parameter="a.b", state_left="old")})

    with serving(does) as url, pytest.raises(SyncFailedError) as caught:
        HttpEngine(url, engine_id="e", token=TOKEN).call(EngineOp.COMMIT, CommitRequest(session="s"), timeout_s=5)
    assert type(caught.value.causes["w0"]) is LoadError
    assert caught.value.causes["w0"].parameter == "a.b"
    assert caught.value.peer == "e"


def test_an_error_that_is_not_ours_is_an_engine_error() -> None:
    def does(op: EngineOp, request: EngineRequest) -> EngineReply:
        raise ZeroDivisionError

    with serving(does) as url, pytest.raises(EngineError, match="500") as caught:
        HttpEngine(url, engine_id="e", token=TOKEN).call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    assert caught.value.peer == "e"


@pytest.mark.parametrize("token", [None, "another-token-of-16"])
def test_the_wrong_token_is_told_as_such(token: str | None) -> None:
    with serving(lambda op, request: REPLY) as url, pytest.raises(AuthError):
        HttpEngine(url, token=token).call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)


def test_calls_from_several_threads_do_not_wait_for_each_other() -> None:
    gate = threading.Barrier(6, timeout=5)

    def does(op: EngineOp, request: EngineRequest) -> EngineReply:
        gate.wait()
        return REPLY

    with serving(does) as url:
        engine = HttpEngine(url, token=TOKEN)
        threads = [
            threading.Thread(target=engine.call, args=(EngineOp.DESCRIBE, DescribeRequest()), kwargs={"timeout_s": 5})
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(6)
        assert not gate.broken
        assert not any(thread.is_alive() for thread in threads)


@contextlib.contextmanager
def raw_server(answers: Callable[[socket.socket], None]) -> Iterator[str]:
    """Reads a describe request, then lets `answers` do what it wants with the connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                conn, _ = listener.accept()
            except OSError:
                return
            with conn, contextlib.suppress(OSError):
                conn.settimeout(5)
                request = b""
                while not request.endswith(b"{}"):  # all of it: closing with unread bytes resets the connection
                    request += conn.recv(65536)
                answers(conn)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(6)


def http(status: str, body: bytes, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body


def describe(url: str, timeout_s: float = 20.0) -> EngineReply:
    engine = HttpEngine(url, engine_id="e", token=TOKEN)
    try:
        return engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=timeout_s)
    finally:
        engine.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"{}",
        b"[]",
        b"null",
        b'{"engine_id": 5}',
        b'{"engine_id": "x", "surprise": 1}',
        b'{"engine_id": "x", "version": {"run_id": "", "number": 1}}',
        b'{"engine_id": "\xff"}',
        b"[" * 200_000,
        b'{"engine_id": "x", "phases": ' + b"[" * 200_000,
        b'{"error": "LoadError", "message": "with 200"}',
        b"<html>proxy</html>",
    ],
    ids=lambda body: repr(body[:40]),
)
def test_200_is_not_yet_a_reply(body: bytes) -> None:
    with raw_server(lambda conn: conn.sendall(http("200 OK", body))) as url, pytest.raises(WeightSyncError) as caught:
        describe(url)
    assert type(caught.value) is EngineError
    assert caught.value.peer == "e"


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        ("500 Oops", b"<html>oops</html>", "text/html"),
        ("502 Bad Gateway", b"", "text/plain"),
        ("404 Not Found", b'{"detail": "Not Found"}', "application/json"),
        ("500 Oops", b"[1, 2]", "application/json"),
        ("500 Oops", b'"error"', "application/json"),
        ("500 Oops", b"\xff\xfe\x00", "application/json"),
        ("500 Oops", b"[" * 200_000, "application/json"),
        ("204 No Content", b"", "text/plain"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_any_other_status_is_an_engine_error_that_shows_it(status: str, body: bytes, kind: str) -> None:
    with raw_server(lambda c: c.sendall(http(status, body, kind))) as url, pytest.raises(EngineError) as caught:
        describe(url)
    assert type(caught.value) is EngineError
    assert status[:3] in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<!DOCTYPE HTML>\n<html>\n<title>Error response</title>", "with status 404: a web page; is"),
        (b"no such\n  route", "with status 404: 'no such route'; is"),
        (b"word " * 100, "word w ...'; is"),
        (b'{"detail":[{"msg":"' + b"x" * 300 + b' is required"}]}', """404: '{"detail":[{"msg":"xxx"""),
    ],
)
def test_an_answer_that_is_none_of_ours_is_told_in_one_line(body: bytes, said: str) -> None:
    """Seen red: a page's first 200 bytes, cut in a tag; and three dots for what has no space in its first 200."""
    answer = http("404 Not Found", body, "text/html")
    with raw_server(lambda c: c.sendall(answer)) as url, pytest.raises(EngineError) as caught:
        HttpEngine(url).call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=5)
    with raw_server(lambda c: c.sendall(answer)) as url, pytest.raises(EngineError) as client:
        JsonClient(url, runs="a test").call("POST", "/x", dict, message={}, timeout_s=5)
    assert said in str(caught.value)
    assert said in str(client.value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": "LoadError", "details": {"self": 1}}',
        b'{"error": "SyncFailedError", "details": {"causes_by_engine": [1]}}',
        b'{"error": {"a": []}, "message": null, "details": 4, "rank": {"x": 1}}',
    ],
    ids=["self", "causes", "types"],
)
def test_a_hostile_error_body_is_still_a_typed_error(body: bytes) -> None:
    with raw_server(lambda c: c.sendall(http("500 Oops", body))) as url, pytest.raises(WeightSyncError):
        describe(url)


def test_a_redirect_is_not_followed() -> None:
    """No address is called that nobody registered, least of all with the token."""
    called = threading.Event()

    def elsewhere(conn: socket.socket) -> None:
        called.set()
        conn.sendall(http("200 OK", b'{"engine_id": "x"}'))

    with (
        raw_server(elsewhere) as other,
        raw_server(
            lambda c: c.sendall(f"HTTP/1.1 307 T\r\nlocation: {other}/\r\ncontent-length: 0\r\n\r\n".encode())
        ) as url,
        pytest.raises(EngineError, match="307"),
    ):
        describe(url)
    assert not called.is_set()


def test_nobody_there() -> None:
    with pytest.raises(EngineUnreachableError) as caught:
        describe(f"http://127.0.0.1:{free_port()}")
    assert caught.value.peer == "e"


@pytest.mark.parametrize(
    "said",
    [b"", b"HTTP/1.1 200 OK\r\ncontent-le", http("200 OK", b"x" * 100)[:-50], b"SSH-2.0-OpenSSH\r\n"],
    ids=["nothing", "half a head", "half a body", "another protocol"],
)
def test_a_connection_that_closes_mid_answer(said: bytes) -> None:
    with raw_server(lambda conn: conn.sendall(said)) as url, pytest.raises(EngineUnreachableError) as caught:
        describe(url)
    assert caught.value.peer == "e"


def until_closed(conn: socket.socket) -> None:
    while conn.recv(4096):
        pass


def test_an_engine_that_never_answers_costs_the_timeout_and_no_more() -> None:
    with raw_server(until_closed) as url:
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError, match="describe") as caught:
            describe(url, timeout_s=1.0)
        assert 0.95 < time.monotonic() - started < 10
    assert caught.value.peer == "e"


def test_an_engine_that_answers_a_byte_at_a_time_costs_the_timeout_and_no_more() -> None:
    """A timeout for each read is none for the answer: a byte now and then would keep a call alive for ever."""
    quit_now = threading.Event()

    def drip(conn: socket.socket) -> None:
        conn.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n")
        end = time.monotonic() + 30
        while not quit_now.wait(0.05) and time.monotonic() < end:
            conn.sendall(b" ")

    with raw_server(drip) as url:
        started = time.monotonic()
        try:
            with pytest.raises(DeadlineExceededError):
                describe(url, timeout_s=0.4)
            assert time.monotonic() - started < 10
        finally:
            quit_now.set()


def test_an_engine_that_sends_its_head_a_byte_at_a_time_costs_the_timeout_and_no_more() -> None:
    quit_now = threading.Event()

    def drip(conn: socket.socket) -> None:
        conn.sendall(b"HTTP/1.1 200 OK\r\nx: ")
        end = time.monotonic() + 30
        while not quit_now.wait(0.05) and time.monotonic() < end:
            conn.sendall(b"a")

    with raw_server(drip) as url:
        started = time.monotonic()
        try:
            with pytest.raises(DeadlineExceededError):
                describe(url, timeout_s=0.4)
            assert time.monotonic() - started < 10
        finally:
            quit_now.set()


@pytest.mark.parametrize(
    "host",
    [
        "a..b", "a" * 64, ".a", "10.0.0.1[::1]", "trainer.internal[::ffff:6.6.6.6]", "[::1]evil.com", "[v1.x]", "[::g]",
        "\uff11\uff12\uff17.0.0.1", "127\u3002\u3002\u30020.1", "\u24d0.com", "a\\b", "a b", "a\tb", "%61", "256.1.1.1",
        "a|b",
    ],
)  # fmt: skip
def test_a_host_that_can_t_be_looked_up_is_no_url(host: str) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        HttpEngine(f"http://{host}:1")


@pytest.mark.parametrize("error", [UnicodeError("label empty"), RuntimeError("can't start new thread"), MemoryError()])
def test_whatever_an_exchange_raises_comes_out_typed(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise error

    async def call() -> None:
        client = AsyncControllerClient("http://127.0.0.1:9")
        monkeypatch.setattr(client, "_exchange", fails)
        await client._call("/wait_version", b"{}", Deadline(60.0))

    with pytest.raises(EngineUnreachableError, match=type(error).__name__) as caught:
        asyncio.run(call())
    assert caught.value.__cause__ is error


def test_an_answer_without_end_is_not_collected() -> None:
    """No size is trusted: an answer is at most some megabytes, whatever the engine says."""
    sent = 0

    def flood(conn: socket.socket) -> None:
        nonlocal sent
        conn.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 400000000\r\n\r\n")
        block = b" " * (1 << 20)
        while sent < 400:
            conn.sendall(block)
            sent += 1

    with raw_server(flood) as url, pytest.raises(EngineError):
        describe(url, timeout_s=30)
    assert sent < 300
