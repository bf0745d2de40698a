"""Where httpx ends: what goes wrong in an exchange becomes a typed error here, once for every HTTP client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx

from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
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
