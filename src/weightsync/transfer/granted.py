"""Transfer: one granted transfer at its sending end: a lock on its segment, and the connections that read it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable

from weightsync.memory import Lock, Reader
from weightsync.memory.folder import open_own
from weightsync.observe import now_s
from weightsync.types import Version
from weightsync.types.publication import Source


class Transfer:
    """One granted transfer: a lock on its segment, and the connections that read it.

    Args:
        version: of the publication.
        source: what is read.
        receiver_id: who asked.
        take_up_s: it is over when nothing was read for so long.
        lasting: the segment is never written again, so a newer version is no reason to end it.
        on_end: told once, with the transfer and whether the receiver has everything.

    Raises:
        BlockingIOError: the segment is being written.
        SharedMemoryError: it is gone.
    """

    def __init__(
        self,
        version: Version,
        source: Source,
        *,
        receiver_id: str,
        take_up_s: float,
        lasting: bool = False,
        on_end: Callable[[Transfer, bool], None],
    ) -> None:
        self.id = secrets.token_hex(16)
        self.start_s = now_s()
        self.version = version
        self.source = source
        self.receiver_id = receiver_id
        self.lasting = lasting
        self._on_end = on_end
        self._take_up_s = take_up_s
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._segment = Lock(source.segment, Reader.SENT)
        try:
            self.fd = open_own(source.segment, os.O_RDONLY)
        except BaseException:
            self._segment.close()
            raise
        self._over = False
        self._num_reading = 0
        self._timer: threading.Timer | None = None
        self._wait_for_readers()

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._over

    def attach(self, connection: socket.socket) -> bool:
        """A connection begins to read; False where the transfer is over."""
        with self._lock:
            if self._over:
                return False
            self._connections.add(connection)
            self._num_reading += 1
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return True

    def detach(self, connection: socket.socket) -> None:
        """A connection ended. The descriptor is closed with the last one, so that nobody sends from another's."""
        with self._lock:
            self._connections.discard(connection)
            self._num_reading -= 1
            last = self._num_reading == 0
            if last and self._over:
                os.close(self.fd)
        if last and not self._over:
            self._wait_for_readers()

    def end(self, *, ok: bool) -> None:
        """Cuts its connections, discards what they have not delivered, and gives the segment back. Idempotent."""
        with self._lock:
            if self._over:
                return
            self._over = True
            if self._timer is not None:
                self._timer.cancel()
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    # A reset. What lies in the socket's buffer is pages, whose content may change now: some of it may
                    # still be delivered, and the receiver's checksum tells.
                    if not ok:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.shutdown(socket.SHUT_RDWR)
            if self._num_reading == 0:
                os.close(self.fd)
        self._segment.close()
        self._on_end(self, ok)

    def _wait_for_readers(self) -> None:
        timer = threading.Timer(self._take_up_s, self._not_taken_up)
        timer.daemon = True
        with self._lock:
            if self._over or self._num_reading:
                return
            self._timer = timer
        timer.start()

    def _not_taken_up(self) -> None:
        with self._lock:
            if self._num_reading:
                return
        self.end(ok=False)
