"""RelayBoard: who has proved which blocks of what an agent has granted, and who takes which from the agent itself.

It is no scheduler: it says who has what, and never tells two hosts to take the same block from the agent at once. What
a host does with that is its own affair, and what it gets is proved by the agent's checksums, whoever sent it.

No thread, no socket: its owner calls it from one thread, or under a lock.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterator

from weightsync.types.relay_messages import (
    MAX_PEERS,
    RelayAnswer,
    RelayFace,
    RelayPeer,
    RelayReport,
    have_bytes,
    have_of,
)

_MAX_CONTENTS = 80
_MAX_HOSTS = 4096
"""Of one content; who was heard of longest ago is forgotten."""
_IN_FLIGHT, _MOST_IN_FLIGHT = 12, 32
"""Blocks that hosts take from the agent at one time: a host alone so many, many hosts one each up to the second. More
of them would share the link, and each would be late where it could be relayed already."""
_PACES, _MOST_IN_FLIGHT_FAST = 3.0, 256
"""Over a fast link as many as come in so many paces of reports, at most so many."""
_GONE_S, _SILENT_S = 45.0, 2.5
"""A host that has not been heard of for so long is not named any more, nor counted; who fetches and says nothing for
so long has no claim any more."""
_CLAIM_S, _CLAIM_TIMES = 2.0, 8.0
"""A block that was to be taken from the agent may take so long, or so many times as long as they usually take."""
_FASTEST_S, _SLOWEST_S = 0.01, 0.1
_PACE_BYTES_S = 1e9
_HOSTS_A_PACE = 12
_GOLDEN = 0.6180339887498949


@dataclasses.dataclass(kw_only=True, eq=False)
class _Host:
    """One host, of one content.

    Attributes:
        face, address: where it serves; None: it does not.
        order: the how manyth that came.
        have: blocks that it serves.
        fetched: blocks that it has.
        told: blocks that somebody has, as it was told last.
        seen_s: when it was heard of last.
        fetches: whether it is at work on it.
    """

    face: RelayFace | None = None
    address: str = ""
    order: int = 0
    have: int = 0
    fetched: int = 0
    told: int = 0
    seen_s: float = 0.0
    fetches: bool = False


@dataclasses.dataclass(kw_only=True, eq=False)
class _Content:
    """One row of blocks that is granted."""

    num_blocks: int
    size_bytes: int
    key: str
    hosts: dict[str, _Host] = dataclasses.field(default_factory=dict)
    claims: dict[int, tuple[str, float]] = dataclasses.field(default_factory=dict)
    num_seen: int = 0
    claim_s: float | None = None
    block_s: float | None = None
    done_s: float | None = None

    @property
    def all(self) -> int:
        return (1 << self.num_blocks) - 1


class RelayBoard:
    """Of one agent.

    Args:
        clock: seconds, rising.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._contents: dict[str, _Content] = {}

    def know(self, content: str, *, num_blocks: int, size_bytes: int) -> None:
        """A content that is granted now; of many, the one that was granted longest ago is forgotten."""
        known = self._contents.pop(content, None)
        if known is None:
            key = hmac.new(self._secret, content.encode(), hashlib.sha256).hexdigest()
            known = _Content(num_blocks=num_blocks, size_bytes=size_bytes, key=key)
        self._contents[content] = known
        while len(self._contents) > _MAX_CONTENTS:
            del self._contents[next(iter(self._contents))]

    def report(self, report: RelayReport, *, address: str) -> bool:
        """Takes a report in.

        Args:
            report: of a receiver that is registered.
            address: that it has called from.

        Returns:
            Whether others may want to hear of it.
        """
        now_s, changed = self._clock(), False
        held = {holding.content: holding.have for holding in report.holdings if report.face is not None}
        for content_id, content in self._contents.items():
            if content_id not in held and content_id != report.content:
                if (host := content.hosts.get(report.receiver_id)) is not None:
                    self._give_up(content, report.receiver_id)
                    host.have = host.fetched = host.told = 0  # of large models and many hosts these are gigabytes
                    host.fetches = False
                continue
            host = self._host(content, report.receiver_id)
            host.seen_s, host.face = now_s, report.face
            host.address = address if report.face is None or report.face.host is None else report.face.host
            before, host.have = host.have, have_of(held.get(content_id, b""), content.num_blocks)
            host.fetches = content_id == report.content
            host.fetched = have_of(report.fetched, content.num_blocks) if host.fetches else host.have
            changed |= host.have & ~before != 0
            self._settle(content, report.receiver_id, host, now_s)
        return changed

    def has_news(self, report: RelayReport) -> bool:
        """Whether an answer to a host that fetches would tell it more than the last one."""
        content = self._contents.get(report.content or "")
        if content is None or (host := content.hosts.get(report.receiver_id)) is None:
            return True
        if self._held_by_others(content, report.receiver_id) & ~host.fetched & ~host.told:
            return True
        return next(self._takes(content, report, host), None) is not None

    def answer(self, report: RelayReport, *, address: str) -> RelayAnswer:
        """What a host is told now; what it is to take is its claim from now on."""
        named = [holding.content for holding in report.holdings] + ([report.content] if report.content else [])
        keys = {name: self._contents[name].key for name in named if name in self._contents}
        seen_as = address if report.face is None or report.face.host is None else report.face.host
        content = self._contents.get(report.content or "")
        host = None if content is None else content.hosts.get(report.receiver_id)
        if content is None or host is None:
            return RelayAnswer(keys=keys, seen_as=seen_as)
        now_s = self._clock()
        taken = []
        for block in self._takes(content, report, host):
            content.claims[block] = (report.receiver_id, now_s)
            taken.append(block)
        host.told = self._held_by_others(content, report.receiver_id)
        num_hosts = self._num_fetching(content)
        pace_s = self._pace_s(content)
        return RelayAnswer(
            keys=keys,
            seen_as=seen_as,
            peers=tuple(self._peers(content, report.receiver_id, host)),
            take=tuple(taken),
            again_s=min(5.0, pace_s * max(1.0, num_hosts / _HOSTS_A_PACE)),
        )

    # --- what follows from what was said ---

    def _host(self, content: _Content, receiver_id: str) -> _Host:
        host = content.hosts.pop(receiver_id, None)
        if host is None:
            host = _Host(order=content.num_seen)
            content.num_seen += 1
            while len(content.hosts) >= _MAX_HOSTS:
                gone = next(iter(content.hosts))
                del content.hosts[gone]
                self._give_up(content, gone)
        content.hosts[receiver_id] = host
        return host

    @staticmethod
    def _give_up(content: _Content, receiver_id: str) -> None:
        for block in [block for block, (who, _) in content.claims.items() if who == receiver_id]:
            del content.claims[block]

    def _settle(self, content: _Content, receiver_id: str, host: _Host, now_s: float) -> None:
        """Claims that have come true, and those that nobody keeps any more."""
        longest_s, num_done = max(_CLAIM_S, _CLAIM_TIMES * (content.claim_s or 0.0)), 0
        for block, (who, since_s) in tuple(content.claims.items()):
            if who == receiver_id and (host.fetched >> block) & 1:
                took_s = now_s - since_s
                content.claim_s = took_s if content.claim_s is None else 0.8 * content.claim_s + 0.2 * took_s
                num_done += 1
                del content.claims[block]
                continue
            claimant = content.hosts.get(who)
            silent = claimant is None or not claimant.fetches or now_s - claimant.seen_s > _SILENT_S
            if silent or now_s - since_s > longest_s:
                del content.claims[block]
        if num_done:
            if content.done_s is not None:
                each_s, before = (now_s - content.done_s) / num_done, content.block_s
                content.block_s = each_s if before is None else 0.9 * before + 0.1 * each_s
            content.done_s = now_s

    def _num_fetching(self, content: _Content) -> int:
        """Of those that were heard of lately: one that was killed never says that it is not at work any more."""
        now_s = self._clock()
        return sum(each.fetches and now_s - each.seen_s < _GONE_S for each in content.hosts.values())

    @staticmethod
    def _pace_s(content: _Content) -> float:
        return min(_SLOWEST_S, max(_FASTEST_S, content.size_bytes / _PACE_BYTES_S))

    def _serving(self, content: _Content, now_s: float) -> Iterator[tuple[str, _Host]]:
        for name, host in content.hosts.items():
            if host.face is not None and host.have and now_s - host.seen_s < _GONE_S:
                yield name, host

    def _held_by_others(self, content: _Content, receiver_id: str) -> int:
        held, now_s = 0, self._clock()
        for name, host in self._serving(content, now_s):
            if name != receiver_id:
                held |= host.have
        return held

    def _takes(self, content: _Content, report: RelayReport, host: _Host) -> Iterator[int]:
        """Blocks that this host may take from the agent: those that nobody has and nobody takes; each host begins at
        another place."""
        num_fetching = max(1, self._num_fetching(content))
        mine = sum(who == report.receiver_id for who, _ in content.claims.values())
        stuck = have_of(report.stuck, content.num_blocks)
        room = report.want  # of a host alone: it knows how fast it is
        if num_fetching > 1:
            together = _IN_FLIGHT
            if content.block_s is not None:
                fast = int(_PACES * self._pace_s(content) / max(1e-6, content.block_s))
                together = max(together, min(_MOST_IN_FLIGHT_FAST, fast))
            most = max(together, _MOST_IN_FLIGHT)
            room = min(room, max(1, together // num_fetching) - mine, most - len(content.claims))
        if room <= 0:
            return
        claimed = 0
        for block in content.claims:
            claimed |= 1 << block
        free = content.all & ~host.fetched & ~claimed
        free &= ~self._held_by_others(content, report.receiver_id) | stuck
        at = int(host.order * _GOLDEN % 1.0 * content.num_blocks)
        for _ in range(room):
            if not free:
                return
            ahead = free >> at << at
            first = ahead or free
            block = (first & -first).bit_length() - 1
            yield block
            free &= ~(1 << block)
            at = block + 1

    def _peers(self, content: _Content, receiver_id: str, host: _Host) -> Iterator[RelayPeer]:
        """Those that have what this host lacks: of its own zone first, then each host others first."""
        now_s, zone = self._clock(), None if host.face is None else host.face.zone
        found = [
            (name, each)
            for name, each in self._serving(content, now_s)
            if name != receiver_id and each.have & ~host.fetched
        ]

        def turn(item: tuple[str, _Host]) -> tuple[bool, bytes]:
            name, each = item
            assert each.face is not None
            near = zone is not None and each.face.zone == zone
            return not near, hashlib.blake2b(f"{receiver_id} {name}".encode(), digest_size=8).digest()

        for name, each in sorted(found, key=turn)[:MAX_PEERS]:
            assert each.face is not None
            yield RelayPeer(
                receiver_id=name, host=each.address, port=each.face.port, zone=each.face.zone, tls=each.face.tls,
                have=have_bytes(each.have, content.num_blocks),
            )  # fmt: skip
