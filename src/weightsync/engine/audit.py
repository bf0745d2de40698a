"""Audit: reads all live weights again, tensor by tensor, while the engine serves, and says what digest they have.

Patches come in between, and may come faster than gigabytes are read. What was read of a tensor stays true then, plus
the sum of what the patch has changed in it: so an audit goes on over as many patches as it takes, and ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

from weightsync.codec.digest import PartSums
from weightsync.codec.model_digest import ShardSum, model_digest
from weightsync.errors import DigestMismatchError, LoadError, TransferAbortedError
from weightsync.handles.fanout import in_thread
from weightsync.load.base import WeightLoader
from weightsync.plan.boxes import split_box, whole_box
from weightsync.tensors import cut_out
from weightsync.types import HeldTensor, Manifest, TensorSpec, Version, itemsize_bytes

_logger = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20
"""Small enough that a piece is summed by the audit's own thread alone, and that stopping it takes no time."""
_NICE = 10
_ENDS_S = 2.0
_REFUSES = "not to be served from until the next full load"


class Audit:
    """One reading of live weights, in one or several runs: `begin`, `run`, and from any thread `pause`."""

    def __init__(self) -> None:
        self._sums: dict[str, ShardSum] = {}  # of whole tensors that were read, as they are now
        self._paused = threading.Event()
        self._idle = threading.Event()
        self._idle.set()

    @property
    def paused(self) -> bool:
        """Whether what it found last says nothing: a session may write the live weights by now."""
        return self._paused.is_set()

    def begin(self) -> None:
        """A run is about to be made, unless it is paused before."""
        self._paused.clear()
        self._idle.clear()

    def pause(self, *, wait_s: float) -> bool:
        """Ends its run soon, and waits so long for that; whether it has ended. If not, it is of no use any more."""
        self._paused.set()
        return self._idle.wait(wait_s)

    def follow(self, changes: Mapping[str, ShardSum]) -> None:
        """While it is paused, a patch was committed that adds this to the sums of these tensors."""
        for name in self._sums.keys() & changes:
            self._sums[name] += changes[name]

    def run(
        self,
        held: Iterable[HeldTensor],
        specs: Iterable[TensorSpec],
        *,
        differs: Callable[[str], str | None] = lambda _: None,
    ) -> str:
        """The digest of what is held; on one core, behind everything else that wants it.

        Args:
            held: what is read.
            specs: all tensors.
            differs: asked behind each tensor that is read: how what is live differs from it.

        Raises:
            TransferAbortedError: it was paused; a tensor that it was at is read anew in the next run.
            DigestMismatchError: what is live differs.
        """
        _be_nice()
        try:
            parts = ShardSum.zero()
            for each in held:
                if each.box is not None:
                    parts += self._read(each)
                elif each.spec.name not in self._sums:
                    self._sums[each.spec.name] = self._compared(self._read(each), each.spec.name, differs)
            return model_digest(specs, sum(self._sums.values(), parts))
        finally:
            self._idle.set()

    def _compared(self, total: ShardSum, name: str, differs: Callable[[str], str | None]) -> ShardSum:
        why = differs(name)
        if self._paused.is_set():
            raise _paused()
        if why is not None:
            raise DigestMismatchError(f"an audit found: {why}", parameter=name, state_left=_REFUSES)
        return total

    def _read(self, each: HeldTensor) -> ShardSum:
        sums, box = PartSums(), each.box or whole_box(each.spec.shape)
        for block in split_box(box, _PIECE_BYTES // itemsize_bytes(each.spec.dtype)):
            if self._paused.is_set():
                raise _paused()
            cut = cut_out(each.tensor, block, origin=box.offset)
            sums.add(HeldTensor(spec=each.spec, box=block, tensor=cut))
        return sums.total()


def _paused() -> TransferAbortedError:
    return TransferAbortedError("the audit was paused: another session began")


class Audits:
    """The audits of one worker, one after the other. Not thread-safe: the worker calls it under its lock.

    Attributes:
        failure: what the last one found; None where all is well.
    """

    def __init__(self) -> None:
        self.failure: DigestMismatchError | None = None
        self._asked: tuple[object, Future[None]] | None = None
        self._current: Audit | None = None

    @property
    def finding(self) -> str | None:
        """`failure`, in words."""
        return None if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"

    def begin(self) -> Audit:
        """The one that was interrupted goes on, or a new one begins; its `run` is the caller's to make."""
        self.pause()
        audit = self._current = self._current or Audit()
        audit.begin()
        return audit

    def ask(self, of: object, read: Callable[[], None]) -> Future[None]:
        """Begins a reading of what is served, for whoever asks; `read` is of `reading`."""
        reading = in_thread(read, name="weightsync-asked-audit")
        self._asked = of, reading
        return reading

    def asked_for(self, of: object) -> Future[None] | None:
        """The reading of the same that is under way; None where there is none."""
        if self._asked is None or self._asked[0] is not of or self._asked[1].done():
            return None
        return self._asked[1]

    def interrupt(self) -> None:
        """Ends a run soon; waits for nobody."""
        if self._current is not None:
            self._current.pause(wait_s=0.0)

    def pause(self) -> None:
        """Ends a run, before live weights are written; one that does not end is of no use any more."""
        if self._current is not None and not self._current.pause(wait_s=_ENDS_S):
            self._current = None

    def follow(self, changes: Mapping[str, ShardSum]) -> None:
        if self._current is not None:
            self._current.follow(changes)

    def forget(self) -> None:
        """The next one reads everything again."""
        self._current = None

    def reading(
        self, loader: WeightLoader, manifest: Manifest, *, lock: threading.RLock, before: Callable[[], None]
    ) -> Callable[[], None]:
        """What reads all that is live, in a thread of its own, and judges it. It raises as `judge`.

        Args:
            loader: no bracket of it is open.
            manifest: of what was committed.
            lock: held now; what is given back takes it to judge.
            before: called in that thread first.

        Raises:
            UnsupportedError: live weights can't be told.
        """
        self.pause()
        try:
            held = list(loader.audited())  # now: within a bracket it gives what will serve
        except LoadError as error:  # other tensors serve
            found = self.failure = DigestMismatchError(f"an audit found: {error.message}", state_left=_REFUSES)
            _logger.error("%s", found)
            return lambda: _raise(found)
        audit = self.begin()

        def run() -> str | DigestMismatchError:
            before()
            try:
                digest = audit.run(held, manifest.tensors, differs=loader.differs)
                if (why := loader.moved()) is not None:
                    return DigestMismatchError(f"an audit found: {why}", state_left=_REFUSES)
            except DigestMismatchError as error:
                return error
            return digest

        def read() -> None:
            found = in_thread(run, name="weightsync-audit").result()
            with lock:
                self.judge(audit, found, of=manifest.version, committed=manifest.model_digest)

        return read

    def judge(self, audit: Audit, found: str | DigestMismatchError, *, of: Version, committed: str | None) -> None:
        """What a run has read, against what was committed.

        Raises:
            TransferAbortedError: it was paused: it says nothing.
            DigestMismatchError: it is another; `failure` from now on.
        """
        if audit.paused:
            raise _paused()
        self._current = None
        if found == committed:
            return
        self.failure = (
            found
            if isinstance(found, DigestMismatchError)
            else DigestMismatchError(
                f"an audit found that the live weights have digest {found}, {committed} was committed",
                version=str(of),
                state_left=_REFUSES,
            )
        )
        _logger.error("%s", self.failure)
        raise self.failure


def _raise(error: Exception) -> None:
    raise error


def _be_nice() -> None:
    """Lowers this thread's priority, where threads have one of their own (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
