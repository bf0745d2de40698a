"""What one HTTP exchange is made of, by the standard library: a socket whose every call has what is left of a deadline.

A controller tells a hundred services at once, again and again: what a general client does for each exchange (a pool,
events, a timer thread) costs more than the exchange. And a server that sends a byte now and then gains nothing by it.
"""

from __future__ import annotations

import functools
import http.client
import io
import socket
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple

from weightsync.errors import ConfigError
from weightsync.types import Deadline


@functools.cache
def trusted(verify: bool | str) -> ssl.SSLContext:
    """What a client checks certificates with, see `JsonClient`. One for all clients: reading the authorities takes tens
    of milliseconds.

    Raises:
        ConfigError: the file can't be read, or is no PEM file of certificates.
    """
    try:
        context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"verify is {verify!r}: {error}; give the PEM file of the authority's certificate", parameter="verify"
        ) from error
    if verify is False:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class Answer(NamedTuple):
    """What a server answered; the names of `headers` are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


def answer_to(
    connection: http.client.HTTPConnection, method: str, path: str, content: bytes | None, headers: Mapping[str, str]
) -> http.client.HTTPResponse:
    """Sends a request, and reads the answer's head. A server that refuses one answers before it has read its body, and
    closes: what it said is what counts, not that the rest of the body could not be sent."""
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


class TimedSocket:
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
        return _SizedReader(_Reader(self))

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
    def __init__(self, timed: TimedSocket) -> None:
        self._timed = timed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._timed._recv_into(buffer)


class _SizedReader(io.BufferedReader):
    """Reads so many bytes, never all that come: a chunk's length is what the server says, and may be below nothing."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            raise http.client.HTTPException("a chunk of negative length")
        return super().read(size)
