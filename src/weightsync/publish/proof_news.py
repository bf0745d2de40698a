"""ProofNews: which versions this host's agent has proved, for whoever waits for one."""

from __future__ import annotations

import threading
from typing import Any

from weightsync.errors import StateError
from weightsync.types import Deadline

_MAX_MISSED = 256
_MAX_WHY = 2000


class ProofNews:
    """Told of proofs by the agent's thread, waited for by any other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._published = -1
        self._not_published: dict[int, str] = {}
        self._delta: dict[str, Any] | None = None
        self._closed = False

    def hear(self, event: dict[str, Any]) -> None:
        """Takes an agent's event; other kinds than "published" and "not_published" say nothing here."""
        with self._changed:
            if event.get("event") == "published":
                self._published = max(self._published, event["version"])
                self._delta = event.get("delta")
                self._not_published = {
                    version: why for version, why in self._not_published.items() if version > self._published
                }
            elif event.get("event") == "not_published":
                self._missed(event["version"], event["error"].get("message", ""))
            self._changed.notify_all()

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

    def delta_to(self, version: int) -> dict[str, Any] | None:
        """Facts of the delta that leads to that version, where it is the newest; None where there is none."""
        with self._changed:
            return self._delta if self._delta is not None and self._delta["version"] == version else None

    def begin_anew(self) -> None:
        """Forgets all versions: a new run begins."""
        with self._changed:
            self._published = -1
            self._delta = None
            self._not_published.clear()

    def close(self) -> None:
        """Whoever waits is told so. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
