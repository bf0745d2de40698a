"""Where httpx ends: what goes wrong in an exchange becomes a typed error here, once for every HTTP client."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx

from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    InvalidRequestError,
    WeightSyncError,
    error_from_dict,
)
from weightsync.net.messages import decode
from weightsync.types import Deadline

MAX_REPLY_BYTES = 64 << 20
MAX_ERROR_BYTES = 1 << 20
"""The most that is read of an answer that is an error: its words are kept, in a status and in logs."""
NO_ENCODING = {"accept-encoding": "identity"}
"""Of every request: an answer that is compressed may unpack to any size, and is not unpacked."""


def checked_url(url: str, *, whose: str) -> str:
    """`url` without a slash at its end.

    Raises:
        ConfigError: it is not http or https, names no host, or has a user or a password in it, which is not quoted.
    """
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise ConfigError(
            f"{whose} URL has an '@': a user and a password in it would stand in every log; give a token instead (the "
            "URL is not shown here)"
        )
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{whose} URL starts with http:// or https://, not {url!r}")
    try:
        parts = urlsplit(url)
        host = httpx.URL(url).host and parts.hostname  # each lets something pass that the other does not
        (host or "").encode("idna")  # as the look-up of its address does
        _ = parts.port
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"{whose} URL can't be read: {error}: {url[:200]!r}") from error
    if not host:
        raise ConfigError(f"{whose} URL names no host: {url[:200]!r}")
    return url.rstrip("/")


@contextlib.contextmanager
def typed_errors(deadline: Deadline, *, url: str, what: str, peer: str, runs: str) -> Iterator[None]:
    """Translates whatever goes wrong in an exchange of requests and answers.

    Args:
        deadline: when the whole exchange has to be over; an error after it is a missed deadline, whatever its type.
        url: whom the exchange is with.
        what: which of its calls, e.g. "commit".
        peer: the name that the error carries.
        runs: what should be running there, e.g. "the engine".

    Raises:
        EngineUnreachableError: no connection, or it broke, or it could not be tried.
        DeadlineExceededError: no answer in time.
    """
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise EngineUnreachableError(f"can't connect to {url}: {error}; does {runs} run there?", peer=peer) from error
    except httpx.LocalProtocolError:  # its words may be a header's
        raise EngineUnreachableError(
            f"{url} could not be asked for {what}: no such request can be sent", peer=peer
        ) from None
    except httpx.HTTPError as error:
        if isinstance(error, httpx.TimeoutException) or deadline.expired:
            raise DeadlineExceededError(
                f"{url} did not answer {what} within {deadline.timeout_s:g} s", peer=peer
            ) from error
        raise EngineUnreachableError(
            f"the connection to {url} broke during {what}: {type(error).__name__}: {error}", peer=peer
        ) from error
    except WeightSyncError:
        raise
    except Exception as error:  # a host that can't be looked up, a client that was closed, no thread, no memory, ...
        raise EngineUnreachableError(
            f"{url} could not be asked for {what}: {type(error).__name__}: {error}", peer=peer
        ) from error


@contextlib.contextmanager
def cut_at(deadline: Deadline) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """Cuts the request's connection when its time is over, headers or body: httpx's timeouts start anew with every
    byte, and a server may send one now and then for ever. Gives the `trace` extension that the request needs. Only
    for clients that keep no connection for the next request: one that was kept is not known here."""
    lock = threading.Lock()
    connections: list[socket.socket] = []
    over = False

    def cut() -> None:
        nonlocal over
        with lock:
            over = True
            for connection in connections:
                with contextlib.suppress(OSError):  # closed meanwhile
                    # not SSLSocket's own method: it would go on in plain text, were it not at its end
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def trace(event: str, info: dict[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with lock:
                connections.append(info["return_value"].get_extra_info("socket"))
            if over:
                cut()

    timer = threading.Timer(deadline.remaining_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield trace
    finally:
        timer.cancel()


def told_error(body: bytes, *, peer: str) -> WeightSyncError | None:
    """The typed error that one of our own servers put into an answer; None where there is none."""
    with contextlib.suppress(InvalidRequestError):
        told = decode(body, dict[str, Any], what="the error")
        if "error" in told:
            return error_from_dict(told, peer=peer)
    return None


def reply_limit(status: int, limit_bytes: int | None) -> int:
    """The longest answer of that status that is read."""
    limit_bytes = MAX_REPLY_BYTES if limit_bytes is None else limit_bytes
    return limit_bytes if status < 300 else min(limit_bytes, MAX_ERROR_BYTES)


def read_body(
    response: httpx.Response,
    deadline: Deadline,
    *,
    what: str,
    peer: str,
    limit_bytes: int | None = None,
    advice: str = "",
) -> bytes:
    """The body, as long as it is small and comes in time: httpx's own timeout starts anew with every byte.

    Args:
        response: opened, its body not read yet.
        deadline: of the whole exchange.
        what: it is, for messages.
        peer: the name that an error carries.
        limit_bytes: the longest that is taken; `MAX_REPLY_BYTES` where not given.
        advice: what to do where it is longer.

    Raises:
        DeadlineExceededError: it is not whole in time.
        EngineError: it is longer than that.
    """
    body = bytearray()
    limit_bytes = reply_limit(response.status_code, limit_bytes)
    for part in response.iter_raw():
        body += part
        deadline.check(f"end of {what}", peer=peer)
        if len(body) > limit_bytes:
            raise EngineError(f"{what} has over {limit_bytes} bytes{advice and ': '}{advice}", peer=peer)
    return bytes(body)
