"""ServingGate: who may generate, and when. The one place that decides whether an engine answers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from weightsync.errors import DeadlineExceededError, NotServingError, StateError
from weightsync.memory import LeaseReader
from weightsync.types import Deadline, Version
from weightsync.types.deadline import MAX_WAIT_S, check_wait_s

_HELD_LOOK_S = 0.002
"""A hold is ended by another process, in shared memory."""


class ServingGate:
    """Generations pass through it; a pause waits until they are out, and keeps new ones waiting.

    States: open; paused (by a session, under a lease: a dead trainer does not keep an engine paused); fenced
    (the weights are half-loaded: nobody passes until a commit).

    Args:
        lease: of the fleet's service on this host, where there is one: nothing is answered without it.
    """

    def __init__(self, lease: LeaseReader | None = None) -> None:
        self._lease = lease
        self._changed = threading.Condition()
        self._running = 0
        self._paused_by: str | None = None
        self._released: str | None = None  # the session that ended last, by `release`
        self._lease_end = 0.0
        self._fenced: str | None = None
        self._fenced_by: str | None = None  # the session that did, inside its pause
        self._in_pause = False  # whether the fence was put up inside a pause that still holds
        self._dead: str | None = None
        self._version: Version | None = None
        self._one_looks = False  # of those who wait for the end of a hold

    @property
    def version(self) -> Version | None:
        """The version that is served; None before the first commit."""
        with self._changed:
            return self._version

    @property
    def serving(self) -> bool:
        """Whether a generation would pass now."""
        with self._changed:
            return self._refusal() is None and self._fenced is None and not self._is_paused()

    @property
    def fenced(self) -> bool:
        """Whether its weights are not whole, or may not be."""
        with self._changed:
            return self._fenced is not None or self._dead is not None

    @contextlib.contextmanager
    def generation(self, *, timeout_s: float = 30.0) -> Iterator[Version | None]:
        """Surrounds one generation; gives the version it runs on.

        Raises:
            InvalidRequestError: `timeout_s` is no time one can wait.
            NotServingError: fenced, or still paused after `timeout_s`: nothing ran. Or, at the end of the body, the
                lease was lost meanwhile: what was generated must not be answered.
        """
        deadline = Deadline(check_wait_s("timeout_s", timeout_s, may_be_0=True))
        with self._changed:
            looks = False
            try:
                while (refused := self._refusal()) is not None or self._waits():
                    if refused is not None:
                        raise NotServingError(f"this engine refuses to serve: {refused}", state_left="fenced")
                    if deadline.expired:
                        raise NotServingError(
                            f"this engine has been paused for over {timeout_s:g} s", state_left="paused"
                        )
                    held = self._held  # read once: it may end between two reads, and nobody tells of that
                    if held and not self._one_looks:
                        self._one_looks = looks = True
                    self._changed.wait(min(deadline.remaining_s, self._until_s(held=held, looks=looks)))
            finally:
                if looks:  # whoever else waits goes on by what it has seen, or looks in its place
                    self._one_looks = False
                    self._changed.notify_all()
            self._running += 1
            version = self._version
        try:
            yield version
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()
        if self._lease is not None and (refused := self._lease.refusal()) is not None:
            raise NotServingError(f"this engine must not answer: {refused}", state_left="fenced")

    def pause(
        self, session: str, *, timeout_s: float, lease_s: float, is_open: Callable[[], bool] | None = None
    ) -> None:
        """Stops new generations and waits for the running ones.

        Args:
            is_open: whether the session is one yet. Looked at in one step with the pause: whoever ends a session says
                so there first, and calls `release` then.

        Raises:
            StateError: another session holds the pause; or, where `is_open` is given, this one is over, or was released
                since its `begin`.
            DeadlineExceededError: generations still ran after `timeout_s`; the gate is open again.
        """
        deadline = Deadline(timeout_s)
        with self._changed:
            if is_open is not None and (self._released == session or not is_open()):
                raise StateError(f"session {session} is not open here: it was aborted, or has ended")
            if self._is_paused() and self._paused_by != session:
                raise StateError(f"already paused by session {self._paused_by}")
            self._paused_by = session
            self._lease_end = time.monotonic() + max(lease_s, timeout_s)
            while True:
                if self._paused_by != session:
                    raise StateError(
                        "the pause was ended while it waited for running generations", state_left="serving"
                    )
                if not self._running:
                    return
                if deadline.expired:
                    self._paused_by = None
                    self._changed.notify_all()
                    raise DeadlineExceededError(
                        f"running generations did not end within {timeout_s:g} s ({self._running} left): raise "
                        "pause_timeout_s, or put shorter units into generation()",
                        state_left="serving again",
                    )
                self._changed.wait(deadline.remaining_s)

    def resume(self, session: str) -> None:
        """Opens the gate, where this session paused it and the weights are whole. Idempotent.

        Raises:
            StateError: fenced: half-loaded weights are never served.
        """
        with self._changed:
            if (reason := self._dead or self._fenced) is not None:
                raise StateError(f"can't resume: {reason}", state_left="fenced")
            self._end_pause(session)

    def begin(self, session: str) -> None:
        """A session of that name begins: what was released was another one."""
        with self._changed:
            if self._released == session:
                self._released = None

    def release(self, session: str) -> None:
        """The session is over, and so is its pause; a fence stays. Idempotent."""
        with self._changed:
            self._released = session
            self._end_pause(session)

    def _end_pause(self, session: str) -> None:
        with self._changed:
            if self._paused_by == session:
                self._paused_by = None
                self._changed.notify_all()

    def release_other(self, session: str | None) -> None:
        """Ends a pause that any other session holds: that session is over. A fence stays."""
        with self._changed:
            if self._paused_by != session:
                self._paused_by = None
                self._changed.notify_all()

    def fence_if_paused_by(self, session: str, reason: str) -> bool:
        """Fences if `session` holds the pause, its lease included, and nothing runs. One step: no lease can run
        out between the look and the fence."""
        with self._changed:
            holds = self._is_paused() and self._paused_by == session and self._running == 0
            if holds:
                self._fenced, self._fenced_by = reason, session
                self._in_pause = True
                self._changed.notify_all()
            return holds

    def fence(self, reason: str) -> None:
        """Nobody passes until `serve`."""
        with self._changed:
            self._fenced, self._fenced_by = reason, None
            self._in_pause = False
            self._changed.notify_all()

    def die(self, reason: str) -> None:
        """Nobody passes ever again: what would have to change is beyond a sync."""
        with self._changed:
            self._dead = self._dead or reason
            self._changed.notify_all()

    def unfence(self, session: str) -> None:
        """The weights are whole again, those of the version served before: as far as that session knows. What another
        one has fenced stays."""
        with self._changed:
            if self._fenced_by == session:
                self._fenced = None
                self._changed.notify_all()

    def serve(self, version: Version) -> None:
        """A version was committed: what passes from now on runs on it. Lifts a fence, not a pause."""
        with self._changed:
            self._version = version
            self._fenced = None
            self._changed.notify_all()

    def _refusal(self) -> str | None:
        """Why nobody may pass, and nobody should wait either. A fence inside its session's own pause is part of an
        orderly update: whoever waits for that pause goes on waiting."""
        if self._dead is not None:
            return self._dead
        if self._lease is not None and (lost := self._lease.refusal()) is not None:
            return lost
        return self._fenced if self._fenced is not None and not (self._in_pause and self._is_paused()) else None

    @property
    def _held(self) -> bool:
        return self._lease is not None and self._lease.held

    def _waits(self) -> bool:
        return self._fenced is not None or self._is_paused() or self._held

    def _until_s(self, *, held: bool, looks: bool) -> float:
        """How long to wait for a word: the end of a pause's lease, and of a hold, may come without one. Of a hold the
        one that looks tells.
        """
        if held:
            return _HELD_LOOK_S if looks else MAX_WAIT_S
        if self._paused_by is None:  # a hold has just ended; the lease is of a pause before
            return 0.001
        return max(0.001, self._lease_end - time.monotonic())

    def _is_paused(self) -> bool:
        if self._paused_by is not None and time.monotonic() >= self._lease_end:
            self._paused_by = None
        return self._paused_by is not None
