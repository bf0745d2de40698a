"""What lies in an object store: a claim, a pointer, a manifest a version, notes of readers. See design/0033.

    claim.json                            who writes here
    pointer.json                          the newest version; moves by conditional put
    e000001/versions/<number>.json        a version's manifest
    e000001/layouts/<number>.json         names, dtypes, shapes, places
    e000001/anchors/<number>-<source>.safetensors
    e000001/deltas/<base>-<number>-<source>.delta
    readers/<id>.json                     who reads what

Everything below `e<epoch>` is written once, by the one writer whose claim has that epoch.
"""

from __future__ import annotations

import re

from weightsync.errors import ConfigError, InvalidRequestError
from weightsync.types.manifest import Version, check_model_digest
from weightsync.types.message import Message, learn
from weightsync.types.publication import MAX_SOURCES, SourceProof
from weightsync.types.spec import MAX_NBYTES, check_id

CLAIM, POINTER = "claim.json", "pointer.json"
READERS = "readers"
SHA256_BYTES = 32
MAX_LINKS = 256
MAX_EPOCH = 10**18 - 1
EPOCH_PATTERN = "e([0-9]{6}|[1-9][0-9]{6,17})/"
"""What a key below a writer's folder begins with; its group is the epoch."""
_KEY = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9._/-]{0,300}")
_N = "[0-9]{1,18}"
_WRITTEN = re.compile(
    EPOCH_PATTERN + rf"((versions|layouts)/{_N}\.json|anchors/{_N}-{_N}\.safetensors|deltas/{_N}-{_N}-{_N}\.delta)"
)
_NOTE = re.compile(READERS + r"/[A-Za-z0-9_-]{1,100}\.json")
_HEX64 = re.compile(r"[0-9a-f]{64}")


def check_key(key: str) -> None:
    """Raises InvalidRequestError where that is no key of ours: what a manifest names is not trusted."""
    if not _KEY.fullmatch(key) or "//" in key or "/." in key or key.endswith("/"):
        raise InvalidRequestError(f"{key[:100]!r} is no key of an object")


def check_place(place: str) -> None:
    """Raises ConfigError where that names no place."""
    if not place or len(place) > 800 or not place.isprintable():
        raise ConfigError(f"{place[:100]!r} names no place in a store")


def epoch_folder(epoch: int) -> str:
    """Where a writer's objects lie."""
    return f"e{epoch:06d}"


def epoch_of(key: str) -> int | None:
    """The epoch of the writer that has written a key; None: no writer writes such a key, whatever folder it is in."""
    found = _WRITTEN.fullmatch(key)
    return None if found is None else int(found[1])


def is_note(key: str) -> bool:
    """Whether a reader leaves a note under such a key."""
    return _NOTE.fullmatch(key) is not None


def check_epoch(epoch: int) -> None:
    """Raises InvalidRequestError where no writer can have that epoch: what lies in a store is not trusted."""
    if not 0 <= epoch <= MAX_EPOCH:
        raise InvalidRequestError(f"an epoch is from 0 to {MAX_EPOCH}")


class StoredRef(Message, frozen=True, kw_only=True):
    """A small object: where it lies, and which bytes it has."""

    key: str
    nbytes: int
    sha256: str

    def __post_init__(self) -> None:
        check_key(self.key)
        if not 0 < self.nbytes <= MAX_NBYTES or not _HEX64.fullmatch(self.sha256):
            raise InvalidRequestError(f"{self.key} has no such size or SHA-256")


class VersionRef(Message, frozen=True, kw_only=True):
    """A version's manifest, by its bytes."""

    number: int
    manifest: StoredRef

    def __post_init__(self) -> None:
        if self.number < 0:
            raise InvalidRequestError("a version is not negative")


class StoredBlob(Message, frozen=True, kw_only=True):
    """A large object, in ranges that are checked one by one.

    Attributes:
        key: where it lies.
        data_start, data_end: its bytes that count, of which ranges are cut; `data_end` is its size.
        block_bytes: of a range; the last may be shorter.
        sha256: of each range, 32 bytes each, one behind the other.
    """

    key: str
    data_start: int
    data_end: int
    block_bytes: int
    sha256: bytes

    def __post_init__(self) -> None:
        check_key(self.key)
        if not 0 <= self.data_start <= self.data_end <= MAX_NBYTES or not 4096 <= self.block_bytes <= 64 << 20:
            raise InvalidRequestError(f"{self.key} can't have such ranges")
        if len(self.sha256) != SHA256_BYTES * -(-(self.data_end - self.data_start) // self.block_bytes):
            raise InvalidRequestError(f"{self.key} has not one SHA-256 a range")

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.data_end

    def digest(self, block: int) -> bytes:
        """SHA-256 of a range."""
        return self.sha256[SHA256_BYTES * block : SHA256_BYTES * (block + 1)]


class StoredLink(Message, frozen=True, kw_only=True):
    """One delta of a chain.

    Attributes:
        base, version: numbers within the run.
        blob: its bytes.
        block_checksums: as of `DeltaLink`, over the same ranges.
        manifest: of `version`; None where that one was not written, but passed by.
    """

    base: int
    version: int
    blob: StoredBlob
    block_checksums: str
    manifest: StoredRef | None = None


class StoredSource(Message, frozen=True, kw_only=True):
    """One source of a publication.

    Attributes:
        data_start, data_end, block_bytes: as of `Source`.
        proof: what its agent has computed over its bytes.
        anchor: the full that its chain begins with; its own bytes where there are no links.
        links: deltas that lead from there to this version, in order.
    """

    data_start: int
    data_end: int
    block_bytes: int
    proof: SourceProof
    anchor: StoredBlob
    links: tuple[StoredLink, ...] = ()


class StoredVersion(Message, frozen=True, kw_only=True):
    """A version's manifest.

    Attributes:
        place: what it was written for (`objects.urls.place_of`): at another place it counts for nothing.
        epoch: of the claim that it was written under.
        version, model_id, incarnation, model_digest: as everywhere.
        layout: names, dtypes, shapes and places, as `PublicationLayout` travels.
        layout_digest: what names that.
        anchor: the version that its chain begins with; None: it is a full itself.
        before: the version that was the newest before it; None: there was none.
        earlier: the last version of the chain before this one, in case this one's anchor is damaged.
        sources: in the publication's order.
        total_bytes: of the model.
        written_s: since 1970, by the writer's clock; for people.
    """

    place: str
    epoch: int
    version: Version
    model_id: str
    layout: StoredRef
    layout_digest: str
    sources: tuple[StoredSource, ...]
    total_bytes: int
    incarnation: str | None = None
    model_digest: str | None = None
    anchor: VersionRef | None = None
    before: VersionRef | None = None
    earlier: VersionRef | None = None
    written_s: float = 0.0

    def __post_init__(self) -> None:
        check_epoch(self.epoch)
        check_id("model_id", self.model_id)
        check_model_digest(self.model_digest, version=str(self.version))
        if not 1 <= len(self.sources) <= MAX_SOURCES:
            raise InvalidRequestError(f"a version has 1 to {MAX_SOURCES} sources")
        if not _HEX64.fullmatch(self.layout_digest):
            raise InvalidRequestError("a layout's digest has 64 hex digits")
        if any((source.links == ()) != (self.anchor is None) for source in self.sources):
            raise InvalidRequestError(
                "a chain begins with an anchor, and an anchor has none", version=str(self.version)
            )
        for source in self.sources:
            if len(source.links) > MAX_LINKS:
                raise InvalidRequestError(f"a chain has at most {MAX_LINKS} links")
            if self.anchor is not None:
                numbers = [self.anchor.number, *(link.version for link in source.links)]
                if numbers[-1] != self.version.number or numbers[:-1] != [link.base for link in source.links]:
                    raise InvalidRequestError(f"these deltas do not lead from {self.anchor.number} to {self.version}")

    @property
    def is_anchor(self) -> bool:
        """Whether it is a full."""
        return self.anchor is None

    def keys(self) -> set[str]:
        """Objects that a reader of it needs, but its own manifest."""
        found = {self.layout.key} if self.anchor is None else {self.layout.key, self.anchor.manifest.key}
        for source in self.sources:
            found.add(source.anchor.key)
            found.update(link.blob.key for link in source.links)
        return found


class Pointer(Message, frozen=True, kw_only=True):
    """The newest version. Its number never goes back within the epoch that wrote it, and epochs rise.

    A reader that has seen a writer's pointer takes none of an earlier writer any more: that one was fenced.

    Attributes:
        place: as of `StoredVersion`.
        epoch: of the writer that moved it last: who takes over moves it before it has a version of its own.
        version, model_id, incarnation: of the newest.
        current: its manifest.
        previous: that of the one before, in case the newest is damaged.
    """

    place: str
    epoch: int
    version: Version
    model_id: str
    current: VersionRef
    incarnation: str | None = None
    previous: VersionRef | None = None

    def __post_init__(self) -> None:
        check_epoch(self.epoch)
        if self.order[0] > self.epoch:
            raise InvalidRequestError(f"a pointer of epoch {self.epoch} names a version of epoch {self.order[0]}")

    def goes_back(self, seen: Pointer) -> bool:
        """Whether it is older than one that was seen."""
        return self.epoch < seen.epoch or self.order < seen.order

    @property
    def order(self) -> tuple[int, int]:
        """What rises from pointer to pointer: the epoch that wrote the version, and its number in that."""
        written = epoch_of(self.current.manifest.key)
        return self.epoch if written is None else written, self.version.number


class Claim(Message, frozen=True, kw_only=True):
    """Who writes here.

    Attributes:
        epoch: rises with each writer.
        writer: names it; nobody else has this name.
        who: in words, for people.
        run_id: its trainer's.
        beat: rises while it lives.
        released: it has ended in order.
    """

    epoch: int
    writer: str
    who: str
    run_id: str
    beat: int = 0
    released: bool = False

    def __post_init__(self) -> None:
        check_epoch(self.epoch)


class ReaderNote(Message, frozen=True, kw_only=True):
    """What a reader leaves, so that what it reads stays. Nobody compares clocks: a note that changes is alive.

    Attributes:
        reader: names it.
        beat: rises while it lives.
        manifests: keys of the manifests that it reads from.
        damaged: keys of objects that it has found damaged; the writer begins a new chain.
    """

    reader: str
    beat: int
    manifests: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.manifests) > 16 or len(self.damaged) > 64:
            raise InvalidRequestError("a reader reads from few manifests")
        for key in (*self.manifests, *self.damaged):
            check_key(key)


learn(Pointer, StoredVersion, Claim, ReaderNote)
