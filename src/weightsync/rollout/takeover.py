"""Takeover: a run that is announced while another one is followed comes in when its sender's agent has it.

So nobody's word alone shuts a run out: not a notification with a wrong run in it, and not one that was sent long ago.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from weightsync.errors import WeightSyncError
from weightsync.types import Deadline, Version

_RETRY_S = 0.02
_LONGEST_RETRY_S = 1.0
_MAX_WAITING = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wish:
    """A version, and the agent that is said to have it."""

    version: Version
    endpoint: str


class Takeover:
    """Asks agents for as long as somebody waits, from one thread.

    Args:
        ask: an agent's newest version by endpoint, None before its first; may raise WeightSyncError.
        accept: told of a wish whose run its agent has.
        refuse: told of a wish that is dropped, and why.
        timeout_s: how long an agent may take to have the run.
        name: of the thread.
    """

    def __init__(
        self,
        ask: Callable[[str], Version | None],
        accept: Callable[[Wish], None],
        refuse: Callable[[Wish, str], None],
        *,
        timeout_s: float,
        name: str,
    ) -> None:
        self._ask = ask
        self._accept = accept
        self._refuse = refuse
        self._timeout_s = timeout_s
        self._name = name
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[Wish, Deadline]] = {}
        self._running = False
        self._closed = threading.Event()

    def offer(self, wish: Wish) -> None:
        """Takes up a wish; of one run the newest counts. Returns at once."""
        dropped: list[Wish] = []
        with self._lock:
            known = self._waiting.pop(wish.version.run_id, None)
            if known is not None and known[0].version.is_newer_than(wish.version):
                wish = known[0]
            self._waiting[wish.version.run_id] = (wish, Deadline(self._timeout_s))
            while len(self._waiting) > _MAX_WAITING:
                dropped.append(self._waiting.pop(next(iter(self._waiting)))[0])
            if not self._running and not self._closed.is_set():
                self._running = True
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
        for each in dropped:
            self._refuse(each, f"{_MAX_WAITING} other runs were announced after it")

    def close(self) -> None:
        """Ends the thread soon."""
        self._closed.set()

    def _run(self) -> None:
        retry_s = _RETRY_S
        while not self._closed.wait(retry_s):
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
            with self._lock:
                waiting = tuple(self._waiting.values())
                if not waiting:
                    self._running = False
                    return
            for wish, deadline in waiting:
                self._try(wish, deadline)

    def _try(self, wish: Wish, deadline: Deadline) -> None:
        run_id = wish.version.run_id
        try:
            newest = self._ask(wish.endpoint)
            there = newest is not None and newest.run_id == run_id
            said = "it has " + ("nothing yet" if newest is None else f"{newest}")
        except WeightSyncError as error:
            there, said = False, str(error)
        with self._lock:
            latest, _ = self._waiting.get(run_id, (wish, deadline))
            if not there and (not deadline.expired or latest is not wish):
                return
            self._waiting.pop(run_id, None)
        if there:
            self._accept(latest)
        else:
            self._refuse(wish, f"{wish.endpoint} did not have it within {deadline.timeout_s:g} s: {said}")
