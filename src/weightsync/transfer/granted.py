"""Transfer: one granted transfer at its sending end: a lock on its segment, and the connections that read it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable

from weightsync.memory import Lock, Reader
from weightsync.memory.folder import open_own
from weightsync.observe import now_s
from weightsync.types import Version
from weightsync.types.publication import Source

RENEWABLE_S = 1800.0
"""From the grant on, or the last block that it asked for, a receiver may say for so long that it is at work, without
reading: terabytes need room."""


class IdleClock:
    """Since when nobody reads any of the transfers that one receiver was granted together: it reads them in turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_reading = 0
        self._since_s = time.monotonic()
        self._renewable_until_s = self._since_s + RENEWABLE_S

    def renew(self) -> bool:
        """The receiver is at work, though it does not read; False where it has said so for too long."""
        with self._lock:
            now_s = time.monotonic()
            if now_s > self._renewable_until_s:
                return False
            self._since_s = now_s
            return True

    def asked(self) -> None:
        """A block is read now."""
        with self._lock:
            self._renewable_until_s = time.monotonic() + RENEWABLE_S

    def count(self, step: int) -> None:
        """One connection more reads, or one less."""
        with self._lock:
            self._num_reading += step
            self._since_s = time.monotonic()

    def seconds(self, at_s: float) -> float:
        """For how long, at a time of the monotonic clock; 0 while somebody reads."""
        with self._lock:
            return 0.0 if self._num_reading else at_s - self._since_s


class Transfer:
    """One granted transfer: a lock on its segment, and the connections that read it.

    Args:
        take_up_s: it is over when nothing was read for so long; see `expired`.
        idle: of what was granted together with it; one of its own where not given.
        lasting: the segment is never written again, so a newer version is no reason to end it.
        lease_s: holds the segment by a lease, which the publisher never waits for, for so long at most.
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
        lease_s: float | None = None,
        idle: IdleClock | None = None,
        on_end: Callable[[Transfer, bool], None],
    ) -> None:
        self.id = secrets.token_hex(16)
        self.start_s = now_s()
        self.version = version
        self.source = source
        self.receiver_id = receiver_id
        self.lasting = lasting
        self.asked_bytes = 0  # of blocks; the block server's to count
        self.leased = lease_s is not None
        self._on_end = on_end
        self._take_up_s = take_up_s
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self.over = False
        self.why_over = ""
        self.num_reading = 0
        self.idle = idle or IdleClock()
        self._lease_ends_s = None if lease_s is None else time.monotonic() + lease_s
        self._segment = Lock(source.segment, Reader.SENT if lease_s is None else Reader.MAPPED)
        try:
            self.fd = open_own(source.segment, os.O_RDONLY)
        except BaseException:
            self._segment.close()
            raise

    def expired(self, at_s: float) -> str | None:
        """Why it is over at a time of the monotonic clock: nobody has read it for too long, or its lease is over. None:
        it is not. Whoever has granted it asks again and again, and ends it.
        """
        if self._lease_ends_s is not None and at_s > self._lease_ends_s:
            return "its lease on the version is over: the receiver is too slow for the trainer's pace"
        if self.idle.seconds(at_s) > self._take_up_s:
            return f"its receiver has neither read nor renewed it for {self._take_up_s:g} s"
        return None

    @property
    def idle_s(self) -> float:
        """For how long nobody has read it, nor what was granted with it; 0 while somebody does."""
        return self.idle.seconds(time.monotonic())

    def attach(self, connection: socket.socket) -> bool:
        """A connection begins to read; False where the transfer is over."""
        with self._lock:
            if self.over:
                return False
            self._connections.add(connection)
            self.num_reading += 1
        self.idle.count(1)
        return True

    def detach(self, connection: socket.socket) -> None:
        """A connection ended. The descriptor is closed with the last one, so that nobody sends from another's."""
        with self._lock:
            self._connections.discard(connection)
            self.num_reading -= 1
            if self.num_reading == 0 and self.over:
                os.close(self.fd)
        self.idle.count(-1)

    def end(self, *, ok: bool, why: str = "") -> None:
        """Cuts its connections, discards what they have not delivered, and gives the segment back. Idempotent.

        Args:
            ok: whether the receiver has everything.
            why: it is over, for the receiver.
        """
        with self._lock:
            if self.over:
                return
            self.over = True
            self.why_over = why
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    # A reset. What lies in the socket's buffer is pages, whose content may change now: some of it may
                    # still be delivered, and the receiver's checksum tells.
                    if not ok:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    # not an SSLSocket's own, which forgets TLS first: a thread that sends would send in clear
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)
            if self.num_reading == 0:
                os.close(self.fd)
        self._segment.close()
        self._on_end(self, ok)
