"""Bearer tokens and who may listen where."""

from __future__ import annotations

import hmac
import ipaddress

from weightsync.errors import AuthError, ConfigError


def bearer_headers(token: str | None) -> dict[str, str]:
    """Headers that carry the token; none where there is none."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, token: str | None) -> None:
    """Refuses to listen beyond loopback without a token.

    Raises:
        ConfigError: says what to do. Nothing is listening.
    """
    if token is None and not is_loopback(host):
        raise ConfigError(f"host {host!r} is reachable from other machines: give a token, or listen on 127.0.0.1")
    if token is not None and len(token) < 16:
        raise ConfigError(f"a token has at least 16 characters, this one has {len(token)}")
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError("a token is printable ASCII without blanks: no HTTP header can carry this one")


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
