"""SyncHistory: the syncs of one model as the timeline shows them, and who was waited for in each."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping
from typing import Literal

from weightsync.control.events import Action, StartSync
from weightsync.observe import now_s
from weightsync.types.control import SyncRecord, SyncSpan

_NUM_RECORDS = 50


class SyncHistory:
    """Of one model. Not thread-safe: its model's lock.

    Args:
        model_tag: which.
        spans: what the method says of the sync that runs, or ended last.
    """

    def __init__(self, model_tag: str, spans: Callable[[], tuple[SyncSpan, ...]]) -> None:
        self._model_tag = model_tag
        self._spans = spans
        self._records: collections.deque[SyncRecord] = collections.deque(maxlen=_NUM_RECORDS)
        self._began: tuple[StartSync, float, float] | None = None  # what, since the epoch, monotonic
        self._since_s: dict[str, float] = {}  # monotonic: since when a wait of this name goes on
        self._step: tuple[Action, float, float, str] | None = None  # what it led to; since, until (monotonic); whose

    def note_waits(self, waits: Mapping[str, bool]) -> None:
        """Which waits go on now, by name; see `SPANS`."""
        for name, holds in waits.items():
            if holds:
                self._since_s.setdefault(name, time.monotonic())
            else:
                self._since_s.pop(name, None)

    def step_ended(self, action: Action, worker: str) -> None:
        """The training step that was waited for has ended, by this worker's word, and led to this."""
        since = self._since_s.get("trainer")
        if since is not None:
            self._step = (action, since, time.monotonic(), worker)

    def begin(self, goal: StartSync) -> None:
        """A sync has begun."""
        self._began = (goal, now_s(), time.monotonic())

    def end(self, error: str | None) -> float:
        """It has ended, well where there is no error; seconds it took."""
        record = self._record("served" if error is None else "failed", error)
        self._records.appendleft(record)
        self._began = None
        return record.seconds

    def forget(self) -> None:
        """The sync that had begun was none."""
        self._began = None

    def records(self) -> list[SyncRecord]:
        """The last syncs, the newest first; of the one that runs, what is known so far."""
        return [*([] if self._began is None else [self._record("running", None)]), *self._records]

    def _record(self, outcome: Literal["running", "served", "failed"], error: str | None) -> SyncRecord:
        assert self._began is not None
        goal, started_s, began = self._began
        now = time.monotonic()
        waits = [
            SyncSpan(name=name, start_s=since - began, seconds=now - since) for name, since in self._since_s.items()
        ]
        if self._step is not None and self._step[0] is goal:
            _, since, until, worker = self._step
            waits.append(SyncSpan(name="trainer", start_s=since - began, seconds=until - since, who=worker))
        return SyncRecord(
            model_tag=self._model_tag,
            run_id=goal.run_id,
            version=goal.version,
            started_s=started_s,
            seconds=now - began,
            outcome=outcome,
            error=error,
            spans=(*waits, *self._spans()),
        )
