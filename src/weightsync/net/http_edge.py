"""What every HTTP client goes by: which URLs are any, how much of an answer is read, which error is in it."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from typing import Any, TypeVar
from urllib.parse import urlsplit

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

_T = TypeVar("_T")

MAX_REPLY_BYTES = 64 << 20
MAX_ERROR_BYTES = 1 << 20
"""The most that is read of an answer that is an error: its words are kept, in a status and in logs."""
_PLACE = re.compile(r"https?://(\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[A-Za-z0-9._-]+)(:[^/?#]*)?([/?#]|$)", re.ASCII)
_SCHEME = re.compile(r"^[A-Za-z][\w+.-]*:/*", re.ASCII)
"""Or what was meant for one: "http:/host", or the user of "user:password@host"."""
NO_ENCODING = {"accept-encoding": "identity"}
"""Of every request: an answer that is compressed may unpack to any size, and is not unpacked."""

OF_A_PROXY = (502, 503, 504)
"""What a proxy answers for one behind it that is away for a moment."""


def checked_url(url: str, *, whose: str) -> str:
    """`url` without a slash at its end.

    Raises:
        ConfigError: it is not http or https, names no host, or has a user or a password in it, which is not quoted.
    """
    if "@" in _SCHEME.sub("", url).partition("/")[0]:
        raise ConfigError(
            f"{whose} URL has an '@': a user and a password in it would stand in every log; give a token instead (the "
            "URL is not shown here)"
        )
    if not url.startswith(("http://", "https://")):
        hint = "" if not url or "://" in url else f": write http://{url}"
        raise ConfigError(f"{whose} URL starts with http:// or https://, not {url!r}{hint}")
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if not _PLACE.match(url) and host:  # `urlsplit` drops, and guesses
            raise ValueError("its host is no name and no address in ASCII, or has something before or after it")
        host.encode("idna")  # as the look-up of its address does
        if ":" in host:
            ipaddress.IPv6Address(host)
        elif host.count(".") == 3 and host.replace(".", "").isdigit():
            ipaddress.IPv4Address(host)
        if any(char.isspace() or not char.isprintable() for char in url):
            raise ValueError("there is a space or a control character in it")
        _ = parts.port
    except ValueError as error:
        problem = f"{whose} URL can't be read"
        if "@" in url:  # a password with a slash in it, perhaps, of which the error tells a part
            raise ConfigError(f"{problem}; it has an '@', and is not shown here: is there a password in it?") from None
        raise ConfigError(f"{problem}: {error}: {url[:200]!r}") from error
    if not host:
        raise ConfigError(f"{whose} URL names no host: {url[:200]!r}")
    return url.rstrip("/")


def broken_exchange(
    error: Exception, what: str, *, url: str, peer: str, deadline: Deadline, late: bool, broke: bool
) -> WeightSyncError:
    """What an exception in an exchange comes to; one after its deadline is a missed one, whatever its type.

    Args:
        what: was asked for.
        late: it says itself that it is one.
        broke: it is one of the connection.
    """
    if late or deadline.expired:
        return DeadlineExceededError(f"{url} did not answer {what} within {deadline.said}", peer=peer)
    where = f"the connection to {url} broke during" if broke else f"{url} could not be asked for"
    why = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return EngineUnreachableError(f"{where} {what}: {why}", peer=peer)


def answered_error(status: int, body: bytes, what: str, *, url: str, peer: str, runs: str) -> WeightSyncError:
    """The error that an answer with that status is: the server's own, where it is one of ours."""
    return told_error(body, peer=peer) or EngineError(
        f"{url} answered {what} with status {status}: {first_words(body)}; is {runs} there?", peer=peer, status=status
    )


def answer_in(status: int, body: bytes, kind: type[_T], what: str, *, url: str, peer: str, runs: str) -> _T:
    """What an answer with a good status says.

    Raises:
        EngineError: it is no such answer.
    """
    try:
        return decode(body, kind, what=f"the answer to {what}")
    except InvalidRequestError as error:
        raise EngineError(
            f"{url} answered {what} with status {status} and what is no answer: {error}; does {runs} run there?",
            peer=peer,
            status=status,
        ) from error


def told_error(body: bytes, *, peer: str) -> WeightSyncError | None:
    """The typed error that one of our own servers put into an answer; None where there is none."""
    with contextlib.suppress(InvalidRequestError):
        answer = decode(body, dict[str, Any], what="the error")
        name, message = answer.get("error"), answer.get("message")  # others' errors are objects, or words: "Not Found"
        if isinstance(name, str) and name.isidentifier() and isinstance(message, str):
            return error_from_dict(answer, peer=peer)
    return None


def first_words(body: bytes) -> str:
    """Of an answer that is none of ours, for an error: one line; of a web page, that it is one."""
    text = " ".join(body[:2000].decode("utf-8", "replace").split())
    if text.lower().startswith(("<!doctype html", "<html")):
        return "a web page"
    return repr(text if len(text) <= 200 else f"{text[:196]} ...")


def reply_limit(status: int, limit_bytes: int | None) -> int:
    limit_bytes = MAX_REPLY_BYTES if limit_bytes is None else limit_bytes
    return limit_bytes if status < 300 else min(limit_bytes, MAX_ERROR_BYTES)
