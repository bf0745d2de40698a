"""Whether engines take a publication of this kind, by what they say of themselves; asked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping

from weightsync.errors import SyncFailedError, WeightSyncError, WrongArtifactError
from weightsync.types import EngineReply, Manifest


def check_takes(manifest: Manifest, replies: Mapping[str, EngineReply]) -> None:
    """Every engine takes it.

    Args:
        manifest: to be brought.
        replies: to describe, by engine.

    Raises:
        SyncFailedError: some do not: each has a WrongArtifactError among the causes.
    """
    causes: dict[str, WeightSyncError] = {
        who: WrongArtifactError(
            f"{manifest.model_id} is a publication of kind {manifest.artifact}, this engine takes "
            f"{' and '.join(reply.artifacts)}; a torch module takes adapters by PeftAdapterLoader, MergedAdapterLoader",
            peer=who,
            version=str(manifest.version),
            state_left="nothing was changed",
        )
        for who, reply in replies.items()
        if manifest.artifact not in reply.artifacts
    }
    if causes:
        raise SyncFailedError(
            f"{', '.join(sorted(causes))} can't take a publication of kind {manifest.artifact}",
            causes=causes,
            version=str(manifest.version),
            state_left="nothing was changed",
        )
