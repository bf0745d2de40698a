"""PeerServer: a host serves blocks that it has proved to other hosts, in the frames of a block server.

What a reader shows is made of the content's key, which the agent gives to who may have it, and of this server's own
address: nothing else opens a stream, and what was shown here is of no use elsewhere.

Bytes are copied into the socket, in pieces: the memory may be written again as soon as `Offer.end` has returned, and
nothing that was sent changes any more.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from weightsync.transfer.blocks import Answer, Code, answer_bytes
from weightsync.transfer.stream_door import StreamDoor, asked_block
from weightsync.transfer.tcp import wait_in_kernel

_PIECE_BYTES = 256 << 10
_MAX_STREAMS, _MAX_STREAMS_EACH = 256, 128
_NUM_SENDING = 8
"""So many blocks are sent at one time; the others wait for their turn."""
_ENDS_S = 5.0


class Shared(Protocol):
    """Blocks of one content, in this process's memory."""

    num_blocks: int

    def has(self, block: int) -> bool:
        """Whether that block is there, proved."""

    def block(self, block: int) -> tuple[int, int]:
        """Offset and length of a block, as its source has them."""

    def read(self, block: int) -> memoryview:
        """Its bytes; a view where they lie in one piece, else a copy."""


class Offer:
    """One content that is served, from when it is made to `end`. See `stream_door.Named`."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._num_using = 0
        self.over = False

    @property
    def num_reading(self) -> int:
        """Connections that read it now."""
        return len(self._connections)

    def attach(self, connection: socket.socket) -> bool:
        """A connection begins to read; False where it is over."""
        with self._changed:
            if not self.over:
                self._connections.add(connection)
            return not self.over

    def detach(self, connection: socket.socket) -> None:
        """A connection has ended."""
        with self._changed:
            self._connections.discard(connection)

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """The memory stays what it is while the body runs.

        Raises:
            ConnectionAbortedError: it is over.
        """
        with self._changed:
            if self.over:
                raise ConnectionAbortedError("it is not served any more")
            self._num_using += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_using -= 1
                self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Pauses; not beyond its end."""
        with self._changed:
            self._changed.wait_for(lambda: self.over, seconds)

    def end(self) -> bool:
        """Cuts its connections; when it returns nobody reads the memory any more. Idempotent.

        Returns:
            False: somebody still does, after seconds; the memory must not be written.
        """
        with self._changed:
            self.over = True
            self._changed.notify_all()
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)  # a thread that sends wakes up
            return self._changed.wait_for(lambda: not self._num_using, _ENDS_S)


class PeerServer:
    """From `start` to `close`.

    Args:
        upload_bytes_s: no more is sent in a second, to all together; None: as much as the link takes.
        stall_s: a connection that takes nothing for so long is cut, and one that takes a block for so long, waits for
            `upload_bytes_s` not counted.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        upload_bytes_s: float | None = None,
        stall_s: float = 10.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._upload_bytes_s = upload_bytes_s
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._offers: dict[str, Offer] = {}
        self._free_s = 0.0
        self._turns = threading.BoundedSemaphore(_NUM_SENDING)
        self.sent_bytes = 0
        self._door: StreamDoor[Offer] = StreamDoor(
            host, port, look_up=self._find, serve=self._answer, tls=tls,
            max_streams=_MAX_STREAMS, max_streams_each=_MAX_STREAMS_EACH,
        )  # fmt: skip
        self.rejected = self._door.rejected
        self.port = self._door.port

    def start(self) -> None:
        self._door.start()

    def serve(self, shown: str, offer: Offer) -> None:
        """From now on who shows these 32 hex digits reads that offer. Those of offers that are over are forgotten."""
        with self._lock:
            self._offers = {name: each for name, each in self._offers.items() if not each.over} | {shown: offer}

    def forget_ended(self) -> None:
        """Lets go of the memory of offers that are over."""
        with self._lock:
            self._offers = {name: each for name, each in self._offers.items() if not each.over}

    def close(self) -> None:
        """Stops listening and ends every offer. Idempotent."""
        self._door.close()
        with self._lock:
            offers, self._offers = tuple(self._offers.values()), {}
        for offer in offers:
            offer.end()

    def _find(self, shown: str) -> Offer | None:
        with self._lock:
            return self._offers.get(shown)

    def _answer(self, connection: socket.socket, offer: Offer) -> None:
        shared = offer.shared
        while True:
            block = asked_block(connection, offer, num_blocks=shared.num_blocks, stall_s=self._stall_s)
            if block is None:
                return
            if not shared.has(block):
                connection.sendall(answer_bytes(Answer(code=Code.BAD_REQUEST, block=0, offset=0, length=0)))
                return
            offset, length = shared.block(block)
            head = answer_bytes(Answer(code=Code.OK, block=block, offset=offset, length=length))
            with self._turns:
                self._send(connection, offer, head, block)

    def _send(self, connection: socket.socket, offer: Offer, head: bytes, block: int) -> None:
        if isinstance(connection, ssl.SSLSocket):
            connection.settimeout(self._stall_s)
        else:
            wait_in_kernel(connection, self._stall_s)
        connection.sendall(head)
        with offer.using():
            data = offer.shared.read(block)
        left_s = self._stall_s  # of a block, or a reader that takes a byte at a time would keep others from their turn
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            self._keep_within(len(piece), offer)
            begun_s = time.monotonic()
            while piece:
                with offer.using():
                    num_sent = connection.send(piece)
                piece = piece[num_sent:]
                with self._lock:
                    self.sent_bytes += num_sent
                if time.monotonic() - begun_s > left_s:
                    raise TimeoutError("it takes a block too slowly")
            left_s -= time.monotonic() - begun_s

    def _keep_within(self, num_bytes: int, offer: Offer) -> None:
        """Waits until so many bytes may be sent."""
        if self._upload_bytes_s is None:
            return
        with self._lock:
            now_s = time.monotonic()
            at_s = max(now_s, self._free_s)
            self._free_s = at_s + num_bytes / self._upload_bytes_s
        if at_s > now_s:
            offer.wait(at_s - now_s)
