"""What is told of a version that every engine of a service serves, and of one that is not served in time."""

from __future__ import annotations

import logging

from weightsync.errors import DeadlineExceededError, SyncFailedError
from weightsync.host.engine_group import GroupReport
from weightsync.host.staged_version import StagedVersion
from weightsync.observe import Metrics, now_s
from weightsync.types import Deadline, SyncReport, Version
from weightsync.types.fleet import MAX_WORDS
from weightsync.types.progress import TransferProgress
from weightsync.types.service import ModelStatus

_logger = logging.getLogger(__name__)


def tell_served(
    model_id: str, metrics: Metrics, pulled: StagedVersion, loaded: GroupReport, *, pull_s: float, load_s: float
) -> None:
    """Counts one sync, and logs it.

    Args:
        model_id, metrics: of what, and where.
        pulled, loaded: how it came, and how engines took it.
        pull_s, load_s: how long that took; without what its fleet took to let it be committed.
    """
    size = pulled.manifest.total_bytes
    metrics.observe_sync(
        SyncReport(
            version=pulled.version,
            engine_ids=tuple(loaded.engine_ids),
            lost={},
            total_bytes=size,
            sent_bytes=pulled.received_bytes,
            num_deltas=pulled.num_deltas,
            full_because=next(iter(loaded.full_because.values()), None),
            num_chunks=loaded.num_chunks,
            seconds=pull_s + load_s,
            paused_s=loaded.paused_s,
            phases_s={"pull": pull_s, "load": load_s},
            digests_equal=None if loaded.unprovable else True,
            unprovable=loaded.unprovable,
            checksums=loaded.checksums,
            written=loaded.written,
        ),
        model_id=model_id,
    )
    deltas = f" ({pulled.num_deltas} deltas of {pulled.received_bytes / 1e6:.1f} MB)" if pulled.num_deltas else ""
    held = f" (and held for its fleet's commit for {loaded.held_s:.3f} s)" if loaded.held_s >= 0.001 else ""
    whole = "".join(f"; {who} loaded all of it: {why}" for who, why in loaded.full_because.items())
    _logger.info(
        "model %s: %s is served: %.1f MB by %s%s in %.3f s, loaded in %.3f s%s, paused for %.3f s%s",
        model_id, pulled.version, size / 1e6, pulled.transport, deltas, pull_s, load_s, held, loaded.paused_s, whole,
    )  # fmt: skip


def late(version: Version, deadline: Deadline, status: ModelStatus) -> DeadlineExceededError:
    """What a wait that took too long raises; with what is wrong there, as far as is known."""
    wrong = "; ".join(f"{who}: {why}" for who, why in {**status.sender_errors, **status.errors}.items())
    return DeadlineExceededError(
        f"{version} is not served within {deadline.timeout_s:.3g} s; it is still tried{': ' if wrong else ''}{wrong}",
        version=str(version),
    )


def failed(version: Version, status: ModelStatus, state_left: str) -> SyncFailedError:
    """What a wait raises for a version that was tried in vain."""
    why = "; ".join(f"{who}: {why}" for who, why in status.errors.items()) or "its load failed"
    return SyncFailedError(why, causes={}, version=str(version), state_left=state_left)


def came(pulled: StagedVersion) -> dict[str, object]:
    """What `ModelStatus` says of a version that was fetched."""
    return {
        "fetched": str(pulled.version), "transport": pulled.transport, "num_deltas": pulled.num_deltas,
        "received_bytes": pulled.received_bytes, "total_bytes": pulled.manifest.total_bytes,
        "received_from": dict(pulled.received_from), "because": pulled.because,
    }  # fmt: skip


def taken(pulled: StagedVersion, loaded: GroupReport) -> dict[str, object]:
    """What `ModelStatus` says of a version that every engine serves, but for its times."""
    version, manifest = pulled.version, pulled.manifest
    return {
        "errors": {}, "run_id": version.run_id, "version": version.number,
        "canaries": loaded.canaries, "paused_s": loaded.paused_s,
        "num_patched": loaded.num_patched, "checksums": loaded.checksums, "full_because": loaded.full_because,
        "artifact": manifest.artifact,
        "adapter": None if manifest.adapter is None else str(manifest.adapter)[:MAX_WORDS],
    }  # fmt: skip


def progress_of(status: ModelStatus, moved: tuple[int, int] | None) -> TransferProgress | None:
    """Of the pull under way, which has brought so many bytes of so many; None where none is, or nothing has come."""
    if moved is None or status.state != "pulling" or status.since_s is None:
        return None
    return TransferProgress(done_bytes=moved[0], total_bytes=moved[1], seconds=max(0.0, now_s() - status.since_s))
