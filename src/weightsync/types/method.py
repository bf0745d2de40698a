"""Push: the training ranks' side of a push, and the report of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from weightsync.types.manifest import Version
from weightsync.types.message import learn
from weightsync.types.progress import log_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What one sync did, as training rank 0 saw it.

    Attributes:
        version: what every engine listed serves now.
        engine_ids: the engines that committed.
        lost: engines that were left out, and why: they did not answer before the sync began, or did not join.
        total_bytes: bytes of the model, once.
        sent_bytes: bytes that were given to the transport, or fetched: the model's, or what changed and where.
        num_deltas: how many deltas they are; 0 where all of it moved.
        full_because: of a push with `ChangesCodec`: why all of it moved; None where it did not, or nobody asked.
        num_chunks: chunks announced.
        seconds: from call to return; of a push, since every training rank has called.
        paused_s: the longest time any engine was paused.
        phases_s: seconds by phase name, summed over this process and the engines (phases overlap).
        digests_equal: True: every engine proved it from live bytes; None: some can't be proved, see
            `unprovable`. A mismatch is an error, never a report.
        unprovable: reasons by engine id.
        written: how many elements engines have written in place, those alone that did not write all of them, as far as
            is known.
        checksums: engines' own, of their live weights, by engine id, compared among engines of one size: SGLang's.
            They say that engines agree, not that this is what was published.
    """

    version: Version
    engine_ids: tuple[str, ...]
    lost: Mapping[str, str]
    total_bytes: int
    sent_bytes: int
    num_deltas: int
    full_because: str | None
    num_chunks: int
    seconds: float
    paused_s: float
    phases_s: Mapping[str, float]
    digests_equal: bool | None
    unprovable: Mapping[str, str]
    checksums: Mapping[str, str] = dataclasses.field(default_factory=dict)
    written: int = 0

    def __str__(self) -> str:
        """One line for a log: `v3: 0.4 MB (1.2 %) in 0.14 s, paused 82 ms, proved`."""
        line = log_line(
            version=self.version.number, moved_bytes=self.sent_bytes, total_bytes=self.total_bytes,
            by_deltas=self.num_deltas > 0, seconds=self.seconds, paused_s=self.paused_s,
            unproved_by=None if self.digests_equal else self.unprovable,
        )  # fmt: skip
        line += " (report.unprovable says why)" if self.unprovable and not self.digests_equal else ""
        line += f", without {', '.join(self.lost)}" if self.lost else ""
        return line + (f"; all of it: {self.full_because}" if self.full_because else "")

    @property
    def lost_engine_ids(self) -> tuple[str, ...]:
        """The engines of `lost`."""
        return tuple(self.lost)


learn(SyncReport)


class Push(Protocol):
    """The training ranks' side of a push: a `PushSync`, whose three methods every rank calls in the same order, or a
    `RayWeightSync`, which calls them on all ranks. A controller syncs by it through `PushMethod`.
    """

    def initialize(self) -> None:
        """Meets the engines once, so that a wrong set-up fails before the first step."""

    def sync_weights(self, version: int) -> SyncReport:
        """Moves the model's present weights to every engine under `version`; see `SyncReport`.

        Raises:
            WeightSyncError: nothing mixed is served: engines keep their old version or refuse to serve.
        """

    def close(self) -> None:
        """Gives back groups, threads and connections. Idempotent."""
