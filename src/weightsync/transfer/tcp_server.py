"""BlockServer: the sending end of TCP pulls, in an agent. One thread a connection, `sendfile` from shared pages.

Why threads: a sender spends its time inside `sendfile`, without the GIL, and a slow receiver then holds nothing but its
own thread and its transfer's lock on the segment.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Callable

from weightsync.errors import ConfigError, StateError, VersionError
from weightsync.memory import Lock, Reader
from weightsync.memory.folder import open_own
from weightsync.observe import now_s
from weightsync.transfer.blocks import ASK, HELLO, MAGIC, Answer, Code, answer_bytes, parse_ask
from weightsync.types import Version
from weightsync.types.publication import Source

_HELLO_WITHIN_S = 5.0
_MAX_CONNECTIONS = 1024
_MAX_TRANSFERS = 256


class Transfer:
    """One granted transfer: a lock on its segment, and the connections that read it.

    Args:
        version: of the publication.
        source: what is read.
        receiver_id: who asked.
        take_up_s: it is over when nothing was read for so long.
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
        on_end: Callable[[Transfer, bool], None],
    ) -> None:
        self.id = secrets.token_hex(16)
        self.start_s = now_s()
        self.version = version
        self.source = source
        self.receiver_id = receiver_id
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


class BlockServer:
    """Serves granted transfers, from `start` to `close`.

    Args:
        host: where to listen.
        port: 0 lets the system choose.
        stall_s: a connection that takes nothing for so long is cut.
        tls: where given, connections speak TLS, and bytes are copied instead of handed to the kernel.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, stall_s: float = 10.0, tls: ssl.SSLContext | None = None
    ) -> None:
        self._host = host
        self._stall_s = stall_s
        self._tls = tls
        self._transfers: dict[str, Transfer] = {}
        self._lock = threading.Lock()
        self._num_connections = 0
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(1024)
        except (OSError, OverflowError) as error:
            self._listener.close()
            raise ConfigError(f"can't listen on {host}:{port}: {error}; choose another port or host") from error
        self.port = int(self._listener.getsockname()[1])

    def start(self) -> None:
        """Starts to accept connections, in a thread."""
        threading.Thread(target=self._accept, name="weightsync-blocks", daemon=True).start()

    def grant(
        self,
        version: Version,
        source: Source,
        *,
        receiver_id: str,
        take_up_s: float,
        on_end: Callable[[Transfer, bool], None],
    ) -> Transfer:
        """Begins a transfer; an earlier one of the same receiver and model has been given up by it, and ends.

        Raises:
            VersionError: the segment is being written again: superseded.
            StateError: too many transfers are under way.
        """
        with self._lock:
            earlier = [each for each in self._transfers.values() if each.receiver_id == receiver_id]
        for each in earlier:
            each.end(ok=False)
        if len(self._transfers) >= _MAX_TRANSFERS:
            raise StateError(f"{_MAX_TRANSFERS} transfers are under way: try again later")

        def ended(transfer: Transfer, ok: bool) -> None:
            with self._lock:
                self._transfers.pop(transfer.id, None)
            on_end(transfer, ok)

        try:
            transfer = Transfer(version, source, receiver_id=receiver_id, take_up_s=take_up_s, on_end=ended)
        except BlockingIOError:
            raise VersionError("the segment is being written again: ask for the newest", version=str(version)) from None
        with self._lock:
            self._transfers[transfer.id] = transfer
        return transfer

    def finish(self, transfer_id: str, *, ok: bool) -> bool:
        """The receiver's acknowledgement; False where the transfer is over, or never was."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return False
        transfer.end(ok=ok)
        return True

    def reset(self, *, keep: Version | None) -> int:
        """Ends all transfers but those of one version; says how many."""
        with self._lock:
            old = [each for each in self._transfers.values() if each.version != keep]
        for transfer in old:
            transfer.end(ok=False)
        return len(old)

    def close(self) -> None:
        """Stops listening and ends every transfer. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset(keep=None)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                threading.Event().wait(0.05)  # out of descriptors: others may be given back
                continue
            with self._lock:
                full = self._num_connections >= _MAX_CONNECTIONS
                self._num_connections += not full
            if full:
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="weightsync-stream", daemon=True).start()
            except RuntimeError:  # no thread can be had now: later ones can
                connection.close()
                with self._lock:
                    self._num_connections -= 1

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_HELLO_WITHIN_S)
                if self._tls is not None:
                    connection = self._tls.wrap_socket(connection, server_side=True)
                self._greet(connection)
        except (OSError, ValueError):  # the peer is gone, too slow, or speaks something else
            pass
        finally:
            connection.close()
            with self._lock:
                self._num_connections -= 1

    def _greet(self, connection: socket.socket) -> None:
        hello = _read(connection, HELLO.size, first_within_s=_HELLO_WITHIN_S, all_within_s=_HELLO_WITHIN_S)
        magic, raw_id = HELLO.unpack(hello) if hello else (b"", b"")
        if magic != MAGIC:
            return
        with self._lock:
            transfer = self._transfers.get(raw_id.hex())
        if transfer is None or not transfer.attach(connection):
            connection.sendall(answer_bytes(Answer(code=Code.ENDED, block=0, offset=0, length=0)))
            return
        try:
            self._answer(connection, transfer)
        finally:
            transfer.detach(connection)

    def _answer(self, connection: socket.socket, transfer: Transfer) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        source = transfer.source
        while True:
            ask = _read(connection, ASK.size, first_within_s=self._stall_s, all_within_s=_HELLO_WITHIN_S)
            if not ask:
                return
            block = parse_ask(ask)
            if transfer.over or block is None or block >= source.num_blocks:
                code = Code.ENDED if transfer.over else Code.BAD_REQUEST
                connection.sendall(answer_bytes(Answer(code=code, block=0, offset=0, length=0)))
                return
            offset, length = source.block(block)
            head = answer_bytes(Answer(code=Code.OK, block=block, offset=offset, length=length))
            self._send(connection, transfer, head, offset, length)

    def _send(self, connection: socket.socket, transfer: Transfer, head: bytes, offset: int, length: int) -> None:
        connection.settimeout(self._stall_s)
        if self._tls is not None:
            connection.sendall(head)
            connection.sendall(os.pread(transfer.fd, length, offset))
            return
        connection.sendall(head, socket.MSG_MORE)
        # A blocking socket with the kernel's own send timeout: else sendfile would have to be tried and waited for.
        connection.settimeout(None)
        whole, part = divmod(self._stall_s, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(whole), int(part * 1e6)))
        end = offset + length
        while offset < end:
            if transfer.over:
                raise ConnectionAbortedError("the transfer is over")
            sent = os.sendfile(connection.fileno(), transfer.fd, offset, end - offset)
            if sent == 0:
                raise ConnectionAbortedError("the segment is shorter than it was")
            offset += sent


def _read(connection: socket.socket, count: int, *, first_within_s: float, all_within_s: float) -> bytes:
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
