"""Who may hold a connection to a server of ours, and for how long: connections are taken here, not by asyncio.

    accept --> waiting: no whole request yet, or nobody known --> its request is being answered, or it showed the token
                 |  10 s, or too many: the oldest is cut                   |  stays
                 v                                                         v

asyncio's own way of taking connections writes a traceback and waits a second for each that meets a full table of
descriptors, thousands in a row (Python 3.11), and knows no limit of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import ipaddress
import itertools
import resource
import socket
import ssl
from collections.abc import Callable

from weightsync.net.auth import unmapped
from weightsync.net.log import logger

HANDSHAKE_WITHIN_S = 10.0
"""How long a TLS handshake may take."""
_TLS_GOODBYE_S = 5.0
_MAX_WAITING = 512
_MIN_WAITING = 16
_TURNS = 6
"""What one peer may have waiting is taken in so many turns of the loop at least: between two is read what others sent,
so who sends a whole request at once is answered in a flood."""
_CUT_AT_ONCE = 16
_PAUSE_S = 0.1
_FRESH_S = 0.25
"""Who has been here for less may have sent a request that was not read yet: a descriptor that is free for a moment must
not go from one to the next of those."""
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Visit:
    """One connection, from its accept to its end. Of the server's event loop."""

    def __init__(self, door: Door, peer: str) -> None:
        self.peer = peer
        self.task: asyncio.Task[None] | None = None
        self.begun = False
        self.since_s = asyncio.get_running_loop().time()
        self._door = door
        self._transport: asyncio.Transport | None = None
        self.known = False  # whether it showed the token

    def connected(self, transport: asyncio.Transport) -> None:
        """Its protocol has it, after the TLS handshake where there is one."""
        self._transport = transport

    def wait(self, waiting: bool) -> None:
        """Whether it may be cut for others: it holds up nothing that somebody was promised."""
        self._door.wait(self, waiting and not self.known)

    def know(self) -> None:
        """It showed the token: it is not cut any more."""
        self.known = True
        self.wait(False)

    def cut(self) -> None:
        """Ends it at once; what was not sent is lost."""
        self._door.wait(self, False)
        if self._transport is not None:
            self._transport.abort()
        elif self.task is not None:
            self.task.cancel()

    def ended(self) -> None:
        self._door.forget(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Room:
    """How many connections there may be: in all, of those that wait, and of these from one peer."""

    in_all: int
    waiting: int
    of_peer: int


class Door:
    """Takes the connections of one listening socket; has the interface of `asyncio.Server` that uvicorn uses.

    Args:
        listener: listens already.
        protocol: makes what a connection speaks.
        tls: where it is encrypted.
    """

    def __init__(
        self, listener: socket.socket, protocol: Callable[[Visit], asyncio.Protocol], tls: ssl.SSLContext | None
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._protocol = protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._visits: set[Visit] = set()
        self._waiting: dict[str, dict[Visit, None]] = {}  # by peer, the oldest first
        self._num_waiting = 0
        self._closed = False
        self._go_on()

    def wait(self, visit: Visit, waiting: bool) -> None:
        of_peer = self._waiting.get(visit.peer, {})
        if waiting == (visit in of_peer):
            return
        if waiting:
            self._waiting.setdefault(visit.peer, of_peer)[visit] = None
            self._num_waiting += 1
            return
        del of_peer[visit]
        self._num_waiting -= 1
        if not of_peer:
            del self._waiting[visit.peer]

    def forget(self, visit: Visit) -> None:
        self.wait(visit, False)
        self._visits.discard(visit)

    def close(self) -> None:
        """Takes no more; handshakes under way end. Idempotent."""
        self._closed = True
        self._loop.remove_reader(self._listener)
        for visit in list(self._visits):
            if visit.task is not None:
                visit.task.cancel()

    async def wait_closed(self) -> None:
        """As `asyncio.Server`."""

    def _go_on(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener)
        self._loop.call_later(_PAUSE_S, self._go_on)

    def _accept(self) -> None:
        room = self._room()
        for _ in range(max(1, room.of_peer // _TURNS)):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._out_of(error)
                return
            self._enter(connection, counted_as(address), room)

    def _out_of(self, error: OSError) -> None:
        """Who waits longest makes room; where nobody does, those that knock wait in the kernel's queue."""
        num_cut = self._cut_oldest(_CUT_AT_ONCE, here_s=_FRESH_S) if error.errno in _NO_DESCRIPTORS else 0
        logger.warning("no connection could be taken: %s; %d that had sent no request were cut", error, num_cut)
        if not num_cut:
            self._pause()

    def _room(self) -> _Room:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # somebody may have changed it
        descriptors = 1 << 20 if soft == resource.RLIM_INFINITY else soft
        waiting = max(_MIN_WAITING, min(_MAX_WAITING, descriptors // 4))
        return _Room(in_all=max(2 * _MIN_WAITING, descriptors * 3 // 4), waiting=waiting, of_peer=waiting * 3 // 4)

    def _enter(self, connection: socket.socket, peer: str, room: _Room) -> None:
        full = len(self._visits) >= room.in_all
        if full and not self._cut_oldest(1):
            connection.close()
            logger.warning("a connection was refused: %d are being answered already", len(self._visits))
            return
        of_peer = self._waiting.get(peer, {})
        if len(of_peer) >= room.of_peer:
            self._tell_of(next(iter(of_peer)).cut)
        elif self._num_waiting >= room.waiting:
            self._tell_of(lambda: self._cut_oldest(1))
        visit = Visit(self, peer)
        self._visits.add(visit)
        self.wait(visit, True)
        connection.setblocking(False)
        visit.task = self._loop.create_task(self._connect(visit, connection))
        visit.task.add_done_callback(lambda _: None if visit.begun else self._drop(visit, connection))

    def _tell_of(self, cut: Callable[[], object]) -> None:
        cut()
        logger.warning("too many connections without a whole request: the oldest was cut")

    def _cut_oldest(self, num: int, *, here_s: float = 0.0) -> int:
        """Cuts so many of the peer that has most, of those that are here for so long; how many there were."""
        if not self._waiting:
            return 0
        of_peer = max(self._waiting.values(), key=len)
        until_s = self._loop.time() - here_s
        oldest = [visit for visit in itertools.islice(of_peer, num) if visit.since_s <= until_s]
        for visit in oldest:
            visit.cut()
        return len(oldest)

    def _drop(self, visit: Visit, connection: socket.socket) -> None:
        connection.close()
        visit.ended()

    async def _connect(self, visit: Visit, connection: socket.socket) -> None:
        visit.begun = True
        within_s = {"ssl_handshake_timeout": HANDSHAKE_WITHIN_S, "ssl_shutdown_timeout": _TLS_GOODBYE_S}
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(visit), connection, ssl=self._tls, **(within_s if self._tls else {})
            )
        except BaseException as error:  # a handshake that failed; the transport closes the socket
            visit.ended()
            if not isinstance(error, OSError | asyncio.CancelledError):  # TimeoutError and ssl.SSLError are OSErrors
                raise
        finally:
            visit.task = None


def counted_as(address: object) -> str:
    """Who a connection counts for: an address; of IPv6, a network, of whose addresses one host has many."""
    host = unmapped(str(address[0])) if isinstance(address, tuple) and address else ""
    with contextlib.suppress(ValueError):
        if ":" in host:
            return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
    return host
