"""Who may listen where, and who gets in."""

from __future__ import annotations

import traceback

import httpx
import pytest

from weightsync.errors import AuthError, ConfigError
from weightsync.net.auth import bearer_headers, check_exposure, check_token, is_loopback, is_nearby

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    check_exposure(host, None)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "10.0.0.5", "192.168.1.1", "8.8.8.8", "example.org", "", "127.0.0.1.example.org", "localhost.x"],
)
def test_everything_else_needs_one(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="token"):
        check_exposure(host, None)
    check_exposure(host, TOKEN)


@pytest.mark.parametrize("token", ["", "short", "x" * 15])
def test_a_short_token_is_none(token: str) -> None:
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(ConfigError):
            check_exposure(host, token)


BAD_TOKENS = [
    "ein-schlüssel-0123456789",
    "0123456789 abcdef\r\nx: y",
    "0123456789\nabcdef",
    "\n0123456789abcdef",
    "\0" * 20,
]


@pytest.mark.parametrize("token", BAD_TOKENS)
def test_a_token_that_no_header_can_carry_is_refused_at_once_and_not_shown(token: str) -> None:
    """Otherwise the server starts, and every client with the right token is turned away; or a client shows the header
    that could not be sent."""
    for refuse in (lambda: check_exposure("127.0.0.1", token), lambda: bearer_headers(token)):
        with pytest.raises(ConfigError) as caught:
            refuse()
        told = "".join(traceback.format_exception(caught.value, chain=True))
        assert not any(part in told.split("ConfigError:")[1] for part in (token, repr(token)[1:-1], "abcdef", "schl"))


@pytest.mark.parametrize("end", ["\n", "\r\n", " ", "\t\n\n"])
def test_what_a_file_appends_is_no_part_of_a_token(end: str) -> None:
    assert check_exposure("0.0.0.0", TOKEN + end) == TOKEN
    assert bearer_headers(TOKEN + end) == bearer_headers(TOKEN)


def test_an_empty_token_is_none_that_counts() -> None:
    """A variable that is set to nothing must not open a server, nor be sent."""
    for token in ("", "\n"):
        with pytest.raises(ConfigError, match="empty"):
            bearer_headers(token)
        with pytest.raises(ConfigError, match="empty"):
            check_exposure("127.0.0.1", token)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        TOKEN,
        f"bearer {TOKEN}",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN} ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer  {TOKEN}",
        f"Bearer {TOKEN.upper()}",
        "Bearer \xff\xfe",
    ],
)
def test_only_the_whole_token_passes(header: str | None) -> None:
    check_token(bearer_headers(TOKEN)["Authorization"], TOKEN)
    with pytest.raises(AuthError) as caught:
        check_token(header, TOKEN)
    assert TOKEN not in str(caught.value)
    check_token(header, None)


def test_a_token_is_a_header_that_httpx_can_send() -> None:
    assert bearer_headers(None) == {}
    assert httpx.Headers(bearer_headers(TOKEN))["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize(
    ("host", "nearby"),
    [
        ("127.0.0.1", True), ("127.1", True), ("0x7f000001", True), ("2130706433", True), ("::1", True),
        ("::ffff:127.0.0.1", True), ("0.0.0.0", True), ("::", True), ("169.254.169.254", True), ("fe80::1%eth0", True),
        ("224.0.0.1", True), ("localhost", True), ("LOCALHOST.", True), ("a.localhost", True),
        ("10.0.0.1", False), ("192.168.1.1", False), ("2001:db8::1", False), ("host-1", False), ("10.1.example", False),
    ],
)  # fmt: skip
def test_what_is_nearby_is_known_in_every_notation(host: str, nearby: bool) -> None:
    assert is_nearby(host) is nearby
