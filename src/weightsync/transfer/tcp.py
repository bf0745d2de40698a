"""TcpSource: the receiving end of a TCP pull. Six connections take blocks from one list, each two ahead."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from typing import Protocol

from weightsync.errors import (
    DeadlineExceededError,
    DigestMismatchError,
    EngineUnreachableError,
    TransferAbortedError,
    TransferError,
    WeightSyncError,
)
from weightsync.net.routes import dialled, looked_up
from weightsync.transfer.blocks import ANSWER, HELLO, MAGIC, Code, ask_bytes, checksum, parse_answer
from weightsync.transfer.source import Arrived, Checksums, Destination
from weightsync.transfer.threads import start_threads
from weightsync.types import Deadline
from weightsync.types.publication import Source

_AHEAD = 2
_PIECE_BYTES = 1 << 20
_MAX_TRIES = 3
_RETRY_S = 0.05


@dataclasses.dataclass(eq=False)
class TcpSource:
    """See `RangedSource`.

    Args:
        transfer_id: as granted, 32 hex digits.
        stall_s: a connection over which nothing comes for so long is given up and opened anew.
        tls: for a server that speaks TLS; with `server_hostname` of the host.
        name: of the server, for errors; the source's endpoint where not given.
        connect_s: a connection that is not open so long after its host's name was looked up never will be; `stall_s`
            where not given.
        max_tries: so often in a row a stream may break before the server counts as gone.
    """

    source: Source
    checksums: Checksums
    _: dataclasses.KW_ONLY
    transfer_id: str = dataclasses.field(repr=False)
    address: tuple[str, int]
    num_streams: int = 6
    stall_s: float = 10.0
    tls: ssl.SSLContext | None = None
    name: str = ""
    connect_s: float | None = None
    max_tries: int = _MAX_TRIES

    def __post_init__(self) -> None:
        self.name = self.name or self.source.endpoint
        self._hello = HELLO.pack(MAGIC, bytes.fromhex(self.transfer_id))
        self._flags = socket.MSG_WAITALL if self.tls is None else 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False

    def read(self, blocks: list[int], into: Destination, arrived: Arrived, *, deadline: Deadline) -> None:
        run = _Run(blocks)
        peer = self.name
        read = functools.partial(self.stream, run, into, arrived, deadline)
        streams = start_threads(read, min(self.num_streams, max(1, len(blocks))), name="weightsync-pull")
        for stream in streams:
            stream.join(deadline.remaining_s)
        if any(stream.is_alive() for stream in streams):
            run.fail(DeadlineExceededError(_late(deadline), peer=peer))  # nothing more is asked for
            self._cut()
            for stream in streams:
                stream.join()  # each ends at once: its connection is cut
        if run.error is not None:
            raise run.error
        if run.left:
            raise TransferError(f"{run.left} blocks did not come", peer=peer)

    def cancel(self) -> None:
        self._closed = True
        self._cut()

    def close(self) -> None:
        self.cancel()

    def _cut(self) -> None:
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)  # an SSLSocket's own forgets that it is one

    def stream(self, run: Work, into: Destination, arrived: Arrived, deadline: Deadline) -> None:
        """Reads what `run` gives, over one connection at a time, until that has nothing left."""
        failures = 0
        pause = threading.Event()
        while run.busy:
            before = run.left
            try:
                self._converse(run, into, arrived, deadline)
            except OSError as error:
                failures = 1 if run.left < before else failures + 1
                if self._closed:
                    run.fail(TransferAbortedError("this source was closed", peer=self.name))
                elif deadline.expired:
                    run.fail(DeadlineExceededError(_late(deadline), peer=self.name))
                elif failures >= self.max_tries:
                    run.fail(
                        EngineUnreachableError(
                            f"{self.address[0]}:{self.address[1]} cut the stream {failures} times: {error}",
                            peer=self.name,
                        )
                    )
                else:
                    pause.wait(min(_RETRY_S * 2**failures, deadline.remaining_s))
            except _DamagedError as error:
                run.damaged(error.block, TransferError(str(error), peer=self.name))
            except WeightSyncError as error:
                error.peer = error.peer or self.name
                run.fail(error)
            except BaseException as error:  # our own bug, or no memory: the caller must hear of it
                run.fail(TransferError(f"a stream failed: {error!r}", peer=self.name))
                raise
            if run.error is not None:
                self._cut()  # what the others wait for is of no use any more

    def _converse(self, run: Work, into: Destination, arrived: Arrived, deadline: Deadline) -> None:
        asked: collections.deque[int] = collections.deque()
        try:
            with self._connected(deadline) as connection:
                connection.sendall(self._hello)
                while True:
                    while len(asked) < _AHEAD and (block := run.take(idle=not asked)) is not None:
                        asked.append(block)
                        connection.sendall(ask_bytes(block))
                    if not asked:
                        return
                    self._receive(connection, asked[0], run, into, arrived, deadline)
                    asked.popleft()
        finally:
            run.put_back(asked)

    def _receive(
        self, connection: socket.socket, block: int, run: Work, into: Destination, arrived: Arrived, deadline: Deadline
    ) -> None:
        try:
            answer = parse_answer(_exactly(connection, ANSWER.size))
        except TransferError as error:
            raise _DamagedError(block, f"block {block}: {error.message}") from error
        if answer.code is Code.ENDED:
            raise TransferAbortedError("the transfer is over at its source: superseded, most likely")
        offset, length = self.source.block(block)
        if answer.code is not Code.OK or (answer.block, answer.offset, answer.length) != (block, offset, length):
            raise _DamagedError(block, f"asked for block {block} ({length} bytes at {offset}), answered {answer}")
        target = into(offset, length)
        view = target
        while view:
            # the kernel fills a piece by itself; BlockingIOError: nothing came for as long
            count = connection.recv_into(view, min(len(view), _PIECE_BYTES), self._flags)
            if count == 0:
                raise ConnectionResetError("it ended inside a block")
            if deadline.expired:
                raise TimeoutError(_late(deadline))
            view = view[count:]
        if checksum(target) != self.checksums.checksum(block):
            run.wrong(block)
            return
        arrived(block, target)
        run.arrived(block)

    @contextlib.contextmanager
    def _connected(self, deadline: Deadline) -> Iterator[socket.socket]:
        connection = self._connect(deadline)
        timeout_s = self._timeout_s(deadline)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls is not None:
                connection = self.tls.wrap_socket(connection, server_hostname=self.address[0])
                connection.settimeout(timeout_s)
            else:
                wait_in_kernel(connection, timeout_s)
            with self._lock:
                if self._closed:
                    raise ConnectionAbortedError("closed")
                self._open.add(connection)
            if deadline.expired:  # it was not there yet when the others were cut
                raise TimeoutError(_late(deadline))
            yield connection
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _timeout_s(self, deadline: Deadline) -> float:
        return max(0.001, min(self.stall_s, deadline.remaining_s))

    def _connect(self, deadline: Deadline) -> socket.socket:
        try:
            places = looked_up(self.address)
            timeout_s = self._timeout_s(deadline)
            within_s = timeout_s if self.connect_s is None else min(timeout_s, self.connect_s)
            connection = dialled(places, Deadline(within_s))
            connection.settimeout(within_s)
            return connection
        except (ValueError, OverflowError) as error:  # a UnicodeError among them; a peer's address is what it said
            raise ConnectionError(f"{self.address} is no address: {error}") from error


class _DamagedError(Exception):
    """The head of an answer is not what was asked for: nothing that follows it on this connection can be trusted."""

    def __init__(self, block: int, text: str) -> None:
        super().__init__(text)
        self.block = block


class Work(Protocol):
    """What a stream is to read, and whom it tells how that went.

    Attributes:
        left: how much is left; it falls with what arrives.
        error: why nothing more is to be read; None: there is no such reason.
    """

    @property
    def left(self) -> int: ...

    @property
    def error(self) -> WeightSyncError | None: ...

    @property
    def busy(self) -> bool:
        """Whether there is, or may be, anything to read."""

    def take(self, *, idle: bool) -> int | None:
        """The next block; None: there is none. Only who is `idle`, with no answer outstanding, may be made to wait."""

    def put_back(self, blocks: collections.deque[int]) -> None:
        """These were taken, and have not arrived."""

    def arrived(self, block: int) -> None:
        """It is there, and right."""

    def wrong(self, block: int) -> None:
        """Its checksum does not hold. It is not put back besides."""

    def damaged(self, block: int, error: TransferError) -> None:
        """Its answer began wrong; it was put back."""

    def fail(self, error: WeightSyncError) -> None:
        """Nothing more can be read here."""


class _Run:
    """What is left to do, shared by the streams."""

    def __init__(self, blocks: list[int]) -> None:
        self._lock = threading.Lock()
        self._todo = collections.deque(blocks)
        self._wrong: collections.Counter[int] = collections.Counter()
        self.left = len(blocks)
        self.error: WeightSyncError | None = None

    @property
    def busy(self) -> bool:
        with self._lock:
            return self.error is None and bool(self._todo)

    def take(self, *, idle: bool) -> int | None:
        with self._lock:
            return self._todo.popleft() if self._todo and self.error is None else None

    def put_back(self, blocks: collections.deque[int]) -> None:
        with self._lock:
            self._todo.extendleft(reversed(blocks))

    def arrived(self, block: int) -> None:
        with self._lock:
            self.left -= 1

    def wrong(self, block: int) -> None:
        """A block whose checksum does not hold: it is asked for again, a few times."""
        if self._may_come_again(block):
            with self._lock:
                self._todo.append(block)
            return
        self.fail(DigestMismatchError(f"block {block} came wrong {_MAX_TRIES} times"))

    def damaged(self, block: int, error: TransferError) -> None:
        """A block, put back already, whose answer began wrong: as `wrong`, on another connection."""
        if not self._may_come_again(block):
            error.message = f"{error.message} (wrong {_MAX_TRIES} times)"
            self.fail(error)

    def _may_come_again(self, block: int) -> bool:
        with self._lock:
            self._wrong[block] += 1
            return self._wrong[block] < _MAX_TRIES

    def fail(self, error: WeightSyncError) -> None:
        with self._lock:
            self.error = self.error or error


def wait_in_kernel(connection: socket.socket, timeout_s: float) -> None:
    """A blocking socket that the kernel gives up: Python's own timeout asks before each call whether there is
    something, which costs a tenth of the speed."""
    whole_s, part_s = divmod(timeout_s, 1)
    connection.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(whole_s), int(part_s * 1e6) or 1))


def _late(deadline: Deadline) -> str:
    return f"not every block came within {deadline.said}"


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("it ended between blocks")
        data += part
    return bytes(data)
