"""Rollout hosts that relay, some of which serve others badly: for the tests of relaying. See `bench.relay_hosts`."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection
from typing import Any

from bench.relay_hosts import Actor, Follower, follower_main

from weightsync.testing.hosts import Host
from weightsync.transfer.blocks import ANSWER
from weightsync.transfer.peer_server import Offer, PeerServer

EVILS = ("wrong", "other", "silent", "drip", "cut", "refuse")
_LONG_S = 60.0


def evil_main(how: Follower, connection: Connection) -> None:
    """Follows as any other, and serves its peers as it is told: `EVILS`, or None for well."""
    ways: list[str | None] = [None]
    counts = dict.fromkeys(EVILS, 0)
    send = PeerServer._send

    def badly(self: PeerServer, connection: socket.socket, offer: Offer, head: bytes, block: int) -> None:
        way = ways[0]
        if way is None:
            send(self, connection, offer, head, block)
            return
        counts[way] += 1
        data = bytearray(offer.shared.read(block))
        if way == "wrong":
            data[len(data) // 2] ^= 1
            connection.sendall(head + data)
        elif way == "other":  # another block's bytes, every other time with its head
            other = (block + 1) % offer.shared.num_blocks
            number = list(ANSWER.unpack(head))
            if counts[way] % 2:
                number[3] = other
            connection.sendall(ANSWER.pack(*number) + os.urandom(len(data)))
        elif way == "silent":
            offer.wait(_LONG_S)
        elif way == "drip":
            connection.sendall(head)
            for byte in data:
                if offer.over:
                    return
                connection.sendall(bytes([byte]))
                offer.wait(1.0)
        elif way == "cut":
            connection.sendall(head + data[: len(data) // 2])
            raise ConnectionAbortedError("cut")
        elif way == "refuse":
            raise ConnectionAbortedError("refused")

    PeerServer._send = badly  # type: ignore[method-assign]

    def behave(way: str | None) -> dict[str, int]:
        ways[0] = way
        return counts

    follower_main(how, connection, {"behave": behave})


def evil(host: Host, mib: float, endpoint: str, **options: Any) -> Actor:
    """A rollout service there that may be told to serve badly."""
    how = Follower(mib=mib, endpoint=endpoint, host=host.address, name=host.name, options=options)
    return Actor(host, evil_main, how)
