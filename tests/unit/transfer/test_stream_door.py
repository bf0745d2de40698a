"""Whom the connections of a block server count for."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest

from weightsync.transfer import stream_door
from weightsync.transfer.stream_door import StreamDoor


class Listens:
    """A listening socket on "::", as far as a door uses it: its connections come from these addresses."""

    def __init__(self, hosts: list[str]) -> None:
        self.door: StreamDoor[Any] | None = None
        self.peers: list[socket.socket] = []
        self._hosts = iter(hosts)

    def accept(self) -> tuple[socket.socket, tuple[str, int, int, int]]:
        host = next(self._hosts, None)
        if host is None:
            assert self.door is not None
            self.door.close()
            raise OSError("closed")
        mine, theirs = socket.socketpair()
        self.peers.append(theirs)
        return mine, (host, 1, 0, 0)

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("hosts", "num_cut"),
    [
        ([f"2001:db8::{number}" for number in range(1, 7)], 2),
        ([f"2001:db8:0:{number}::1" for number in range(1, 7)], 0),
        ([f"::ffff:10.0.0.{number}" for number in range(1, 7)], 0),
        (["::ffff:10.0.0.1"] * 6, 2),
    ],
)
def test_a_host_of_many_addresses_cuts_its_own(monkeypatch: pytest.MonkeyPatch, hosts: list[str], num_cut: int) -> None:
    """Seen red: each address of IPv6 counted on its own, of which one host has as many as it likes."""
    monkeypatch.setattr(stream_door, "MAX_SILENT_A_PEER", 4)
    monkeypatch.setattr(stream_door, "HELLO_WITHIN_S", 60.0)
    door = StreamDoor[Any]("127.0.0.1", 0, look_up=lambda _: None, serve=lambda *_: None)
    door.close()
    door._closed = False
    listens = door._listener = Listens(hosts)  # type: ignore[assignment]
    listens.door = door  # type: ignore[attr-defined]
    door._accept()
    assert door.rejected["crowd"] == num_cut
    with contextlib.ExitStack() as stack:
        for each in listens.peers:  # type: ignore[attr-defined]
            stack.enter_context(each)
