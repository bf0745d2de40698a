"""Proved: a publication that an agent has proved; StoredDelta: a delta that it keeps in shared memory."""

from __future__ import annotations

import msgspec

from weightsync.errors import VersionError
from weightsync.memory.folder import read_head
from weightsync.plan.safetensors import STAMP_WITHIN_BYTES, read_stamp
from weightsync.types.agent_messages import DeltaReport
from weightsync.types.publication import Publication, Source, SourceProof


class Proved(msgspec.Struct, frozen=True, kw_only=True):
    """A publication that an agent has proved, and the index of the source that it has."""

    publication: Publication
    source: int
    proof: SourceProof

    @property
    def run_id(self) -> str:
        return self.publication.manifest.version.run_id

    @property
    def number(self) -> int:
        return self.publication.manifest.version.number

    @property
    def where(self) -> Source:
        return self.publication.sources[self.source]

    def lies_like(self, publication: Publication, source: int) -> bool:
        """Whether each byte of both is of the same element, so that a delta can lead from one to the other."""
        mine, theirs = self.where, publication.sources[source]
        return (
            self.source == source
            and self.run_id == publication.manifest.version.run_id
            and (mine.data_start, mine.data_end) == (theirs.data_start, theirs.data_end)
            and self.publication.parts_of(source) == publication.parts_of(source)
        )


class StoredDelta(DeltaReport, frozen=True, kw_only=True):
    """One delta in shared memory.

    Attributes:
        digest: of the source's bytes after it.
        blob: where it lies.
        block_checksums: over the blob.
    """

    digest: str
    blob: Source
    block_checksums: str


def facts_of(delta: StoredDelta) -> DeltaReport:
    """What users are told of a delta."""
    return DeltaReport(**{name: getattr(delta, name) for name in DeltaReport.__struct_fields__})


def check_stamp(publication: Publication, source: int) -> None:
    """Reads a segment's stamp; only under a lock on the segment does the answer hold.

    Raises:
        VersionError: another version lies there by now, or is being written.
        SharedMemoryError: the segment is gone.
    """
    where, manifest = publication.sources[source], publication.manifest
    stamp = read_stamp(memoryview(read_head(where.segment, STAMP_WITHIN_BYTES, need_bytes=where.data_end)))
    if stamp != (manifest.version, manifest.model_id):
        raise VersionError("the segment holds another version: ask for the newest", version=str(manifest.version))
