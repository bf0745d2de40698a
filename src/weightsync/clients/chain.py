"""Chain: what one place of an object store has, as a reader finds it: its pointer, manifests, and what of it is good.

One for each place and key in a process: whoever asks what is newest, and whoever reads it, know of the same damage.
What is damaged is passed by: the version before it, or the one that the chain's anchor leads to, counts as the newest.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import re
import threading
import time
import uuid
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from weightsync.errors import (
    InvalidRequestError,
    NotPublishedError,
    ObjectConflictError,
    ObjectMissingError,
    SignatureError,
    StoreAuthError,
    StoreDamagedError,
    VersionError,
    WeightSyncError,
)
from weightsync.objects.base import ObjectStore
from weightsync.objects.signing import Trust, unseal
from weightsync.objects.urls import place_of
from weightsync.types import Deadline
from weightsync.types.layout import PublicationLayout
from weightsync.types.store import (
    EPOCH_PATTERN,
    POINTER,
    READERS,
    Pointer,
    ReaderNote,
    StoredRef,
    StoredVersion,
    VersionRef,
)

_SOONEST_S, _LATEST_S, _SHARE = 0.1, 2.0, 0.05
_BEAT_S = 20.0
_BAD_S = 60.0
_NUM_BACK = 64
"""So many manifests are looked at for a good version: one or two of each chain."""
_NUM_KEPT, _KEPT_BYTES = 300, 64 << 20
"""So many manifests are kept, and so many bytes of them, as they are stored: of large models each has megabytes."""
_MAX_RECOVER = 16
_MUTE_S = 300.0
"""So long no note is tried after a refusal: a credential may have expired, and come anew."""
_NOTE_S = 3.0
"""A pull waits for its note so long at most. A request of a store may last longer: no limit of ours ends it."""
_MANIFEST = re.compile(EPOCH_PATTERN + r"versions/([0-9]{1,18})\.json")

_T = TypeVar("_T")
_logger = logging.getLogger(__name__)


class Chain:
    """Thread-safe; what is asked of the store is asked by the caller's thread.

    Args:
        store: the place.
        trust: whose manifests are taken; None: anybody's.
        beat_s: how often the reader's note is renewed at least; 0: none is left.
        seen: the newest pointer that is known of; nothing older is taken.
    """

    def __init__(
        self, store: ObjectStore, *, trust: Trust | None, beat_s: float = _BEAT_S, seen: Pointer | None = None
    ) -> None:
        self.store = store
        self._place = place_of(store.url)
        self._trust = trust
        self._lock = threading.RLock()
        self._pointer: Pointer | None = None
        self._etag: str | None = None
        self._seen = seen
        self._manifests: dict[str, tuple[StoredVersion, int]] = {}
        self._layouts: dict[str, PublicationLayout] = {}
        self._bad: dict[str, float] = {}
        self._changed_s = time.monotonic()
        self._recovered: str | None = None
        self._reader = f"reader-{uuid.uuid4().hex}"
        self._beat_s = beat_s
        self._beats, self._beaten_s = 0, -1e9
        self._refused_until_s = self._failing_until_s = -1e9
        self._is_telling = False
        self._note_etag: str | None = None
        self._noted: tuple[str, ...] = ()
        self._reading: dict[str, tuple[str, ...]] = {}

    # --- what there is ---

    def newest(self, *, deadline: Deadline) -> StoredVersion:
        """The newest version of which all is good, as far as is known. Asks for the pointer.

        Raises:
            NotPublishedError: there is none yet.
            StoreDamagedError, SignatureError: the pointer is damaged, or not by whom is trusted; or no version is good.
            WeightSyncError: the store can't be asked.
        """
        self._look(deadline)
        for version in self._back_from_newest(deadline):
            if not self._is_bad(version):
                return version
        raise StoreDamagedError(f"{self.store.url} has no version of which all is good: {', '.join(self.bad)}")

    def version(self, number: int, *, deadline: Deadline) -> StoredVersion:
        """One version of the newest run.

        Raises:
            VersionError: it is not there (any more).
        """
        self._look(deadline)
        run_id: str | None = None
        for version in self._back_from_newest(deadline):
            run_id = run_id or version.version.run_id
            if version.version.run_id != run_id:
                break
            if version.version.number == number:
                return version
            for ref in _chain_before(version):
                if ref.number == number:
                    found = self.manifest(ref.manifest, deadline=deadline)
                    if (found.version.run_id, found.version.number) != (run_id, number):
                        raise StoreDamagedError(f"{self.store.url}/{ref.manifest.key} is of {found.version}")
                    return found
            if version.version.number < number:
                break
        raise VersionError(f"{self.store.url} does not have version {number} (any more)", version=number)

    @property
    def seen(self) -> Pointer | None:
        """The newest pointer that it knows of, be it read or recovered."""
        with self._lock:
            return self._seen

    def pause_s(self) -> float:
        """Until the pointer is asked for again: the longer nothing has come, the longer; with jitter."""
        with self._lock:
            idle_s = time.monotonic() - self._changed_s
        return min(_LATEST_S, max(_SOONEST_S, _SHARE * idle_s)) * (0.75 + 0.5 * random.random())

    def manifest(self, ref: StoredRef, *, deadline: Deadline) -> StoredVersion:
        """A manifest, checked.

        Raises:
            StoreDamagedError, SignatureError, ObjectMissingError: it is not what it should be.
        """
        with self._lock:
            if ref.sha256 in self._manifests:
                return self._manifests[ref.sha256][0]
        with self._noting(ref.key):
            raw = self._small(ref, deadline)
            version = self._read("version", raw, StoredVersion, what=f"{self.store.url}/{ref.key}")
        with self._lock:
            self._manifests[ref.sha256] = version, len(raw)
            kept_bytes = sum(size for _, size in self._manifests.values())
            while len(self._manifests) > _NUM_KEPT or (kept_bytes > _KEPT_BYTES and len(self._manifests) > 1):
                kept_bytes -= self._manifests.pop(next(iter(self._manifests)))[1]
        return version

    def layout(self, version: StoredVersion, *, deadline: Deadline) -> PublicationLayout:
        """The layout of a version: one object for all that have the same."""
        with self._lock:
            known = self._layouts.get(version.layout_digest)
        if known is None:
            with self._noting(version.layout.key):
                raw = self._small(version.layout, deadline)
                try:
                    known = PublicationLayout.read(raw, version.layout_digest)
                except InvalidRequestError as error:
                    raise StoreDamagedError(f"{self.store.url}/{version.layout.key}: {error.message}") from error
            with self._lock:
                self._layouts = {version.layout_digest: known}
        return known

    # --- what is wrong ---

    def damaged(self, key: str) -> None:
        """An object is not what it should be, though it was asked for again: it is passed by for a while."""
        with self._lock:
            if key not in self._bad:
                _logger.warning("%s/%s is damaged or gone: what needs it is passed by", self.store.url, key)
            self._bad[key] = time.monotonic() + _BAD_S
            self._beaten_s = self._failing_until_s = -1e9  # the writer is told soon

    @contextlib.contextmanager
    def _noting(self, key: str) -> Iterator[None]:
        """What is found damaged here is passed by from now on."""
        try:
            yield
        except ObjectMissingError as error:
            self.damaged(key)
            raise StoreDamagedError(f"{self.store.url}/{key} is gone") from error
        except (StoreDamagedError, SignatureError):
            self.damaged(key)
            raise

    @property
    def bad(self) -> tuple[str, ...]:
        """Objects that are passed by now."""
        now_s = time.monotonic()
        with self._lock:
            self._bad = {key: until_s for key, until_s in self._bad.items() if until_s > now_s}
            return tuple(self._bad)

    def _is_bad(self, version: StoredVersion) -> bool:
        return not version.keys().isdisjoint(self.bad)

    # --- who reads ---

    def reading(self, who: str, manifests: tuple[str, ...]) -> None:
        """That reader of this process reads from these manifests; none: it does no more."""
        with self._lock:
            self._reading[who] = manifests
            if not manifests:
                del self._reading[who]

    def beat(self, *, deadline: Deadline) -> None:
        """Renews the note that tells the writer what has to stay, and what is damaged. Where that may not be written,
        nothing is said."""
        now_s, within_s = time.monotonic(), min(_NOTE_S, deadline.remaining_s)
        with self._lock:
            manifests = tuple(sorted({key for keys in self._reading.values() for key in keys}))[:16]
            due = now_s - self._beaten_s > self._beat_s or manifests != self._noted
            damaged = self.bad[:64]
            mute = self._is_telling or now_s < max(self._refused_until_s, self._failing_until_s)
            if not self._beat_s or not (manifests or damaged) or not due or mute:
                return
            self._beaten_s, self._noted, self._beats = now_s, manifests, self._beats + 1
            note = ReaderNote(reader=self._reader, beat=self._beats, manifests=manifests, damaged=damaged)
            self._is_telling = True
        told = threading.Event()

        def tell() -> None:
            try:
                self._tell(note, within_s)
            finally:
                self._is_telling = False
                told.set()

        try:
            threading.Thread(target=tell, name="reader's note", daemon=True).start()
        except RuntimeError as error:
            self._is_telling = False
            _logger.info("%s: the note of what is read here is not renewed: %s", self.store.url, error)
            return
        told.wait(within_s)

    def _tell(self, note: ReaderNote, within_s: float) -> None:
        try:
            self._put_note(msgspec.json.encode(note), Deadline(within_s))
        except StoreAuthError as error:
            _logger.info("%s: no note is left of what is read here: %s", self.store.url, error)
            self._refused_until_s = time.monotonic() + _MUTE_S
        except WeightSyncError as error:
            _logger.info("%s: the note of what is read here is not renewed: %s", self.store.url, error)
            if within_s == _NOTE_S:  # else it may be its pull that had no time
                self._failing_until_s = time.monotonic() + self._beat_s

    def close(self) -> None:
        """Takes the note away. Idempotent."""
        if self._note_etag is not None:
            with contextlib.suppress(WeightSyncError):
                self.store.delete([self._note_key], deadline=Deadline(2.0))
            self._note_etag = None

    @property
    def _note_key(self) -> str:
        return f"{READERS}/{self._reader}.json"

    def _put_note(self, body: bytes, deadline: Deadline) -> None:
        for _ in range(2):
            try:
                self._note_etag = self.store.put(self._note_key, body, deadline=deadline, replaces=self._note_etag)
                return
            except ObjectConflictError:  # its own, of an answer that was lost; or somebody has deleted it
                try:
                    found = self.store.get(self._note_key, deadline=deadline)
                    self._note_etag = None if found is None else found.etag
                except ObjectMissingError:
                    self._note_etag = None

    # --- helpers ---

    def _look(self, deadline: Deadline) -> None:
        what = f"{self.store.url}/{POINTER}"
        with self._lock:
            etag, known = self._etag, self._recovered
        found = None
        try:
            found = self.store.get(POINTER, deadline=deadline, unless=etag)
            if found is None or found.etag == self._recovered:
                return
            pointer = self._read("pointer", found.data, Pointer, what=what)
        except ObjectMissingError:
            if self._seen is not None:
                raise StoreDamagedError(f"{what} is gone") from None
            raise NotPublishedError(f"nothing is written at {self.store.url} yet") from None
        except (StoreDamagedError, SignatureError) as error:
            if self._pointer is not None and self._recovered is None:
                raise
            _logger.warning("%s: %s; the newest manifest that is good counts", self.store.url, error)
            recovered = self._recover(deadline, error)
            with self._lock:
                if self._seen is None or recovered.current != self._seen.current:
                    if self._seen is not None and recovered.goes_back(self._seen):
                        raise  # what was found before is gone: nobody goes back
                    self._seen = recovered
                self._pointer = recovered
                self._recovered = None if found is None else found.etag
            return
        with self._lock:
            if self._seen is not None and pointer.goes_back(self._seen):
                if (self._etag, self._recovered) != (etag, known):
                    return  # another thread has asked meanwhile, and has a newer answer
                raise StoreDamagedError(f"{what} went back to {pointer.version}: an old one was put there again")
            self._pointer, self._etag, self._seen, self._recovered = pointer, found.etag, pointer, None
            self._changed_s = time.monotonic()

    def _back_from_newest(self, deadline: Deadline) -> Iterator[StoredVersion]:
        """The newest version, and where to go on from one that won't do, as far as these can be read: the last version
        before its chain's first bad delta, then the last one of the chain before."""
        with self._lock:
            pointer = self._pointer
        assert pointer is not None
        last: WeightSyncError | None = None
        refs = [ref for ref in (pointer.current, pointer.previous) if ref is not None]
        for count in range(_NUM_BACK):
            if not refs:
                break
            ref = refs.pop(0)
            try:
                version = self.manifest(ref.manifest, deadline=deadline)
                if version.version.number != ref.number or (count == 0 and version.version != pointer.version):
                    raise StoreDamagedError(f"{self.store.url}/{ref.manifest.key} is of {version.version}")
            except (StoreDamagedError, SignatureError) as error:
                self.damaged(ref.manifest.key)
                last = error
                continue
            yield version
            refs = [each for each in (self._before_damage(version), version.earlier) if each is not None]
        if last is not None:
            raise last

    def _before_damage(self, version: StoredVersion) -> VersionRef | None:
        """The last version of its chain that needs none of its bad deltas; None where these are all good."""
        bad = self.bad
        bases = [link.base for source in version.sources for link in source.links if link.blob.key in bad]
        last = min(bases, default=-1)
        return next((ref for ref in reversed(_chain_before(version)) if ref.number <= last), None)

    def _recover(self, deadline: Deadline, error: WeightSyncError) -> Pointer:
        """A pointer to the newest manifest that is good, found by listing; no more than a way out of damage."""
        listed = [_MANIFEST.fullmatch(each.key) for each in self.store.list_under("", deadline=deadline)]
        found = sorted(((int(each[1]), int(each[2]), each[0]) for each in listed if each is not None), reverse=True)
        for epoch, number, key in found[:_MAX_RECOVER]:
            try:
                got = self.store.get(key, deadline=deadline)
                assert got is not None
                version = self._read("version", got.data, StoredVersion, what=f"{self.store.url}/{key}")
            except (StoreDamagedError, SignatureError, ObjectMissingError):
                continue
            if (version.epoch, version.version.number) != (epoch, number):  # an older one under a newer name
                continue
            ref = StoredRef(key=key, nbytes=len(got.data), sha256=hashlib.sha256(got.data).hexdigest())
            current = VersionRef(number=version.version.number, manifest=ref)
            return Pointer(
                place=version.place, epoch=version.epoch, version=version.version, model_id=version.model_id,
                incarnation=version.incarnation, current=current, previous=version.before,
            )  # fmt: skip
        raise error

    def _small(self, ref: StoredRef, deadline: Deadline) -> bytes:
        """A small object; asked for again where it is damaged, which may have been on its way."""
        for _ in range(2):
            found = self.store.get(ref.key, deadline=deadline)
            assert found is not None
            if len(found.data) == ref.nbytes and hashlib.sha256(found.data).hexdigest() == ref.sha256:
                return found.data
        raise StoreDamagedError(f"{self.store.url}/{ref.key} is damaged: its SHA-256 is another than was written")

    def _read(self, kind: str, raw: bytes, record: type[_T], *, what: str) -> _T:
        payload = unseal(kind, raw, self._trust, what=what)
        try:
            read = msgspec.json.decode(payload, type=record)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidRequestError) as error:
            raise StoreDamagedError(f"{what} is no {kind} of this release: {error}") from error
        if (place := getattr(read, "place", self._place)) != self._place:
            raise SignatureError(
                f"{what} was written for {place!r}, and this is {self._place!r}: it counts for nothing"
            )
        return read


def _chain_before(version: StoredVersion) -> list[VersionRef]:
    """The versions that are written of its chain before it, its anchor first."""
    links = version.sources[0].links
    named = [VersionRef(number=link.version, manifest=link.manifest) for link in links if link.manifest is not None]
    return named if version.anchor is None else [version.anchor, *named]
