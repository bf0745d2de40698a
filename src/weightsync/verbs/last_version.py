"""LastVersion: what the end of a `publish` block waits for, and `Publisher.wait_served`.

proved by this host's own agent -> served by those in `to` who are alive
                                or, where nobody is in `to`, fetched by the receivers that keep up
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from weightsync.errors import DeadlineExceededError, StateError
from weightsync.trainer.notifier import Notifier
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Deadline, Version

_AGENT = "its own agent"
_FIRST_S = 3.0
"""Where nobody fetches anything, nor has: hosts wait at the agent, and begin at once."""


class LastVersion:
    """One wait. Training rank 0 alone has it; one thread.

    Args:
        manager: has published it.
        notifier: tells whoever is in `to`.
        version: the last one.
        timeout_s: for all of it.
        away: those in `to` who were not there when the version before was waited for: they get a second.
    """

    def __init__(
        self, manager: WeightManager, notifier: Notifier, version: Version, *, timeout_s: float,
        away: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._manager = manager
        self._notifier = notifier
        self._version = version
        self._deadline = Deadline(timeout_s)
        self._away = frozenset(away)
        self._hosts: Callable[[float], Mapping[str, str] | None] | None = None
        self._first: Deadline | None = None
        self._named: set[str] = set()  # whoever was behind at any time

    def outcome(self, seconds: float) -> Mapping[str, str] | None:
        """Who has it not, and why; waits for that at most so many seconds. None: it is not known yet.

        It is known after `timeout_s`, and some seconds.
        """
        if self._hosts is None and self._first is None:
            try:
                self._manager.wait_published(self._version.number, timeout_s=self._some_of(seconds))
            except DeadlineExceededError:
                return {_AGENT: f"not proved within {self._deadline.said}"} if self._deadline.expired else None
            except StateError as error:
                return {_AGENT: error.message}
            self._first = Deadline(min(_FIRST_S, self._deadline.remaining_s))
            if self._notifier.urls:
                self._hosts = self._notifier.begin_wait(self._version, self._deadline.remaining_s, away=self._away)
        return self._fetched(seconds) if self._hosts is None else self._hosts(seconds)

    def _fetched(self, seconds: float) -> Mapping[str, str] | None:
        assert self._first is not None
        behind = self._manager.receivers_behind(self._version.number, wait_s=self._some_of(seconds))
        self._named.update(behind or ())
        if behind == () or (behind is None and self._first.expired):
            left = self._manager.receivers_behind(self._version.number, also=self._named)
            return dict.fromkeys(left or (), "its first pull failed, and it has not come again")
        if self._deadline.expired:
            return dict.fromkeys(behind or (), f"not fetched within {self._deadline.said}")
        return None

    def _some_of(self, seconds: float) -> float:
        return max(0.001, min(seconds, self._deadline.remaining_s))
