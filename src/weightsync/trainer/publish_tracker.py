"""PublishTracker: what this host's agent has proved, and who has fetched it, for whoever waits for that."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Collection

from weightsync.errors import StateError
from weightsync.types import Deadline
from weightsync.types.agent_messages import DeltaReport, Event, NotPublished, Published, TransferBegun, TransferDone

_MAX_MISSED = 256
_MAX_WHY = 2000
_MAX_RECEIVERS = 4096
_LIFE = re.compile(r"(?:-[0-9a-f]{8}(?=/|$)|/\d+/[0-9a-f]{8}$)")
_AGAIN_S = 15.0
"""A receiver that could not fetch a version tries again within that: hosts pause for 10 s at most."""


class PublishTracker:
    """Told of events by the agent's thread, waited for by any other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._published = -1
        self._not_published: dict[int, str] = {}
        self._delta: DeltaReport | None = None
        self._fetched: dict[str, int] = {}  # the newest version, by receiver
        self._recent: list[int] = []  # the last two versions that anybody has fetched
        self._at_it: dict[str, float] = {}  # receivers that fetch a version, and until when they count
        self._cut_off: set[str] = set()  # those whose agent died meanwhile: until the next one has proved the version
        self._closed = False

    def hear(self, event: Event) -> None:
        with self._changed:
            match event:
                case Published():
                    self._published = max(self._published, event.version.number)
                    self._delta = event.delta
                    for who in self._cut_off:
                        self._is_at_it(who, time.monotonic() + _AGAIN_S)
                    self._cut_off.clear()
                    self._not_published = {
                        version: why for version, why in self._not_published.items() if version > self._published
                    }
                case NotPublished():
                    self._missed(event.version.number, event.error.get("message", ""))
                case TransferBegun():
                    self._is_at_it(event.receiver, math.inf)
                case TransferDone(ok=True):
                    self._at_it.pop(event.receiver, None)
                    self._was_fetched(event.receiver, event.version.number)
                case TransferDone():
                    self._is_at_it(event.receiver, time.monotonic() + _AGAIN_S)
            self._changed.notify_all()

    def agent_restarted(self) -> None:
        """The agent died, and its transfers with it: they begin again when the next one has proved the version."""
        with self._changed:
            now_s = time.monotonic()
            self._cut_off |= {who for who, until_s in self._at_it.items() if until_s > now_s}
            self._at_it.clear()

    def _is_at_it(self, who: str, until_s: float) -> None:
        """Under the lock."""
        self._at_it.pop(who, None)
        self._at_it[who] = until_s
        while len(self._at_it) > _MAX_RECEIVERS:
            del self._at_it[next(iter(self._at_it))]

    def tried(self, version: int) -> None:
        """A version is about to be published, perhaps once more."""
        with self._changed:
            self._not_published.pop(version, None)

    def skipped(self, version: int, why: str) -> None:
        """A version that the agent was never told of."""
        with self._changed:
            self._missed(version, why)
            self._changed.notify_all()

    def _missed(self, version: int, why: str) -> None:
        """Under the lock. Whoever waits for one waits for a late one: of many the newest are kept."""
        self._not_published[version] = why[:_MAX_WHY]
        while len(self._not_published) > _MAX_MISSED:
            del self._not_published[min(self._not_published)]

    def _was_fetched(self, who: str, version: int) -> None:
        """Under the lock."""
        self._fetched[who] = max(version, self._fetched.pop(who, version))  # the latest to be heard of is the last
        self._recent = sorted({*self._recent, version})[-2:]
        while len(self._fetched) > _MAX_RECEIVERS:
            del self._fetched[next(iter(self._fetched))]

    def wait(self, version: int, *, timeout_s: float) -> None:
        """Waits until that version, or a newer one, is proved and served.

        Raises:
            StateError: it was not published, in words why; or this was closed meanwhile.
            DeadlineExceededError: it takes longer.
        """
        deadline = Deadline(timeout_s)
        with self._changed:
            while self._published < version:
                if version in self._not_published:
                    raise StateError(f"version {version} was not published: {self._not_published[version]}")
                if self._closed:
                    raise StateError(f"version {version} was not proved before this WeightManager was closed")
                self._changed.wait(deadline.check("proof of the publication"))

    def is_under_way(self, version: int) -> bool:
        """Whether that version was published, and is not proved yet."""
        with self._changed:
            return version >= 0 and self._published < version and version not in self._not_published

    def delta_to(self, version: int) -> DeltaReport | None:
        """The delta that leads to that version, where it is the newest; None where there is none."""
        with self._changed:
            return self._delta if self._delta is not None and self._delta.version == version else None

    def behind(self, version: int, *, wait_s: float = 0.0, also: Collection[str] = ()) -> tuple[str, ...] | None:
        """Who keeps up, and has not fetched that version, or a newer one, yet; None where nobody has begun to.

        Who has fetched one of the last two versions that anybody has fetched keeps up, and whoever is at a first pull:
        others have ended, or hang.

        Args:
            version: its number.
            wait_s: where it is not fetched, something new is waited for, so long at most.
            also: who counts as well, though its first pull has failed and it has not come again, under whatever name:
                each life of a receiver has one of its own.
        """
        with self._changed:
            if wait_s and self._behind(version, also) != ():
                self._changed.wait(wait_s)
            return self._behind(version, also)

    def _behind(self, version: int, also: Collection[str]) -> tuple[str, ...] | None:
        now_s = time.monotonic()
        at_it = {who for who, until_s in self._at_it.items() if until_s > now_s} | self._cut_off
        here = {_name(who) for who, newest in self._fetched.items() if newest >= version}
        at_it |= {who for who in also if _name(who) not in here}
        first = tuple(sorted(at_it - self._fetched.keys()))
        if not self._recent:
            return first or None
        return tuple(who for who, newest in self._fetched.items() if self._recent[0] <= newest < version) + first

    def close(self) -> None:
        """Whoever waits is told so. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _name(receiver_id: str) -> str:
    """Without the random digits that each life of a receiver has."""
    return _LIFE.sub("", receiver_id)
