"""Bearer tokens and who may listen where."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from typing import overload

from weightsync.errors import AuthError, ConfigError

MIN_TOKEN_CHARACTERS = 16
"""Of a server's token; a client is given what a foreign server has."""


@overload
def checked_token(token: str) -> str: ...
@overload
def checked_token(token: str | None) -> str | None: ...
def checked_token(token: str | None) -> str | None:
    """The token as a header can carry it: every token of ours goes through here, a client's as well as a server's.

    What a file, a shell or an environment variable appends (a newline, CRLF, blanks) is taken off. No error quotes
    the token, or any part of it.

    Raises:
        ConfigError: it is empty, or has blanks, control characters or others that no header can carry.
    """
    if token is None:
        return None
    token = token.rstrip()
    if not token:
        raise ConfigError("the token is empty: leave it out, or give one")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError(
            "a token is printable ASCII without blanks or control characters, so that a header can carry it; this one "
            "is not (it is not shown here)"
        )
    return token


def bearer_headers(token: str | None) -> dict[str, str]:
    """Headers that carry the token; none where there is none.

    Raises:
        ConfigError: see `checked_token`.
    """
    token = checked_token(token)
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def address_in(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a text is, in the usual notation; None where it is none."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    address = address_in(host)
    return host == "localhost" if address is None else address.is_loopback


def unmapped(host: str) -> str:
    """An address as its own network writes it: who listens on "::" has callers by IPv4 as ::ffff:a.b.c.d."""
    return str(getattr(address_in(host), "ipv4_mapped", None) or host)


def is_nearby(host: str) -> bool:
    """Whether an address, in whatever notation, leads to this machine or to no host behind a route: loopback,
    link-local (where clouds keep their metadata), multicast, none at all. Names but localhost are not looked up."""
    if (address := address_in(host)) is None:
        try:
            address = ipaddress.ip_address(socket.inet_aton(host))  # 127.1, 0x7f000001: the resolver takes them
        except (OSError, ValueError):
            name = host.lower().rstrip(".")
            return name == "localhost" or name.endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_link_local or mapped.is_multicast or mapped.is_unspecified)


def check_exposure(host: str, token: str | None) -> str | None:
    """Refuses to listen beyond loopback without a token.

    Returns:
        The token, see `checked_token`.

    Raises:
        ConfigError: says what to do. Nothing is listening.
    """
    token = checked_token(token)
    if token is None and not is_loopback(host):
        raise ConfigError(f"host {host!r} is reachable from other machines: give a token, or listen on 127.0.0.1")
    if token is not None and len(token) < MIN_TOKEN_CHARACTERS:
        raise ConfigError(f"a token has at least {MIN_TOKEN_CHARACTERS} characters, this one has {len(token)}")
    return token


def check_token(header: str | None, token: str | None) -> None:
    """Compares an Authorization header with the token, in constant time.

    Raises:
        AuthError: it is missing or wrong.
    """
    if token is None:
        return
    given = (header or "").encode()
    if not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise AuthError(
            "no bearer token was sent: this server demands one ('Authorization: Bearer <token>')"
            if header is None
            else "the bearer token that was sent is not this server's"
        )
