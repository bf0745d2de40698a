"""Wishes: what a service was told to serve, and what of that it believes. Of one run the newest counts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from weightsync.errors import StateError, TransferAbortedError, VersionError
from weightsync.rollout.takeover import Takeover, Wish
from weightsync.types import Deadline, Version

_MAX_RUNS = 1000

_logger = logging.getLogger(__name__)


class Wishes:
    """The wishes for one model. Thread-safe, under its owner's lock.

    Args:
        model_id: which model.
        changed: the owner's lock.
        ask: an agent's newest version by endpoint, None before its first; may raise WeightSyncError.
        taken_over: called under the lock when another run took over.
        told: called without the lock after every change that did not come by `add`.
        patience_s: after so long a version that does not come gives way to what is there.
        timeout_s: how long an agent may take to have a run that is announced beside the one that is followed.
    """

    def __init__(
        self,
        model_id: str,
        changed: threading.Condition,
        *,
        ask: Callable[[str], Version | None],
        taken_over: Callable[[], None],
        told: Callable[[], None],
        patience_s: float,
        timeout_s: float,
    ) -> None:
        self._model_id = model_id
        self._changed = changed
        self._taken_over = taken_over
        self._told = told
        self._patience_s = patience_s
        self._takeover = Takeover(
            ask, self._accept, self._refuse, timeout_s=timeout_s, name=f"weightsync-takeover-{model_id}"
        )
        self._wanted_since = Deadline(patience_s)
        self._runs_over: dict[str, str] = {}
        self._runs_refused: dict[str, str] = {}
        self._closed = False
        self.wanted: Wish | None = None
        self.count = 0

    def add(self, wish: Wish) -> int:
        """Notes a wish; its number. One of another run is taken up when its agent has it.

        Raises:
            StateError: the service is closing.
            TransferAbortedError: another run took over from that one.
        """
        with self._changed:
            self.check(wish.version)
            self.count += 1
            if self.wanted is None or self.follows(wish.version):
                self._set(wish)
            else:
                self._runs_refused.pop(wish.version.run_id, None)
                self._takeover.offer(wish)
            return self.count

    def check(self, version: Version) -> None:
        """Whether that run may still be served.

        Raises:
            StateError: the service is closing.
            TransferAbortedError: another run took over from that one.
        """
        with self._changed:
            run_id = version.run_id
            if self._closed:
                raise StateError("this service is closing", version=str(version))
            if run_id in self._runs_over:
                raise TransferAbortedError(
                    f"run {run_id} was taken over by {self._runs_over[run_id]}", version=str(version)
                )

    def check_taken_up(self, version: Version) -> None:
        """As `check`, for who waits for it.

        Raises:
            VersionError: its sender never had that run.
        """
        with self._changed:
            self.check(version)
            if (why := self._runs_refused.get(version.run_id)) is not None:
                raise VersionError(f"run {version.run_id} was not taken up: {why}", version=str(version))

    def follows(self, version: Version) -> bool:
        """Whether that version's run is the one that is followed."""
        with self._changed:
            return self.wanted is not None and self.wanted.version.run_id == version.run_id

    def still(self, wish: Wish, served: Iterable[Version | None]) -> Version:
        """What a pull for a wish has to bring by now.

        Once it was waited for too long, whatever is newer than what is served will do: nobody's word alone makes a host
        wait for a version that never comes.

        Args:
            wish: that the pull began with.
            served: what each engine serves.

        Raises:
            TransferAbortedError: another run or another sender took its place, or the service is closing.
        """
        with self._changed:
            wanted = self.wanted
            if self._closed or wanted is None or wanted.endpoint != wish.endpoint or not self.follows(wish.version):
                raise TransferAbortedError("another sender was named meanwhile, or the service is closing")
            if not self._wanted_since.expired:
                return wanted.version
            run_id = wanted.version.run_id
            numbers = [each.number if each is not None and each.run_id == run_id else -1 for each in served]
            everywhere = min(numbers) == max(numbers)
            return Version(run_id=run_id, number=min(max(numbers) + everywhere, wanted.version.number))

    def close(self) -> None:
        """No wish is taken any more."""
        with self._changed:
            self._closed = True
        self._takeover.close()

    def _set(self, wish: Wish) -> None:
        before = self.wanted
        if before is not None and before.version.run_id == wish.version.run_id:
            if before.version.is_newer_than(wish.version):
                return  # told late
            if before.version == wish.version:
                self.wanted = wish
                return
        self.wanted, self._wanted_since = wish, Deadline(self._patience_s)

    def _accept(self, wish: Wish) -> None:
        """Its agent has the run: whoever was followed before is not any more."""
        with self._changed:
            before = self.wanted
            if self._closed or wish.version.run_id in self._runs_over:
                return
            self.count += 1
            self._set(wish)
            if before is not None and before.version.run_id != wish.version.run_id:
                self._runs_over[before.version.run_id] = wish.version.run_id
                _forget_oldest(self._runs_over)
                _logger.info("model %s: run %s takes over from %s", self._model_id, wish.version.run_id, before.version)
                self._taken_over()
        self._told()

    def _refuse(self, wish: Wish, why: str) -> None:
        _logger.warning("model %s: %s was not taken up: %s", self._model_id, wish.version, why)
        with self._changed:
            self._runs_refused[wish.version.run_id] = why
            _forget_oldest(self._runs_refused)
        self._told()


def _forget_oldest(runs: dict[str, str]) -> None:
    while len(runs) > _MAX_RUNS:
        del runs[next(iter(runs))]
