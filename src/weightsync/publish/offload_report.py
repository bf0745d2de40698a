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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaReport:
    """A delta that receivers can take.

    Attributes:
        run_id: of both versions.
        base, version: numbers of the versions that it leads from and to.
        base_digest: sum of this host's bytes before, 32 hex digits.
        nbytes: its size.
        num_changed, num_elements: how many elements it changes on this host, and of how many.
        seconds: that the agent took to make it.
    """

    run_id: str
    base: int
    base_digest: str
    version: int
    nbytes: int
    num_changed: int
    num_elements: int
    seconds: float
