"""Sweeper: deletes what nobody needs: no version of the last two chains, no reader that is alive, for a while now.

    needed    what the newest version's chain has, what the chain before it has, what is being written,
              and what the chains have that readers' notes name
    deleted   what a listing shows that is not needed, and was not needed for `keep_s`, by this process's own clock

What is not named as a writer or a reader names it is somebody else's, and stays, whatever folder it lies in.
A listing that lags shows less: that is deleted later. Readers' clocks are never compared: a note that changes is alive.
Where there are more notes than are read at once, nothing is deleted but those of the dead.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Iterator

import msgspec

from weightsync.clients.chain import Chain
from weightsync.errors import ObjectMissingError, SignatureError, StoreAuthError, StoreDamagedError, WeightSyncError
from weightsync.handles.fanout import call_all
from weightsync.objects.base import Found, ObjectStore
from weightsync.objects.signing import NO_RECORD, record_in
from weightsync.sink.writer import ChainWriter
from weightsync.types import Deadline
from weightsync.types.store import READERS, ReaderNote, StoredRef, StoredVersion, epoch_of, is_note

_NUM_CHAINS = 2
_READER_S = 120.0
_MAX_READERS = 1000
"""So many notes are read at once."""
_NUM_STREAMS = 16
"""So many of them side by side."""
_MAX_NOTE_BYTES = 1 << 16
_CALL_S = 60.0

_logger = logging.getLogger(__name__)


class Sweeper:
    """Of one writer; called by its thread.

    Args:
        reader_s: a reader whose note has not changed for so long is gone.
    """

    def __init__(
        self, store: ObjectStore, writer: ChainWriter, *, keep_s: float, every_s: float, reader_s: float = _READER_S
    ) -> None:
        self._store = store
        self._writer = writer
        self._keep_s = keep_s
        self._every_s = every_s
        self._reader_s = reader_s
        self._swept_s = time.monotonic()
        self._unneeded: dict[str, float] = {}
        self._notes: dict[str, tuple[str, float, ReaderNote | None]] = {}  # what was read last stands last
        self._is_crowded = False
        self._chain = Chain(store, trust=None, beat_s=0.0)  # what it deletes by is its own, or named by nobody's word

    def sweep(self, *, now: bool = False) -> int:
        """Deletes, where it is time; how many objects. What fails is tried again the next time."""
        if self._writer.current is None or not (now or time.monotonic() - self._swept_s >= self._every_s):
            return 0
        self._swept_s = time.monotonic()
        try:
            return self._sweep(Deadline(_CALL_S))
        except WeightSyncError as error:
            _logger.warning("%s is not swept now: %s", self._store.url, error)
            return 0

    def _sweep(self, deadline: Deadline) -> int:
        notes = self._live_notes(deadline)
        self._writer.damaged(frozenset(key for note in notes for key in note.damaged))
        if self._is_crowded:  # who reads what is not known
            return 0
        needed = self._needed(notes, deadline)
        at_s, gone = time.monotonic(), []
        assert self._writer.current is not None
        epoch = self._writer.current.epoch  # what a later writer has is not this one's to delete
        listed = {each.key: epoch_of(each.key) for each in self._store.list_under("", deadline=deadline)}
        for key, below in listed.items():
            if key in needed or below is None or below > epoch:
                self._unneeded.pop(key, None)
            elif at_s - self._unneeded.setdefault(key, at_s) >= self._keep_s:
                gone.append(key)
        gone.sort(key=lambda key: "/versions/" not in key)  # manifests first: who finds one finds its bytes
        self._store.delete(gone, deadline=deadline)
        left = listed.keys() - set(gone)
        self._unneeded = {key: since_s for key, since_s in self._unneeded.items() if key in left}
        if gone:
            _logger.info("%s: %d objects that nobody needs are deleted", self._store.url, len(gone))
        return len(gone)

    def _needed(self, notes: list[ReaderNote], deadline: Deadline) -> set[str]:
        needed, now = set(self._writer.under_way), self._writer.current
        assert now is not None
        assert self._writer.ref is not None
        at: tuple[StoredVersion, StoredRef] | None = (now, self._writer.ref.manifest)
        for _ in range(_NUM_CHAINS):
            if at is None:
                break
            at = self._add_chain(*at, needed, deadline)
        for key in {key for note in notes for key in note.manifests} - needed:
            if (read := self._manifest(key, deadline)) is not None:
                self._add_chain(*read, needed, deadline)
        return needed

    def _add_chain(
        self, version: StoredVersion, ref: StoredRef, needed: set[str], deadline: Deadline
    ) -> tuple[StoredVersion, StoredRef] | None:
        """All that a chain up to a version has; the last version of the chain before it."""
        needed |= version.keys() | {ref.key}
        needed |= {link.manifest.key for source in version.sources for link in source.links if link.manifest}
        if version.anchor is not None:
            needed.add(version.anchor.manifest.key)
        before = version.earlier  # stands in each version: the anchor's manifest may be damaged
        try:
            return None if before is None else (
                self._chain.manifest(before.manifest, deadline=deadline), before.manifest
            )  # fmt: skip
        except (ObjectMissingError, StoreDamagedError, SignatureError):
            return None

    def _manifest(self, key: str, deadline: Deadline) -> tuple[StoredVersion, StoredRef] | None:
        """What a reader's note names; it is believed where it is a manifest."""
        try:
            found = self._store.get(key, deadline=deadline)
            assert found is not None
            version = record_in("version", found.data, None, StoredVersion, what=key)
        except (ObjectMissingError, *NO_RECORD):
            return None
        digest = hashlib.sha256(found.data).hexdigest()
        return version, StoredRef(key=key, nbytes=len(found.data), sha256=digest)

    def _live_notes(self, deadline: Deadline) -> list[ReaderNote]:
        """What readers say that are alive; some of it, where there are too many."""
        at_s, listed = time.monotonic(), self._listed_notes(deadline)
        self._notes = {key: kept for key, kept in self._notes.items() if key in listed}
        in_turn = [*sorted(listed - self._notes.keys()), *self._notes][:_MAX_READERS]
        live: list[ReaderNote] = []
        dead: list[str] = []
        for key, found in self._read_notes(in_turn, deadline):
            etag, since_s, note = self._notes.get(key, ("", at_s, None))
            try:
                if isinstance(found, WeightSyncError):
                    raise found
                if found is not None:
                    etag, since_s, note = found.etag, since_s if found.etag == etag else at_s, None
                    note = msgspec.json.decode(found.data, type=ReaderNote)
            except (ObjectMissingError, StoreAuthError, *NO_RECORD):  # no answer at all: nothing is swept now
                note = None
            if note is not None and at_s - since_s <= self._reader_s:
                live.append(note)
            if at_s - since_s > 10 * self._reader_s:
                dead.append(key)
            self._notes.pop(key, None)
            self._notes[key] = etag, since_s, None if self._is_crowded else note
        self._store.delete(dead, deadline=deadline)
        return live

    def _read_notes(self, keys: list[str], deadline: Deadline) -> Iterator[tuple[str, Found | WeightSyncError | None]]:
        """Each note, or why it can't be read; None where it is as it was."""
        for start in range(0, len(keys), _NUM_STREAMS):
            calls: dict[str, Callable[[], Found | None]] = {}
            for key in keys[start : start + _NUM_STREAMS]:
                etag, _, note = self._notes.get(key, ("", 0.0, None))
                unless = None if note is None else etag
                calls[key] = functools.partial(self._store.get, key, deadline=deadline, unless=unless)
            found, errors = call_all(calls, what="note", timeout_s=deadline.remaining_s)
            yield from ((key, errors[key] if key in errors else found[key]) for key in calls)

    def _listed_notes(self, deadline: Deadline) -> set[str]:
        listed = {
            each.key
            for each in self._store.list_under(READERS, deadline=deadline)
            if each.nbytes <= _MAX_NOTE_BYTES and is_note(each.key)
        }
        is_crowded = len(listed) > _MAX_READERS
        if is_crowded and not self._is_crowded:
            _logger.warning(
                "%s has %d readers' notes, and %d are read at once: nothing is deleted until there are fewer",
                self._store.url, len(listed), _MAX_READERS,
            )  # fmt: skip
        self._is_crowded = is_crowded
        return listed
