"""LongPoll: requests that wait at the agent until there is something new. A waiter costs no thread, and they are
counted, see `Places`."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import time
from collections.abc import Callable

from starlette.requests import Request

from weightsync.errors import InvalidRequestError
from weightsync.net.places import Places, peer_of
from weightsync.types import Version
from weightsync.types.spec import check_id

MAX_WAIT_S = 60.0
"""No request waits longer. Whoever wants more asks again."""
_MAX_WAITERS = 1024
_FOLLOWS_S = 10.0
"""Who lets a request wait for longer asks again as soon as it is answered: it follows."""
_BACK_S = 2.0
"""A follower that has not asked again for so long is gone, or has no reason to."""
_MAX_AWAY = 4096


class LongPoll:
    """The requests that wait now. `changed` may be called from any thread, `until` in the server's loop."""

    def __init__(self) -> None:
        self._places = Places(_MAX_WAITERS)
        self._lock = threading.Condition()
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        # followers that were answered, the longest ago first: until when each may come back, and from which address:
        # the next request of one has a connection of its own
        self._away = collections.deque[tuple[float, str]](maxlen=_MAX_AWAY)
        self._closed = False

    async def until(self, ready: Callable[[], bool], request: Request, *, wait_s: float) -> None:
        """Returns when `ready` says so, or after `wait_s`, or when the caller has gone, or at `close`, or to make room
        for another one's request.

        Raises:
            StateError: too many wait already.
        """
        follows = wait_s > _FOLLOWS_S
        if follows:
            self._is_back(peer_of(request))
        if not (wait_s <= 0 or ready()):
            await self._wait(ready, request, wait_s)
        if follows and ready():
            self._is_away(peer_of(request))

    async def _wait(self, ready: Callable[[], bool], request: Request, wait_s: float) -> None:
        awake = asyncio.Event()
        with self._places.take(request, awake.set) as place:
            with self._lock:
                self._waiting[awake] = asyncio.get_running_loop()
            gone = asyncio.ensure_future(_disconnected(request))
            gone.add_done_callback(lambda _: awake.set())
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        while not (ready() or gone.done() or self._closed or place.lost):
                            await awake.wait()
                            awake.clear()
            finally:
                gone.cancel()
                with self._lock:
                    del self._waiting[awake]

    def changed(self) -> None:
        """Each waiter looks whether it is ready."""
        with self._lock:
            for awake, loop in self._waiting.items():
                with contextlib.suppress(RuntimeError):  # that loop has ended, and its requests with it
                    loop.call_soon_threadsafe(awake.set)

    def close(self) -> None:
        """Nobody waits any longer. Idempotent."""
        self._closed = True
        self.changed()

    def close_for_followers(self) -> None:
        """`close`, and then a wait for those that are between two requests, so that each has asked once more: 2 s at
        most. Not in the server's loop."""
        self.close()
        with self._lock:
            while self._away and (left_s := self._away[-1][0] - time.monotonic()) > 0:
                self._lock.wait(left_s)

    def _is_back(self, peer: str) -> None:
        with self._lock:
            now_s = time.monotonic()
            found = next((each for each in self._away if each[1] == peer and each[0] > now_s), None)
            if found is not None:
                self._away.remove(found)
                self._lock.notify_all()

    def _is_away(self, peer: str) -> None:
        with self._lock:
            if not self._closed:
                self._away.append((time.monotonic() + _BACK_S, peer))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def asked_wait_s(request: Request) -> float:
    """How long a request may wait for its answer, as its query says; 0 where it says nothing.

    Raises:
        InvalidRequestError: it says what is no such time.
    """
    text = request.query_params.get("wait_s", "0")
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= MAX_WAIT_S:  # NaN fails both
            return float(text)
    raise InvalidRequestError(f"wait_s is a number of seconds from 0 to {MAX_WAIT_S:g}, not {text[:30]!r}")


def asked_version(request: Request) -> Version | None:
    """The version in `after=RUN/NUMBER` of a query; None where there is none.

    Raises:
        InvalidRequestError: it is no version.
    """
    text = request.query_params.get("after")
    if text is None:
        return None
    run_id, _, number = text.rpartition("/")
    if not (number.isascii() and number.isdigit() and len(number) < 20):
        raise InvalidRequestError(f"after is a version as RUN/NUMBER, not {text[:100]!r}")
    check_id("run_id", run_id)
    return Version(run_id=run_id, number=int(number))


def asked_number(request: Request) -> int:
    """The count in `after=N` of a query; 0 where there is none.

    Raises:
        InvalidRequestError: it is no count.
    """
    text = request.query_params.get("after", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidRequestError(f"after is a number, 0 or more, not {text[:30]!r}")
    return int(text)
