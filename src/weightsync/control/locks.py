"""ModuleLocks: the modules that a model has locked, and that it unlocks in the end, whatever they raise."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

_logger = logging.getLogger(__name__)
_MOMENT_S = 0.5
"""How long a thread waits for another one that is in a module: much longer than one takes that waits for nobody."""
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
        self._lock = threading.Condition()  # no module is called under it
        self._applier: int | None = None  # the thread that calls modules now
        self._num_asked = self._num_done = 0  # changes of what is wanted, and those that were applied
        self._timer: threading.Timer | None = None  # until what could not be unlocked is tried again
        self._again_s = _AGAIN_S[0]
        self._locked: dict[int, Lockable] = {}  # by identity: a module may not be hashable; of whoever applies

    def apply(self) -> None:
        """Locks and unlocks what has to be. Where another thread is at it, that one sees to it, and is waited for no
        longer than a moment: it may be in a module that waits for the caller. From within a module nothing is waited
        for.
        """
        with self._lock:
            self._num_asked += 1
            asked = self._num_asked
            if self._applier == threading.get_ident():
                return
            self._lock.wait_for(lambda: self._applier is None or self._num_done >= asked, _MOMENT_S)
            if self._applier is not None or self._num_done >= asked:
                return
            self._applier = threading.get_ident()
        try:
            stuck: set[int] = set()  # what could not be unlocked, which is tried again later
            while self._is_more():
                self._apply_once(stuck)
        except BaseException:
            self._leave()
            raise

    def _is_more(self) -> bool:
        """Whether something is to be applied still; else whoever comes next applies."""
        with self._lock:
            if self._num_done < self._num_asked:
                return True
            self._leave()
            return False

    def _leave(self) -> None:
        with self._lock:
            self._applier = None
            self._lock.notify_all()

    def _apply_once(self, stuck: set[int]) -> None:
        asked = self._num_asked
        wanted = {id(module): module for module in self._wanted()}
        for key in (self._locked.keys() ^ wanted.keys()) - stuck:
            lock = key in wanted
            module = wanted[key] if lock else self._locked[key]
            try:
                (module.lock if lock else module.unlock)(self._tag)
            except Exception:  # one that may be locked is unlocked later
                _logger.exception("model %s: %r can't be %s", self._tag, module, "locked" if lock else "unlocked")
                if not lock:
                    stuck.add(key)
                    continue
            if lock:
                self._locked[key] = module
            else:
                del self._locked[key]
        with self._lock:
            self._num_done = asked
            self._lock.notify_all()
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
        with self._lock:
            self._timer = None
        self.apply()
