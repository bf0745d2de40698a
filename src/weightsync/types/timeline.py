"""What `/timeline` of a controller, a rollout service or an agent answers: its last phases, by its own clock."""

from __future__ import annotations

from typing import Literal

from weightsync.types.engine import PhaseRecord
from weightsync.types.message import Message, learn

MAX_RECORDS = 10_000
"""The most that one answer holds: the newest."""


class Timeline(Message, frozen=True, kw_only=True):
    """The last phases of a process, and of those that report to it.

    Attributes:
        kind: what answers.
        name: which one: a service's id, an agent's model, a controller's models.
        now_s: its clock as it answers; the phases are told by the same one.
        phases: the newest, in the order they ended.
        num_dropped: older ones, which it has forgotten or left out.
        peers: URLs of those that take part: a controller's services, a service's agents.
    """

    kind: Literal["controller", "service", "agent"]
    name: str
    now_s: float
    phases: tuple[PhaseRecord, ...] = ()
    num_dropped: int = 0
    peers: tuple[str, ...] = ()


learn(Timeline)
