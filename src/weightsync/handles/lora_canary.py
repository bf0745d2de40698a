"""CanaryWatch: an engine's answers to the trainer's canary, version after version and replica by replica."""

from __future__ import annotations

import math

from weightsync.errors import CanaryError
from weightsync.types import Manifest
from weightsync.types.canary import Canary, CanaryReading, distance

_SERVED_ON = "the adapter that was served is served on"


class CanaryWatch:
    """Of one engine. One session at a time.

    Attributes:
        last: of the version that was asked last.
    """

    def __init__(self) -> None:
        self.last: CanaryReading | None = None
        self._served: dict[int | None, tuple[Canary, str | None, tuple[float, ...]]] = {}
        self._staged: dict[int | None, tuple[Canary, str | None, tuple[float, ...]]] = {}

    def check(
        self, manifest: Manifest, canary: Canary, scores: tuple[float, ...], *, replica: int | None = None
    ) -> None:
        """Takes an answer by a staged version.

        Args:
            manifest: of it.
            canary: what its trainer says.
            scores: what the engine says.
            replica: which.

        Raises:
            CanaryError: they are further apart than the tolerance, or no numbers; or the engine says to the bit what it
                said with the version before, which had other bytes, and of which the trainer said something else.
        """
        version, digest = str(manifest.version), manifest.model_digest
        if not all(map(math.isfinite, scores)):  # NaN is further from nothing
            raise CanaryError("the canary says what is no number", version=version, state_left=_SERVED_ON, still=False)
        if replica in self._staged or (self.last is not None and self.last.version != version):
            self._staged.clear()  # of a try that failed
        worst = distance(scores, canary.logprobs)
        before, moved, still = self._served.get(replica), None, False
        if before is not None and before[0].tokens == canary.tokens:
            moved = distance(scores, before[2])
            changed = digest is None or digest != before[1]
            still = changed and moved == 0 and distance(canary.logprobs, before[0].logprobs) > 0
        earlier = self.last if self._staged else None
        self._staged[replica] = (canary, digest, scores)
        self.last = CanaryReading(
            version=version,
            worst=worst if earlier is None else max(worst, earlier.worst),
            tolerance=canary.tolerance,
            moved=moved,
            num_replicas=len(self._staged),
        )
        where = "" if replica is None else f" of replica {replica}"
        if still:
            raise CanaryError(
                f"the canary{where} stands still: the adapter has other bytes than the version before, and the engine "
                "answers to the bit as it did; what was loaded is not what it computes with",
                version=version, state_left=_SERVED_ON, still=True, worst=worst,
            )  # fmt: skip
        if worst > canary.tolerance:
            raise CanaryError(
                f"the canary{where} says {worst:.3g} less or more than the trainer for some token; allowed are "
                f"{canary.tolerance:g}",
                version=version, state_left=_SERVED_ON, still=False, worst=worst,
            )  # fmt: skip

    def committed(self) -> None:
        """What was staged is served."""
        if self._staged:
            self._served, self._staged = self._staged, {}
