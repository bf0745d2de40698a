"""Deltas: makes, keeps and hands out an agent's deltas: from each publication to the next, in shared memory.

One is made while a version is being proved, from the publisher's own two segments, so it needs a read lock on the older
one. The trainer comes first: when it wants that segment, the lock is given back, and the version has no delta. So the
codec's kernels, which take seconds to compile where no cache has them, are there before the first lock is taken.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from weightsync.agent.proved import Proved, StoredDelta, check_stamp
from weightsync.errors import (
    DeltaTooLargeError,
    SharedMemoryError,
    TransferAbortedError,
    UnsupportedError,
    WeightSyncError,
)
from weightsync.memory import Lock, Reader, Segment
from weightsync.types.publication import DeltaBase, Publication, SourceProof

if TYPE_CHECKING:
    from weightsync.codec.delta import Search
    from weightsync.codec.delta_cost import CostModel

_WANTED_FOR = 16
"""Publications for which deltas are made after one was asked for."""
_LONGEST_REST = 64
_BLOCK_BYTES = 1 << 20
_MAX_CHAIN = 32
"""Deltas that are kept, however small: each is a segment of its own, and a receiver that far behind takes a full."""

_logger = logging.getLogger(__name__)


class Deltas:
    """The last deltas of one agent. Made by one thread, asked for by any.

    Args:
        endpoint: says where the agent is reached.
        budget_bytes: what all of them together may take of shared memory; 0: none are made; None: a quarter of what the
            source has.
        full_sync_interval: a version whose number is a multiple of it has no delta; 0: none is excepted.
        evicted: told of a segment whose delta is given up, before it is.
        begun: told that one is being made: who dies of it is to rest.
        search_device: where changes are searched for, as torch names it; None: on the CPU's cores.
        rest: of so many versions none is made at first, of `_LONGEST_REST` at most.

    Attributes:
        why_none: why the newest version has no delta, in words; None where it has one.
    """

    def __init__(
        self,
        endpoint: Callable[[], str],
        *,
        budget_bytes: int | None,
        full_sync_interval: int,
        evicted: Callable[[str], None],
        begun: Callable[[], None] = lambda: None,
        search_device: str | None = None,
        rest: int = 0,
    ) -> None:
        self._endpoint = endpoint
        self._budget_bytes = budget_bytes
        self._full_sync_interval = full_sync_interval
        self._evicted = evicted
        self._begun = begun
        self._search_device = search_device
        self._search: Search | None = None
        self._lock = threading.Lock()
        self._chain: deque[tuple[StoredDelta, Segment]] = deque()
        self._num_wanted = 0
        self._base: _HeldBase | None = None
        self._rest = self._num_resting = min(_LONGEST_REST, rest)
        self._costs: CostModel | None = None
        self._codec: Literal["not wanted", "loading", "ready", "missing"] = "not wanted"
        self.why_none: str | None = "nothing was published yet"

    # --- what is asked for ---

    @property
    def codec_ready(self) -> bool:
        """Whether the next version can have a delta."""
        return self._codec == "ready"

    @property
    def can_be_made(self) -> bool:
        """Whether any version can have a delta: there is room for one, and as far as is known a codec."""
        return self._budget_bytes != 0 and self._codec != "missing"

    def want(self) -> None:
        """Some receiver could take one: they are made for a while, as soon as the codec is there."""
        self._num_wanted = _WANTED_FOR
        if self._codec == "not wanted" and self._budget_bytes != 0:
            threading.Thread(target=self.load_codec, name="weightsync-delta-codec", daemon=True).start()

    def from_base(self, base: DeltaBase, newest: Proved) -> tuple[StoredDelta, ...] | None:
        """Deltas that lead from a base to the newest version; none where it is that one; None where there are none."""
        if base.run_id != newest.run_id:
            return None
        if (base.version, base.digest) == (newest.number, newest.proof.digest):
            return ()
        with self._lock:
            chain = [stored for stored, _ in self._chain]
        for index, stored in enumerate(chain):
            if (stored.base, stored.base_digest) == (base.version, base.digest):
                for end, last in enumerate(chain[index:], start=index + 1):  # a newer one may be about to be served
                    if (last.version, last.digest) == (newest.number, newest.proof.digest):
                        return tuple(chain[index:end])
        return None

    def to(self, number: int) -> StoredDelta | None:
        return next((stored for stored in self.kept() if stored.version == number), None)

    def kept(self) -> tuple[StoredDelta, ...]:
        """All that are there, the oldest first."""
        with self._lock:
            return tuple(stored for stored, _ in self._chain)

    def observe_link(self, nbytes: int, seconds: float) -> None:
        self._cost_model().observe_link(nbytes, seconds)

    def load_codec(self) -> None:
        """Returns when it is loaded, or was already, or never will be."""
        with self._lock:
            if self._codec != "not wanted" or self._budget_bytes == 0:
                return
            self._codec = "loading"
        try:
            from weightsync.agent import delta_file  # noqa: F401
            from weightsync.codec.delta import warm_up

            warm_up()
            if self._search_device is not None:
                from weightsync.codec.device_search import DeviceSearch

                self._search = DeviceSearch(self._search_device)
        except (ImportError, UnsupportedError) as error:
            self._codec = "missing"
            _logger.warning("there will be no deltas: their codec can't be loaded: %r", error)
        except Exception as error:  # for want of memory or descriptors, say: whoever asks next tries again
            self._codec = "not wanted"
            _logger.warning("the delta codec can't be loaded now: %r", error)
        else:
            self._codec = "ready"

    # --- how they are made ---

    @contextlib.contextmanager
    def holding(self, older: Proved | None, publication: Publication, source: int) -> Iterator[None]:
        """Keeps the older version's bytes while the body runs; where that can't be, `make` gives nothing."""
        held = None
        why = self._why_not_due(older, publication, source)
        if older is not None and why is None:
            try:
                held = _HeldBase(older)
            except (BlockingIOError, WeightSyncError) as error:
                why = f"the trainer was faster: version {older.number} can't be read any more ({error})"
        self._say(why, publication)
        self._base = held
        try:
            yield
        finally:
            self._base = None
            if held is not None:
                held.let_go()

    def let_go(self) -> None:
        """The trainer wants the older segment: it has it soon. From any thread."""
        held = self._base
        if held is not None:
            held.ask_back()

    def make(
        self, publication: Publication, source: int, proof: SourceProof, *, check_cancelled: Callable[[], None]
    ) -> None:
        """The delta to a version that was just proved, if `holding` has its base. Else the chain ends before it.

        Raises:
            TransferAbortedError: from `check_cancelled`.
        """
        held, made = self._base, False
        try:
            if held is not None and held.begin():
                self._begun()
                made = self._make(held, Proved(publication=publication, source=source, proof=proof), check_cancelled)
        finally:
            if held is not None:
                held.end()
                self._rest = 0 if made else min(_LONGEST_REST, 2 * self._rest + 1)
                self._num_resting = self._rest
            if not made:
                self.clear()

    def clear(self) -> None:
        with self._lock:
            dropped = list(self._chain)
            self._chain.clear()
        self._drop(dropped)

    def _say(self, why: str | None, publication: Publication) -> None:
        """Keeps the reason, and tells the log of each one once in a row."""
        if why is not None and why != self.why_none:
            _logger.info("no delta to %d: %s", publication.manifest.version.number, why)
        self.why_none = why

    def _why_not_due(self, older: Proved | None, publication: Publication, source: int) -> str | None:
        number = publication.manifest.version.number
        self._num_wanted -= 1
        if self._budget_bytes == 0:
            return "delta_budget_bytes is 0"
        if self._num_wanted < 0:
            return "no receiver has asked for one lately: mode 'auto' asks over TCP, mode 'delta' on the same host too"
        if not self.codec_ready:
            return "the delta codec can't be loaded" if self._codec == "missing" else "the delta codec is being loaded"
        if older is None:
            return "there is no version before it"
        if not older.lies_like(publication, source):
            return "its tensors lie in another way than those of the version before"
        if self._full_sync_interval and number % self._full_sync_interval == 0:
            return f"it is a multiple of full_sync_interval {self._full_sync_interval}"
        if self._num_resting:
            self._num_resting -= 1
            return "the one before was too large, the trainer wanted its memory, or an agent died of it: a rest"
        return None

    def _make(self, held: _HeldBase, new: Proved, check_cancelled: Callable[[], None]) -> bool:
        from weightsync.agent.delta_file import encode_publication, store

        def still() -> None:
            check_cancelled()
            if held.asked_back:
                raise _AskedBackError("the trainer wants the segment")

        size_bytes = new.where.data_end - new.where.data_start
        budget_bytes = size_bytes // 4 if self._budget_bytes is None else self._budget_bytes
        most_bytes = min(budget_bytes, size_bytes)  # of more no delta is of use
        try:
            encoded = encode_publication(
                held.older,
                new,
                costs=self._cost_model(),
                max_bytes=most_bytes,
                check_cancelled=still,
                search=self._search,
            )
        except (_AskedBackError, DeltaTooLargeError) as error:
            self._say(str(error), new.publication)
            return False
        except Exception as error:  # e.g. a GPU without memory: what was proved goes out in full
            check_cancelled()
            self._say(f"it could not be made: {type(error).__name__}: {error}", new.publication)
            return False
        held.end()  # nothing is read of it any more
        if encoded.nbytes > most_bytes:  # with its head
            self._say(f"a delta takes more than the {most_bytes} bytes that it may have", new.publication)
            return False
        self._keep_within(budget_bytes - encoded.nbytes, before=held.older)
        try:
            stored, segment = store(encoded, held.older, new, endpoint=self._endpoint(), block_bytes=_BLOCK_BYTES)
        except (SharedMemoryError, OSError) as error:
            self._say(str(error), new.publication)
            return False
        with self._lock:
            self._chain.append((stored, segment))
        return True

    def _keep_within(self, room_bytes: int, *, before: Proved) -> None:
        """Drops what does not lead to `before`, and the oldest until the rest has room."""
        with self._lock:
            dropped = []
            last = self._chain[-1][0] if self._chain else None
            if last is not None and (last.version, last.digest) != (before.number, before.proof.digest):
                dropped, self._chain = list(self._chain), deque()
            while self._chain and (
                len(self._chain) >= _MAX_CHAIN or sum(stored.nbytes for stored, _ in self._chain) > room_bytes
            ):
                dropped.append(self._chain.popleft())
        self._drop(dropped)

    def _drop(self, dropped: list[tuple[StoredDelta, Segment]]) -> None:
        for stored, segment in dropped:
            self._evicted(stored.blob.segment)
            segment.close()

    def _cost_model(self) -> CostModel:
        from weightsync.codec.delta_cost import CostModel  # with numpy: not before the agent has begun to answer

        if self._costs is None:
            self._costs = CostModel()
        return self._costs


class _AskedBackError(TransferAbortedError):
    """The diff ends here."""


class _HeldBase:
    """A read lock on a publication's segment, which the trainer may ask back.

    Raises:
        BlockingIOError: it is being written again.
        VersionError: another version lies there.
        SharedMemoryError: it is gone.
    """

    def __init__(self, older: Proved) -> None:
        self.older = older
        self.asked_back = False
        self._turn = threading.Lock()
        self._reading = False
        self._lock: Lock | None = Lock(older.where.segment, Reader.SENT)
        try:
            check_stamp(older.publication, older.source)
        except BaseException:
            self.let_go()
            raise

    def begin(self) -> bool:
        """Its bytes are read from here on; False where it was given back."""
        with self._turn:
            self._reading = self._lock is not None
            return self._reading

    def end(self) -> None:
        """They are not read any more."""
        with self._turn:
            self._reading = False
        self.let_go()

    def ask_back(self) -> None:
        """Gives it back, now or when whoever reads has noticed `asked_back`."""
        self.asked_back = True
        with self._turn:
            if not self._reading:
                self._close()

    def let_go(self) -> None:
        """Gives it back. Idempotent."""
        with self._turn:
            self._close()

    def _close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()
