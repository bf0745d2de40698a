"""Wire: one HTTP exchange on a connection of its own, by the standard library, within one deadline.

A controller tells a hundred services at once, again and again: what a general client does for each exchange (a pool,
events, a timer thread) costs more than the exchange. Every read of the socket has what is left of the deadline, so a
server that sends a byte now and then gains nothing by it.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from weightsync.clients.http_edge import reply_limit
from weightsync.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    TransferAbortedError,
    WeightSyncError,
)
from weightsync.types import Deadline

_PART_BYTES = 1 << 20


@functools.cache
def trusted(verify: bool | str) -> ssl.SSLContext:
    """What a client checks certificates with, see `JsonClient`. One for all clients: reading the authorities takes tens
    of milliseconds."""
    return ssl.create_default_context(cafile=verify) if isinstance(verify, str) else httpx.create_ssl_context(verify)


class Wire:
    """Exchanges with one server. Thread-safe.

    Args:
        url: of the server, checked.
        runs: what should be running there, for messages.
        headers: of every request.
        connect_timeout_s: how long to try to connect.
        verify: see `JsonClient`.
    """

    def __init__(
        self, url: str, *, runs: str, headers: Mapping[str, str], connect_timeout_s: float, verify: bool | str
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._url, self._runs = url, runs
        self._host = parts.hostname
        self._tls = trusted(verify) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path
        self._headers = dict(headers)
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False

    def exchange(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None,
        headers: Mapping[str, str],
        deadline: Deadline,
        limit_bytes: int,
        advice: str,
    ) -> tuple[int, bytes]:
        """The status and the body of the answer.

        Raises:
            EngineUnreachableError: no connection, or it broke.
            DeadlineExceededError: no answer in time.
            EngineError: it is longer than `limit_bytes`; `advice` says what to do.
            TransferAbortedError: this was closed.
        """
        if self._closed:
            raise TransferAbortedError("this client was closed", peer=self._url)
        with self._typed(deadline, path), self._connected(deadline, path) as timed:
            connection = http.client.HTTPConnection(self._host, self._port)
            connection.sock = timed
            answer = _answer(connection, method, self._prefix + path, content, {**self._headers, **headers})
            if timed.at_end:
                raise http.client.RemoteDisconnected("its headers were cut off")
            limit_bytes = reply_limit(answer.status, limit_bytes)
            body = bytearray()
            while part := answer.read(min(_PART_BYTES, limit_bytes + 1)):
                body += part
                if len(body) > limit_bytes:
                    raise EngineError(
                        f"{self._url}'s answer to {path} has over {limit_bytes} bytes{advice and ': '}{advice}",
                        peer=self._url,
                    )
            if answer.length:  # what was announced and has not come
                raise http.client.IncompleteRead(bytes(body[:100]), answer.length)
            return answer.status, bytes(body)

    def close(self) -> None:
        """Ends what is under way. Idempotent."""
        with self._lock:
            self._closed = True
            for each in self._open:
                with contextlib.suppress(OSError):  # not SSLSocket's own: it would go on in plain text
                    socket.socket.shutdown(each, socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _connected(self, deadline: Deadline, path: str) -> Iterator[_Timed]:
        try:
            patience_s = min(self._connect_timeout_s, deadline.check(f"connection to {self._url}", peer=self._url))
            plain = socket.create_connection((self._host, self._port), timeout=patience_s)
        except OSError as error:
            raise EngineUnreachableError(
                f"can't connect to {self._url}: {error}; does {self._runs} run there?", peer=self._url
            ) from error
        with plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                ready = plain if self._tls is None else self._tls.wrap_socket(plain, server_hostname=self._host)
            except OSError as error:
                raise EngineUnreachableError(
                    f"can't connect to {self._url}: {error}; does {self._runs} run there?", peer=self._url
                ) from error
            with ready:
                with self._lock:
                    if self._closed:
                        raise TransferAbortedError("this client was closed", peer=self._url)
                    self._open.add(ready)
                try:
                    yield _Timed(ready, deadline)
                finally:
                    with self._lock:
                        self._open.discard(ready)

    @contextlib.contextmanager
    def _typed(self, deadline: Deadline, path: str) -> Iterator[None]:
        try:
            yield
        except WeightSyncError:
            raise
        except Exception as error:  # of the socket or of its answer; a host that can't be looked up, no memory, ...
            if self._closed:
                raise TransferAbortedError("this client was closed", peer=self._url) from error
            if isinstance(error, TimeoutError) or deadline.expired:
                raise DeadlineExceededError(
                    f"{self._url} did not answer {path} within {deadline.timeout_s:g} s", peer=self._url
                ) from error
            broke = isinstance(error, OSError | http.client.HTTPException)
            what = f"the connection to {self._url} broke during" if broke else f"{self._url} could not be asked for"
            raise EngineUnreachableError(f"{what} {path}: {type(error).__name__}: {error}", peer=self._url) from error


def _answer(
    connection: http.client.HTTPConnection, method: str, path: str, content: bytes | None, headers: Mapping[str, str]
) -> http.client.HTTPResponse:
    """Sends it all, and reads the answer's head. A server that refuses a request answers before it has read its body,
    and closes: what it said is what counts, not that the rest of the body could not be sent."""
    try:
        connection.request(method, path, body=content, headers=dict(headers))
    except ValueError:  # its words may be a header's
        raise ValueError("no such request can be sent: its path or a header has characters that can't be") from None
    except (BrokenPipeError, ConnectionResetError) as broke:
        try:
            return connection.getresponse()
        except (OSError, http.client.HTTPException):
            raise broke from None
    return connection.getresponse()


class _Timed:
    """A socket as `http.client` uses it: each of its calls has what is left of the deadline."""

    def __init__(self, inner: socket.socket, deadline: Deadline) -> None:
        self._inner = inner
        self._deadline = deadline
        self.at_end = False

    def sendall(self, data: Any) -> None:
        self._inner.settimeout(self._left_s())
        self._inner.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_Reader(self))

    def close(self) -> None:
        """Its owner closes it."""

    def _recv_into(self, buffer: Any) -> int:
        self._inner.settimeout(self._left_s())
        num_bytes = self._inner.recv_into(buffer)
        self.at_end = num_bytes == 0
        return num_bytes

    def _left_s(self) -> float:
        left_s = self._deadline.remaining_s
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        return left_s


class _Reader(io.RawIOBase):
    def __init__(self, timed: _Timed) -> None:
        self._timed = timed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._timed._recv_into(buffer)
