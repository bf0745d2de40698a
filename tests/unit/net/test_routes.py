"""Which address of this machine another one can call."""

from __future__ import annotations

import socket

import pytest

from weightsync.errors import ConfigError
from weightsync.net.routes import address_towards, interface_towards, listening, name_leads_here, own_address_towards


def test_loopback_needs_no_address_and_an_unknown_machine_is_an_error() -> None:
    assert address_towards(["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3"], instead="") is None
    with pytest.raises(ConfigError, match="say host="):
        address_towards(["http://no-such-machine.invalid:9000"], instead="say host=")


@pytest.mark.parametrize("url", ["127.0.0.1:9000", "host-0:9000", "host-0", ""])
def test_an_address_without_http_is_said_to_lack_it(url: str) -> None:
    """Seen red: no address was said to lead to a machine without a name."""
    with pytest.raises(ConfigError, match=f"'{url}' is no URL: write it as http://HOST:PORT"):
        address_towards([url], instead="say host=")


def test_this_machine_is_seen_as_the_other_one_is_reached() -> None:
    assert own_address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError, match=r"."):
        own_address_towards("no-such-machine.invalid")


def test_the_interface_of_an_address() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("localhost") == "lo"
    assert interface_towards("no address") is None


@pytest.mark.parametrize(
    ("name", "leads"), [("localhost", False), ("no-such-machine.invalid", False), ("8.8.4.4", True)]
)
def test_a_name_that_leads_to_loopback_or_nowhere_leads_nobody_here(
    monkeypatch: pytest.MonkeyPatch, name: str, leads: bool
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: name)
    assert name_leads_here() is leads


def test_a_port_that_is_taken_is_said_with_what_may_hold_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(ConfigError, match="of an earlier start"):
        listening("127.0.0.1", server.getsockname()[1])


def test_where_nobody_can_listen_is_said_without_a_port_that_nobody_named() -> None:
    """Seen red: it said port 0."""
    with pytest.raises(ConfigError, match=r"^can't listen on 192\.0\.2\.1: "):
        listening("192.0.2.1", 0)
    with pytest.raises(ConfigError, match=r"^can't listen on 192\.0\.2\.1:81: "):
        listening("192.0.2.1", 81)
