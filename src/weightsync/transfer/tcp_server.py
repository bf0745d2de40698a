"""BlockServer: the sending end of TCP pulls, in an agent. One thread a connection, `sendfile` from shared pages.

Why threads: a sender spends its time inside `sendfile`, without the GIL, and a slow receiver then holds nothing but its
own thread and its transfer's lock on the segment.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence

from weightsync.errors import StateError, TransferAbortedError, VersionError
from weightsync.transfer.blocks import Answer, Code, answer_bytes
from weightsync.transfer.granted import RENEWABLE_S, Transfer
from weightsync.transfer.stream_door import StreamDoor, asked_block
from weightsync.transfer.tcp import wait_in_kernel
from weightsync.types import Version
from weightsync.types.publication import Source

_MAX_TRANSFERS = 256
_PIECE_BYTES = 256 << 10
"""With TLS each stream holds so many bytes of its block."""
_LEASE_IDLE_S = 1.0
"""A leased transfer that nobody reads for so long may be of a receiver that was killed: the publisher comes first."""
_SWEEP_EVERY_S = 0.05
_CUTS_UNTIL_LEASE = 2
_MAX_CUT = 10_000
_MAX_OVER = 4096
_SUPERSEDED = "it is superseded: the trainer needs its memory for a newer version"

_logger = logging.getLogger(__name__)


class BlockServer:
    """Serves granted transfers, from `start` to `close`.

    Who may connect, and how many, is in `StreamDoor`.

    Args:
        stall_s: a connection that takes nothing for so long is cut.
        tls: where given, connections speak TLS, and bytes are copied instead of handed to the kernel.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, stall_s: float = 10.0, tls: ssl.SSLContext | None = None
    ) -> None:
        self._stall_s = stall_s
        self._tls = tls
        self._transfers: dict[str, Transfer] = {}
        self._granted = threading.Event()
        self._floor: Version | None = None  # older ones of its run are about to be written over
        self._cut: dict[str, int] = {}  # by receiver, how often in a row; who was cut longest ago first
        self._why_over: dict[str, str] = {}  # by id, of the last transfers; the oldest first
        self._lock = threading.Lock()
        self._closed = False
        self.sent_bytes = 0
        self._door = StreamDoor(host, port, look_up=self._find, serve=self._answer, tls=tls)
        self.rejected = self._door.rejected
        self.port = self._door.port

    @property
    def num_connections(self) -> int:
        return self._door.num_connections

    @property
    def num_transfers(self) -> int:
        with self._lock:
            return len(self._transfers)

    def start(self) -> None:
        """Starts to accept connections, in a thread, and to end transfers that nobody reads, in another."""
        threading.Thread(target=self._sweep, name="weightsync-sweeper", daemon=True).start()
        self._door.start()

    def grant(
        self,
        version: Version,
        source: Source,
        *,
        receiver_id: str,
        take_up_s: float,
        on_end: Callable[[Transfer, bool], None],
        beside: Sequence[Transfer] = (),
        lasting: bool = False,
        lease_s: float | None = None,
    ) -> Transfer:
        """Begins a transfer; earlier ones of the same receiver and model have been given up by it, and end.

        A receiver whose last two transfers were cut as superseded is slower than the trainer, and would never have
        anything: its next one holds its segment by a lease. Only one version at a time is held so.

        Args:
            beside: those of the same receiver that were granted together with it, and go on.
            lease_s: how long a lease may last; None: there must be none now.

        Raises:
            VersionError: the segment is being written again, or is about to be: superseded.
            StateError: transfers of too many receivers are under way.
        """

        def ended(transfer: Transfer, ok: bool) -> None:
            with self._lock:
                self._transfers.pop(transfer.id, None)
                self._why_over[transfer.id] = transfer.why_over
                while len(self._why_over) > _MAX_OVER:
                    del self._why_over[next(iter(self._why_over))]
                if ok:
                    self._cut.pop(transfer.receiver_id, None)
                if ok and transfer.leased:  # which says nothing of its speed: cut once more it has another
                    self._cut[transfer.receiver_id] = _CUTS_UNTIL_LEASE - 1
            on_end(transfer, ok)

        earlier: list[Transfer] = []
        try:
            with self._lock:  # all of it: a reset, or another grant, comes before or after it
                earlier = [
                    each for each in self._transfers.values() if each.receiver_id == receiver_id and each not in beside
                ]
                others = [each for each in self._transfers.values() if each not in earlier]
                receivers = {each.receiver_id for each in others}
                if len(receivers | {receiver_id}) > _MAX_TRANSFERS:
                    raise StateError(f"transfers of {_MAX_TRANSFERS} receivers are under way: try again later")
                if not lasting and self._is_wanted_back(version):
                    raise VersionError("the segment is about to be written: ask for the newest", version=str(version))
                starves = self._cut.get(receiver_id, 0) >= _CUTS_UNTIL_LEASE
                if not starves or lasting or any(each.leased and each.version != version for each in others):
                    lease_s = None
                transfer = Transfer(
                    version, source, receiver_id=receiver_id, take_up_s=take_up_s, lasting=lasting, lease_s=lease_s,
                    idle=beside[0].idle if beside else None, on_end=ended,
                )  # fmt: skip
                self._transfers[transfer.id] = transfer
        except BlockingIOError:
            raise VersionError("the segment is being written again: ask for the newest", version=str(version)) from None
        finally:
            for each in earlier:
                each.end(ok=False, why="its receiver was granted another one since")
        self._granted.set()
        return transfer

    def _is_wanted_back(self, version: Version) -> bool:
        """Whether a reset came for a newer version of its run."""
        floor = self._floor
        return floor is not None and floor.run_id == version.run_id and floor.is_newer_than(version)

    def finish(self, transfer_id: str, *, ok: bool) -> bool:
        """The receiver's acknowledgement; False where the transfer is over, or never was."""
        with self._lock:
            transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return False
        transfer.end(ok=ok, why="its receiver has finished it")
        return True

    def renew(self, transfer_id: str) -> None:
        """The receiver is at work on it, though it does not read yet. What ends transfers of superseded versions, and
        leases, ends it all the same.

        Raises:
            TransferAbortedError: it is over, in words why; or it was renewed for too long.
        """
        with self._lock:
            transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.over:
            raise TransferAbortedError(f"this transfer is over: {self.why_over(transfer_id)}")
        if not transfer.idle.renew():
            raise TransferAbortedError(
                f"nothing was read of this transfer for {RENEWABLE_S:g} s, for which it may be renewed: ask for another"
            )

    def why_over(self, transfer_id: str) -> str:
        """Why a transfer has ended, as far as that is known still."""
        with self._lock:
            return self._why_over.get(transfer_id) or "the agent does not know it (any more)"

    def reset(self, *, keep: Version | None) -> int:
        """Ends all transfers but those of one version, those whose bytes stay, and those whose lease is read; says how
        many. What is older than that version is not granted any more.
        """
        with self._lock:
            self._floor = keep
            old = [
                each
                for each in self._transfers.values()
                if each.version != keep and not each.lasting and (not each.leased or each.idle_s > _LEASE_IDLE_S)
            ]
            for receiver_id in dict.fromkeys(each.receiver_id for each in old):
                self._cut[receiver_id] = self._cut.pop(receiver_id, 0) + 1
            while len(self._cut) > _MAX_CUT:
                del self._cut[next(iter(self._cut))]
        for transfer in old:
            transfer.end(ok=False, why=_SUPERSEDED)
        return len(old)

    def end_all_of(self, segment: str) -> None:
        """Ends the transfers of one segment, which is about to go."""
        with self._lock:
            found = [each for each in self._transfers.values() if each.source.segment == segment]
        for transfer in found:
            transfer.end(ok=False, why="its delta was given up")

    def close(self) -> None:
        """Stops listening and ends every transfer. Idempotent."""
        self._closed = True
        self._granted.set()
        self._door.close()
        with self._lock:
            left = list(self._transfers.values())
        for transfer in left:
            transfer.end(ok=False, why="the agent ends")

    def _sweep(self) -> None:
        """Ends what nobody reads, and leases that have lasted too long."""
        pause = threading.Event()
        while not self._closed:
            self._granted.wait()
            pause.wait(_SWEEP_EVERY_S)
            with self._lock:
                if not self._transfers and not self._closed:
                    self._granted.clear()
                at_s = time.monotonic()
                over = [(each, why) for each in self._transfers.values() if (why := each.expired(at_s)) is not None]
                for transfer, _ in over:
                    if transfer.leased:  # it had its time: others may want the lease
                        self._cut.pop(transfer.receiver_id, None)
            for transfer, why in over:
                try:
                    transfer.end(ok=False, why=why)
                except Exception as error:  # of whoever is told; the segment is given back
                    _logger.warning("the end of transfer %s was not told: %r", transfer.id, error)

    def _find(self, transfer_id: str) -> Transfer | None:
        with self._lock:
            return self._transfers.get(transfer_id)

    def _answer(self, connection: socket.socket, transfer: Transfer) -> None:
        source = transfer.source
        while True:
            block = asked_block(connection, transfer, num_blocks=source.num_blocks, stall_s=self._stall_s)
            if block is None:
                return
            offset, length = source.block(block)
            with self._lock:
                transfer.asked_bytes += length
            transfer.idle.asked()
            head = answer_bytes(Answer(code=Code.OK, block=block, offset=offset, length=length))
            self._send(connection, transfer, head, offset, length)

    def _send(self, connection: socket.socket, transfer: Transfer, head: bytes, offset: int, length: int) -> None:
        connection.settimeout(self._stall_s)
        if self._tls is not None:
            connection.sendall(head)
        else:
            connection.sendall(head, socket.MSG_MORE)
            wait_in_kernel(connection, self._stall_s)  # else sendfile would have to be tried and waited for
        end = offset + length
        while offset < end:
            if transfer.over:
                raise ConnectionAbortedError("the transfer is over")
            if self._tls is not None:
                piece = os.pread(transfer.fd, min(_PIECE_BYTES, end - offset), offset)
                connection.sendall(piece)
                sent = len(piece)
            else:
                sent = os.sendfile(connection.fileno(), transfer.fd, offset, end - offset)
            if sent == 0:
                raise ConnectionAbortedError("the segment is shorter than it was")
            offset += sent
            self._count(sent)

    def _count(self, sent_bytes: int) -> None:
        with self._lock:
            self.sent_bytes += sent_bytes
