"""PublishTracker: what this host's agent has proved, and who has fetched it, for whoever waits for that."""

from __future__ import annotations

import threading
from collections import Counter

from weightsync.errors import StateError
from weightsync.types import Deadline
from weightsync.types.agent_messages import DeltaReport, Event, NotPublished, Published, TransferBegun, TransferDone

_MAX_MISSED = 256
_MAX_WHY = 2000
_MAX_RECEIVERS = 4096


class PublishTracker:
    """Told of events by the agent's thread, waited for by any other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._published = -1
        self._not_published: dict[int, str] = {}
        self._delta: DeltaReport | None = None
        self._fetched: dict[str, int] = {}  # the newest version, by receiver
        self._recent: list[int] = []  # the last two versions that anybody has fetched
        self._under_way: Counter[tuple[str, int]] = Counter()  # transfers, by receiver and version
        self._closed = False

    def hear(self, event: Event) -> None:
        with self._changed:
            match event:
                case Published():
                    self._published = max(self._published, event.version.number)
                    self._delta = event.delta
                    self._not_published = {
                        version: why for version, why in self._not_published.items() if version > self._published
                    }
                case NotPublished():
                    self._missed(event.version.number, event.error.get("message", ""))
                case TransferBegun():
                    self._under_way[event.receiver, event.version.number] += 1
                    while len(self._under_way) > _MAX_RECEIVERS:  # an agent leaves out ends where it has many to tell
                        del self._under_way[next(iter(self._under_way))]
                case TransferDone():
                    self._under_way -= Counter([(event.receiver, event.version.number)])  # never less than none
                    if event.ok:
                        self._was_fetched(event.receiver, event.version.number)
            self._changed.notify_all()

    def agent_restarted(self) -> None:
        """The agent died: its transfers with it."""
        with self._changed:
            self._under_way.clear()
            self._changed.notify_all()

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

    def behind(self, version: int, *, wait_s: float = 0.0) -> tuple[str, ...] | None:
        """Who keeps up, and has not fetched that version, or a newer one, yet; None where nobody has begun to.

        Who has fetched one of the last two versions that anybody has fetched keeps up, and whoever fetches one just
        now: others have ended, or hang.

        Args:
            version: its number.
            wait_s: where it is not fetched, something new is waited for, so long at most.
        """
        with self._changed:
            if wait_s and self._behind(version) != ():
                self._changed.wait(wait_s)
            return self._behind(version)

    def _behind(self, version: int) -> tuple[str, ...] | None:
        if not (self._recent or self._under_way):
            return None
        keep_up = [who for who, newest in self._fetched.items() if newest >= self._recent[0]]
        at_it = [who for who, _ in self._under_way]
        return tuple(who for who in dict.fromkeys(keep_up + at_it) if self._fetched.get(who, -1) < version)

    def close(self) -> None:
        """Whoever waits is told so. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
