"""Whether a segment still holds the publication that it was stamped with."""

from __future__ import annotations

from weightsync.errors import VersionError
from weightsync.memory.folder import read_head
from weightsync.plan.safetensors import STAMP_WITHIN_BYTES, read_stamp
from weightsync.types.publication import Publication


def check_stamp(publication: Publication, source: int) -> None:
    """Reads the stamp; only under a lock on the segment does the answer hold.

    Raises:
        VersionError: another version lies there by now, or is being written.
        SharedMemoryError: the segment is gone.
    """
    where, manifest = publication.sources[source], publication.manifest
    stamp = read_stamp(memoryview(read_head(where.segment, STAMP_WITHIN_BYTES, need_bytes=where.data_end)))
    if stamp != (manifest.version, manifest.model_id):
        raise VersionError("the segment holds another version: ask for the newest", version=str(manifest.version))
