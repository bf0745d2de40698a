"""Canary: what a trainer's model says of a known prompt, to compare an engine with where its bytes can't be read.

The trainer computes the log-probabilities with the very weights that it publishes; each replica of an engine is asked
for its own before it serves them.
"""

from __future__ import annotations

import math

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types.message import learn

MAX_TOKENS = 4096


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Of one version.

    Attributes:
        tokens: token ids of the prompt.
        logprobs: log-probability (natural) of each token but the first, after those before it.
        tolerance: how far an engine's may be from each of them.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float

    def __post_init__(self) -> None:
        if not 2 <= len(self.tokens) <= MAX_TOKENS or min(self.tokens) < 0:
            raise InvalidRequestError(f"a canary's prompt has 2 to {MAX_TOKENS} token ids")
        if len(self.logprobs) != len(self.tokens) - 1 or not all(map(math.isfinite, self.logprobs)):
            raise InvalidRequestError("a canary has one finite log-probability a token but the first")
        if not 0 < self.tolerance < math.inf:
            raise InvalidRequestError(f"a canary's tolerance is above 0, not {self.tolerance}")


class CanaryReading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an engine has answered.

    Attributes:
        version: as `run_id/number`.
        worst: the greatest difference from the trainer's, over tokens and replicas.
        tolerance: that was allowed.
        moved: the greatest difference from what it answered with the version before; None where it was not asked then.
        num_replicas: that were asked.
    """

    version: str
    worst: float
    tolerance: float
    moved: float | None = None
    num_replicas: int = 1


def distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The greatest difference, place by place."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


learn(Canary, CanaryReading)
