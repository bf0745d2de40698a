"""OffloadReport: what one `WeightManager.offload` did."""

from __future__ import annotations

import dataclasses

from weightsync.types import Version


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadReport:
    """What one `offload` did.

    Attributes:
        version: that was given.
        published: whether the agents were told of it. False: no segment came free within the guard.
        path: "shards" (each rank its own part, without communication) or "gather".
        seconds: of the whole call.
        waited_s: for a segment.
        copied_bytes: by this rank.
        why: in words, where it was not published.
    """

    version: Version
    published: bool
    path: str
    seconds: float
    waited_s: float
    copied_bytes: int
    why: str | None = None

    def __str__(self) -> str:
        """One line for a log: `v3: 33.0 MB in 0.14 s, published`."""
        how = "published" if self.published else f"not published: {self.why}"
        waited = f", of which it waited {1e3 * self.waited_s:.0f} ms for a segment" if self.waited_s >= 1e-3 else ""
        return f"v{self.version.number}: {self.copied_bytes / 1e6:.1f} MB copied in {self.seconds:.2f} s{waited}, {how}"
