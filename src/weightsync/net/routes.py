"""Addresses of this machine, which of them another one can call; sockets that listen on one, or reach another's."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from weightsync.errors import ConfigError
from weightsync.net.auth import is_loopback
from weightsync.types import Deadline

ANY_ADDRESS = ("", "0.0.0.0", "::")
_ANY_PORT = 9
_MOMENT_S = 0.001
_SIOCGIFADDR = 0x8915
_SEEN_S = 30.0
"""So long it is believed how another machine sees this one: either may move."""
_MAX_SEEN = 64
CLOCK = time.monotonic
_seen: dict[tuple[str, int], tuple[float, str | None]] = {}
"""By the other's name and the family: when it was asked, and the address."""


Places = Sequence[tuple[Any, ...]]
"""Addresses of a host, as `socket.getaddrinfo` has them."""


def looked_up(address: tuple[str, int]) -> Places:
    """Where a stream may reach that host and port. It takes as long as name servers take, which nothing bounds: a time
    to connect begins behind it.

    Raises:
        OSError, ValueError, OverflowError: it is nowhere.
    """
    return socket.getaddrinfo(*address, type=socket.SOCK_STREAM)


def dialled(places: Places, within: Deadline) -> socket.socket:
    """A connection to the first of these addresses that answers. One that is silent has its share of that time.

    Raises:
        OSError: the last one's, of those whose family this kernel has.
    """
    failed: OSError | None = None
    for index, (family, kind, protocol, _, place) in enumerate(places):
        with contextlib.ExitStack() as stack:
            try:
                connection = stack.enter_context(socket.socket(family, kind, protocol))
                connection.settimeout(max(_MOMENT_S, within.remaining_s / (len(places) - index)))
                connection.connect(place)
            except OSError as error:
                if failed is None or error.errno != errno.EAFNOSUPPORT:  # which says nothing of the host
                    failed = error
            else:
                stack.pop_all()
                return connection
    raise failed or OSError("its name has no address")


def own_address_towards(host: str, *, family: int = 0) -> str:
    """The address of this machine that `host` sees: a datagram socket that connects asks the routing table, and sends
    nothing.

    Args:
        host: the other machine.
        family: of the address; 0: any.

    Raises:
        OSError: the name of that machine is not known here, or no route leads to it.
    """
    family, _, _, _, address = socket.getaddrinfo(host, _ANY_PORT, family=family, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def address_towards(urls: Iterable[str], *, instead: str) -> str | None:
    """This machine's address as the first of these machines sees it; None where all of them are this one.

    Args:
        urls: of the others.
        instead: what to do where it can't be told, for the error.

    Raises:
        ConfigError: one is no URL, the name of that machine is not known here, or no route leads to it.
    """
    for url in urls:
        try:
            host = urlsplit(url).hostname
        except ValueError:  # half a bracket, say
            host = None
        if not host:
            raise ConfigError(f"{url!r} is no URL: write it as http://HOST:PORT")
        if is_loopback(host):
            continue
        try:
            address = own_address_towards(host)
        except OSError as error:
            raise ConfigError(f"no address of this machine leads to {host} ({error}): {instead}") from error
        if not is_loopback(address):
            return address
    return None


def url_towards(url: str, caller: str, *, instead: str) -> str:
    """By which the machine of `caller` reaches what listens at `url` of this one: an address stands for "all of them".

    Args:
        url: where it listens.
        caller: URL of another machine, or of this one.
        instead: what to do where only this machine reaches it, for the error.

    Raises:
        ConfigError: it is another machine, and `url` is loopback's.
    """
    host, theirs = urlsplit(url).hostname or "", urlsplit(caller).hostname or ""
    if is_loopback(theirs) or not (host in ANY_ADDRESS or is_loopback(host)):
        return url
    try:
        own = _seen_by(theirs, socket.AF_INET if host == "0.0.0.0" else 0)
    except OSError:  # its name is not known yet, say
        return url
    if own is None:
        return url
    if is_loopback(host):
        raise ConfigError(f"{caller} is another machine, and can't reach {url}: {instead}")
    parts = urlsplit(url)
    return parts._replace(netloc=f"{f'[{own}]' if ':' in own else own}:{parts.port}").geturl()


def _seen_by(host: str, family: int) -> str | None:
    """The address of this machine that `host` sees; None where it is this machine. What was known stays where that
    can't be told now.

    Raises:
        OSError: it was never known.
    """
    known, now_s = _seen.get((host, family)), CLOCK()
    if known is not None and now_s - known[0] < _SEEN_S:
        return known[1]
    try:
        own = own_address_towards(host, family=family)
        there = {str(place[0]) for *_, place in socket.getaddrinfo(host, None, family=family)}
    except OSError:
        if known is None:
            raise
        return known[1]
    if len(_seen) >= _MAX_SEEN:
        _seen.clear()
    seen = None if is_loopback(own) or own in there else own
    _seen[host, family] = now_s, seen
    return seen


def interface_towards(host: str) -> str | None:
    """The network interface that leads to `host`; None where that can't be told (IPv6, no Linux)."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        own = own_address_towards(host)
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(reply[20:24]) == own:
                    return name
    return None


def name_leads_here() -> bool:
    """Whether this machine's own name leads to an address of it that others may reach: on many it leads to loopback, on
    some to nothing."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return not any(is_loopback(str(address[0])) for *_, address in found)


def listening(host: str, port: int, *, backlog: int = 2048) -> socket.socket:
    """A listening socket whose connections send at once.

    asyncio turns Nagle's algorithm off only where the socket says that it is TCP; uvicorn's own sockets do
    not say so, and every small answer then waits 40 ms for the peer's delayed acknowledgement (seen).

    Raises:
        ConfigError: the port is taken, or the address is not this host's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except (OSError, OverflowError) as error:
        listener.close()
        where = f"{host}:{port}" if port else host
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        also = "end what listens there (of an earlier start?), or " if taken else ""
        raise ConfigError(f"can't listen on {where}: {error}; {also}choose another port or host") from error
    return listener


def held_port(host: str, port: int) -> socket.socket | None:
    """Keeps a port for a process that listens there, dies, and is started again: meanwhile nobody else is given it.

    It does not listen: who connects meanwhile is refused at once. `listening` still finds it free, as does whoever
    names this port and allows its reuse: the kernel alone gives it to nobody.

    Args:
        port: 0: any that is free.

    Returns:
        The socket that keeps it until it is closed; None where the port is taken already, or the address is not
        this host's: who listens there says so.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # both sides have it, and this one never listens
        holder.bind((host, port))
    except (OSError, OverflowError, ValueError, TypeError):
        holder.close()
        return None
    return holder
