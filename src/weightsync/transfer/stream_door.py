"""StreamDoor: accepts connections of a block server, hears their hello, and hands each to what it names.

Who says nothing for 5 s is cut, and earlier where such connections are too many, the most numerous address first. Those
that have named something are limited on their own, in all and for each thing named, so that neither a crowd of
strangers nor one reader keeps others out. One thread a connection.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from weightsync.net.door import counted_as
from weightsync.net.routes import listening
from weightsync.transfer.blocks import ASK, HELLO, MAGIC, Answer, Code, answer_bytes, parse_ask
from weightsync.types.process import closed_in_children

HELLO_WITHIN_S = 5.0
MAX_SILENT, MAX_SILENT_A_PEER = 128, 64
"""Connections that have not shown a transfer yet, in all and of one peer (`counted_as`). Beyond it the oldest
goes, of that peer or of the one that has most: an honest one speaks at once."""
MAX_STREAMS = 1536
"""Connections that read a granted transfer, each with a thread."""
MAX_STREAMS_A_TRANSFER = 128


class Named(Protocol):
    """What a hello names."""

    @property
    def num_reading(self) -> int: ...

    @property
    def over(self) -> bool: ...

    def attach(self, connection: socket.socket) -> bool:
        """A connection begins to read; False where it is over."""

    def detach(self, connection: socket.socket) -> None:
        """A connection has ended."""


_T = TypeVar("_T", bound=Named)


class StreamDoor(Generic[_T]):
    """From `start` to `close`.

    Args:
        look_up: what a hello's 32 hex digits name; None: nothing.
        serve: serves one connection of it, which is attached; in the connection's own thread.
        max_streams, max_streams_each: connections that are served, in all and of one thing.

    Attributes:
        rejected: connections that were cut or refused, by reason: "no hello" (wrong, or not in time), "crowd" (none so
            far, and too many such), "no transfer", "full", "no thread".
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        look_up: Callable[[str], _T | None],
        serve: Callable[[socket.socket, _T], None],
        tls: ssl.SSLContext | None = None,
        max_streams: int = MAX_STREAMS,
        max_streams_each: int = MAX_STREAMS_A_TRANSFER,
    ) -> None:
        self._look_up = look_up
        self._serve_named = serve
        self._tls = tls
        self._max_streams = max_streams
        self._max_streams_each = max_streams_each
        self._lock = threading.Lock()
        self._silent: dict[socket.socket, str] = {}  # with whom it counts for; the oldest first
        self._num_streams = 0
        self._closed = False
        self.rejected: collections.Counter[str] = collections.Counter()
        self._listener = listening(host, port, backlog=1024)
        closed_in_children(self, lambda door: door._listener.close())  # the port is free when the parent ends
        self.port = int(self._listener.getsockname()[1])

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._silent) + self._num_streams

    def start(self) -> None:
        threading.Thread(target=self._accept, name="weightsync-blocks", daemon=True).start()

    def close(self) -> None:
        """Stops listening. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                threading.Event().wait(0.05)  # out of descriptors: others may be given back
                continue
            peer = counted_as(address)
            with self._lock:
                if (oldest := self._one_too_many(peer)) is not None:
                    del self._silent[oldest]
                    self.rejected["crowd"] += 1
                    with contextlib.suppress(OSError):  # its thread wakes up and closes it
                        socket.socket.shutdown(oldest, socket.SHUT_RDWR)
                self._silent[connection] = peer
            try:
                threading.Thread(target=self._serve, args=(connection,), name="weightsync-stream", daemon=True).start()
            except RuntimeError:  # no thread can be had now: later ones can
                self._heard_of(connection, rejected="no thread")
                connection.close()

    def _one_too_many(self, peer: str) -> socket.socket | None:
        """Under the lock, before another one from that address: which of the silent ones goes; None: there is room."""
        each_has = collections.Counter(self._silent.values())
        if each_has[peer] < MAX_SILENT_A_PEER:
            if len(self._silent) < MAX_SILENT:
                return None
            peer = each_has.most_common(1)[0][0]
        return next(connection for connection, whose in self._silent.items() if whose == peer)

    def _heard_of(self, connection: socket.socket, *, rejected: str | None = None) -> bool:
        """A connection is silent no longer; False where it has been cut meanwhile."""
        with self._lock:
            known = connection in self._silent
            self._silent.pop(connection, None)
            if known and rejected is not None:
                self.rejected[rejected] += 1
            return known

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(HELLO_WITHIN_S)
            if self._tls is not None:
                connection = self._wrapped(connection, self._tls)
            self._greet(connection)
        except (OSError, ValueError):  # the peer is gone, too slow, or speaks something else
            pass
        finally:
            self._heard_of(connection, rejected="no hello")
            connection.close()

    def _wrapped(self, plain: socket.socket, tls: ssl.SSLContext) -> socket.socket:
        """The same connection with TLS in it; it stays one of the silent while hands are shaken."""
        with self._lock:
            if plain not in self._silent:
                raise ConnectionAbortedError("cut meanwhile")
            peer = self._silent.pop(plain)
            connection = tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
            self._silent[connection] = peer
        try:
            connection.do_handshake()
        except BaseException:
            self._heard_of(connection, rejected="no hello")
            connection.close()
            raise
        return connection

    def _greet(self, connection: socket.socket) -> None:
        hello = read_exactly(connection, HELLO.size, first_within_s=HELLO_WITHIN_S, all_within_s=HELLO_WITHIN_S)
        magic, raw_id = HELLO.unpack(hello) if hello else (b"", b"")
        if magic != MAGIC:
            return
        named = self._look_up(raw_id.hex())
        if named is None:
            if self._heard_of(connection, rejected="no transfer"):
                connection.sendall(answer_bytes(Answer(code=Code.ENDED, block=0, offset=0, length=0)))
            return
        with self._lock:
            full = self._num_streams >= self._max_streams or named.num_reading >= self._max_streams_each
            self._num_streams += not full
        if full:
            self._heard_of(connection, rejected="full")
            return
        try:
            if self._heard_of(connection):
                self._stream(connection, named)
        finally:
            with self._lock:
                self._num_streams -= 1

    def _stream(self, connection: socket.socket, named: _T) -> None:
        if not named.attach(connection):
            connection.sendall(answer_bytes(Answer(code=Code.ENDED, block=0, offset=0, length=0)))
            return
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._serve_named(connection, named)
        finally:
            named.detach(connection)


def asked_block(connection: socket.socket, named: Named, *, num_blocks: int, stall_s: float) -> int | None:
    """The next block that a connection asks for; None: it asks for none any more, or it was told why it gets none."""
    ask = read_exactly(connection, ASK.size, first_within_s=stall_s, all_within_s=HELLO_WITHIN_S)
    if not ask:
        return None
    block = parse_ask(ask)
    if named.over or block is None or block >= num_blocks:
        code = Code.ENDED if named.over else Code.BAD_REQUEST
        connection.sendall(answer_bytes(Answer(code=code, block=0, offset=0, length=0)))
        return None
    return block


def read_exactly(connection: socket.socket, count: int, *, first_within_s: float, all_within_s: float) -> bytes:
    """Exactly `count` bytes; nothing where the peer has ended. A peer that sends byte by byte has `all_within_s`."""
    connection.settimeout(first_within_s)
    data = connection.recv(count)
    if not data:
        return b""
    connection.settimeout(all_within_s / count)
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            return b""
        data += part
    return data
