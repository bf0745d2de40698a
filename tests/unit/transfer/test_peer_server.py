"""A host that serves peers, over real sockets: who gets in, what is refused, and that memory is let go of."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from weightsync.errors import EngineUnreachableError, TransferAbortedError, WeightSyncError
from weightsync.transfer.blocks import ANSWER, HELLO, MAGIC, Code, ask_bytes, checksum, parse_answer
from weightsync.transfer.peer_server import Offer, PeerServer
from weightsync.transfer.relay import show
from weightsync.transfer.tcp import TcpSource
from weightsync.types import Deadline
from weightsync.types.publication import Source, SourceProof

BLOCK, NUM = 1 << 20, 10
CONTENT, KEY = "ab" * 16, "cd" * 32


class Shared:
    """Blocks in memory; which are there is told."""

    def __init__(self) -> None:
        self.num_blocks = NUM
        self.data = bytearray(os.urandom(NUM * BLOCK))
        self.there = set(range(NUM))

    def has(self, block: int) -> bool:
        return block in self.there

    def block(self, block: int) -> tuple[int, int]:
        return block * BLOCK, BLOCK

    def read(self, block: int) -> memoryview:
        return memoryview(self.data)[block * BLOCK : (block + 1) * BLOCK]


class Served:
    def __init__(self, **options: float) -> None:
        self.server = PeerServer(**options)  # type: ignore[arg-type]
        self.shared = Shared()
        self.offer = Offer(self.shared)
        self.shown = show(KEY, CONTENT, "127.0.0.1", self.server.port)
        self.server.serve(self.shown, self.offer)
        self.server.start()
        self.source = Source(
            endpoint="http://127.0.0.1:1", segment="weightsync-1", data_start=0, data_end=NUM * BLOCK, block_bytes=BLOCK
        )
        checksums = "".join(checksum(self.shared.read(block)) for block in range(NUM))
        self.proof = SourceProof(block_checksums=checksums, part_digests=b"", lane_a=0, lane_b=0)

    def read(self, shown: str, blocks: list[int]) -> bytearray:
        into = bytearray(NUM * BLOCK)
        source = TcpSource(
            self.source, self.proof, transfer_id=shown, address=("127.0.0.1", self.server.port), num_streams=2,
            max_tries=1,
        )  # fmt: skip
        source.read(blocks, lambda at, size: memoryview(into)[at : at + size], lambda *_: None, deadline=Deadline(20))
        return into


@pytest.fixture
def served() -> Iterator[Served]:
    there = Served()
    with contextlib.closing(there.server):
        yield there


def test_who_shows_the_right_proof_reads(served: Served) -> None:
    assert served.read(served.shown, list(range(NUM))) == served.shared.data
    end_s = time.monotonic() + 10
    while served.server.sent_bytes != NUM * BLOCK:  # counted when it is sent, which may be after it was read
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize("wrong", ["another peer", "another content", "another key"])
def test_what_is_shown_is_good_for_one_peer_and_one_content(served: Served, wrong: str) -> None:
    """Seen to fail with the address left out of what is shown."""
    port = served.server.port
    shown = {
        "another peer": show(KEY, CONTENT, "127.0.0.2", port),
        "another content": show(KEY, "ef" * 16, "127.0.0.1", port),
        "another key": show("ef" * 32, CONTENT, "127.0.0.1", port),
    }[wrong]
    with pytest.raises(TransferAbortedError):
        served.read(shown, [0])
    assert served.server.sent_bytes == 0


def test_a_block_that_is_not_proved_is_not_served(served: Served) -> None:
    served.shared.there.discard(3)
    with pytest.raises(WeightSyncError):
        served.read(served.shown, [3])
    assert served.server.sent_bytes == 0


def test_an_address_that_is_none_is_a_peer_that_is_gone(served: Served) -> None:
    """Seen to fail where the error of `socket` went through: it ended the whole read."""
    source = TcpSource(served.source, served.proof, transfer_id=served.shown, address=("a" * 64, 1), max_tries=1)
    with pytest.raises(EngineUnreachableError):
        source.read([0], lambda at, size: memoryview(bytearray(size)), lambda *_: None, deadline=Deadline(5))


def reading(served: Served) -> socket.socket:
    """A reader that has asked for a block and takes nothing of it."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(10)
    raw.connect(("127.0.0.1", served.server.port))
    raw.sendall(HELLO.pack(MAGIC, bytes.fromhex(served.shown)) + b"".join(ask_bytes(block) for block in range(NUM)))
    assert parse_answer(raw.recv(ANSWER.size, socket.MSG_WAITALL)).code is Code.OK
    sent_bytes, end_s = -1, time.monotonic() + 20
    while sent_bytes != served.server.sent_bytes or not served.offer._num_using:  # it is held in `send`
        assert time.monotonic() < end_s
        sent_bytes = served.server.sent_bytes
        time.sleep(0.2)
    return raw


def test_what_ended_is_read_by_nobody(served: Served) -> None:
    """Also where a reader takes nothing: it is cut. Seen to fail without the cut: `end` gave up after 5 s."""
    with contextlib.closing(reading(served)):
        assert served.offer.end()
        served.server.forget_ended()  # and its memory is not kept
        assert served.server._offers == {}
        with pytest.raises((TransferAbortedError, EngineUnreachableError)):
            served.read(served.shown, [1])


def test_who_takes_a_block_too_slowly_is_cut() -> None:
    """A little at a time, and never nothing: else a few such readers would have all turns. Seen to fail where each
    `send` had its own time."""
    served = Served(stall_s=6.0)
    with contextlib.closing(served.server), contextlib.closing(reading(served)) as raw:
        end_s = time.monotonic() + 40
        while served.offer.num_reading:
            assert time.monotonic() < end_s
            with contextlib.suppress(OSError):
                raw.recv(4096, socket.MSG_DONTWAIT)
            time.sleep(0.05)


def test_bytes_that_were_sent_do_not_change() -> None:
    """The memory is written right after `end`: what a reader had of a block by then is of the old one."""
    served = Served()
    with contextlib.closing(served.server), contextlib.closing(reading(served)) as raw:
        old = bytes(served.shared.data)
        assert served.offer.end()
        served.shared.data[:] = bytes(len(old))
        had = b""
        with contextlib.suppress(OSError):
            while part := raw.recv(1 << 16):
                had += part
        assert had[:BLOCK] == old[: len(had[:BLOCK])]


def test_upload_is_bounded() -> None:
    served = Served(upload_bytes_s=NUM * BLOCK)
    with contextlib.closing(served.server):
        begun_s = time.monotonic()
        threads = [threading.Thread(target=served.read, args=(served.shown, list(range(NUM)))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert time.monotonic() - begun_s > 1.5


def test_a_source_does_not_show_the_right_to_read_it(served: Served) -> None:
    """In a log, or a traceback with locals. Seen red: a data class shows all of its fields."""
    source = TcpSource(served.source, served.proof, transfer_id=served.shown, address=("127.0.0.1", 1))
    assert served.shown not in repr(source)
