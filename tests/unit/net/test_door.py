"""The door: connections that send no whole request, of a process with few descriptors; its log; TLS. Real sockets."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from weightsync.errors import EngineUnreachableError
from weightsync.net import protocol as protocol_module
from weightsync.net.client import JsonClient
from weightsync.net.door import counted_as
from weightsync.net.log import OneAWhile
from weightsync.net.server import Api, ServerSettings, ServerThread, TlsFiles
from weightsync.types import Deadline

TOKEN = "0123456789abcdef"
DESCRIPTORS = 200
HALF = b"GET /healthz HTTP/1.1\r\nX"
SERVER = """
import asyncio, os, resource, sys
from starlette.requests import Request
from starlette.responses import Response
from weightsync.net.server import ServerSettings, ServerThread, TlsFiles, Api
port, token, descriptors = int(sys.argv[1]), sys.argv[2] or None, int(sys.argv[3])
app = Api("test")
go, num_waiting = None, 0
async def wait():
    global go, num_waiting
    go = go or asyncio.Event()
    num_waiting += 1
    await go.wait()
    return {"waited": True}
async def waiting():
    return num_waiting
app.answer("GET", "/waiting", waiting)
async def let():
    go.set()
    return {}
app.answer("GET", "/wait", wait)
app.answer("GET", "/let", let)
tls = TlsFiles(certificate=sys.argv[4], key=sys.argv[5]) if sys.argv[4:] else None
server = ServerThread(app, ServerSettings(port=port, token=token, tls=tls))
resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
print(server.start(), flush=True)
held = []
for line in sys.stdin:
    if line == "take all\\n":
        try:
            while True: held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError: pass
    else:
        for each in held: os.close(each)
        held.clear()
    print("done", flush=True)
"""


class Served:
    """A server in a process of its own, with few descriptors."""

    def __init__(self, tmp_path: Path, *, token: str = TOKEN, tls: TlsFiles | None = None) -> None:
        self.log = tmp_path / "stderr"
        files = [] if tls is None else [tls.certificate, tls.key]
        with self.log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVER, "0", token, str(DESCRIPTORS), *files],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.token = token
        port = httpx.URL(self.url).port
        assert port is not None
        self.address = ("127.0.0.1", port)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def ask(self, path: str) -> socket.socket:
        raw = socket.create_connection(self.address, timeout=20)
        authorization = f"Authorization: Bearer {self.token}\r\n" if self.token else ""
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{authorization}Connection: close\r\n\r\n".encode())
        return raw

    def answer(self, raw: socket.socket) -> bytes:
        """The body."""
        with raw:
            said = b""
            while more := raw.recv(4000):
                said += more
        return said.partition(b"\r\n\r\n")[2]

    def health_s(self) -> float:
        """How long an answer takes; no address or certificate is looked up within it."""
        started = time.monotonic()
        with socket.create_connection(self.address, timeout=10) as raw:
            raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert raw.recv(4000).startswith(b"HTTP/1.1 200")
        return time.monotonic() - started

    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.close()


def half_open(address: tuple[str, int], num: int, said: bytes = HALF) -> list[socket.socket]:
    made = []
    for _ in range(num):
        raw = socket.create_connection(address, timeout=10)
        with contextlib.suppress(OSError):  # it was cut meanwhile
            raw.sendall(said)
        made.append(raw)
    return made


@pytest.fixture(autouse=True)
def descriptors() -> Iterator[None]:
    """Of this process: an attacker has more than the server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("token", [TOKEN, ""], ids=["token", "tokenless"])
def test_half_open_connections_shut_nobody_out_and_cut_nobody_who_is_served(tmp_path: Path, token: str) -> None:
    """Five times as many as there are descriptors: the oldest are cut, and who waits for an answer is not."""
    served = Served(tmp_path, token=token)
    try:
        waits = served.ask("/wait")
        while served.answer(served.ask("/waiting")) != b"1":
            time.sleep(0.001)
        attackers = half_open(served.address, 5 * DESCRIPTORS)
        took = [served.health_s() for _ in range(10)]
        assert max(took) < 8, took
        assert min(took) < 1, took
        assert served.num_descriptors() < DESCRIPTORS // 2, "the rest is for what the process is for"
        attackers[0].settimeout(10)
        with contextlib.suppress(ConnectionError):
            assert attackers[0].recv(10) == b"", "the oldest is cut at once"
        for attacker in attackers:
            attacker.close()
        assert served.health_s() < 8
        assert served.answer(served.ask("/let")) == b"{}"
        assert served.answer(waits) == b'{"waited":true}'
        assert len(served.lines()) < 10, served.lines()[:20]
    finally:
        served.close()


def test_a_process_without_a_descriptor_left_goes_on_when_it_has_some(served: Served) -> None:
    """Taken by others of the process: nobody can be cut. Connections wait in the kernel meanwhile."""
    served.health_s()
    served.tell("take all")
    waiting = half_open(served.address, 50, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    server = psutil.Process(served.process.pid)
    before_s = server.cpu_times().user + server.cpu_times().system
    time.sleep(1)  # so that the server meets its limit again and again
    assert server.cpu_times().user + server.cpu_times().system - before_s < 0.2, "it tries without a pause"
    served.tell("give all")
    for each in waiting:
        assert each.recv(4000).startswith(b"HTTP/1.1 200")
        each.close()
    assert served.health_s() < 8
    assert 1 <= len(served.lines()) < 10, served.lines()[:20]


def test_garbage_writes_no_line_a_request(served: Served) -> None:
    for said in (b"GARBAGE\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"):
        for _ in range(60):
            with socket.create_connection(served.address, timeout=10) as raw:
                raw.sendall(said)
                assert raw.recv(4000).startswith(b"HTTP/1.1 4")
    assert len(served.lines()) < 10, served.lines()[:20]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    folder = tmp_path_factory.mktemp("tls")
    files = TlsFiles(certificate=str(folder / "cert.pem"), key=str(folder / "key.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", files.key, "-out", files.certificate,
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


def test_handshakes_that_stall_or_are_none_shut_nobody_out(tmp_path: Path, tls: TlsFiles) -> None:
    """No byte, plain HTTP, half a handshake: the same limits, and no traceback each."""
    served = Served(tmp_path, tls=tls)
    trusting = ssl.create_default_context(cafile=tls.certificate)
    try:
        with httpx.Client(base_url=served.url, verify=trusting, trust_env=False, timeout=10) as http:
            for said in (b"", HALF + b": y\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"):
                attackers = half_open(served.address, 2 * DESCRIPTORS, said)
                assert http.get("/healthz", headers={"connection": "close"}).status_code == 200
                for attacker in attackers:
                    attacker.close()
            assert http.get("/healthz", headers={"connection": "close"}).status_code == 200
        assert len(served.lines()) < 10, served.lines()[:20]
    finally:
        served.close()


@pytest.mark.parametrize("size", [0, 4 << 20])
def test_http_where_tls_is_spoken_is_told_the_cure(tls: TlsFiles, size: int) -> None:
    """Seen red: RemoteDisconnected, or a broken pipe, and no word of https."""
    server = ServerThread(Api("a part of weightsync"), ServerSettings(tls=tls))
    with contextlib.closing(server):
        url = server.start().replace("https", "http", 1)
        with contextlib.closing(JsonClient(url, runs="it")) as client, pytest.raises(EngineUnreachableError) as caught:
            client.answer("POST", "/healthz", content=bytes(size), deadline=Deadline(10.0))
    assert str(caught.value).endswith("; or does it speak https?"), caught.value


def test_a_connection_without_a_request_is_cut_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that asked for its health before: whoever has no token has no right to stay."""
    monkeypatch.setattr(protocol_module, "REQUEST_WITHIN_S", 0.2)
    server = ServerThread(Api("test"), ServerSettings(token=TOKEN))
    port = httpx.URL(server.start()).port
    try:
        for said in (b"", HALF, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
                raw.sendall(said)
                with contextlib.suppress(ConnectionError):
                    while raw.recv(4000):
                        pass
    finally:
        server.close()


def test_a_kind_of_line_is_written_once_a_while_and_then_counted() -> None:
    now_s = [100.0]
    told = OneAWhile(30.0, clock=lambda: now_s[0])

    def record(text: str, *given: object) -> logging.LogRecord:
        return logging.LogRecord("x", logging.WARNING, "", 0, text, given, None)

    assert told.filter(record("cut %s", 1))
    assert not any(told.filter(record("cut %s", number)) for number in range(500))
    assert told.filter(record("another"))
    now_s[0] += 31
    again = record("cut %s", 7)
    assert told.filter(again)
    assert again.getMessage() == "cut 7 (and 500 more of these in 31 s)"
    now_s[0] += 31
    last = record("cut %s", 8)
    assert told.filter(last)
    assert last.getMessage() == "cut 8"
    assert not any(not told.filter(record(f"kind {number}")) for number in range(1000))
    assert len(told._told) <= 64


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        (("10.0.0.2", 1), "10.0.0.2"),
        (("::ffff:10.0.0.2", 1, 0, 0), "10.0.0.2"),
        (("2001:db8::2", 1, 0, 0), "2001:db8::/64"),
        (("fe80::2%eth0", 1, 0, 2), "fe80::/64"),
        ("", ""),
    ],
)
def test_whom_a_connection_counts_for(address: Any, counted: str) -> None:
    """Seen red: a server on "::" counted all callers by IPv4 as one peer, ::/64, so that a crowd took everybody's
    places."""
    assert counted_as(address) == counted
