"""The last syncs of a controller as phases of a trace: who was waited for, model by model."""

from __future__ import annotations

from weightsync.types import PhaseRecord
from weightsync.types.control import ControllerStatus


def phases_of(status: ControllerStatus, *, now_s: float) -> tuple[PhaseRecord, ...]:
    """What each sync waited for, the oldest sync first.

    Args:
        status: whose `syncs` these are; they are told by its wall clock.
        now_s: the same moment by the clock of the phases.
    """
    ahead_s = now_s - status.now_s
    return tuple(
        PhaseRecord(
            name=span.name,
            start_s=sync.started_s + ahead_s + span.start_s,
            end_s=sync.started_s + ahead_s + span.start_s + span.seconds,
            track=f"waits of {sync.model_tag}",
            detail=f"version {sync.version}{f', {span.who}' if span.who else ''}",
        )
        for sync in reversed(status.syncs)
        for span in sync.spans
    )
