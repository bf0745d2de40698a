"""ModuleLocks: the modules that a model has locked, and that it unlocks in the end, whatever they raise."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

_logger = logging.getLogger(__name__)
_AGAIN_S = (1.0, 60.0)
"""When a module that could not be unlocked is tried again, and at most how much later in the end."""


class Lockable(Protocol):
    """A dataloader or a trajectory pool, as the controller sees it. Both calls are idempotent and soon over."""

    def lock(self, model_tag: str) -> None: ...
    def unlock(self, model_tag: str) -> None: ...


class ModuleLocks:
    """Of one model. Thread-safe.

    Args:
        tag: which.
        wanted: the modules that are to be locked now. Two that are equal are two.
        closed: none is tried again by itself any more.
    """

    def __init__(self, tag: str, wanted: Callable[[], Iterable[Lockable]], closed: threading.Event) -> None:
        self._tag = tag
        self._wanted = wanted
        self._closed = closed
        self._applying = threading.Lock()
        self._locked: dict[int, Lockable] = {}  # by identity: a module may not be hashable
        self._timer: threading.Timer | None = None  # until what could not be unlocked is tried again
        self._again_s = _AGAIN_S[0]

    def apply(self) -> None:
        """Locks and unlocks what has to be. Whoever comes last applies the last state."""
        with self._applying:
            stuck = False
            wanted = {id(module): module for module in self._wanted()}
            for key in self._locked.keys() ^ wanted.keys():
                lock = key in wanted
                module = wanted[key] if lock else self._locked[key]
                try:
                    (module.lock if lock else module.unlock)(self._tag)
                except Exception:  # one that may be locked is unlocked later
                    _logger.exception("model %s: %r can't be %s", self._tag, module, "locked" if lock else "unlocked")
                    if not lock:
                        stuck = True
                        continue
                if lock:
                    self._locked[key] = module
                else:
                    del self._locked[key]
            if not stuck:
                self._again_s = _AGAIN_S[0]
            elif self._timer is None and not self._closed.is_set():
                self._apply_later()

    def _apply_later(self) -> None:
        timer = threading.Timer(self._again_s, self._apply_again)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # there is no thread: at the next change
            timer.start()
            self._timer = timer
            self._again_s = min(2 * self._again_s, _AGAIN_S[1])

    def _apply_again(self) -> None:
        with self._applying:
            self._timer = None
        self.apply()
