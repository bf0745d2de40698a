"""JsonClient: calls to an HTTP face of ours, each within one deadline; every failure is a typed error."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from weightsync.errors import EngineError, EngineUnreachableError, TransferAbortedError, WeightSyncError
from weightsync.net.auth import bearer_headers
from weightsync.net.exchange import Answer, TimedSocket, answer_to, trusted
from weightsync.net.http_edge import NO_ENCODING, answer_in, answered_error, broken_exchange, checked_url, reply_limit
from weightsync.net.messages import encode
from weightsync.net.routes import dialled, looked_up
from weightsync.types import Deadline

_T = TypeVar("_T")
_NO_HEADERS: Mapping[str, str] = {}
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")
"""What OpenSSL calls an answer in plain text."""
_PART_BYTES = 1 << 20
_MOMENT_S = 0.001
"""For a socket 0 would mean not to wait."""


class JsonClient:
    """Calls to one of our own HTTP faces. Thread-safe.

    Args:
        url: e.g. "http://127.0.0.1:8123".
        runs: what should be running there, for messages.
        token: bearer token of the server.
        connect_timeout_s: how long to try to connect, once the host's name is looked up.
        verify: whether to check an https server's certificate; or the PEM file of the authority that signed it.
        peer: the name that errors carry; the URL where not given.

    Raises:
        ConfigError: the URL is none.
    """

    def __init__(
        self,
        url: str,
        *,
        runs: str,
        token: str | None = None,
        connect_timeout_s: float = 3.0,
        verify: bool | str = True,
        peer: str | None = None,
    ) -> None:
        self.url = checked_url(url, whose=f"{runs}'s")
        self.peer = peer or self.url
        self._runs = runs
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        self._host = parts.hostname
        self._tls = trusted(verify) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path
        self._headers = {**bearer_headers(token), **NO_ENCODING}
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False

    def call(
        self,
        method: str,
        path: str,
        kind: type[_T],
        *,
        message: Any = None,
        timeout_s: float,
        limit_bytes: int | None = None,
        advice: str = "",
    ) -> _T:
        """One exchange.

        Args:
            method, path: what is called.
            kind: type of the answer.
            message: the body; none where not given.
            timeout_s: for the whole exchange.
            limit_bytes: the longest answer that is taken; `http_edge.MAX_REPLY_BYTES` where not given.
            advice: what to do where it is longer, for the error.

        Raises:
            EngineUnreachableError: nobody answered.
            EngineError: the answer is none, or too long.
            DeadlineExceededError: no answer in time.
            WeightSyncError: what the server raised, typed.
        """
        answer = self.answer(
            method,
            path,
            content=None if message is None else encode(message),
            deadline=Deadline(timeout_s),
            limit_bytes=limit_bytes,
            advice=advice,
        )
        return answer_in(answer.status, answer.body, kind, path, url=self.url, peer=self.peer, runs=self._runs)

    def answer(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        headers: Mapping[str, str] = _NO_HEADERS,
        deadline: Deadline,
        limit_bytes: int | None = None,
        advice: str = "",
    ) -> Answer:
        """One exchange of bytes: a good answer, with its headers. See `call` for arguments and errors."""
        sent = {**self._headers, **({} if content is None else {"content-type": "application/json"}), **headers}
        if self._closed:
            raise TransferAbortedError("this client was closed", peer=self.peer)
        with self._typed(deadline, path), self._connected(deadline) as timed:
            connection = http.client.HTTPConnection(self._host, self._port)
            connection.sock = timed
            try:
                answer = answer_to(connection, method, self._prefix + path, content, sent)
            except ConnectionError as error:  # as of a TLS server that is not spoken to by TLS
                if self._tls is None:
                    error.add_note("or does it speak https?")
                raise
            if timed.at_end:
                raise http.client.RemoteDisconnected("its headers were cut off")
            body = self._read(answer, path, reply_limit(answer.status, limit_bytes), advice)
            if answer.status >= 300:
                raise self._error_in(answer.status, body, path)
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, body)

    def close(self) -> None:
        """Ends what is under way. Idempotent."""
        with self._lock:
            self._closed = True
            for each in self._open:
                with contextlib.suppress(OSError):  # not SSLSocket's own: it would go on in plain text
                    socket.socket.shutdown(each, socket.SHUT_RDWR)

    def _read(self, answer: http.client.HTTPResponse, path: str, limit_bytes: int, advice: str) -> bytes:
        parts, num_bytes = [], 0
        while part := answer.read(min(_PART_BYTES, limit_bytes + 1)):
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > limit_bytes:
                raise EngineError(
                    f"{self.url}'s answer to {path} has over {limit_bytes} bytes{advice and ': '}{advice}",
                    peer=self.peer,
                )
        if answer.length:  # what was announced and has not come
            raise http.client.IncompleteRead(b"".join(parts)[:100], answer.length)
        return b"".join(parts)

    @contextlib.contextmanager
    def _connected(self, deadline: Deadline) -> Iterator[TimedSocket]:
        with contextlib.ExitStack() as stack:
            try:
                awaited = f"connection to {self.url}"
                deadline.check(awaited, peer=self.peer)
                places = looked_up((self._host, self._port))
                within = Deadline(min(self._connect_timeout_s, deadline.check(awaited, peer=self.peer)))
                plain = stack.enter_context(dialled(places, within))
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ready = plain
                if self._tls is not None:
                    plain.settimeout(max(_MOMENT_S, within.remaining_s))
                    ready = stack.enter_context(self._tls.wrap_socket(plain, server_hostname=self._host))
            except OSError as error:
                raise EngineUnreachableError(
                    f"can't connect to {self.url}: {self._why(error)}", peer=self.peer
                ) from error
            with self._lock:
                if self._closed:
                    raise TransferAbortedError("this client was closed", peer=self.peer)
                self._open.add(ready)
            try:
                yield TimedSocket(ready, deadline)
            finally:
                with self._lock:
                    self._open.discard(ready)

    def _why(self, error: OSError) -> str:
        if isinstance(error, socket.gaierror):
            return f"the name {self._host!r} is not known here ({error})"
        if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
            return f"what answers there speaks no TLS: write {self.url.replace('https', 'http', 1)}"
        return f"{error}; does {self._runs} run there?"

    @contextlib.contextmanager
    def _typed(self, deadline: Deadline, path: str) -> Iterator[None]:
        try:
            yield
        except WeightSyncError:
            raise
        except Exception as error:  # of the socket or of its answer; a host that can't be looked up, no memory, ...
            if self._closed:
                raise TransferAbortedError("this client was closed", peer=self.peer) from error
            raise broken_exchange(
                error, path, url=self.url, peer=self.peer, deadline=deadline, late=isinstance(error, TimeoutError),
                broke=isinstance(error, OSError | http.client.HTTPException),
            ) from error  # fmt: skip

    def _error_in(self, status: int, body: bytes, path: str) -> WeightSyncError:
        return answered_error(status, body, path, url=self.url, peer=self.peer, runs=self._runs)
