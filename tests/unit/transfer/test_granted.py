"""Granted transfers: whatever goes wrong, a segment's lock is given back; who is too slow for the trainer gets more."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.standins.clock import StandingClock
from tests.standins.descriptors import num_open
from weightsync.errors import StateError, TransferAbortedError, VersionError
from weightsync.memory import Lock, Reader, Segment, folder, is_read
from weightsync.transfer import granted, tcp_server
from weightsync.transfer.blocks import ANSWER, HELLO, MAGIC, ask_bytes
from weightsync.transfer.granted import Transfer
from weightsync.transfer.tcp_server import BlockServer
from weightsync.types import Version
from weightsync.types.publication import Source

SIZE = 1 << 16


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this test alone."""
    monkeypatch.setattr(folder, "_path", str(tmp_path))
    yield tmp_path
    assert os.listdir(tmp_path) == []


class Served:
    """A block server and segments, one a version."""

    def __init__(self, num_versions: int = 4) -> None:
        self.server = BlockServer()
        self.server.start()
        self.segments = [Segment(SIZE) for _ in range(num_versions)]
        self.ended: list[tuple[str, int, bool]] = []

    def grant(
        self,
        number: int,
        receiver_id: str = "r",
        *,
        take_up_s: float = 10.0,
        lease_s: float | None = 30.0,
        beside: tuple[Transfer, ...] = (),
    ) -> Transfer:
        source = Source(
            endpoint="http://127.0.0.1:1", segment=self.segments[number].name, data_start=4096, data_end=SIZE,
            block_bytes=4096,
        )  # fmt: skip
        return self.server.grant(
            version(number), source, receiver_id=receiver_id, take_up_s=take_up_s, lease_s=lease_s, beside=beside,
            on_end=lambda transfer, ok: self.ended.append((transfer.receiver_id, transfer.version.number, ok)),
        )  # fmt: skip

    def read_for(self, number: int) -> set[Reader]:
        return {reader for reader in Reader if is_read(self.segments[number].name, reader)}

    def close(self) -> None:
        self.server.close()
        for segment in self.segments:
            segment.close()


@pytest.fixture
def clock(served: Served, monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    """By which transfers end; it stands where a busy machine would let seconds pass between two lines."""
    return StandingClock(monkeypatch, granted, tcp_server)


def version(number: int) -> Version:
    return Version(run_id="run", number=number)


@pytest.fixture
def served() -> Iterator[Served]:
    there = Served()
    yield there
    there.close()
    wait_until(lambda: there.server.num_transfers == 0)


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# --- no lock is lost ---


def test_a_grant_needs_no_thread_and_ends_when_nobody_takes_it_up(
    served: Served, clock: StandingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen to fail: a Timer a transfer, which could not be started, and the segment was locked for ever."""

    start, here = threading.Thread.start, threading.current_thread()

    def no_thread(thread: threading.Thread) -> None:
        by = threading.current_thread()
        if by is here or by.name == "weightsync-sweeper":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with contextlib.suppress(RuntimeError):
            transfer = served.grant(0, take_up_s=1.0)
            ends = socket.socketpair()
            assert transfer.attach(ends[0])
            unread = served.grant(1, "another", take_up_s=1.0)
            clock.now_s += 1.1
            wait_until(lambda: unread.over)
            assert not transfer.over, "it is read"
            transfer.detach(ends[0])
            clock.now_s += 1.1
            for end in ends:
                end.close()
    wait_until(lambda: not served.read_for(0) and not served.server.num_transfers and len(served.ended) == 2)
    assert served.server.num_transfers == 0
    assert served.ended == [("another", 1, False), ("r", 0, False)]


def test_a_transfer_that_cannot_be_made_holds_nothing(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_open(served.segments[0].name)
    with monkeypatch.context() as patched:
        patched.setattr(granted, "open_own", lambda *_: (_ for _ in ()).throw(OSError("too many open files")))
        with pytest.raises(OSError, match="too many"):
            served.grant(0)
    with Lock(served.segments[0].name, None), pytest.raises(VersionError, match="written again"):
        served.grant(0)
    assert not served.read_for(0)
    assert num_open(served.segments[0].name) == before
    assert served.server.num_transfers == 0


def test_a_listener_that_raises_keeps_no_other_transfer_from_its_end(served: Served) -> None:
    source = served.grant(0, "other", take_up_s=0.1).source

    def broken(_: Transfer, __: bool) -> None:
        raise OSError("nobody listens")

    served.server.grant(version(0), source, receiver_id="x", take_up_s=0.05, on_end=broken)
    wait_until(lambda: not served.read_for(0))
    served.grant(1, take_up_s=0.05)
    wait_until(lambda: not served.read_for(1))


class Meddling:
    """Something that happens while a transfer is made, and may have to wait until it is there."""

    def __init__(self, patched: pytest.MonkeyPatch, what: Any) -> None:
        self.thread = threading.Thread(target=what)
        original = tcp_server.Transfer
        meddling = self

        class Made(original):  # type: ignore[valid-type,misc]
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                if not meddling.thread.ident:
                    meddling.thread.start()
                    meddling.thread.join(0.3)

        patched.setattr(tcp_server, "Transfer", Made)

    def settle(self) -> None:
        self.thread.join(10)
        assert not self.thread.is_alive()


def test_a_reset_while_a_transfer_is_made_ends_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: it was in no table yet, and went on reading what the trainer waited for."""
    meddling = Meddling(monkeypatch, lambda: served.server.reset(keep=version(1)))
    served.grant(0)
    meddling.settle()
    assert not served.read_for(0)
    assert served.server.num_transfers == 0


def test_of_two_grants_to_one_receiver_one_lives(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen to fail: neither saw the other."""
    meddling = Meddling(monkeypatch, lambda: served.grant(0))
    served.grant(0)
    meddling.settle()
    assert served.server.num_transfers == 1
    assert len(served.ended) == 1


def test_what_is_about_to_be_written_is_not_granted_again(served: Served) -> None:
    """Whoever was cut asks again at once, while the newest is still being proved."""
    served.grant(1)
    assert served.server.reset(keep=version(2)) == 1
    with pytest.raises(VersionError, match="about to be written"):
        served.grant(1)
    assert not served.read_for(1)
    served.grant(2)
    served.grant(3, "another")
    source = served.grant(2).source
    transfer = served.server.grant(
        Version(run_id="another", number=0), source, receiver_id="fourth", take_up_s=10.0, on_end=lambda *_: None
    )
    assert not transfer.over, "another run's numbers say nothing"


def test_an_end_shuts_the_socket_and_not_its_tls(served: Served) -> None:
    """Seen to fail: SSLSocket.shutdown drops TLS first, and a thread that is sending would go on in clear."""

    class Tls(socket.socket):
        forgot = False

        def shutdown(self, how: int) -> None:
            self.forgot = True
            super().shutdown(how)

    ends = socket.socketpair()
    connection = Tls(fileno=ends[0].detach())
    transfer = served.grant(0)
    assert transfer.attach(connection)
    served.server.finish(transfer.id, ok=True)
    assert ends[1].recv(1) == b"", "it is shut"
    assert not connection.forgot
    transfer.detach(connection)
    connection.close()
    ends[1].close()


def test_with_tls_a_stream_holds_a_piece_of_its_block(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """And stops where the transfer ends. Seen red: it held all of it, 4 MiB, gigabytes for a hundred receivers."""
    most, data = 10_000, os.urandom(SIZE)
    monkeypatch.setattr(tcp_server, "_PIECE_BYTES", most, raising=False)
    monkeypatch.setattr(served.server, "_tls", object())
    served.segments[0].memory[:] = data
    transfer, sent = served.grant(0), list[bytes]()

    class Ending:
        settimeout = staticmethod(lambda _: None)

        @staticmethod
        def sendall(piece: bytes) -> None:
            sent.append(piece)
            if len(sent) == 10:
                transfer.end(ok=False)

    connection: Any = Ending()
    served.server._send(connection, transfer, b"head", 4096, SIZE - 4096)
    assert b"".join(sent) == b"head" + data[4096:]
    assert max(len(piece) for piece in sent) == most
    assert served.server.sent_bytes == SIZE - 4096
    with pytest.raises(ConnectionAbortedError, match="over"):
        served.server._send(connection, transfer, b"head", 4096, SIZE - 4096)
    assert transfer.over
    assert len(sent) == 10


# --- who is too slow for the trainer ---


def cut(served: Served, number: int, receiver_id: str = "r") -> Transfer:
    """A transfer that a reset ended."""
    transfer = served.grant(number, receiver_id)
    served.server.reset(keep=version(number + 1))
    assert transfer.over is not transfer.leased
    return transfer


def test_who_was_cut_twice_in_a_row_holds_a_lease_that_no_reset_ends(served: Served) -> None:
    """Seen to fail: a receiver slower than two steps never had any version."""
    assert not cut(served, 0).leased
    assert not cut(served, 1).leased
    third = cut(served, 2)
    assert third.leased
    assert served.read_for(2) == {Reader.MAPPED}, "for which the trainer takes its third segment, and does not wait"
    assert not served.grant(3, "faster").leased
    assert served.read_for(3) == {Reader.SENT}
    served.server.finish(third.id, ok=True)
    assert not served.read_for(2)
    again = served.grant(3)
    assert not again.leased
    served.server.reset(keep=version(4))
    assert again.over


def test_one_cut_more_is_enough_for_who_had_a_lease_and_a_whole_one_makes_good(served: Served) -> None:
    for number in (0, 0):
        served.server._floor = None
        cut(served, number)
    served.server._floor = None
    leased = served.grant(0)
    assert leased.leased
    served.server.finish(leased.id, ok=True)
    cut(served, 0)
    assert served.grant(1).leased
    served.server.finish(served.grant(1).id, ok=True)
    served.server.finish(served.grant(1).id, ok=True)
    cut(served, 1)
    assert not served.grant(2).leased, "it kept up with the trainer once"


def test_only_one_version_at_a_time_is_leased(served: Served) -> None:
    """With two, and the newest, the trainer would have no segment left."""
    for number in (0, 1):
        for name in ("a", "b", "c"):
            served.grant(number, name)
        served.server.reset(keep=version(number + 1))
    first, beside = served.grant(2, "a"), served.grant(2, "b")
    assert first.leased
    assert beside.leased
    assert not served.grant(3, "c").leased
    served.server.finish(first.id, ok=False)
    served.server.finish(beside.id, ok=False)
    assert served.grant(3, "c").leased
    assert not served.grant(3, "a", lease_s=None).leased, "the agent says that there must be none"


def test_a_lease_ends_when_nobody_reads_or_when_it_has_lasted_too_long(served: Served, clock: StandingClock) -> None:
    for number in (0, 1):
        cut(served, number)
    leased = served.grant(2, take_up_s=0.1)
    assert leased.leased
    clock.now_s += 0.2
    wait_until(lambda: leased.over and not served.read_for(2))
    assert not served.grant(2).leased, "it had its time"
    for _ in range(2):
        served.server._floor = None
        cut(served, 2)
    leased = served.grant(3, lease_s=1.0)
    assert leased.leased
    ends = socket.socketpair()
    assert leased.attach(ends[0])
    clock.now_s += 1.1
    wait_until(lambda: leased.over)
    assert ends[1].recv(1) == b"", "though it was being read"
    leased.detach(ends[0])
    for end in ends:
        end.close()


def test_what_was_granted_together_waits_for_its_turn(served: Served, clock: StandingClock) -> None:
    """A chain's deltas are read one after the other. Seen to fail: the last one had run out when its turn came, every
    time, and the pull never ended."""
    first = served.grant(0, take_up_s=1.0)
    second = served.grant(1, take_up_s=1.0, beside=(first,))
    alone = served.grant(2, "another", take_up_s=1.0)
    ends = socket.socketpair()
    assert first.attach(ends[0])
    clock.now_s += 1.1
    wait_until(lambda: alone.over)
    assert not second.over, "granted before the other, for as long"
    first.detach(ends[0])
    clock.now_s += 1.1
    wait_until(lambda: first.over and second.over)
    for end in ends:
        end.close()


def test_a_receivers_chain_takes_no_others_place(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "_MAX_TRANSFERS", 2)
    chain: tuple[Transfer, ...] = ()
    for number in range(4):
        chain = (*chain, served.grant(number, "a", beside=chain))
    served.grant(0, "b")
    with pytest.raises(StateError, match="receivers"):
        served.grant(0, "c")


def test_a_crowd_of_transfers_is_refused_and_a_receivers_own_counts_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_server, "_MAX_TRANSFERS", 2)
    for name in ("a", "b", "a", "b"):
        served.grant(0, name)
    with pytest.raises(StateError, match="under way"):
        served.grant(0, "c")
    assert served.server.num_transfers == 2


# --- renewals ---


def test_what_was_granted_together_is_renewed_together(served: Served, clock: StandingClock) -> None:
    first = served.grant(0, take_up_s=2.0)
    second = served.grant(1, take_up_s=2.0, beside=(first,))
    alone = served.grant(2, "another", take_up_s=2.0)
    clock.now_s += 1.5
    served.server.renew(first.id)
    clock.now_s += 1.5
    wait_until(lambda: alone.over)
    assert not first.over
    assert not second.over
    clock.now_s += 1.5
    wait_until(lambda: first.over and second.over)
    assert "neither read nor renewed" in served.server.why_over(second.id)


def read_block(served: Served, transfer: Transfer) -> None:
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=10) as connection:
        connection.sendall(HELLO.pack(MAGIC, bytes.fromhex(transfer.id)) + ask_bytes(0))
        left = ANSWER.size + transfer.source.block(0)[1]
        while left:
            part = connection.recv(left)
            assert part
            left -= len(part)
    wait_until(lambda: not transfer.num_reading)


def test_who_reads_may_renew_on_and_who_stops_is_swept(served: Served, clock: StandingClock) -> None:
    """Each report of a relayed pull renews. Seen red: it was refused from half an hour after the grant on, and so the
    whole read failed, though it read all the time: "nothing was read"."""
    of_grant = granted.RENEWABLE_S
    reads, unread = (served.grant(number, f"r{number}", take_up_s=10 * of_grant) for number in (0, 1))
    for _ in range(3):
        clock.now_s += 0.9 * of_grant
        read_block(served, reads)
        served.server.renew(reads.id)
    with pytest.raises(TransferAbortedError, match="nothing was read of this transfer"):
        served.server.renew(unread.id)
    clock.now_s += 1.1 * of_grant
    with pytest.raises(TransferAbortedError, match="nothing was read of this transfer"):
        served.server.renew(reads.id)
    clock.now_s += 11 * of_grant
    wait_until(lambda: reads.over and unread.over)


def test_a_lease_ends_though_it_is_renewed(served: Served, clock: StandingClock) -> None:
    """Seen as an attack: a receiver that reads nothing holds a trainer's third segment for ever."""
    for number in (0, 1):
        served.grant(number)
        assert served.server.reset(keep=version(number + 1)) == 1
    leased = served.grant(2, take_up_s=2.0, lease_s=2.5)
    assert leased.leased
    for _ in range(2):
        clock.now_s += 1.2
        wait_until(clock.acted("weightsync-sweeper"))
        served.server.renew(leased.id)
    assert not leased.over
    clock.now_s += 0.2
    wait_until(lambda: leased.over)
    wait_until(lambda: "its lease on the version is over" in served.server.why_over(leased.id))
    assert not served.read_for(2)
