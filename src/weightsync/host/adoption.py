"""Adoption: a version that engines served before their service was started, and whether the trainer that lives
published it.

A name is not enough: a trainer that was started again under its run_id publishes other bytes under the same numbers.
Its agent is who knows.
"""

from __future__ import annotations

import dataclasses
import enum

from weightsync.types import Version
from weightsync.types.transfer_messages import AgentVersion

ANOTHER_INCARNATION = "?"
"""In place of a trainer's life: it is known to be none of those that speak."""


def published_anew(version: Version, pulled: int) -> str:
    """What is said of a version at or above which another life's are served, the newest of them `pulled`."""
    return (
        f"run {version.run_id} is published anew, by a trainer that was started again: what is served under {version} "
        f"or above is of the one before. Give each life of a trainer a run_id of its own, or publish above {pulled}"
    )


class Verdict(enum.Enum):
    """What an agent's word makes of an adoption."""

    OURS = "it published just that"
    ANEW = "it publishes the run anew"
    UNPROVED = "it published that number, and does not say its digest"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adoption:
    """What was taken over.

    Attributes:
        version, digest: what every engine says that it serves.
        sure: a controller vouches for both; else nobody does, before an agent has spoken.
    """

    version: Version
    digest: str
    sure: bool

    def judge(self, answer: AgentVersion) -> Verdict | None:
        """What an agent's word makes of it; None: nothing. It has nothing of that run, or has gone on (what it has now
        is pulled, and replaces this), or is about to prove what may be this.
        """
        if answer.run_id != self.version.run_id or answer.version is None or answer.version > self.version.number:
            return None
        if answer.version == self.version.number:
            if answer.model_digest is None:
                return Verdict.UNPROVED
            return Verdict.OURS if answer.model_digest == self.digest else Verdict.ANEW
        coming = answer.coming if answer.coming_run_id == self.version.run_id else None
        return Verdict.ANEW if coming is None or coming < self.version.number else None
