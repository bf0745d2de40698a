"""Which address of this machine another one can call."""

from __future__ import annotations

import errno
import re
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.standins.clock import StandingClock
from tests.standins.deaf import deaf_server
from weightsync.errors import ConfigError, DeadlineExceededError
from weightsync.net import routes
from weightsync.net.client import JsonClient
from weightsync.net.routes import (
    address_towards,
    dialled,
    interface_towards,
    listening,
    looked_up,
    name_leads_here,
    own_address_towards,
    url_towards,
)
from weightsync.transfer.tcp import TcpSource
from weightsync.types import Deadline, deadline
from weightsync.types.publication import Source


def test_loopback_needs_no_address_and_an_unknown_machine_is_an_error() -> None:
    assert address_towards(["http://127.0.0.1:1", "http://localhost:2", "http://[::1]:3"], instead="") is None
    with pytest.raises(ConfigError, match="say host="):
        address_towards(["http://no-such-machine.invalid:9000"], instead="say host=")


@pytest.mark.parametrize("url", ["127.0.0.1:9000", "host-0:9000", "host-0", "", "http://[::1"])
def test_an_address_without_http_is_said_to_lack_it(url: str) -> None:
    """Seen red: no address was said to lead to a machine without a name; half a bracket was a ValueError."""
    with pytest.raises(ConfigError, match=re.escape(f"'{url}' is no URL: write it as http://HOST:PORT")):
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
    ("url", "caller", "told"),
    [
        ("http://0.0.0.0:9000", "http://127.0.0.1:8700", "http://0.0.0.0:9000"),
        ("http://0.0.0.0:9000", "http://there:8700", "http://10.1.2.3:9000"),
        ("https://[::]:9000", "http://there:8700", "https://10.1.2.3:9000"),
        ("http://10.9.9.9:9000", "http://there:8700", "http://10.9.9.9:9000"),
        ("http://127.0.0.1:9000", "http://there:8700", None),
        ("http://127.0.0.1:9000", "http://10.1.2.3:8700", "http://127.0.0.1:9000"),
        ("http://127.0.0.1:9000", "http://no-such-machine.invalid:8700", "http://127.0.0.1:9000"),
    ],
)
def test_another_machine_is_told_a_url_that_it_reaches(
    url: str, caller: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: a fleet's controller was told http://0.0.0.0:9000, called itself, and every sync failed."""
    look_up = socket.getaddrinfo

    def known(host: str, *asked: Any, **more: Any) -> Any:
        return look_up("10.1.2.4" if host == "there" else host, *asked, **more)

    def own(host: str, *, family: int = 0) -> str:
        known(host, None)
        return "10.1.2.3"

    monkeypatch.setattr(socket, "getaddrinfo", known)
    monkeypatch.setattr(routes, "own_address_towards", own)
    monkeypatch.setattr(routes, "_seen", {})
    if told is not None:
        assert url_towards(url, caller, instead="say --host") == told
    else:
        with pytest.raises(ConfigError, match=r"can.t reach http://127\.0\.0\.1:9000: say --host"):
            url_towards(url, caller, instead="say --host")


def test_another_machine_that_moves_is_told_where_this_one_is_seen_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a controller that had been on this machine was told http://0.0.0.0:9000 on another one, too, and an
    address that this machine had no more, until the service was started again."""
    look_up, now_s, at = socket.getaddrinfo, 1000.0, ["there", "here"]

    def known(host: str, *asked: Any, **more: Any) -> Any:
        if not at[0]:
            raise socket.gaierror("no name server answers")
        return look_up(at[0], *asked, **more)

    monkeypatch.setattr(socket, "getaddrinfo", known)
    monkeypatch.setattr(routes, "own_address_towards", lambda host, *, family=0: known(host, None) and at[1])
    monkeypatch.setattr(routes, "CLOCK", lambda: now_s, raising=False)
    monkeypatch.setattr(routes, "_seen", {}, raising=False)
    told = []
    for at[:] in (("10.1.2.3", "10.1.2.3"), ("10.1.2.4", "10.1.2.3"), ("10.1.2.4", "10.1.2.9"), ("", "10.1.2.9")):
        now_s += 31.0
        told.append(url_towards("http://0.0.0.0:9000", "http://there:8700", instead=""))
    assert told == ["http://0.0.0.0:9000", "http://10.1.2.3:9000", "http://10.1.2.9:9000", "http://10.1.2.9:9000"]


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


def test_silent_addresses_of_a_host_share_one_time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull's streams dial so, too. Seen red there: each address had that time of its own."""
    look_up = socket.getaddrinfo
    with deaf_server() as deaf:
        monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **more: look_up(*asked, **more) * 40)
        started = time.monotonic()
        source = TcpSource(
            Source(endpoint="http://h:1", segment="s", data_start=0, data_end=1, block_bytes=4096),
            None,  # type: ignore[arg-type]
            transfer_id="0" * 32,
            address=deaf.getsockname(),
        )
        for dial in (lambda within: dialled(looked_up(deaf.getsockname()), within), source._connect):
            with pytest.raises(TimeoutError):
                dial(Deadline(0.5))
        assert time.monotonic() - started < 10
        mute = (socket.AF_INET, socket.SOCK_STREAM, 6, "", deaf.getsockname())
        monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **more: [mute, *look_up(*asked, **more)])
        with (
            socket.create_server(("127.0.0.1", 0)) as answers,
            dialled(looked_up(answers.getsockname()), Deadline(2)) as connection,
        ):
            assert connection.getpeername() == answers.getsockname()


@pytest.mark.parametrize(("timeout_s", "client_s", "stream_s"), [(10.0, 3.0, 2.0), (4.0, 0.8, 0.8)])
def test_a_slow_look_up_takes_nothing_of_the_time_to_connect(
    monkeypatch: pytest.MonkeyPatch, timeout_s: float, client_s: float, stream_s: float
) -> None:
    """Seen red: behind a name server that took 3.2 s a millisecond was left to connect, and one for the handshake, so
    each call failed; the error asked whether the peer runs."""
    clock, look_up = StandingClock(monkeypatch, deadline), socket.getaddrinfo
    given: list[float | None] = []
    here = threading.get_ident()  # threads that another test has left have sockets, too

    class Noting(socket.socket):
        def settimeout(self, value: float | None) -> None:
            if threading.get_ident() == here:
                given.append(value)
            super().settimeout(value)

    def slow(*asked: Any, **more: Any) -> Any:
        clock.now_s += 3.2 if threading.get_ident() == here else 0.0
        return look_up(*asked, **more)

    with socket.create_server(("127.0.0.1", 0)) as listens:
        address = listens.getsockname()
        client = JsonClient(f"http://127.0.0.1:{address[1]}", runs="it")
        client._tls = SimpleNamespace(wrap_socket=lambda plain, **_: plain)  # type: ignore[assignment]
        source = TcpSource(
            Source(endpoint="http://h:1", segment="s", data_start=0, data_end=1, block_bytes=4096),
            None,  # type: ignore[arg-type]
            transfer_id="0" * 32, address=address, connect_s=2.0,
        )  # fmt: skip
        monkeypatch.setattr(socket, "socket", Noting)
        monkeypatch.setattr(socket, "getaddrinfo", slow)
        with client._connected(Deadline(timeout_s)):
            assert given == [pytest.approx(client_s)] * 2
        given.clear()
        with source._connect(Deadline(timeout_s)):
            assert given == [pytest.approx(stream_s)] * 2
        with pytest.raises(DeadlineExceededError), client._connected(Deadline(3.0)):
            pass


def test_an_address_of_a_family_that_the_kernel_lacks_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: where it was the first the others were not tried; where it was the last, the error said "Address family
    not supported" of an agent that was down."""
    lacking = (socket.AddressFamily.AF_APPLETALK, socket.SOCK_STREAM, 0, "", ("::1", 1))
    new = socket.socket

    def made(family: int = -1, *more: int, **named: Any) -> socket.socket:
        if family == lacking[0]:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return new(family, *more, **named)

    with new() as nobody, socket.create_server(("127.0.0.1", 0)) as answers:
        nobody.bind(("127.0.0.1", 0))
        there, gone = looked_up(answers.getsockname()), looked_up(nobody.getsockname())
        monkeypatch.setattr(socket, "socket", made)
        with dialled([lacking, *there], Deadline(10)) as connection:
            assert connection.getpeername() == answers.getsockname()
        for places in ([*gone, lacking], [lacking, *gone]):
            with pytest.raises(ConnectionRefusedError):
                dialled(places, Deadline(10))
        with pytest.raises(OSError, match="not supported"):
            dialled([lacking], Deadline(10))
