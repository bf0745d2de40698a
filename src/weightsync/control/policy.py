"""CommitPolicy: how many instances have to have staged a version before any commits it."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from weightsync.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitPolicy:
    """When instances commit.

    Attributes:
        kind: "each": an instance commits when it has staged; "all": nobody before all have; "quorum": nobody before
            `quorum` have, and the others are evicted.
        quorum: how many; 0 with the other kinds.
    """

    kind: Literal["each", "all", "quorum"]
    quorum: int = 0

    @classmethod
    def parse(cls, text: str) -> CommitPolicy:
        """Reads "each", "all" or "quorum(n)".

        Raises:
            ConfigError: it is none of them.
        """
        if text == "each":
            return cls(kind="each")
        if text == "all":
            return cls(kind="all")
        if (found := re.fullmatch(r"quorum\(([1-9]\d{0,5})\)", text)) is not None:
            return cls(kind="quorum", quorum=int(found[1]))
        raise ConfigError(f"commit_policy is 'each', 'all' or 'quorum(n)' with n from 1 on, not {text!r}")

    def num_needed(self, num_instances: int) -> int:
        """How many of so many have to have staged."""
        return self.quorum if self.kind == "quorum" else num_instances
