"""History: what the page's plots show of a controller, version by version."""

from __future__ import annotations

import threading
from typing import Literal

import msgspec

from weightsync.types.control import ControllerStatus, SyncRecord

_MAX_VERSIONS = 400


class VersionPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a model.

    Attributes:
        model_tag, run_id, version: which.
        behind: how many versions rollout was behind while this was the newest that was trained, at the most; None:
            nobody looked.
        seconds, outcome: of its last sync that has ended; None where it had none.
        nbytes: that an instance fetched for it, at the most; 0: nobody said.
        slowest_bytes_s: the lowest rate of any instance; 0: nobody said.
    """

    model_tag: str
    run_id: str | None
    version: int
    behind: int | None = None
    seconds: float | None = None
    outcome: Literal["served", "failed"] | None = None
    nbytes: int = 0
    slowest_bytes_s: float = 0.0


class History:
    """Looks at status after status, and keeps the newest versions of each model's current run. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._points: dict[str, dict[int, VersionPoint]] = {}
        self._runs: dict[str, str | None] = {}
        self._looked_s = 0.0

    def look(self, status: ControllerStatus) -> None:
        """Takes what is new in it. Call it after each change of a model, or a version may go by unseen."""
        with self._lock:
            if status.now_s < self._looked_s:  # another thread has brought a later one before
                return
            self._looked_s = status.now_s
            for tag, model in status.models.items():
                if self._runs.setdefault(tag, model.run_id) != model.run_id:
                    self._runs[tag] = model.run_id
                    self._points.pop(tag, None)
                points = self._points.setdefault(tag, {})
                for denied in [each for each in points if each > model.train_model_version]:
                    del points[denied]  # within a run numbers rise: its agent never had that one
                before = self._point(tag, model.train_model_version).behind or 0
                self._change(tag, model.train_model_version, behind=max(before, model.staleness))
            for sync in reversed(status.syncs):  # the oldest first: of several tries the last one counts
                of = status.models.get(sync.model_tag)
                current = of is not None and of.run_id == sync.run_id and sync.version <= of.train_model_version
                if sync.outcome != "running" and current:
                    self._change(
                        sync.model_tag, sync.version, seconds=sync.seconds, outcome=sync.outcome, **_moved(sync)
                    )
            for points in self._points.values():
                for version in sorted(points)[: max(0, len(points) - _MAX_VERSIONS)]:
                    del points[version]

    def points(self) -> tuple[VersionPoint, ...]:
        """What is kept, by model, the oldest version first."""
        with self._lock:
            return tuple(point for points in self._points.values() for _, point in sorted(points.items()))

    def _point(self, tag: str, version: int) -> VersionPoint:
        return self._points.get(tag, {}).get(version) or VersionPoint(
            model_tag=tag, run_id=self._runs.get(tag), version=version
        )

    def _change(self, tag: str, version: int, **changes: object) -> None:
        self._points.setdefault(tag, {})[version] = msgspec.structs.replace(self._point(tag, version), **changes)


def _moved(sync: SyncRecord) -> dict[str, float]:
    """Bytes and rate of the transfers that said how much they were."""
    moved = [span for span in sync.spans if span.nbytes > 0]
    return {
        "nbytes": max((span.nbytes for span in moved), default=0),
        "slowest_bytes_s": min((span.nbytes / max(1e-6, span.seconds) for span in moved), default=0.0),
    }
