"""CommitGate: which version of a model a fleet's service may commit; what is staged waits for it.

    engines' threads: ... stage -> PendingCommit.staged() waits ... -> pause -> commit -> resume
    the fleet:        prepare -> reply "staged"       -> allow(version)
                                                      -> release(): the load is aborted, the old version stays

A service that is in no fleet has no gate, and its engines wait for nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from weightsync.errors import DeadlineExceededError, TransferAbortedError
from weightsync.host.agent_state import is_in
from weightsync.types import Deadline, Version

CLOCK = time.monotonic
NOT_COMMITTED = "it was not committed"
"""So begins the error of a load that was staged alone: nothing was paused for it."""
_ENDS = "the service ends"
_TAKEN_OVER = "another run took over"
_INSTEAD = "is prepared instead"


class CommitGate:
    """Of one model. Thread-safe, under its owner's lock.

    Args:
        changed: the owner's lock, notified after each change.
        tell: called after each change, without waiting for anybody.
    """

    def __init__(self, changed: threading.Condition, tell: Callable[[], None]) -> None:
        self._changed = changed
        self._tell = tell
        self._allowed: Version | None = None
        self._prepared: Version | None = None
        self._run_id: str | None = None
        self._hold: PendingCommit | None = None
        self._closed = False

    @property
    def staged(self) -> Version | None:
        """What every engine that needs it has staged, and waits with."""
        with self._changed:
            return self._hold.version if self._hold is not None and self._hold.complete else None

    def allows(self, version: Version) -> bool:
        """Whether that version may be committed."""
        with self._changed:
            return is_in(version, self._allowed)

    @property
    def passing(self) -> Version | None:
        """What some engine commits, or has, while its load is under way."""
        with self._changed:
            return self._hold.version if self._hold is not None and self._hold.passed else None

    def allow(self, version: Version) -> None:
        """It and older ones of its run may be committed; what waits for that goes on, and what was prepared before is
        waited for no more."""
        with self._changed:
            self._allowed, self._prepared = version, None
            self._tell()

    def allow_no_more_than(self, served: Version | None) -> bool:
        """What is served already is all that may be committed: what an instance was told before it came in ends there.

        Returns:
            False: something else is being committed already. Nothing was changed.
        """
        with self._changed:
            hold = self._hold
            if hold is not None and hold.passed and hold.version != served:
                return False
            self._allowed = served
            return True

    def prepare(self, version: Version) -> None:
        """Of its run nothing older is held from now on, but what may be committed: who waits for this version would
        wait for one that nobody commits, where its agent has it only in a moment.
        """
        with self._changed:
            self._prepared = version
            self.release(_instead(version), older_than=version)

    def turn_to(self, run_id: str) -> None:
        """That run took over: nothing of another one is held from now on, but what may be committed."""
        with self._changed:
            self._run_id = run_id
            self.release(_TAKEN_OVER, older_than=Version(run_id=run_id, number=0))

    def release(self, why: str, *, older_than: Version | None = None) -> None:
        """Aborts what is held; engines go on with what they serve.

        Args:
            why: for the error.
            older_than: only where what is held is older than this version, or of another run.
        """
        with self._changed:
            if older_than is None:
                self._prepared = None
            hold = self._hold
            if hold is None or self.allows(hold.version):  # there is no way back: some may have committed
                return
            if older_than is not None and is_in(older_than, hold.version):
                return
            hold.why = hold.why or why
            self._tell()

    def hold(self, version: Version, num_engines: int) -> PendingCommit:
        """Begins the load of a version into so many engines."""
        with self._changed:
            self._hold = PendingCommit(self, version, num_engines)
            prepared = self._prepared
            if self._closed:
                self.release(_ENDS)
            elif self._run_id not in (None, version.run_id):  # it was pulled when its run was taken over
                self.turn_to(self._run_id)
            elif prepared is not None and prepared.run_id == version.run_id and prepared.is_newer_than(version):
                self.release(_instead(prepared), older_than=prepared)
            return self._hold

    def close(self) -> None:
        """Aborts what is held, and all that comes to be held: nobody is going to say that it may be committed. What has
        been allowed passes."""
        with self._changed:
            self._closed = True
            self.release(_ENDS)

    def ended(self, hold: PendingCommit) -> None:
        """That load is over."""
        with self._changed:
            if self._hold is hold:
                self._hold = None
                self._tell()


class PendingCommit:
    """One load of one version; made by `CommitGate.hold`.

    Attributes:
        version: which.
        why: why it is aborted; None: it is not.
        passed: whether some engine commits it, or has.
        held_s: for so long all had staged it before one passed.
    """

    def __init__(self, gate: CommitGate, version: Version, num_engines: int) -> None:
        self.version = version
        self.why: str | None = None
        self.passed = False
        self.held_s = 0.0
        self._complete_s: float | None = None
        self._gate = gate
        self._changed, self._tell = gate._changed, gate._tell
        self._num_missing = num_engines

    @property
    def complete(self) -> bool:
        """Whether every engine waits, or has gone on."""
        return self._num_missing <= 0 and self.why is None

    def staged(self, deadline: Deadline) -> None:
        """From an engine's thread: it has staged the version; returns when it may be committed.

        Raises:
            TransferAbortedError: it may not. Nothing was paused or committed.
            DeadlineExceededError: nobody said so in time. Likewise.
        """
        with self._changed:
            self._num_missing -= 1
            if self._num_missing <= 0:
                self._complete_s = CLOCK()
            self._tell()
            while self.why is not None or not self._gate.allows(self.version):
                if self.why is not None:
                    raise TransferAbortedError(
                        f"{NOT_COMMITTED}: {self.why}", version=str(self.version), state_left="serving as before"
                    )
                if not self._changed.wait(deadline.remaining_s) and deadline.expired:
                    raise DeadlineExceededError(
                        "it is staged, and nobody said that it may be committed",
                        version=str(self.version), state_left="serving as before",
                    )  # fmt: skip
            if not self.passed and self._complete_s is not None:
                self.held_s = CLOCK() - self._complete_s
            self.passed = True

    def failed(self, why: str) -> None:
        """From an engine's thread: its load has failed; the others need not wait, unless they may commit already."""
        with self._changed:
            if not self._gate.allows(self.version):
                self.why = self.why or why
            self._tell()


def gave_way(why: str) -> bool:
    """Whether an engine's error, in words, is that a newer version of its run took its place: nothing failed."""
    return why.startswith(TransferAbortedError.__name__) and _INSTEAD in why


def _instead(version: Version) -> str:
    return f"{version} {_INSTEAD}"
