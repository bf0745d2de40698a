"""Relay: a rollout host serves the blocks that it has proved on to other hosts, and takes from them what they have.

    Relay        one a service: the block server for peers, its face, and what is known of peers
    RelayShelf   one a model: what is served now, and what agents are told of it

What is served is the model's staging, and the deltas that brought it: both are withdrawn before they are written again,
and readers are cut then. What a host tells its agents of that is one request, which also brings who else has what.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from weightsync.clients.agent import AgentClient
from weightsync.errors import NotRegisteredError, StateError, UnsupportedError, WeightSyncError
from weightsync.host.settings import RolloutConfig
from weightsync.host.staging import Target, TargetMap
from weightsync.net.auth import is_loopback
from weightsync.net.routes import ANY_ADDRESS
from weightsync.transfer.peer_server import Offer, PeerServer
from weightsync.transfer.relay import show
from weightsync.transfer.relay_standing import Standing
from weightsync.types import Deadline, Version
from weightsync.types.publication import Source
from weightsync.types.relay_messages import Holding, RelayAnswer, RelayFace, RelayReport, have_bytes, set_of
from weightsync.types.transfer_messages import RegisterRequest

_CALL_S = 5.0
_TELL_EVERY_S = 10.0
_RETRY_S = 1.0

_logger = logging.getLogger(__name__)


class Relay:
    """Of one service, from `start` to `close`. Thread-safe.

    Args:
        host, port: where peers are served; port 0 lets the system choose.
        advertise: name by which other hosts reach it; None: as the agents see it, or `host` where that is an address.
        zone: rack, room or data centre: hosts of one ask each other first.
        upload_bytes_s: no more is sent to peers in a second; None: no limit.
        max_peers: peers that are asked at one time.
        tls: of the block server.

    Raises:
        ConfigError: it can't listen there.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        zone: str | None = None,
        upload_bytes_s: float | None = None,
        max_peers: int = 6,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.server = PeerServer(host, port, upload_bytes_s=upload_bytes_s, tls=tls)
        named = advertise or (None if host in ANY_ADDRESS or is_loopback(host) else host)
        self.face = RelayFace(host=named, port=self.server.port, zone=zone, tls=tls is not None)
        self.zone = zone
        self.max_peers = max_peers
        self.standing = Standing()

    def start(self) -> None:
        self.server.start()

    def close(self) -> None:
        """Ends every stream. Idempotent."""
        self.server.close()


def relay_of(config: RolloutConfig) -> Relay | None:
    """The relay of a service; None where it is to have none.

    Raises:
        ConfigError: it can't listen where it should, or its TLS files are none.
    """
    if not config.relays:
        return None
    return Relay(
        host=config.relay_address(),
        port=config.relay_port,
        advertise=urlsplit(config.advertise or "").hostname,
        zone=config.zone,
        upload_bytes_s=config.upload_bytes_s,
        max_peers=config.max_peers,
        tls=None if config.tls is None else config.tls.context(),
    )


class BlockShare:
    """Blocks of one content that are here, one by one. See `peer_server.Shared`. Thread-safe.

    Args:
        source: where its blocks are cut.
        bytes_of: bytes of a range of the source, as they lie here.
    """

    def __init__(self, source: Source, bytes_of: Callable[[int, int], memoryview]) -> None:
        self.num_blocks = source.num_blocks
        self.block = source.block
        self._bytes_of = bytes_of
        self._lock = threading.Lock()
        self._have = 0

    @classmethod
    def of_target(cls, target: Target, source: Source, index: int, places: TargetMap, version: Version) -> BlockShare:
        """Of a staging: what is noted there counts, from the start."""

        def bytes_of(offset: int, length: int) -> memoryview:
            there = places.borrow(offset, length)
            return (places.get(offset, length) if there is None else there).data

        share = cls(source, bytes_of)
        share._have = set_of(block for block in range(source.num_blocks) if target.has(version, index, block))
        return share

    @property
    def have(self) -> int:
        """The set of blocks that are there."""
        return self._have

    def note(self, block: int) -> None:
        """That block is there, proved."""
        with self._lock:
            self._have |= 1 << block

    def has(self, block: int) -> bool:
        return bool(self._have >> block & 1)

    def read(self, block: int) -> memoryview:
        return self._bytes_of(*self.block(block))


class _Kept:
    """Something that is served, or will be as soon as its key is known."""

    def __init__(self, share: BlockShare, *, staged: bool) -> None:
        self.share = share
        self.staged = staged
        self.offer = Offer(share)
        self.shown: str | None = None


class RelayShelf:
    """What one model's receiver serves. Thread-safe.

    Args:
        relay: of the service.
        receiver_id: as agents know it.
        connect: makes a client of an agent; the caller's to close.
    """

    def __init__(self, relay: Relay, receiver_id: str, connect: Callable[[str], AgentClient]) -> None:
        self.relay = relay
        self.receiver_id = receiver_id
        self.connect = connect
        self._changed = threading.Condition()
        self._kept: dict[str, dict[str, _Kept]] = {}  # by agent, by content
        self._reading: dict[str, int] = {}  # agents that reads under way tell of everything
        self._dirty: set[str] = set()  # agents that have to be told
        self._stuck: list[_Kept] = []  # withdrawn, and read still
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, endpoint: str, content: str, share: BlockShare, *, staged: bool) -> None:
        """Serves it, as soon as the agent has said by which key.

        Args:
            endpoint: of the agent that granted it.
            content: its name.
            share: its blocks.
            staged: whether it lies in the staging; else it is a delta.
        """
        with self._changed:
            if self._closed:
                return
            self._kept.setdefault(endpoint, {})[content] = _Kept(share, staged=staged)
            self._dirty.add(endpoint)
            self._changed.notify_all()
            if self._thread is None:
                thread = threading.Thread(target=self._tell_on, name="weightsync-relay-tell", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread can be had now: reads tell, and the next one tries
                    thread.start()
                    self._thread = thread

    def withdraw(self, *, staged: bool) -> None:
        """Serves nothing of the staging (or no delta) any more: nobody reads it when this returns.

        Raises:
            StateError: somebody still does. It must not be written.
        """
        with self._changed:
            gone = [each for each in self._stuck if each.staged is staged]
            for endpoint, kept in self._kept.items():
                for content in [name for name, each in kept.items() if each.staged is staged]:
                    gone.append(kept[content])
                    del kept[content]
                    self._dirty.add(endpoint)
            self._changed.notify_all()
        stuck = [each for each in gone if not each.offer.end()]
        self.relay.server.forget_ended()
        with self._changed:  # who tries again finds them
            self._stuck = [each for each in self._stuck if each.staged is not staged] + stuck
        if stuck:
            raise StateError("another host reads what is to be written, and can't be cut: it is tried again")

    def reading(self, endpoint: str, step: int) -> None:
        """Reads that tell an agent of everything that is here: one more, or one less."""
        with self._changed:
            self._reading[endpoint] = self._reading.get(endpoint, 0) + step
            self._dirty.add(endpoint)
            self._changed.notify_all()

    def exchange(self, client: AgentClient, endpoint: str, timeout_s: float, **fields: Any) -> RelayAnswer:
        """One report with all that is here, and its answer, which is heeded. `fields` are further ones."""
        with self._changed:
            holdings = tuple(
                Holding(content=content, have=have_bytes(each.share.have, each.share.num_blocks))
                for content, each in self._kept.get(endpoint, {}).items()
            )
        report = RelayReport(receiver_id=self.receiver_id, face=self.relay.face, holdings=holdings, **fields)
        answer = client.relay(report, timeout_s=timeout_s)
        self._serve(endpoint, answer.keys, answer.seen_as)
        return answer

    def _serve(self, endpoint: str, keys: Mapping[str, str], seen_as: str) -> None:
        with self._changed:
            for content, each in self._kept.get(endpoint, {}).items():
                key = keys.get(content)
                if key is None:
                    continue
                shown = show(key, content, seen_as, self.relay.face.port)
                if shown != each.shown:
                    each.shown = shown
                    self.relay.server.serve(shown, each.offer)

    def _tell_on(self) -> None:
        """Tells agents what is here, when it has changed and no read tells them, and now and then."""
        told_s: dict[str, float] = {}
        while (endpoint := self._next(told_s)) is not None:
            told_s[endpoint] = time.monotonic()
            try:
                with contextlib.closing(self.connect(endpoint)) as client:
                    self._tell(client, endpoint)
            except WeightSyncError as error:
                _logger.debug("%s was not told what is relayed: %s", endpoint, error)
                if not isinstance(error, UnsupportedError):  # an agent of before relays came is not asked each second
                    told_s[endpoint] = time.monotonic() - _TELL_EVERY_S + _RETRY_S

    def _tell(self, client: AgentClient, endpoint: str) -> None:
        deadline = Deadline(_CALL_S)
        tell = functools.partial(self.exchange, client, endpoint)
        try:
            tell(deadline.check("time to tell"))
        except NotRegisteredError:  # it was started again
            client.register(RegisterRequest(receiver_id=self.receiver_id), timeout_s=deadline.check("time to register"))
            tell(deadline.check("time to tell"))

    def _next(self, told_s: dict[str, float]) -> str | None:
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                idle = [endpoint for endpoint in self._kept if not self._reading.get(endpoint)]
                due = [
                    endpoint
                    for endpoint in idle
                    if endpoint in self._dirty
                    or (self._kept[endpoint] and now_s - told_s.get(endpoint, now_s) >= _TELL_EVERY_S)
                ]
                if due:
                    self._dirty.discard(due[0])
                    return due[0]
                again = [endpoint for endpoint in idle if endpoint in told_s and self._kept[endpoint]]
                left = [_TELL_EVERY_S - now_s + told_s[endpoint] for endpoint in again]
                self._changed.wait(max(0.01, min(left, default=_TELL_EVERY_S)))
            return None

    def close(self) -> None:
        """Serves nothing any more. Idempotent."""
        with self._changed:
            self._closed = True
            gone = [each for kept in self._kept.values() for each in kept.values()]
            self._kept.clear()
            self._changed.notify_all()
        for each in gone:
            each.offer.end()
        self.relay.server.forget_ended()


class GrantBoard:
    """`transfer.relay.Board` of one grant.

    Args:
        shelf: of this receiver.
        endpoint: of the agent that granted.
        transfer_id: of the grant; each report renews it.
    """

    def __init__(self, shelf: RelayShelf, endpoint: str, transfer_id: str) -> None:
        self._shelf = shelf
        self._endpoint = endpoint
        self._transfer_id = transfer_id
        self._client = shelf.connect(endpoint)
        self._lock = threading.Lock()
        self._open = True
        shelf.reading(endpoint, 1)

    def exchange(
        self, content: str, *, fetched: bytes, stuck: bytes, want: int, wait_s: float, deadline: Deadline
    ) -> RelayAnswer:
        timeout_s = min(_CALL_S, deadline.check("time to ask who has what", peer=self._endpoint))
        return self._shelf.exchange(
            self._client, self._endpoint, timeout_s, transfer_id=self._transfer_id, content=content, fetched=fetched,
            stuck=stuck, want=want, wait_s=wait_s,
        )  # fmt: skip

    def close(self) -> None:
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:
            self._client.close()
            self._shelf.reading(self._endpoint, -1)
