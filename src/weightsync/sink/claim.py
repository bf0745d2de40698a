"""ClaimKeeper: one writer a place. The claim is taken by a conditional put, and renewed while its writer lives.

Nobody compares clocks: who finds a claim watches whether it changes. One that does is alive, and this writer is
refused; one that does not for `takeover_s` is taken over, under the next epoch. Whoever was taken over finds his next
renewal, or his next move of the pointer, refused by its condition, and ends.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid

import msgspec

from weightsync.errors import (
    ObjectConflictError,
    ObjectMissingError,
    RunClaimedError,
    StoreDamagedError,
    WeightSyncError,
)
from weightsync.objects.base import ObjectStore
from weightsync.objects.signing import NO_RECORD, record_in, seal
from weightsync.observe.told_once import ToldOnce
from weightsync.types import Deadline
from weightsync.types.store import CLAIM, MAX_EPOCH, POINTER, Claim, Pointer, epoch_of

_LOOKS = 8
_CALL_S = 15.0

_logger = logging.getLogger(__name__)


class ClaimKeeper:
    """Of one writer.

    Args:
        takeover_s: see above. A claim is renewed four times in it.
        writer: names this writer, and those before it that its trainer knows to be dead: their claim is not watched.

    Attributes:
        epoch: of this writer; 0 before `acquire`.
    """

    def __init__(self, store: ObjectStore, *, run_id: str, takeover_s: float, writer: str = "") -> None:
        self._store = store
        self._takeover_s = takeover_s
        self._claim = Claim(
            epoch=0, writer=writer or uuid.uuid4().hex, who=f"{socket.gethostname()[:100]}/{os.getpid()}", run_id=run_id
        )
        self._etag: str | None = None
        self._lost: str | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name="weightsync-claim", daemon=True)

    @property
    def epoch(self) -> int:
        return self._claim.epoch

    def acquire(self, *, ended: threading.Event) -> None:
        """Takes the claim; waits for `takeover_s` where somebody else has it.

        Raises:
            RunClaimedError: he is alive; or `ended` was set. Nothing was changed.
            StoreDamagedError: the epoch there is the last one: nobody has counted so far. Nothing was changed.
            WeightSyncError: the store can't be asked.
        """
        found, etag = self._found()
        if found is not None and not found.released and found.writer != self._claim.writer:
            until_s = time.monotonic() + self._takeover_s
            _logger.warning(
                "%s is claimed by %s: it is watched for %.3g s", self._store.url, found.who, self._takeover_s
            )
            while time.monotonic() < until_s:
                if ended.wait(self._takeover_s / _LOOKS):
                    raise RunClaimedError(f"{self._store.url} is claimed by {found.who}")
                now, etag_now = self._found()
                if etag_now != etag and now is not None and not now.released:
                    raise RunClaimedError(
                        f"{self._store.url} is written by {now.who} (run {now.run_id}), who is alive: give this "
                        "trainer a place of its own",
                        state_left="nothing was written",
                    )
                found, etag = now, etag_now
                if found is None or found.released:
                    break
        epoch = 1 + max(0 if found is None else found.epoch, self._pointer_epoch())
        if epoch > MAX_EPOCH:
            raise StoreDamagedError(
                f"{self._store.url} has epoch {MAX_EPOCH}, after which there is none: somebody has put it there; take "
                "another place",
                state_left="nothing was written",
            )
        claim = msgspec.structs.replace(self._claim, epoch=epoch)
        try:
            self._etag = self._put(claim, etag)
        except ObjectConflictError:
            now, self._etag = self._found()
            if now is None or (now.writer, now.epoch) != (claim.writer, epoch):  # else its own: an answer that was lost
                self._etag = None
                raise RunClaimedError(
                    f"{self._store.url} was claimed by somebody else just now", state_left="nothing was written"
                ) from None
        self._claim = claim
        self._thread.start()

    def check(self) -> None:
        """Raises RunClaimedError where the claim is lost."""
        if self._lost is not None:
            raise RunClaimedError(self._lost, state_left="what was written so far stays")

    def lose(self, why: str) -> None:
        self._lost = self._lost or why

    def release(self) -> None:
        """The next writer need not wait. Idempotent."""
        self._ended.set()
        with self._lock:
            if self._etag is None or self._lost is not None:
                return
            try:
                self._put(msgspec.structs.replace(self._claim, beat=self._claim.beat + 1, released=True), self._etag)
            except WeightSyncError as error:
                _logger.warning("the claim of %s could not be released: %s", self._store.url, error)
            self._etag = None

    def _keep(self) -> None:
        troubles = ToldOnce(_logger)
        while not self._ended.wait(self._takeover_s / 4):
            with self._lock:
                if self._ended.is_set() or self._etag is None:
                    return
                claim = msgspec.structs.replace(self._claim, beat=self._claim.beat + 1)
                try:
                    self._etag, self._claim = self._put(claim, self._etag), claim
                    troubles.over()
                except ObjectConflictError:
                    try:
                        found, etag = self._found()
                    except WeightSyncError as error:  # whose it is now is asked the next time
                        troubles.say(type(error), "the claim of %s can't be read: %s", self._store.url, error)
                        continue
                    if found is not None and (found.writer, found.epoch) == (claim.writer, claim.epoch):
                        self._etag, self._claim = etag, claim
                        continue
                    who = "somebody" if found is None else f"{found.who} (run {found.run_id})"
                    self.lose(f"{self._store.url} was taken over by {who}")
                    return
                except WeightSyncError as error:
                    troubles.say(type(error), "the claim of %s is not renewed: %s", self._store.url, error)

    def _put(self, claim: Claim, etag: str | None) -> str:
        body = seal("claim", msgspec.json.encode(claim), None)
        return self._store.put(CLAIM, body, deadline=Deadline(_CALL_S), replaces=etag)

    def _found(self) -> tuple[Claim | None, str | None]:
        try:
            got = self._store.get(CLAIM, deadline=Deadline(_CALL_S))
        except ObjectMissingError:
            return None, None
        assert got is not None
        try:
            return record_in("claim", got.data, None, Claim, what=CLAIM), got.etag
        except NO_RECORD:  # he is watched as any other
            return Claim(epoch=0, writer="?", who="somebody whose claim is damaged", run_id="?"), got.etag

    def _pointer_epoch(self) -> int:
        try:
            got = self._store.get(POINTER, deadline=Deadline(_CALL_S))
            assert got is not None
            return record_in("pointer", got.data, None, Pointer, what=POINTER).epoch
        except (ObjectMissingError, *NO_RECORD):
            listed = self._store.list_under("", deadline=Deadline(_CALL_S))
            return max((epoch_of(each.key) or 0 for each in listed), default=0)
