"""ChainWriter: writes versions into a place of an object store, one after another, and points to each.

    layout, where it is another -> anchors or deltas -> manifest -> pointer

Whatever ends it before the last step leaves the pointer where it was: what was written then counts for nothing, and
is swept away by and by.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence

import msgspec

from weightsync.errors import ObjectConflictError, ObjectMissingError, RunClaimedError, VersionError
from weightsync.objects.base import Data, ObjectStore
from weightsync.objects.signing import NO_RECORD, Signer, record_in, seal
from weightsync.objects.urls import place_of
from weightsync.sink.claim import ClaimKeeper
from weightsync.sink.intake import Taken
from weightsync.threads import map_all
from weightsync.types import Deadline, Version
from weightsync.types.layout import PublicationLayout
from weightsync.types.publication import DeltaBase
from weightsync.types.store import (
    MAX_LINKS,
    POINTER,
    Pointer,
    StoredBlob,
    StoredLink,
    StoredRef,
    StoredSource,
    StoredVersion,
    VersionRef,
    epoch_folder,
)

_logger = logging.getLogger(__name__)


class ChainWriter:
    """One thread.

    Args:
        signer: signs manifests and pointers; None: they are not signed.

    Attributes:
        current: the version that is pointed to, of this writer; None before the first.
        ref: its manifest.
        under_way: keys that are being written.
    """

    def __init__(
        self,
        store: ObjectStore,
        claim: ClaimKeeper,
        *,
        signer: Signer | None = None,
        anchor_every: int = 32,
        anchor_share: float = 0.5,
    ) -> None:
        self._store = store
        self._claim = claim
        self._signer = signer
        self._trust = None if signer is None else signer.trust
        self._anchor_every = min(anchor_every, MAX_LINKS)
        self._anchor_share = anchor_share
        self._folder = epoch_folder(claim.epoch)
        self._place = place_of(store.url)
        self._layouts: dict[str, StoredRef] = {}
        self._anchor: VersionRef | None = None
        self._earlier: VersionRef | None = None
        self._etag: str | None = None
        self._pointed: Pointer | None = None
        self._refused: frozenset[str] = frozenset()
        self._again = False
        self._burnt = -1
        self._begun: tuple[StoredVersion, bytes] | None = None
        self.current: StoredVersion | None = None
        self.ref: VersionRef | None = None
        self.under_way: set[str] = set()

    def begin(self, *, deadline: Deadline) -> None:
        """Takes the pointer over, so that a writer before this one can't move it any more.

        Raises:
            RunClaimedError: a later writer has it.
        """
        found = self._look(deadline)
        if found is not None and found.epoch < self._claim.epoch:
            self._move(msgspec.structs.replace(found, epoch=self._claim.epoch), deadline)

    @property
    def last_number(self) -> int:
        """No version at or below this one can be written any more; -1: there is none."""
        return max(self._burnt, -1 if self.current is None else self.current.version.number)

    @property
    def bases(self) -> tuple[DeltaBase, ...] | None:
        """What the next version's deltas may build on; None where it has to be a full."""
        now = self.current
        if now is None or self._again:
            return None
        chain = max(len(source.links) for source in now.sources)
        nbytes = sum(link.blob.nbytes for source in now.sources for link in source.links)
        if chain + 1 >= self._anchor_every or nbytes > self._anchor_share * now.total_bytes:
            return None
        return tuple(
            DeltaBase(run_id=now.version.run_id, version=now.version.number, digest=source.proof.digest)
            for source in now.sources
        )

    def damaged(self, keys: frozenset[str]) -> None:
        """Readers find these objects damaged: where the chain needs one, the next version begins a new chain."""
        fresh = keys - self._refused
        if self.current is not None and fresh & self.current.keys():
            _logger.warning("readers find %s damaged: the next version is a full", ", ".join(sorted(fresh)))
            self._again = True
            self._layouts = {}
        self._refused |= fresh

    def write(self, taken: Taken, *, deadline: Deadline) -> int:
        """Writes a version, and points to it.

        Returns:
            Bytes that were written.

        Raises:
            RunClaimedError: another writer has taken over. Nothing is pointed to.
            VersionError: it does not follow the last one, or its chain would be too long. Nothing was written.
            WeightSyncError: the store fails. Nothing is pointed to.
        """
        version, now = taken.version, self.current
        if version.number <= self.last_number or (now is not None and version.run_id != now.version.run_id):
            raise VersionError(f"{version} does not follow {now and now.version}", version=str(version))
        chains = () if now is None or taken.deltas is None else zip(now.sources, taken.deltas, strict=False)
        if any(len(source.links) + len(links) > MAX_LINKS for source, links in chains):
            self._again = True
            raise VersionError(f"{version} is more than {MAX_LINKS} deltas from its anchor", version=str(version))
        self._claim.check()
        self._begun = None
        try:
            return self._write(taken, deadline)
        finally:
            self.under_way.clear()

    def finish(self, version: Version, *, deadline: Deadline) -> int:
        """Goes on with a version whose manifest was begun when the store failed; nothing was swept meanwhile.

        Returns:
            Bytes of its manifest; 0 where that is not the version that was begun last.

        Raises:
            RunClaimedError, WeightSyncError: see `write`.
        """
        if self._begun is None or self._begun[0].version != version:
            return 0
        self._claim.check()
        try:
            return self._point(*self._begun, deadline)
        finally:
            self.under_way.clear()

    def _write(self, taken: Taken, deadline: Deadline) -> int:
        version, publication, now = taken.version, taken.publication, self.current
        layout, sources, nbytes = self._layout(taken, deadline), [], 0
        for index, (where, proof) in enumerate(zip(publication.sources, taken.proofs, strict=True)):
            links: tuple[StoredLink, ...] = ()
            if taken.fulls is not None:
                name = f"{self._folder}/anchors/{version.number:08d}-{index}.safetensors"
                anchor = self._blob(name, taken.fulls[index], where.data_start, where.block_bytes, deadline)
                nbytes += anchor.nbytes
            else:
                assert now is not None
                assert taken.deltas is not None
                anchor, links = now.sources[index].anchor, now.sources[index].links
                for link, data in taken.deltas[index]:
                    name = f"{self._folder}/deltas/{link.base:08d}-{link.version:08d}-{index}.delta"
                    blob = self._blob(name, data, link.blob.data_start, link.blob.block_bytes, deadline)
                    nbytes += blob.nbytes
                    base = self.ref.manifest if self.ref is not None and link.base == self.ref.number else None
                    links = (*_named(links, link.base, base), StoredLink(
                        base=link.base, version=link.version, blob=blob, block_checksums=link.block_checksums,
                    ))  # fmt: skip
            sources.append(StoredSource(
                data_start=where.data_start, data_end=where.data_end, block_bytes=where.block_bytes, proof=proof,
                anchor=anchor, links=links,
            ))  # fmt: skip
        before = self.ref or (None if self._pointed is None else self._pointed.current)
        record = StoredVersion(
            place=self._place, epoch=self._claim.epoch, version=version, model_id=publication.manifest.model_id,
            layout=layout, layout_digest=PublicationLayout.of(publication).digest, sources=tuple(sources),
            total_bytes=publication.manifest.total_bytes, incarnation=taken.incarnation,
            model_digest=_model_digest(taken), anchor=None if taken.fulls is not None else self._anchor,
            before=before, earlier=before if taken.fulls is not None else self._earlier, written_s=time.time(),
        )  # fmt: skip
        self._burnt = max(self._burnt, version.number)
        raw = seal("version", msgspec.json.encode(record), self._signer)
        self._begun = record, raw
        return nbytes + self._point(record, raw, deadline)

    def _point(self, record: StoredVersion, raw: bytes, deadline: Deadline) -> int:
        """Writes a manifest, and points to it; what it names is there."""
        version = record.version
        key = f"{self._folder}/versions/{version.number}.json"
        ref = VersionRef(number=version.number, manifest=self._small(key, raw, deadline))
        self._claim.check()
        self._move(
            Pointer(
                place=self._place, epoch=self._claim.epoch, version=version, model_id=record.model_id,
                incarnation=record.incarnation, current=ref,
                previous=record.before,
            ),
            deadline,
        )  # fmt: skip
        self.current, self.ref, self._begun = record, ref, None
        if record.is_anchor:
            self._anchor, self._earlier, self._again = ref, record.before, False
        return len(raw)

    # --- objects ---

    def _blob(self, key: str, data: memoryview, start: int, block_bytes: int, deadline: Deadline) -> StoredBlob:
        self.under_way.add(key)
        starts = range(start, len(data), block_bytes)
        found = map_all(lambda at: hashlib.sha256(data[at : at + block_bytes]).digest(), starts)
        self._claim.check()
        self._store.put_large(key, data, deadline=deadline)
        return StoredBlob(
            key=key, data_start=start, data_end=len(data), block_bytes=block_bytes, sha256=b"".join(found)
        )

    def _layout(self, taken: Taken, deadline: Deadline) -> StoredRef:
        layout = PublicationLayout.of(taken.publication)
        if layout.digest not in self._layouts:
            key = f"{self._folder}/layouts/{taken.version.number:08d}.json"
            self._layouts = {layout.digest: self._small(key, layout.encode(), deadline)}
        return self._layouts[layout.digest]

    def _small(self, key: str, data: Data, deadline: Deadline) -> StoredRef:
        """A small object, written once. Where it is there already, it has to be the same."""
        self.under_way.add(key)
        try:
            self._store.put(key, data, deadline=deadline, replaces=None)
        except ObjectConflictError:  # an answer that was lost
            found = self._store.get(key, deadline=deadline)
            if found is None or found.data != bytes(data):
                raise
        return StoredRef(key=key, nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    # --- the pointer ---

    def _move(self, pointer: Pointer, deadline: Deadline) -> None:
        """Conditional: on the pointer being the one that was seen last, and of no later writer."""
        raw = seal("pointer", msgspec.json.encode(pointer), self._signer)
        for _ in range(3):
            try:
                self._etag = self._store.put(POINTER, raw, deadline=deadline, replaces=self._etag)
                self._pointed = pointer
                return
            except ObjectConflictError:
                if self._look(deadline) == pointer:  # an answer that was lost
                    return
        raise RunClaimedError(f"the pointer of {self._store.url} is moved by somebody else", state_left="it stays")

    def _look(self, deadline: Deadline) -> Pointer | None:
        """The pointer as it is; one that is damaged counts as none, and is replaced. So does one that this writer's
        key has not signed: what is carried on is signed anew, and nobody else's word may be."""
        try:
            found = self._store.get(POINTER, deadline=deadline)
        except ObjectMissingError:
            self._etag = self._pointed = None
            return None
        assert found is not None
        self._etag = found.etag
        try:
            pointer = record_in("pointer", found.data, self._trust, Pointer, what=POINTER)
        except NO_RECORD as error:
            _logger.warning("the pointer of %s does not count, and is replaced: %s", self._store.url, error)
            return None
        if pointer.place != self._place:
            _logger.warning("the pointer of %s is of %s, and is replaced", self._store.url, pointer.place)
            return None
        if pointer.epoch > self._claim.epoch:
            why = f"{self._store.url} was taken over: its pointer is of epoch {pointer.epoch}"
            self._claim.lose(why)
            raise RunClaimedError(why, state_left="what was written so far stays")
        self._pointed = pointer
        return pointer


def _named(links: Sequence[StoredLink], version: int, manifest: StoredRef | None) -> tuple[StoredLink, ...]:
    """Links, of which the one to `version` knows its manifest."""
    if manifest is None or not links or links[-1].version != version:
        return tuple(links)
    return (*links[:-1], msgspec.structs.replace(links[-1], manifest=manifest))


def _model_digest(taken: Taken) -> str:
    from weightsync.codec.model_digest import ShardSum, model_digest

    total = sum((ShardSum(lane_a=one.lane_a, lane_b=one.lane_b) for one in taken.proofs), ShardSum.zero())
    return model_digest(taken.publication.manifest.table, total)
