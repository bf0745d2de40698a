"""What the streams of a relayed read work on: `transfer.tcp.Work` of a peer, whose failures are its own, and of the
agent."""

from __future__ import annotations

import collections

from weightsync.errors import DigestMismatchError, EngineUnreachableError, TransferError, WeightSyncError
from weightsync.transfer.relay_pick import Swarm


class PeerWork:
    """`transfer.tcp.Work` of one peer: its failures are its own."""

    def __init__(self, swarm: Swarm, name: str) -> None:
        self._swarm = swarm
        self._name = name
        self._ended = False
        self.error: WeightSyncError | None = None

    @property
    def left(self) -> int:
        return self._swarm.num_left

    @property
    def busy(self) -> bool:
        return not self._swarm.over and not self._ended and self.error is None

    def take(self, *, idle: bool) -> int | None:
        block = self._swarm.take_from_peer(self._name, wait=idle) if self.busy else None
        self._ended |= block is None and idle
        return block

    def put_back(self, blocks: collections.deque[int]) -> None:
        self._swarm.not_from_peer(self._name, blocks)

    def arrived(self, block: int) -> None:
        self._swarm.arrived_from_peer(self._name, block)

    def wrong(self, block: int) -> None:
        self._swarm.not_from_peer(self._name, [block])
        self._strike(DigestMismatchError(f"{self._name} sent block {block} wrong"), wrong=True)

    def damaged(self, block: int, error: TransferError) -> None:
        self._strike(error, wrong=True)

    def fail(self, error: WeightSyncError) -> None:
        if not self._swarm.over:
            self._strike(error, wrong=False)

    def _strike(self, error: WeightSyncError, *, wrong: bool) -> None:
        if self.error is None:
            self.error = error
            self._swarm.peer_failed(self._name, wrong=wrong)


class AgentWork:
    """`transfer.tcp.Work` of one stream of the agent's."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._ended = False

    @property
    def error(self) -> WeightSyncError | None:
        return self._swarm.error or self._swarm.agent_error

    @property
    def left(self) -> int:
        return self._swarm.num_left

    @property
    def busy(self) -> bool:
        return not self._swarm.over and not self._ended and self._swarm.agent_error is None

    def take(self, *, idle: bool) -> int | None:
        block = self._swarm.take_from_agent(wait=idle)
        self._ended |= block is None and idle
        return block

    def put_back(self, blocks: collections.deque[int]) -> None:
        if blocks:
            self._swarm.not_from_agent(list(reversed(blocks)))

    def arrived(self, block: int) -> None:
        self._swarm.arrived_from_agent(block)

    def wrong(self, block: int) -> None:
        self._swarm.agent_was_wrong(block)

    def damaged(self, block: int, error: TransferError) -> None:
        self._swarm.agent_was_wrong(block, error)

    def fail(self, error: WeightSyncError) -> None:
        if isinstance(error, EngineUnreachableError):
            self._swarm.agent_failed(error)
        else:
            self._swarm.fail(error)
