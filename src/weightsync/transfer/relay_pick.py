"""Swarm: what is left of one relayed read, and who is asked for which block: the rarest first, each host others first.

Each block is asked of one side at a time, so no two streams write to one place. No socket, no clock of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable

from weightsync.errors import DigestMismatchError, TransferError, WeightSyncError
from weightsync.transfer.relay_standing import Standing
from weightsync.types.relay_messages import RelayPeer, have_of, set_of

_AHEAD = 2
"""Blocks that a stream asks for at one time."""
_TIERS = 4
"""How many hosts have a block is counted up to so many."""
_MAX_WRONG = 3
_IDLE_S = 2.0
"""A stream to a peer that has nothing of use for so long ends; it is opened again when it has."""
_PATIENCE_S, _PATIENCE_TIMES = 1.0, 8.0
"""A block may take so long, or so many times as long as blocks usually take."""
_STUCK_S = 1.0
_NUM_TIMES = 32


@dataclasses.dataclass(kw_only=True, eq=False)
class _Peer:
    """One that serves some of it; `asked` has since when which block is asked of it."""

    facts: RelayPeer
    have: int
    asked: dict[int, float] = dataclasses.field(default_factory=dict)
    since_s: float = 0.0


class Swarm:
    """Of one read. Thread-safe.

    Args:
        wanted: blocks that are missing.
        first_patience_s: how long a peer's first block may take, before any has come.

    Attributes:
        changed: notified when there may be more to take; its lock guards everything.
        agent_bytes, peer_bytes: bytes that came, from where.
        num_cut: how often a peer failed, was too slow or wrong.
    """

    def __init__(
        self,
        num_blocks: int,
        wanted: Iterable[int],
        *,
        zone: str | None,
        standing: Standing,
        size_of: Callable[[int], int],
        first_patience_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self.changed = threading.Condition()
        self.ended = threading.Event()
        self._num_blocks = num_blocks
        self._missing = set_of(wanted)
        if not self._missing:
            self.ended.set()
        self._zone = zone
        self._standing = standing
        self._size_of = size_of
        self._first_patience_s = first_patience_s
        self._clock = clock
        self._random = random.Random(seed)
        self._in_flight = 0
        self._agent_todo: collections.deque[int] = collections.deque()
        self._agent_asked: dict[int, float] = {}
        self._agent_wrong: collections.Counter[int] = collections.Counter()
        self._slow: set[str] = set()
        self._refused: dict[str, int] = {}  # which blocks a peer was asked for and did not give
        self._peers: dict[str, _Peer] = {}
        self._times_s: collections.deque[float] = collections.deque(maxlen=_NUM_TIMES)
        self._lonely = (0, 0.0)
        self._agent_block_s: float | None = None  # from one block of the agent's to the next
        self._agent_since_s = clock()
        self.alone = False
        self.agent_error: WeightSyncError | None = None
        self.agent_bytes = self.peer_bytes = self.num_cut = 0
        self.error: WeightSyncError | None = None

    # --- how it is ---

    @property
    def num_left(self) -> int:
        """Blocks that have not arrived."""
        return self._missing.bit_count()

    @property
    def over(self) -> bool:
        return self._missing == 0 or self.error is not None

    @property
    def fetched(self) -> int:
        """Blocks that are there."""
        return ~self._missing & ((1 << self._num_blocks) - 1)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked of anybody, so that nothing can arrive."""
        with self.changed:
            return not self._in_flight and not self._agent_todo

    @property
    def is_asking(self) -> bool:
        """Whether something is asked of somebody, so that bytes may still be written."""
        return self._in_flight != 0

    def fail(self, error: WeightSyncError) -> None:
        with self.changed:
            self.error = self.error or error
            self.ended.set()
            self.changed.notify_all()

    # --- what the agent says ---

    def told(self, peers: Iterable[RelayPeer], take: Iterable[int]) -> list[RelayPeer]:
        """Who has what, and what is to be taken from the agent.

        Returns:
            Peers to be asked now, those that should be asked first first.
        """
        with self.changed:
            self.alone = False
            before, self._peers = self._peers, {}
            for facts in peers:
                known = before.pop(facts.receiver_id, None)
                if known is None:
                    known = _Peer(facts=facts, have=0)
                known.facts, known.have = facts, have_of(facts.have, self._num_blocks) | known.have
                self._peers[facts.receiver_id] = known
            self._peers |= {name: peer for name, peer in before.items() if peer.asked}
            todo = set(self._agent_todo)
            for block in take if self.agent_error is None else ():
                if 0 <= block < self._num_blocks and self._missing >> block & 1 and block not in todo:
                    self._agent_todo.append(block)
            self.changed.notify_all()
            near = {name: self._zone is not None and p.facts.zone == self._zone for name, p in self._peers.items()}
            order = self._standing.fast_first(self._peers)
            return [
                self._peers[name].facts
                for name in sorted(order, key=lambda name: not near[name])
                if self._standing.usable(name) and self._peers[name].have & self._missing
            ]

    def go_alone(self) -> None:
        """The agent does not say who has what: everything that nobody is asked for is taken from it."""
        with self.changed:
            self.alone = True
            self.changed.notify_all()

    def stuck(self) -> int:
        """Blocks that no peer gives, though some are said to have them; only the agent will."""
        with self.changed:
            usable = bad = 0
            for name, peer in self._peers.items():
                if self._standing.usable(name):
                    usable |= self._gives(name, peer)
                    bad |= peer.have & ~self._gives(name, peer)
                else:
                    bad |= peer.have
            lonely = self._free() & ~usable
            since, since_s = self._lonely
            long = lonely & since if self._clock() - since_s > _STUCK_S else 0
            if not since & lonely or self._clock() - since_s > 2 * _STUCK_S:
                self._lonely = lonely, self._clock()
            return lonely & (bad | long)

    def want(self, at_least: int, again_s: float) -> int:
        """How many blocks more could be taken from the agent until it is asked again."""
        with self.changed:
            block_s = self._agent_block_s
            most = at_least if block_s is None else max(at_least, min(256, int(2 * again_s / max(1e-6, block_s)) + 1))
            return max(0, most - len(self._agent_todo) - len(self._agent_asked))

    def slow_peers(self) -> list[str]:
        """Peers whose block takes too long: they are to be cut."""
        with self.changed:
            if self._times_s:
                patience_s = max(_PATIENCE_S, _PATIENCE_TIMES * statistics.median(self._times_s))
                patience_s = min(self._first_patience_s, patience_s)
            else:  # who stands still costs half of what the one before it did
                patience_s = min(self._first_patience_s, _PATIENCE_S)
                patience_s = max(patience_s, self._first_patience_s / 2 ** len(self._slow))
            now_s = self._clock()
            # a peer answers in turns: each answer is waited for from the one before it on
            slow = [
                name
                for name, peer in self._peers.items()
                if peer.asked and now_s - max(peer.since_s, min(peer.asked.values())) > patience_s
            ]
            self._slow.update(slow)
            return slow

    # --- taking ---

    def take_from_peer(self, name: str, *, wait: bool) -> int | None:
        """A block to be asked of that peer; None: there is none (any more)."""
        with self.changed:
            until_s = self._clock() + _IDLE_S
            while not self.over:
                peer = self._peers.get(name)
                if peer is None or not self._standing.usable(name):
                    return None
                if (block := self._pick(peer)) is not None:
                    peer.asked[block] = self._clock()
                    self._in_flight |= 1 << block
                    return block
                if not wait or (left_s := until_s - self._clock()) <= 0:
                    return None
                self.changed.wait(left_s)
            return None

    def take_from_agent(self, *, wait: bool) -> int | None:
        """A block to be asked of the agent; None: there is none."""
        with self.changed:
            until_s = self._clock() + _IDLE_S
            while not self.over:
                if (block := self._next_of_agent()) is not None:
                    self._agent_asked[block] = self._clock()
                    self._in_flight |= 1 << block
                    return block
                if not wait or (left_s := until_s - self._clock()) <= 0:
                    return None
                self.changed.wait(left_s)
            return None

    def agent_streams(self, most: int) -> int:
        """So many connections to the agent have something to do."""
        with self.changed:
            if self.over or self.agent_error is not None:
                return 0
            num_blocks = len(self._agent_todo) + len(self._agent_asked)
            return min(most, self._free().bit_count() if self.alone else -(-num_blocks // _AHEAD))

    def _free(self) -> int:
        return self._missing & ~self._in_flight

    def _gives(self, name: str, peer: _Peer) -> int:
        """What it has and has not refused in this read. Where the agent is gone all that it has: it may be the last."""
        return peer.have if self.agent_error is not None else peer.have & ~self._refused.get(name, 0)

    def _next_of_agent(self) -> int | None:
        while self._agent_todo:
            block = self._agent_todo.popleft()
            if self._free() >> block & 1:
                return block
        return self._any_of(self._free()) if self.alone else None

    def _pick(self, peer: _Peer) -> int | None:
        """The rarest block that it has, and that is needed; one that a host of this zone has is not fetched from
        another zone."""
        useful = self._gives(peer.facts.receiver_id, peer) & self._free()
        for block in self._agent_todo:
            useful &= ~(1 << block)
        if self._zone is not None and peer.facts.zone != self._zone:
            for name, other in self._peers.items():
                if other.facts.zone == self._zone and self._standing.usable(name):
                    useful &= ~other.have
        if not useful:
            return None
        at_least = [0] * _TIERS  # blocks that at least 1, 2, ... peers have
        for other in self._peers.values():
            for tier in range(_TIERS - 1, 0, -1):
                at_least[tier] |= at_least[tier - 1] & other.have
            at_least[0] |= other.have
        for tier in range(1, _TIERS):
            if rare := useful & ~at_least[tier]:
                return self._any_of(rare)
        return self._any_of(useful)

    def _any_of(self, blocks: int) -> int | None:
        if not blocks:
            return None
        at = self._random.randrange(self._num_blocks)
        first = (blocks >> at << at) or blocks
        return (first & -first).bit_length() - 1

    # --- how it went ---

    def arrived_from_peer(self, name: str, block: int) -> None:
        """A peer's block is there, and right."""
        with self.changed:
            peer = self._peers.get(name)
            asked_s = None if peer is None else peer.asked.pop(block, None)
            if peer is not None and asked_s is not None:
                took_s = self._clock() - max(asked_s, peer.since_s)
                peer.since_s = self._clock()
                self._times_s.append(took_s)
                self._standing.gave(name, self._size_of(block), took_s)
            self.peer_bytes += self._size_of(block)
            self._there(block)

    def arrived_from_agent(self, block: int) -> None:
        """A block of the agent's is there, and right."""
        with self.changed:
            asked_s = self._agent_asked.pop(block, None)
            if asked_s is not None:
                self._times_s.append(self._clock() - asked_s)
            now_s = self._clock()
            took_s, before = now_s - self._agent_since_s, self._agent_block_s
            self._agent_block_s = took_s if before is None else 0.9 * before + 0.1 * took_s
            self._agent_since_s = now_s
            self.agent_bytes += self._size_of(block)
            self._there(block)

    def _there(self, block: int) -> None:
        self._in_flight &= ~(1 << block)
        self._missing &= ~(1 << block)
        if not self._missing:
            self.ended.set()
        self.changed.notify_all()

    def not_from_peer(self, name: str, blocks: Iterable[int]) -> None:
        """They were asked of a peer, and have not come."""
        with self.changed:
            peer = self._peers.get(name)
            for block in blocks:
                self._refused[name] = self._refused.get(name, 0) | 1 << block
                if peer is not None:
                    peer.asked.pop(block, None)
                self._in_flight &= ~(1 << block)
            self.changed.notify_all()

    def not_from_agent(self, blocks: Iterable[int]) -> None:
        """They were asked of the agent, and have not come: they are asked again."""
        with self.changed:
            for block in blocks:
                self._agent_asked.pop(block, None)
                self._in_flight &= ~(1 << block)
                if self.agent_error is None:  # else peers may give it
                    self._agent_todo.appendleft(block)
            self.changed.notify_all()

    def peer_failed(self, name: str, *, wrong: bool = False) -> None:
        """A peer is gone, too slow, or sent what is wrong."""
        with self.changed:
            self.num_cut += 1
            self._standing.strike(name, wrong=wrong)
            self.changed.notify_all()

    def agent_was_wrong(self, block: int, error: TransferError | None = None) -> None:
        """A block of the agent's came wrong: it is asked for again, a few times."""
        with self.changed:
            self._agent_wrong[block] += 1
            if self._agent_wrong[block] >= _MAX_WRONG:
                self.fail(error or DigestMismatchError(f"block {block} came wrong {_MAX_WRONG} times"))
            elif error is None:  # else it was put back already
                self.not_from_agent([block])

    def agent_failed(self, error: WeightSyncError) -> None:
        """The agent can't be read any more: peers may still have all of it."""
        with self.changed:
            self._agent_todo.clear()  # a peer may be asked for some of it: that stays in flight
            self.agent_error = error
            self.changed.notify_all()

    def check_hope(self) -> None:
        """Fails where the agent is gone and no peer has what is missing."""
        with self.changed:
            if self.agent_error is None or self.over:
                return
            there = 0
            for name, peer in self._peers.items():
                if self._standing.usable(name):
                    there |= peer.have
            if self._missing & ~there & ~self._in_flight or (self.alone and not self._in_flight):
                self.fail(self.agent_error)

    def because(self) -> str:
        """Where it came from, and why, in words."""
        bad = f"; peers failed, were too slow or wrong {self.num_cut} times" if self.num_cut else ""
        if not self.peer_bytes:
            why = "the agent did not say who has what" if self.alone else "no other host gave any of it in time"
            return f"all of it from the agent: {why}{bad}"
        total = self.peer_bytes + self.agent_bytes
        text = f"{self.peer_bytes / total:.0%} from other hosts that had it, the rest from the agent: nobody had that"
        if not self.agent_bytes:
            text = "all of it from other hosts that had it"
        return text + bad
