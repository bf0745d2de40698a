"""What the instances of a fleet have staged, and what their failures come to."""

from __future__ import annotations

from collections.abc import Mapping

from weightsync.control.pool import Member
from weightsync.errors import NotPublishedError, SyncFailedError, VersionError, WeightSyncError
from weightsync.types.fleet import ModelVersion, PrepareReply

Set = tuple[ModelVersion, ...]
"""Versions that are served together, by model."""


class GoneOnError(VersionError):
    """An instance has staged newer versions than it was to: `number` of them all; None where they differ."""

    def __init__(self, message: str, *, version: str, number: int | None) -> None:
        super().__init__(message, version=version)
        self.number = number


def check_staged(wanted: Set, reply: PrepareReply) -> None:
    """Whether an instance has staged what it was to.

    Raises:
        GoneOnError: it has staged others.
    """
    staged = {each.model_id: each for each in reply.versions}
    for each in wanted:
        found = staged.get(each.model_id)
        if found is None or found.of != each.of:
            alike = {one.run_id for one in wanted} == {one.run_id for one in reply.versions}
            numbers = {one.version for one in reply.versions}
            raise GoneOnError(
                f"it has staged {found and found.of} of model {each.model_id}: the trainer has gone on",
                version=str(each.of), number=numbers.pop() if alike and len(numbers) == 1 else None,
            )  # fmt: skip


def newer_of(error: SyncFailedError) -> int | None:
    """The number that all have staged, where that alone is why it failed."""
    numbers = {each.number if isinstance(each, GoneOnError) else None for each in error.causes.values()}
    return numbers.pop() if len(numbers) == 1 else None


def failed_error(versions: Set, failed: Mapping[Member, WeightSyncError], num_members: int) -> WeightSyncError:
    """What the failures of all come to: where an agent has denied a version, that is what counts."""
    causes = {member.instance_id: error for member, error in failed.items()}
    for who, error in causes.items():
        if isinstance(error, NotPublishedError) and any(str(each.of) == error.version for each in versions):
            return NotPublishedError(
                error.message, peer=who, version=error.version, newest=error.newest,
                state_left="what was served is served",
            )  # fmt: skip
    return SyncFailedError(
        f"{len(causes)} of {num_members} instances failed: "
        + "; ".join(f"{who}: {type(error).__name__}: {error}" for who, error in causes.items())[:2000],
        causes=causes,
        version=", ".join(f"{each.model_id} {each.of}" for each in versions),
        state_left="what was served is served",
    )
