"""Every HTTP client of ours before a server that wants to harm it: bounded in time and memory, typed, and no token goes
anywhere else."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.standins.deaf import deaf_server
from weightsync.clients.agent import AgentClient
from weightsync.clients.async_controller import AsyncControllerClient
from weightsync.clients.controller import ControllerClient
from weightsync.clients.host import RolloutClient
from weightsync.errors import ConfigError, EngineError, EngineUnreachableError, WeightSyncError
from weightsync.handles.http import HttpEngine
from weightsync.handles.probe import probe
from weightsync.handles.sglang_api import SGLangApi, SGLangRouter
from weightsync.handles.two_kinds import SGLangServerEngine, VllmServerEngine
from weightsync.handles.vllm_api import VllmHttpApi
from weightsync.net.server import Api, ServerSettings, ServerThread, TlsFiles
from weightsync.types import DescribeRequest, EngineOp

TOKEN = "super-secret-token-0123456789"
TIMEOUT_S = 1.0
LATE_S = 10.0  # of a busy machine, on top
Answer = Callable[[socket.socket], None]


def _gate(url: str, token: str) -> None:
    async def ask() -> None:
        client = AsyncControllerClient(url, token=token)
        try:
            await client.check_rollout_service_status("actor", timeout_s=TIMEOUT_S)
        finally:
            await client.close()

    asyncio.run(ask())


CALLS: dict[str, Callable[[str, str], object]] = {
    "engine": lambda url, token: HttpEngine(url, token=token).call(
        EngineOp.DESCRIBE, DescribeRequest(), timeout_s=TIMEOUT_S
    ),
    "agent": lambda url, token: AgentClient(url, token=token).get_version(timeout_s=TIMEOUT_S),
    "service": lambda url, token: RolloutClient(url, token=token).status(timeout_s=TIMEOUT_S),
    "controller": lambda url, token: ControllerClient(url, token=token).status(timeout_s=TIMEOUT_S),
    "gate": _gate,
    "vllm": lambda url, token: VllmHttpApi(url, token=token).is_paused(timeout_s=TIMEOUT_S),
    "sglang": lambda url, token: SGLangApi(url, token=token).model_info(timeout_s=TIMEOUT_S),
    "router": lambda url, token: SGLangRouter(url, token=token).workers(timeout_s=TIMEOUT_S),
    "probe": lambda url, token: probe(url, token=token, timeout_s=TIMEOUT_S),
}


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads a request's head and does that; what it heard."""
    heard: list[bytes] = []

    def serve(raw: socket.socket) -> None:
        with raw, contextlib.suppress(OSError):
            raw.settimeout(LATE_S)
            said = b""
            while b"\r\n\r\n" not in said and (more := raw.recv(65536)):
                said += more
            heard.append(said)
            answer(raw)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", heard
        listener.shutdown(socket.SHUT_RDWR)


def endless(start: bytes, part: bytes) -> Answer:
    def answer(raw: socket.socket) -> None:
        raw.sendall(start)
        while True:
            raw.sendall(part)

    return answer


def dripping(start: bytes, part: bytes) -> Answer:
    def answer(raw: socket.socket) -> None:
        raw.sendall(start)
        while True:
            raw.sendall(part)
            time.sleep(0.02)

    return answer


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_PACKER = zlib.compressobj(1, wbits=31)
BOMB = b"".join((*(_PACKER.compress(b" " * (1 << 20)) for _ in range(256)), _PACKER.flush()))
HARM: dict[str, Answer] = {
    "nothing": lambda raw: time.sleep(LATE_S),
    "endless body": endless(OK + b"\r\n", b" " * 65536),
    "endless chunks": endless(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 65536 + b"\r\n"),
    "a chunk below nothing": endless(OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", b" " * 65536),
    "endless error": endless(b"HTTP/1.1 500 Oops\r\n\r\n", b'{"error":"' * 6000),
    "endless header": endless(OK, b"X: " + b"y" * 60_000),
    "endless headers": endless(OK, b"X: y\r\n" * 1000),
    "endless continue": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "endless trailers": endless(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n" * 1000),
    "dripping status": dripping(b"HTTP/1.1 2", b"0"),
    "dripping headers": dripping(OK, b"X: y\r\n"),
    "dripping body": dripping(OK + b"Content-Length: 100000\r\n\r\n", b" "),
    "a length of terabytes": lambda raw: raw.sendall(OK + b"Content-Length: 9999999999999\r\n\r\n" + b" " * 10_000),
    "a bomb": lambda raw: raw.sendall(
        OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB
    ),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
def test_what_a_server_sends_is_bounded(harm: str) -> None:
    """All clients at once; each has its own deadline, and 64 MiB are the longest answer that any of them takes."""
    ended: dict[str, tuple[float, BaseException | None]] = {}

    def call(name: str, url: str) -> None:
        started, error = time.monotonic(), None
        try:
            CALLS[name](url, TOKEN)
        except BaseException as caught:
            error = caught
        ended[name] = (time.monotonic() - started, error)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with answering(HARM[harm]) as (url, _):
        threads = [threading.Thread(target=call, args=(name, url)) for name in CALLS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S + 2 * LATE_S)
    assert ended.keys() == CALLS.keys()
    for name, (seconds, error) in ended.items():
        assert isinstance(error, WeightSyncError) or (name == "probe" and error is None), (name, error)
        assert seconds < TIMEOUT_S + LATE_S, (name, seconds)
        assert TOKEN not in repr(error) + str(error)
        assert len(str(error)) < 20_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (len(CALLS) * 64 + 64) << 10  # KiB


@pytest.mark.parametrize(
    ("name", "harm"), [("gate", "endless body"), *((name, "endless error") for name in CALLS if name != "probe")]
)
def test_an_answer_is_cut_where_it_gets_too_long(monkeypatch: pytest.MonkeyPatch, name: str, harm: str) -> None:
    """And not where its time is over."""
    monkeypatch.setattr(sys.modules[__name__], "TIMEOUT_S", 30.0)
    with answering(HARM[harm]) as (url, _), pytest.raises(EngineError, match=f"over {1 << 20} bytes"):
        CALLS[name](url, TOKEN)


def test_a_chunk_of_negative_length_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: all that came until the deadline was read, whatever the limit, and then said to be incomplete."""
    monkeypatch.setattr(sys.modules[__name__], "TIMEOUT_S", 30.0)
    said = OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n" + b" " * (4 << 20)
    with (
        answering(lambda raw: raw.sendall(said)) as (url, _),
        pytest.raises(EngineUnreachableError, match="a chunk of negative length"),
    ):
        CALLS["agent"](url, TOKEN)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_takes_the_token_nowhere(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TIMEOUT_S", 30.0)
    with (
        answering(lambda raw: raw.sendall(OK + b"Content-Length: 2\r\n\r\n{}")) as (elsewhere, stolen),
        answering(
            lambda raw: raw.sendall(
                f"HTTP/1.1 {status} Go\r\nLocation: {elsewhere}/x\r\nContent-Length: 0\r\n\r\n".encode()
            )
        ) as (url, heard),
    ):
        for name, call in CALLS.items():
            with contextlib.nullcontext() if name == "probe" else pytest.raises(WeightSyncError):
                call(url, TOKEN)
    assert len(heard) >= len(CALLS)
    assert all(TOKEN.encode() in said for said in heard)
    assert all(b"accept-encoding: identity" in said.lower() for said in heard), "or it unpacks"
    assert stolen == []


@pytest.mark.parametrize("name", CALLS)
def test_a_token_is_checked_before_it_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TIMEOUT_S", 30.0)
    with answering(lambda raw: raw.sendall(b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n")) as (url, heard):
        for token in (f"{TOKEN}\r\nX-Evil: 1", f"{TOKEN}\x00", f"{TOKEN}\xe9"):
            with pytest.raises(ConfigError) as caught:
                CALLS[name](url, token)
            assert TOKEN not in str(caught.value)
        assert heard == []
        with pytest.raises(WeightSyncError):
            CALLS[name](url, TOKEN + "\r\n")
        assert f"Bearer {TOKEN}\r\n".encode() in heard[0], "what a file appends is taken off"


@pytest.mark.parametrize("name", CALLS)
def test_a_password_in_a_url_is_refused_and_not_shown(name: str) -> None:
    """Seen red: where the scheme was missing, or had a slash too few, the advice repeated it."""
    for scheme in ("http://", "http:/", "https:", ""):
        with pytest.raises(ConfigError) as caught:
            CALLS[name](f"{scheme}me:{TOKEN}@127.0.0.1:1", "x" * 20)
        assert TOKEN not in str(caught.value)
        assert "token" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        CALLS[name](f"http://me:{TOKEN}/x@127.0.0.1:1", "x" * 20)
    assert TOKEN not in str(caught.value)


def test_a_host_of_several_addresses_is_tried_within_one_time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them answers, not even with a refusal. Seen red: each address had that time of its own."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **more: look_up(*asked, **more) * 40)
    with deaf_server() as deaf:
        mute = (socket.AF_INET, socket.SOCK_STREAM, 6, "", deaf.getsockname())
        client = AgentClient(f"http://127.0.0.1:{deaf.getsockname()[1]}", token=TOKEN)
        started = time.monotonic()
        with pytest.raises(WeightSyncError):
            client.get_version(timeout_s=TIMEOUT_S)
        assert time.monotonic() - started < 20 * TIMEOUT_S
        with answering(lambda raw: raw.sendall(b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n")) as (url, heard):
            monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **more: [mute, *look_up(*asked, **more)])
            with pytest.raises(EngineError, match="status 500"):
                AgentClient(url, token=TOKEN).get_version(timeout_s=LATE_S)
            assert heard, "a silent address leaves time for the next one"


def certificate_for(name: str, folder: Path) -> TlsFiles:
    """Signed by itself."""
    files = TlsFiles(certificate=str(folder / "cert.pem"), key=str(folder / "key.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", files.key, "-out", files.certificate,
         "-days", "2", "-subj", "/CN=it", "-addext", f"subjectAltName={name}"],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


@pytest.mark.parametrize("kind", [VllmServerEngine, SGLangServerEngine, HttpEngine])
def test_an_engine_behind_an_authority_of_ones_own_is_trusted(kind: Any, tmp_path: Path) -> None:
    """Seen red: vLLM's certificate was checked by the system's authorities, whatever `verify` was."""
    files = certificate_for("IP:127.0.0.1", tmp_path)
    server = ServerThread(Api("it"), ServerSettings(token=TOKEN, tls=files))
    url = server.start()
    try:
        for verify, words in ((files.certificate, "no route|404"), (True, "certificate")):
            with (
                contextlib.closing(kind(url, token=TOKEN, verify=verify)) as engine,
                pytest.raises(WeightSyncError, match=f"(?i){words}"),
            ):
                engine.call(EngineOp.DESCRIBE, DescribeRequest(model_id="actor"), timeout_s=30.0)
    finally:
        server.close()


def test_a_certificate_that_nobody_signed_is_refused_and_no_request_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TIMEOUT_S", 30.0)
    files = certificate_for("DNS:elsewhere", tmp_path)
    refused: list[int] = []
    server = ServerThread(Api("it"), ServerSettings(token=TOKEN, tls=files), on_refused=lambda: refused.append(1))
    url = server.start()
    try:
        for call in CALLS.values():
            with pytest.raises(EngineUnreachableError, match=r"(?i)certificate"):
                call(url, TOKEN[:-1])
        with pytest.raises(EngineUnreachableError, match=r"(?i)certificate"):  # signed, for another name
            AgentClient(url, token=TOKEN, verify=files.certificate).get_version(timeout_s=TIMEOUT_S)
    finally:
        server.close()
    assert refused == []


def test_a_connection_is_used_again_only_while_a_server_surely_keeps_it() -> None:
    """Seen red: both ended it after 5 s, and a request that met that failed, of a controller that was well."""
    kept_s = uvicorn.Config("nothing:app").timeout_keep_alive

    async def limits() -> float:
        client = AsyncControllerClient("http://127.0.0.1:1")
        pool = client._client._transport._pool  # type: ignore[attr-defined]
        await client.close()
        return float(pool._keepalive_expiry)

    assert asyncio.run(limits()) <= kept_s / 2
