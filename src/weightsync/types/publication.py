"""A publication, and what is said about it between an agent and its receivers."""

from __future__ import annotations

import math
from typing import cast

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types.manifest import Manifest
from weightsync.types.message import Message, learn
from weightsync.types.spec import MAX_NBYTES, TensorSpec, check_id
from weightsync.types.table import DIGEST_BYTES, SpecTable, TensorTable, written_digest

MAX_SOURCES = 4096
_CHECKSUM_DIGITS = 16
_SCHEMES = tuple(f"{scheme}://" for scheme in ("http", "https", "s3", "gs", "az", "file", "memory"))
_FITTING_BLOCKS = 128


def fitting_block_bytes(size_bytes: int, *, at_most: int, at_least: int = 64 << 10) -> int:
    """How large blocks are of so many bytes: a power of two, so that there are some hundred of them, which hosts that
    relay take from each other one by one; between `at_least` and `at_most`, which wins.
    """
    wanted = 1 << max(0, (size_bytes // _FITTING_BLOCKS - 1)).bit_length()
    return min(at_most, max(at_least, wanted))


class Source(Message, frozen=True, kw_only=True):
    """One place that a publication lies in: a segment of one trainer host, served by that host's agent.

    Attributes:
        endpoint: the agent's URL, or a place in an object store.
        segment: name of the segment in the host's shared memory, or of the object; a safetensors file.
        data_start: first byte of tensors in it (what is before is the header).
        data_end: its size in bytes.
        block_bytes: what one checksum covers; blocks are cut from `data_start` on.
    """

    endpoint: str
    segment: str
    data_start: int
    data_end: int
    block_bytes: int

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(_SCHEMES):
            raise InvalidRequestError(
                f"a source's endpoint is an http URL or a place in a store, not {self.endpoint!r}"
            )
        if not 0 <= self.data_start <= self.data_end <= MAX_NBYTES or self.data_start >= 1 << 40:
            raise InvalidRequestError(f"a source can't hold bytes {self.data_start} to {self.data_end}")
        if not 4096 <= self.block_bytes <= 64 << 20:
            raise InvalidRequestError(f"a block has between 4 KiB and 64 MiB, not {self.block_bytes} bytes")

    @property
    def num_blocks(self) -> int:
        """Number of blocks; the last may be shorter."""
        return math.ceil((self.data_end - self.data_start) / self.block_bytes)

    def block(self, index: int) -> tuple[int, int]:
        """First byte and length of a block, within the segment."""
        start = self.data_start + index * self.block_bytes
        return start, min(self.block_bytes, self.data_end - start)


class Publication(Message, frozen=True, kw_only=True):
    """One immutable version: what it is, and where each part of it lies.

    Attributes:
        manifest: whole tensors, in the stream's order, without digests (see `SourceProof`).
        parts: which part of which tensor lies where: `source` is an index into `sources`, `offset` a byte within that
            source's segment. Over all sources they cover every tensor exactly once.
        sources: one a trainer host; each holds its parts one behind the other, and nothing else.
    """

    manifest: Manifest
    parts: tuple[TensorSpec, ...]
    sources: tuple[Source, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.sources) <= MAX_SOURCES:
            raise InvalidRequestError(f"a publication has 1 to {MAX_SOURCES} sources, not {len(self.sources)}")
        if type(self.parts) is not SpecTable:
            msgspec.structs.force_setattr(self, "parts", SpecTable(self.parts))
        extents = tuple((source.data_start, source.data_end) for source in self.sources)
        self.table.derive(check_parts, self.manifest.table, extents)

    @property
    def table(self) -> SpecTable:
        """`parts`, with what follows from them."""
        return cast(SpecTable, self.parts)

    def parts_of(self, source: int) -> tuple[TensorSpec, ...]:
        """The parts that lie in one source, in order."""
        return self.table.derive(_parts_of, source)


def check_parts(parts: SpecTable, tensors: TensorTable, extents: tuple[tuple[int, int], ...]) -> bool:
    """Checks that parts are of these tensors, and that each source has its parts one behind the other and nothing else.

    Args:
        parts, tensors: of a publication.
        extents: first byte of tensors and size of each source.

    Raises:
        InvalidRequestError: they are not.
    """
    specs = tensors.by_name
    for part in parts:
        spec = specs.get(part.name)
        if spec is None or (spec.dtype, spec.shape) != (part.dtype, part.shape):
            raise InvalidRequestError("a part is not of the manifest's tensor", parameter=part.name)
        if part.source >= len(extents):
            raise InvalidRequestError(f"there is no source {part.source}", parameter=part.name)
        start, end = extents[part.source]
        if part.offset < start or part.offset + part.nbytes > end:
            raise InvalidRequestError("a part lies outside its source", parameter=part.name)
    ends = [start for start, _ in extents]
    for part in sorted(parts, key=lambda part: (part.offset, part.nbytes)):
        if part.offset != ends[part.source]:
            raise InvalidRequestError("a source's parts overlap, or leave a hole", parameter=part.name)
        ends[part.source] += part.nbytes
    if any(found != end for found, (_, end) in zip(ends, extents, strict=True)):
        raise InvalidRequestError("a source has more bytes than its parts")
    return True


def _parts_of(parts: SpecTable, source: int) -> tuple[TensorSpec, ...]:
    if all(part.source == source for part in parts):
        return parts
    return SpecTable(part for part in parts if part.source == source)


class SourceProof(Message, frozen=True, kw_only=True):
    """What an agent has computed over its source's bytes.

    Attributes:
        block_checksums: xxh3-64 of each block, 16 hex digits each, one behind the other.
        part_digests: XXH3-128 of each part of this source (`codec.tensor_digest.tensor_digest`), 16 bytes each, in the
            order of `Publication.parts_of`.
        lane_a, lane_b: the sum of this source's parts towards the model's digest (`codec.model_digest.ShardSum`).
    """

    block_checksums: str
    part_digests: bytes
    lane_a: int
    lane_b: int

    def check_fits(self, publication: Publication, source: int) -> None:
        """Raises InvalidRequestError where it is not of that source."""
        if len(self.block_checksums) != _CHECKSUM_DIGITS * publication.sources[source].num_blocks:
            raise InvalidRequestError("there is not one checksum a block")
        if len(self.part_digests) != DIGEST_BYTES * len(publication.parts_of(source)):
            raise InvalidRequestError("there is not one digest a part")

    def digest_of(self, index: int) -> str:
        """Digest of one part, as `codec.tensor_digest.tensor_digest` writes it."""
        return written_digest(self.part_digests, index)

    @property
    def digest(self) -> str:
        """Both lanes as 32 hex digits: what `DeltaBase` has of a source."""
        return f"{self.lane_a:016x}{self.lane_b:016x}"

    def checksum(self, block: int) -> str:
        """Checksum of one block."""
        return self.block_checksums[_CHECKSUM_DIGITS * block : _CHECKSUM_DIGITS * (block + 1)]


class DeltaBase(Message, frozen=True, kw_only=True):
    """What a receiver holds of one source, proved: what a delta may build on.

    Attributes:
        run_id, version: of the publication that it is.
        digest: the sum of that source's parts (both lanes of `SourceProof`, 32 hex digits).
    """

    run_id: str
    version: int
    digest: str

    def __post_init__(self) -> None:
        check_id("run_id", self.run_id)
        if self.version < 0:
            raise InvalidRequestError(f"a version is not negative, got {self.version}")
        if len(self.digest) != 32 or set(self.digest) - set("0123456789abcdef"):
            raise InvalidRequestError("a base's digest has 32 hex digits")


class DeltaLink(Message, frozen=True, kw_only=True):
    """One delta of a chain: a blob that turns a source's bytes of one version into those of a later one.

    Attributes:
        base, version: numbers within the run.
        blob: where it lies; its bytes are what docs/delta-format.md says.
        block_checksums: as of `SourceProof`, over the blob.
        transfer_id: the right to read it.
    """

    base: int
    version: int
    blob: Source
    block_checksums: str
    transfer_id: str

    def __post_init__(self) -> None:
        if not 0 <= self.base < self.version:
            raise InvalidRequestError(f"a delta leads to a later version, not from {self.base} to {self.version}")
        if len(self.block_checksums) != _CHECKSUM_DIGITS * self.blob.num_blocks:
            raise InvalidRequestError("there is not one checksum a block")
        check_transfer_id(self.transfer_id)

    def checksum(self, block: int) -> str:
        """Checksum of one block."""
        return self.block_checksums[_CHECKSUM_DIGITS * block : _CHECKSUM_DIGITS * (block + 1)]


learn(Publication)


def check_transfer_id(transfer_id: str) -> None:
    """Raises InvalidRequestError where it is no transfer's name."""
    if len(transfer_id) != 32 or set(transfer_id) - set("0123456789abcdef"):
        raise InvalidRequestError("a transfer_id has 32 hex digits")
