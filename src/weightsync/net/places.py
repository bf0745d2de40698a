"""Places: how many requests may wait for their answers at a server, and who makes room for one more.

Who waits costs no thread, but a connection: a crowd that may take them all shuts everybody else out. So places are
counted by peer, and the peer that has most of them makes room: a crowd takes them from itself, and from nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable, Iterator

from starlette.requests import Request

from weightsync.errors import StateError
from weightsync.net.guard import VISIT

FRESH_S = 5.0
"""A peer's request that has waited for less does not make room for another of that peer: else those that ask again as
soon as they are answered would keep the server busy with that alone."""
_FEWEST = 16


class Place:
    """One request that waits.

    Attributes:
        since_s: when it began, by the loop's clock.
        lost: whether it made room for another; it is to be answered now.
    """

    def __init__(self, peer: str, since_s: float, leave: Callable[[], None]) -> None:
        self.peer = peer
        self.since_s = since_s
        self.lost = False
        self.leave = leave


class Places:
    """The requests that wait now. Of one event loop.

    Args:
        num_places: in all; fewer where the process may not have twice as many descriptors.
        clock: seconds; the loop's where not given.
    """

    def __init__(self, num_places: int, *, clock: Callable[[], float] | None = None) -> None:
        self._num_places = num_places
        self._clock = clock
        self._by_peer: dict[str, dict[Place, None]] = {}  # the oldest first
        self.num_taken = 0

    @contextlib.contextmanager
    def take(self, request: Request, leave: Callable[[], None]) -> Iterator[Place]:
        """A place for a request, until it is answered.

        Args:
            request: whose peer is counted.
            leave: called once `lost`; sees to it that the request is answered soon.

        Raises:
            StateError: all are taken, and nobody makes room: this peer has most of them, and has asked just now.
        """
        now_s = (self._clock or asyncio.get_running_loop().time)()
        place = Place(peer_of(request), now_s, leave)
        most = self._room()
        while self.num_taken >= most:
            self._make_room(place, most)
        self._by_peer.setdefault(place.peer, {})[place] = None
        self.num_taken += 1
        try:
            yield place
        finally:
            self._drop(place)

    def _room(self) -> int:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # somebody may have changed it
        return self._num_places if soft == resource.RLIM_INFINITY else min(self._num_places, max(_FEWEST, soft // 2))

    def _make_room(self, newcomer: Place, most: int) -> None:
        crowd = max(self._by_peer.values(), key=len)
        oldest = next(iter(crowd))
        has_as_many = len(self._by_peer.get(newcomer.peer, ())) + 1 >= len(crowd)
        if has_as_many and newcomer.since_s - oldest.since_s < FRESH_S:
            raise StateError(
                f"this server is busy, try again: {most} requests wait here already, most of them from "
                f"{newcomer.peer}; who asks with wait_s=0 need not wait",
                state_left="nothing was changed",
            )
        self._drop(oldest)
        oldest.lost = True
        oldest.leave()

    def _drop(self, place: Place) -> None:
        of_peer = self._by_peer.get(place.peer, {})
        if place in of_peer:
            del of_peer[place]
            self.num_taken -= 1
            if not of_peer:
                del self._by_peer[place.peer]


def end_now(limit: asyncio.Timeout) -> None:
    """Ends what waits within it, as if its time were over."""
    with contextlib.suppress(RuntimeError):  # it is over
        limit.reschedule(0.0)


def peer_of(request: Request) -> str:
    """The address that a request comes from; empty where it comes from no network."""
    visit = request.scope.get(VISIT)
    if visit is not None:
        return str(visit.peer)
    return "" if request.client is None else request.client.host
