"""Whose page sent a request: a browser on this host sends whatever any web page says, also to loopback.

A server that asks for a token needs none of this: no page has the token. One that asks for none looks at two headers
that a page can't forge. `Origin` says which page sent it; it is there in every cross-site POST. `Host` says by which
name the browser came: a page whose name was made to resolve to 127.0.0.1 ("DNS rebinding") counts as of the same
origin, and only its name gives it away.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from weightsync.errors import ConfigError, ForbiddenError
from weightsync.net.auth import address_in, is_loopback

ALLOWED_HOSTS_VARIABLE = "WEIGHTSYNC_ALLOWED_HOSTS"
"""Further names by which servers without a token may be called, separated by commas."""


def host_names(names: Iterable[str]) -> frozenset[str]:
    """These names and those of the environment, as they are compared.

    Raises:
        ConfigError: one of the environment's is no name.
    """
    allowed = [name.strip() for name in os.environ.get(ALLOWED_HOSTS_VARIABLE, "").split(",") if name.strip()]
    for name in allowed:
        if set(name) & set("/*;?#@ ") or name.rpartition("]")[2].count(":") == 1:
            raise ConfigError(
                f"{ALLOWED_HOSTS_VARIABLE} has host names, separated by commas, without scheme, port or pattern: "
                f"{name[:100]!r} is none"
            )
    given = [*names, *allowed]
    return frozenset(name.strip().strip("[]").rstrip(".").lower() for name in given if name.strip())


def check_page(headers: Mapping[str, str], names: frozenset[str]) -> None:
    """Refuses what a web page of somebody else's may have sent.

    Args:
        headers: of the request, by names in lower case.
        names: that this server may be called by, beside those of loopback.

    Raises:
        ForbiddenError: a foreign Host or Origin. Nothing was done.
    """
    called = headers.get("host", "")
    host = _name_of(called)
    if host is None or not (is_loopback(host) or host in names):
        raise ForbiddenError(
            f"this server is not called {(host or called)[:100]!r}: without a token it answers to localhost and to the "
            f"host that it listens on alone, so that no web page reaches it by a name of its own; name others in "
            f"{ALLOWED_HOSTS_VARIABLE}, or give it a token",
            state_left="nothing was done",
        )
    origin = headers.get("origin")
    if origin is not None and origin.lower().partition("://")[2] != called.lower():
        raise ForbiddenError(
            f"a web page of {origin[:100]!r} sent this: a server without a token obeys its own pages alone; give it a "
            "token, or have the proxy in front of it pass the Host header on",
            state_left="nothing was done",
        )


def is_foreign_page(headers: Mapping[str, str], names: frozenset[str]) -> bool:
    """Whether a web page sent it that is not this server's own: of another origin, or by a name that was made to lead
    here. For a server that programs may call by any name: what no browser sent is nobody's page.

    Args:
        headers: of the request, by names in lower case.
        names: that this server may be called by, beside addresses and "localhost".
    """
    origin, called = headers.get("origin"), headers.get("host", "").lower()
    if not origin:
        return False
    host = _name_of(called)
    # an address: no page has made a name of it
    by_own_name = host is not None and (is_loopback(host) or host in names or address_in(host) is not None)
    return not by_own_name or origin.lower().partition("://")[2] != called


def _name_of(netloc: str) -> str | None:
    """The host of `host:port`; None where it is none."""
    if not netloc or any(mark in netloc for mark in "/?#@\\ \t"):
        return None
    try:
        parts = urlsplit(f"//{netloc}")
        _ = parts.port
    except ValueError:
        return None
    return (parts.hostname or "").rstrip(".") or None
