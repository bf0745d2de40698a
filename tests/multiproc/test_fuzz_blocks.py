"""Byte streams that nobody would write into a real block server; and hostile servers for a real reader.

Whatever comes: right bytes or a typed error, in time; no memory that stays, no thread, no line of log.
"""

from __future__ import annotations

import contextlib
import gc
import logging.handlers
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.multiproc.pull_kit import wait_until
from tests.multiproc.test_pull_tcp import Served, exactly, hello_of
from tests.standins.processes import children
from weightsync.errors import WeightSyncError
from weightsync.transfer import tcp
from weightsync.transfer.blocks import ANSWER, ASK, HELLO, MAGIC, Answer, Code, answer_bytes, ask_bytes, parse_answer
from weightsync.transfer.granted import Transfer

BLOCK = 4096
NUM_BLOCKS = 6
MAX_GROWTH_BYTES = 64 << 20
SHORT, LONG = 150, 5_000
BATCH = 500
"""Cases that hypothesis is given at once: it keeps what it has tried, and of thousands that is more than what is looked
for here."""


def in_own_process(fuzz: Callable[[Served, int], None], num_cases: int, *, timeout_s: float) -> None:
    """What other tests' threads take and free of a process, and what they log, is none of the server's."""
    with children() as start:
        start(run_fuzz, fuzz, num_cases, name=fuzz.__name__).result(timeout_s)


def run_fuzz(fuzz: Callable[[Served, int], None], num_cases: int) -> None:
    with served() as there:
        for _ in range(0, num_cases, BATCH):
            fuzz(there, min(num_cases, BATCH))


@contextlib.contextmanager
def served() -> Iterator[Served]:
    """A server; afterwards nobody has raised in a thread, logged anything, or kept memory, threads or connections."""
    raised: list[Any] = []
    threading.excepthook = raised.append
    tcp._RETRY_S = 0.0005
    lines = logging.handlers.BufferingHandler(sys.maxsize)
    logging.getLogger("weightsync").addHandler(lines)
    logging.getLogger("weightsync").setLevel(logging.DEBUG)
    there = Served(NUM_BLOCKS, block_bytes=BLOCK, stall_s=2.0)
    with contextlib.closing(there):
        there.reader(there.grant("before")).read()
        num_threads, rss = threading.active_count(), psutil.Process().memory_info().rss
        yield there
        there.reader(there.grant("after")).read()
        wait_until(lambda: there.server.num_connections == 0, "no connection is left", timeout_s=30)
        wait_until(lambda: threading.active_count() <= num_threads + 4, "no thread is left", timeout_s=30)
        gc.collect()
        assert psutil.Process().memory_info().rss < rss + MAX_GROWTH_BYTES
    ours = [each for each in raised if each.thread is None or each.thread.name.startswith("weightsync")]
    assert ours == [], ours
    told = [(record.levelno, record.getMessage()) for record in lines.buffer]
    told = [each for each in told if each[0] > logging.DEBUG]
    assert told == [], told


def fuzzed(num_cases: int) -> settings:
    return settings(
        max_examples=num_cases, deadline=None, database=None, derandomize=num_cases == SHORT,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


# --- byte streams into a real server ---

words = st.one_of(
    st.integers(0, NUM_BLOCKS + 2).map(ask_bytes),
    st.integers(0, 2**32 - 1).map(ask_bytes),
    st.binary(max_size=64),
    st.sampled_from([MAGIC, b"WSAK", b"WSBK", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", bytes(4096)]),
)
begins = st.one_of(
    st.just(b"right"), st.just(b"right"), st.just(b"right"),
    st.binary(max_size=HELLO.size + 4),
    st.binary(min_size=16, max_size=16).map(lambda raw: HELLO.pack(MAGIC, raw)),
)  # fmt: skip
streams = st.tuples(
    begins, st.lists(words, max_size=12), st.integers(1, 400), st.sampled_from(["half", "whole", "reset"])
)


def speak(served: Served, transfer: Transfer, begin: bytes, said: list[bytes], cut: int, end: str) -> None:
    """Sends it in pieces; what comes back is right, as far as it answers to what is right."""
    told = (hello_of(transfer) if begin == b"right" else begin) + b"".join(said)
    with (
        socket.create_connection(("127.0.0.1", served.server.port), timeout=20) as raw,
        contextlib.suppress(ConnectionError),  # who says what makes no sense may be cut while it speaks
    ):
        for start in range(0, len(told), cut):
            raw.sendall(told[start : start + cut])
        if end == "reset":
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if end != "half":
            return
        with contextlib.suppress(OSError):  # it was cut already
            raw.shutdown(socket.SHUT_WR)
        if told[: HELLO.size] != hello_of(transfer):
            ended = answer_bytes(Answer(code=Code.ENDED, block=0, offset=0, length=0))
            assert exactly(raw, ANSWER.size) in (b"", ended)
            return
        asks = told[HELLO.size :]
        for start in range(0, len(asks) - ASK.size + 1, ASK.size):
            check_answer(served, asks[start : start + ASK.size], raw)
            if not is_ask(asks[start : start + ASK.size]):
                return


def is_ask(said: bytes) -> bool:
    magic, block = ASK.unpack(said)
    return magic == b"WSAK" and block < NUM_BLOCKS


def check_answer(served: Served, ask: bytes, raw: socket.socket) -> None:
    answer = parse_answer(exactly(raw, ANSWER.size))
    if not is_ask(ask):
        assert answer.code is Code.BAD_REQUEST
        return
    _, block = ASK.unpack(ask)
    start, length = served.source.block(block)
    assert answer == Answer(code=Code.OK, block=block, offset=start, length=length)
    assert exactly(raw, length) == served.data[start : start + length]


def to_a_server(served: Served, num_cases: int) -> None:
    transfer = served.grant()

    @fuzzed(num_cases)
    @given(streams)
    def run(stream: tuple[bytes, list[bytes], int, str]) -> None:
        speak(served, transfer, *stream)
        assert not transfer.over

    run()


# --- hostile servers for a real reader ---

deeds = st.one_of(
    st.just(("honest", 0)), st.just(("honest", 0)),
    st.tuples(st.just("flip head"), st.integers(0, 8 * ANSWER.size - 1)),
    st.tuples(st.just("flip byte"), st.integers(0, 8 * BLOCK - 1)),
    st.tuples(st.just("cut"), st.integers(0, ANSWER.size + BLOCK)),
    st.tuples(st.just("more"), st.integers(1, 200)),
    st.tuples(st.just("garbage"), st.integers(0, 200)),
    st.tuples(st.just("other block"), st.integers(0, NUM_BLOCKS)),
    st.tuples(st.just("code"), st.sampled_from([1, 2, 3, 65535])),
    st.tuples(st.just("length"), st.sampled_from([0, 1, BLOCK - 1, BLOCK + 1, 1 << 40, (1 << 64) - 1])),
    st.tuples(st.just("silent"), st.just(0)),
    st.tuples(st.just("refuse"), st.just(0)),
)  # fmt: skip


class Hostile:
    """A block server that does one deed after the other, and then is honest or does the last for ever."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._lock = threading.Lock()
        self._deeds: list[tuple[str, int]] = []
        self._stays = False
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def does(self, deeds: list[tuple[str, int]], stays: bool) -> None:
        with self._lock:
            self._deeds, self._stays = list(deeds), stays

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _next(self) -> tuple[str, int]:
        with self._lock:
            if not self._deeds:
                return ("honest", 0)
            return self._deeds[0] if self._stays and len(self._deeds) == 1 else self._deeds.pop(0)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._socket.accept()[0],), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, struct.error):
            connection.settimeout(10)
            exactly(connection, HELLO.size)
            while ask := exactly(connection, ASK.size):
                if not self._answer(connection, ASK.unpack(ask)[1], *self._next()):
                    return

    def _answer(self, connection: socket.socket, block: int, deed: str, number: int) -> bool:
        start, length = self._served.source.block(block)
        facts: dict[str, Any] = {"code": Code.OK, "block": block, "offset": start, "length": length}
        if deed in ("code", "length"):
            facts[deed] = number
        if deed == "other block":
            facts["block"] = number
        said = bytearray(answer_bytes(Answer(**facts)) + self._served.data[start : start + length])
        if deed == "flip head":
            said[number // 8] ^= 1 << number % 8
        if deed == "flip byte":
            said[ANSWER.size + number // 8 % length] ^= 1 << number % 8
        if deed == "garbage":
            said = bytearray(b"\xa5" * number)
        if deed == "more":
            said += b"\x5a" * number
        if deed == "silent":
            connection.recv(1)
            return False
        if deed == "refuse":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        connection.sendall(said[:number] if deed == "cut" else said)
        return deed not in ("cut", "garbage")


def to_a_reader(served: Served, num_cases: int) -> None:
    transfer = served.grant()
    outcomes: dict[str, int] = {}

    @fuzzed(num_cases)
    @given(st.lists(deeds, min_size=1, max_size=10), st.booleans(), st.integers(1, 3))
    def run(deeds: list[tuple[str, int]], stays: bool, num_streams: int) -> None:
        hostile.does(deeds, stays)
        reading = served.reader(transfer, port=hostile.port, num_streams=num_streams, stall_s=0.05)
        begun_s = time.monotonic()
        try:
            reading.read(5.0)
        except WeightSyncError as error:
            outcomes[type(error).__name__] = outcomes.get(type(error).__name__, 0) + 1
        else:
            assert reading.memory[BLOCK:] == served.data[BLOCK:]
            outcomes["right"] = outcomes.get("right", 0) + 1
        finally:
            reading.tcp.close()
        for block in reading.arrived:
            start, length = served.source.block(block)
            assert reading.memory[start : start + length] == served.data[start : start + length]
        assert time.monotonic() - begun_s < 30

    with contextlib.closing(Hostile(served)) as hostile:
        run()
    assert outcomes["right"] > num_cases // 20
    assert len(outcomes) > 2, outcomes


def test_a_block_server_survives_what_nobody_would_say() -> None:
    in_own_process(to_a_server, SHORT, timeout_s=250)


def test_a_reader_survives_what_nobody_would_answer() -> None:
    in_own_process(to_a_reader, SHORT, timeout_s=250)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fuzz", [to_a_server, to_a_reader])
def test_ten_thousand_cases(fuzz: Callable[[Served, int], None]) -> None:
    in_own_process(fuzz, LONG, timeout_s=1750)
