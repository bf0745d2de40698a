"""Stand-ins around object stores: a real S3 server in a process, a store that fails when told to, and a proxy that
does the same to HTTP."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx

from tests.standins.processes import free_port
from weightsync.errors import StoreAuthError, StoreUnavailableError
from weightsync.objects.base import Data, Found, Listed, ObjectStore
from weightsync.types import Deadline

BUCKET = "bucket"
_START_S = 60.0
_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL")


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """moto's S3 over HTTP, with one bucket; gives its endpoint. This process and its children find it by their
    environment."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    before = {name: os.environ.get(name) for name in _VARIABLES}
    try:
        end_s = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.put(f"{endpoint}/{BUCKET}", trust_env=False, timeout=5.0).status_code == 200:
                    break
            assert time.monotonic() < end_s, "moto's server does not start"
            assert process.poll() is None, "moto's server has ended"
            time.sleep(0.05)
        os.environ.update(zip(_VARIABLES, ("tests-only", "tests-only", "us-east-1", endpoint), strict=True))
        yield endpoint
    finally:
        process.kill()
        process.wait()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def at_endpoint(url: str) -> Iterator[None]:
    """Stores that are opened meanwhile are reached there."""
    before = os.environ["AWS_ENDPOINT_URL"]
    os.environ["AWS_ENDPOINT_URL"] = url
    try:
        yield
    finally:
        os.environ["AWS_ENDPOINT_URL"] = before


Rule = Callable[[str, str, int], str | None]
"""(operation, key, how many operations came before) -> "unavailable", "auth", "die", "lost" (done, and the answer is
lost), "flip", "cut", "lag" (a listing shows nothing), or None."""


class DiedError(BaseException):
    """The process that used the store was killed at this point."""


class FaultyStore:
    """A store that fails as a rule says."""

    def __init__(self, store: ObjectStore, rule: Rule = lambda *_: None) -> None:
        self.url = store.url
        self.inner = store
        self.rule = rule
        self.ops: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def _fault(self, op: str, key: str) -> str | None:
        with self._lock:
            count = len(self.ops)
            self.ops.append((op, key))
        fault = self.rule(op, key, count)
        if fault == "unavailable":
            raise StoreUnavailableError(f"{self.url}/{key}: slow down")
        if fault == "auth":
            raise StoreAuthError(f"{self.url}/{key}: expired")
        if fault == "die":
            raise DiedError
        return fault

    def get(self, key: str, *, deadline: Deadline, unless: str | None = None) -> Found | None:
        fault = self._fault("get", key)
        found = self.inner.get(key, deadline=deadline, unless=unless)
        if fault and found is not None:
            data = found.data[: len(found.data) // 2] if fault == "cut" else flipped(found.data, len(found.data) // 2)
            return Found(data=data, etag=found.etag)
        return found

    def get_range(self, key: str, start: int, into: memoryview, *, deadline: Deadline) -> None:
        fault = self._fault("range", key)
        self.inner.get_range(key, start, into, deadline=deadline)
        if fault:
            into[len(into) // 2] ^= 1

    def put(self, key: str, data: Data, *, deadline: Deadline, replaces: str | None) -> str:
        fault = self._fault("put", key)
        etag = self.inner.put(key, data, deadline=deadline, replaces=replaces)
        if fault == "lost":
            raise StoreUnavailableError(f"{self.url}/{key}: the answer is lost")
        return etag

    def put_large(self, key: str, data: Data, *, deadline: Deadline) -> None:
        fault = self._fault("put_large", key)
        self.inner.put_large(key, data, deadline=deadline)
        if fault == "lost":
            raise StoreUnavailableError(f"{self.url}/{key}: the answer is lost")

    def delete(self, keys: Iterable[str], *, deadline: Deadline) -> None:
        for key in keys:
            self._fault("delete", key)
            self.inner.delete([key], deadline=deadline)

    def list_under(self, prefix: str, *, deadline: Deadline) -> Iterator[Listed]:
        fault = self._fault("list", prefix)
        return iter(()) if fault == "lag" else self.inner.list_under(prefix, deadline=deadline)


def flipped(data: bytes, byte: int, bit: int = 0) -> bytes:
    """The same with one bit turned."""
    turned = bytearray(data)
    turned[byte] ^= 1 << bit
    return bytes(turned)


class FaultProxy:
    """HTTP in front of a server. `rule(method, path)` gives None, a status, "cut" (half of the body, then the end),
    "flip" (one bit of the body), or "drop" (no answer)."""

    def __init__(self, upstream: str) -> None:
        self.rule: Callable[[str, str], int | str | None] = lambda method, path: None
        self.num_asked = 0
        host, port = upstream.removeprefix("http://").split(":")
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                proxy.num_asked += 1
                length = int(self.headers.get("content-length") or 0)
                body = self.rfile.read(length)
                fault = proxy.rule(self.command, self.path)
                if isinstance(fault, int):
                    said = b"<Error><Code>Injected</Code></Error>"
                    self.send_response(fault)
                    self.send_header("content-length", str(len(said)))
                    self.end_headers()
                    self.wfile.write(said)
                    return
                if fault == "drop":
                    self.close_connection = True
                    return
                asked = http.client.HTTPConnection(host, int(port), timeout=30)
                try:
                    headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
                    asked.request(self.command, self.path, body=body, headers=headers)
                    answer = asked.getresponse()
                    data = answer.read()
                    status, said_headers = answer.status, answer.getheaders()
                finally:
                    asked.close()
                if fault == "flip" and data:
                    data = flipped(data, len(data) // 2)
                self.send_response(status)
                for name, value in said_headers:
                    if name.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                        self.send_header(name, value)
                size = next((value for name, value in said_headers if name.lower() == "content-length"), len(data))
                self.send_header("content-length", str(size))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)
                if fault == "cut":
                    self.wfile.flush()
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
