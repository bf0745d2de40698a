"""Prover: proves stamped segments one after the other, in a thread of the agent; the newest gives the orders."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from weightsync.agent.deltas import Deltas
from weightsync.agent.proved import Proved, check_stamp
from weightsync.errors import StateError, TransferAbortedError, WeightSyncError, as_weightsync_error
from weightsync.memory import Lock, Reader
from weightsync.observe import now_s
from weightsync.types import Version
from weightsync.types.publication import Publication, SourceProof
from weightsync.types.scarcity import is_passing

_RETRY_S = (0.05, 2.0)
"""The first pause after a proof that failed for want of something, and the longest."""

_logger = logging.getLogger(__name__)


class Prover:
    """Given publications, from `start` to `close`. One that waits for its turn gives way to a newer one.

    A proof that fails for want of descriptors or memory is tried again, with longer and longer pauses, until there is
    a newer publication: a crowd of connections must not cost a version.

    Args:
        proved: takes a publication, the index of its source here, its proof, and the seconds it took; from the thread.
        refused: takes one that can't be proved, and why; from the thread.
        served: what is served now.
        deltas: makes a delta of each, where one is wanted.
    """

    def __init__(
        self,
        proved: Callable[[Publication, int, SourceProof, float], None],
        refused: Callable[[Version, WeightSyncError], None],
        *,
        served: Callable[[], Proved | None],
        deltas: Deltas,
    ) -> None:
        self._proved = proved
        self._refused = refused
        self._served = served
        self._deltas = deltas
        self._changed = threading.Condition()
        self._next: tuple[Publication, int] | None = None
        self._proving: Version | None = None
        self._closed = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="weightsync-agent-prover", daemon=True).start()

    def publish(self, publication: Publication, source: int) -> None:
        """A stamped segment. Returns at once."""
        with self._changed:
            self._next = (publication, source)
            self._changed.notify_all()

    @property
    def newest(self) -> Version | None:
        """The newest version that is not done with; None where nothing is under way."""
        with self._changed:
            return self._proving if self._next is None else self._next[0].manifest.version

    def close(self) -> None:
        """Ends a proof that is under way. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            from weightsync.agent.proof import warm_up  # numba: not before the agent has begun to answer

            warm_up()  # seconds that the first publication would wait for
        except Exception as error:  # each proof will say so again, and by name
            _logger.warning("the agent can't prove anything: %r", error)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closed)
                if self._closed:
                    return
                assert self._next is not None
                publication, source = self._next
                self._next = None
                self._proving = publication.manifest.version
            try:
                begun_s = now_s()
                proof = self._prove_patiently(publication, source)
                self._proved(publication, source, proof, now_s() - begun_s)
            except Exception as error:
                typed = as_weightsync_error(error, StateError, "the publication could not be proved")
                self._refused(publication.manifest.version, typed)
            finally:
                with self._changed:
                    self._proving = None

    def _prove_patiently(self, publication: Publication, source: int) -> SourceProof:
        pause_s, longest_s = _RETRY_S
        while True:
            try:
                return self._prove(publication, source)
            except Exception as error:
                if not is_passing(error):
                    raise
                _logger.warning("the proof of %s is tried again: %s", publication.manifest.version, error)
                with self._changed:
                    if self._changed.wait_for(lambda: self._next is not None or self._closed, pause_s):
                        raise
                pause_s = min(2 * pause_s, longest_s)

    def _prove(self, publication: Publication, source: int) -> SourceProof:
        from weightsync.agent.proof import prove

        version = publication.manifest.version

        def check_cancelled() -> None:
            if self._closed:
                raise TransferAbortedError("the agent ends", version=str(version))

        try:
            lock = Lock(publication.sources[source].segment, Reader.SENT)
        except BlockingIOError:
            raise TransferAbortedError(f"{version} is superseded before it was proved", version=str(version)) from None
        with lock, self._deltas.holding(self._served(), publication, source):
            check_stamp(publication, source)
            proof = prove(publication, source, check_cancelled=check_cancelled)
            self._deltas.make(publication, source, proof, check_cancelled=check_cancelled)
            return proof
