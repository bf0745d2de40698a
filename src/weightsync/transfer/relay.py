"""RelaySource: reads a granted content from the hosts that have proved blocks of it, and the rest from its agent.

    reporter   tells the agent what is here, hears who has what and which blocks to take from the agent itself
    peers      a stream each, at most so many at once; each block is proved by the agent's checksum before it counts
    agent      streams as of a plain TCP pull, for the blocks that this host was told to take

A peer that is wrong, slow, silent or gone costs its block another turn elsewhere; the agent has everything.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import ssl
import threading
import time
from collections.abc import Callable
from typing import Protocol

from weightsync.errors import (
    BusyError,
    ConfigError,
    DeadlineExceededError,
    EngineUnreachableError,
    StateError,
    TransferAbortedError,
    WeightSyncError,
)
from weightsync.transfer.relay_pick import Swarm
from weightsync.transfer.relay_standing import Standing
from weightsync.transfer.relay_work import AgentWork, PeerWork
from weightsync.transfer.source import Arrived, Checksums, Destination
from weightsync.transfer.tcp import TcpSource
from weightsync.types import Deadline
from weightsync.types.publication import Source
from weightsync.types.relay_messages import RelayAnswer, RelayPeer, have_bytes

_WATCH_S = 0.1
_LONGEST_WAIT_S = 0.5
_ALONE_S = 1.0
"""Where the agent does not say who has what it is asked again after so long; everything is taken from it meanwhile."""
_REPORTS_A_PACE = 4
_CONNECT_S = 2.0
"""A peer that can't be connected to for so long is gone. It is asked for nothing yet, so no patience ends it."""
_END_S = 0.2
"""So long a read waits at its end for threads that write nothing any more, e.g. that still connect."""


class Board(Protocol):
    """The agent's answer of who has what, for one grant."""

    def exchange(
        self, content: str, *, fetched: bytes, stuck: bytes, want: int, wait_s: float, deadline: Deadline
    ) -> RelayAnswer:
        """One report, and its answer.

        Raises:
            TransferAbortedError: the grant is over.
            WeightSyncError: the agent could not be asked, or does not relay.
        """

    def close(self) -> None:
        """Ends an exchange under way. Idempotent."""


def show(key: str, content: str, host: str, port: int) -> str:
    """What a reader shows to a peer instead of the content's key: 32 hex digits that are good at that address alone.

    Args:
        key: as the agent gave it, to reader and peer.
        host, port: of the peer, as the agent hands them out.
    """
    message = f"{content} {host} {port}".encode()
    return hmac.new(bytes.fromhex(key), message, hashlib.sha256).hexdigest()[:32]


@dataclasses.dataclass(eq=False)
class RelaySource:
    """See `RangedSource`.

    Args:
        source, checksums: what is read; the checksums are the agent's.
        stall_s: a connection over which nothing comes for so long is given up.
        max_peers: so many are asked at once.
        tls_of: of a peer's host; None where it is to be spoken to in clear. Raises where it may not be asked at all.
        told: told at the end how many bytes came from the agent and from peers, and why.
    """

    source: Source
    checksums: Checksums
    _: dataclasses.KW_ONLY
    content: str
    agent: TcpSource
    num_streams: int
    board: Board
    standing: Standing
    zone: str | None
    stall_s: float
    max_peers: int
    tls_of: Callable[[RelayPeer], ssl.SSLContext | None]
    told: Callable[[int, int, str], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._asking: dict[str, TcpSource] = {}
        self._threads: list[threading.Thread] = []
        self._num_agent_streams = 0
        self._closed = False

    def read(self, blocks: list[int], into: Destination, arrived: Arrived, *, deadline: Deadline) -> None:
        swarm = Swarm(
            self.source.num_blocks, blocks, zone=self.zone, standing=self.standing,
            size_of=lambda block: self.source.block(block)[1], first_patience_s=self.stall_s,
        )  # fmt: skip
        reading = _Reading(swarm, into, arrived, deadline)
        self._start(self._report, reading, name="weightsync-relay-report")
        try:
            self._watch(reading)
        finally:
            swarm.fail(TransferAbortedError("this read has ended"))  # nothing more is asked for
            self.board.close()
            self._cut()
            self._let_end(swarm)
            self.told(swarm.agent_bytes, swarm.peer_bytes, swarm.because())
        if reading.error is not None:
            raise reading.error

    def cancel(self) -> None:
        self._closed = True
        self.board.close()
        self._cut()

    def close(self) -> None:
        self.cancel()

    def _watch(self, reading: _Reading) -> None:
        """Until all is there, or it has failed; peers that are too slow are cut meanwhile."""
        swarm = reading.swarm
        while True:
            if swarm.ended.wait(_WATCH_S):
                reading.error = swarm.error if swarm.num_left else None
                return
            if self._closed:
                swarm.fail(TransferAbortedError("this source was closed", peer=self.source.endpoint))
            elif reading.deadline.expired:
                swarm.fail(
                    DeadlineExceededError(
                        f"not every block came within {reading.deadline.said}", peer=self.source.endpoint
                    )
                )
            else:
                swarm.check_hope()
                for name in swarm.slow_peers():
                    with self._lock:
                        slow = self._asking.get(name)
                    if slow is not None:
                        slow.cancel()

    def _let_end(self, swarm: Swarm) -> None:
        """Returns when no thread writes any more: each has put back what it was to read. Their connections are cut, so
        they end at once, but for one that still connects, or looks up a name: it finds nothing to do, and ends then."""
        end_s = time.monotonic() + _END_S
        for thread in tuple(self._threads):
            while thread.is_alive() and (swarm.is_asking or time.monotonic() < end_s):
                thread.join(_END_S / 4)

    def _start(self, run: Callable[..., None], *args: object, name: str) -> None:
        thread = threading.Thread(target=self._guarded, args=(run, *args), name=name, daemon=True)
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be had now
            self._threads.remove(thread)
            raise StateError(f"no thread can be started to read {self.source.endpoint}: {error}") from error

    @staticmethod
    def _guarded(run: Callable[..., None], reading: _Reading, *args: object) -> None:
        try:
            run(reading, *args)
        except WeightSyncError as error:
            reading.swarm.fail(error)
        except BaseException as error:  # our own bug, or no memory: the caller must hear of it
            reading.swarm.fail(EngineUnreachableError(f"a relayed read failed: {error!r}"))
            raise

    def _cut(self) -> None:
        self.agent.cancel()
        with self._lock:
            asking = tuple(self._asking.values())
        for each in asking:
            each.cancel()

    # --- threads ---

    def _read_agent(self, reading: _Reading) -> None:
        try:
            self.agent.stream(AgentWork(reading.swarm), reading.into, reading.arrived, reading.deadline)
        finally:
            with self._lock:
                self._num_agent_streams -= 1

    def _ask_agent(self, reading: _Reading) -> None:
        """As many streams to the agent as there is work for."""
        while True:
            with self._lock:
                if self._closed or self._num_agent_streams >= reading.swarm.agent_streams(self.num_streams):
                    return
                self._num_agent_streams += 1
            try:
                self._start(self._read_agent, reading, name="weightsync-pull-agent")
            except StateError:
                with self._lock:
                    self._num_agent_streams -= 1
                    if self._num_agent_streams:
                        return  # those that run do it
                raise

    def _read_peer(self, reading: _Reading, facts: RelayPeer, peer: TcpSource) -> None:
        try:
            peer.stream(PeerWork(reading.swarm, facts.receiver_id), reading.into, reading.arrived, reading.deadline)
        finally:
            with self._lock:
                self._asking.pop(facts.receiver_id, None)
            peer.close()

    def _report(self, reading: _Reading) -> None:
        """Says what is here and hears who has what, again and again."""
        swarm, num_blocks = reading.swarm, self.source.num_blocks
        pause_s, reported, key = 0.0, -1, ""
        while not swarm.over and not self._closed:
            began_s = time.monotonic()
            fetched = swarm.fetched
            try:
                answer = self.board.exchange(
                    self.content,
                    fetched=have_bytes(fetched, num_blocks),
                    stuck=have_bytes(swarm.stuck(), num_blocks),
                    want=swarm.want(2 * self.num_streams, pause_s),
                    wait_s=_LONGEST_WAIT_S if swarm.is_idle and fetched == reported else 0.0,
                    deadline=reading.deadline,
                )
            except TransferAbortedError:
                if not self._closed and not swarm.over:
                    raise
                return
            except WeightSyncError as error:
                if isinstance(error, BusyError | DeadlineExceededError | EngineUnreachableError | StateError):
                    pause_s = _ALONE_S
                else:  # it knows no such thing, and will not
                    pause_s = reading.deadline.timeout_s
                swarm.go_alone()
                self._ask_agent(reading)
                _wait(swarm, pause_s, began_s)
                continue
            reported, key, pause_s = fetched, answer.keys.get(self.content, key), answer.again_s
            order = swarm.told(answer.peers, answer.take)
            if key:
                self._ask(reading, order, key)
            elif not answer.take:
                swarm.go_alone()  # the agent has forgotten it: what it still serves is taken from it
            self._ask_agent(reading)
            # what is new is told soon, and what is not new now and then
            _wait(swarm, pause_s, began_s, reported=reported)

    def _ask(self, reading: _Reading, order: list[RelayPeer], key: str) -> None:
        """Streams to the peers that come first, as long as there is room for more."""
        for facts in order:
            with self._lock:
                if len(self._asking) >= self.max_peers:
                    return
                if facts.receiver_id in self._asking or self._closed:
                    continue
            try:
                peer = TcpSource(
                    self.source,
                    self.checksums,
                    transfer_id=show(key, self.content, facts.host, facts.port),
                    address=(facts.host, facts.port),
                    num_streams=1,
                    stall_s=self.stall_s,
                    connect_s=_CONNECT_S,
                    tls=self.tls_of(facts),
                    name=f"{facts.receiver_id} at {facts.host}:{facts.port}",
                    max_tries=1,
                )
                with self._lock:
                    self._asking[facts.receiver_id] = peer
                self._start(self._read_peer, reading, facts, peer, name="weightsync-pull-peer")
            except WeightSyncError as error:
                # not to be asked, it speaks in clear, say; so nobody waits for what it has: the agent gives that
                with self._lock:
                    self._asking.pop(facts.receiver_id, None)
                reading.swarm.peer_failed(facts.receiver_id, wrong=isinstance(error, ConfigError))


@dataclasses.dataclass(eq=False)
class _Reading:
    swarm: Swarm
    into: Destination
    arrived: Arrived
    deadline: Deadline
    error: WeightSyncError | None = None


def _wait(swarm: Swarm, pause_s: float, since_s: float, *, reported: int | None = None) -> None:
    """At least `pause_s` from `since_s` on; then, where the agent was told of these blocks, until there is something to
    say, at most a few times as long."""
    with swarm.changed:
        swarm.changed.wait_for(lambda: swarm.over, max(0.0, since_s + pause_s - time.monotonic()))
        if reported is not None:
            swarm.changed.wait_for(
                lambda: swarm.over or swarm.fetched != reported or swarm.is_idle,
                _REPORTS_A_PACE * min(pause_s, _WATCH_S),
            )
