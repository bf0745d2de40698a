"""Native calls that may ignore their time-out: each runs in a thread that can be left behind.

Seen with torch 2.13: gloo's connectFullMesh came back 18 s after its time-out under load, and a store's client waits
for a stopped server as long as that is stopped. So whoever waits for such a call keeps the deadline itself. What the
thread holds (a group, a store, the buffers of an operation) is that thread's alone: a call that comes back late writes
into memory that nobody else uses, finds that it was given up, and lets go of everything.
"""

from __future__ import annotations

import atexit
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from queue import SimpleQueue
from typing import Any, TypeVar

from weightsync.errors import StateError, TransferAbortedError
from weightsync.types import Deadline

MAX_LEFT_BEHIND = 16
"""So many threads of a process may sit in native calls that were given up; no new group is made beyond that."""

_POLL_S = 0.05
_END_S = 0.2
_EXIT_S = 5.0

_T = TypeVar("_T")
_left_behind: set[_Inside] = set()
_ending: set[_Inside] = set()  # closed while they were idle, and not ended yet
_lock = threading.Lock()


class _Inside:
    """What the thread itself sees."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[tuple[Future[Any], Callable[[dict[str, Any]], Any]] | None] = SimpleQueue()
        self.held: dict[str, Any] = {}
        self.busy = False
        self.given_up = threading.Event()
        self.last: Callable[[dict[str, Any]], None] | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        while (item := self.jobs.get()) is not None:
            future, job = item
            del item
            self._do(future, job)
            del future, job
        try:
            if self.last is not None:
                self.last(self.held)
        finally:
            self.held.clear()
            with _lock:
                _left_behind.discard(self)
                _ending.discard(self)
            self.ended.set()

    def _do(self, future: Future[Any], job: Callable[[dict[str, Any]], Any]) -> None:
        with _lock:
            self.busy = not self.given_up.is_set()
        if not self.busy:
            future.set_exception(_given_up())
            return
        result, failure = None, None
        try:
            result = job(self.held)
        except BaseException as error:
            failure = _without_frames(error)
        self.busy = False  # before anybody learns of it and closes
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)


def _given_up() -> TransferAbortedError:
    return TransferAbortedError("the group of this call was closed, or given up")


def _without_frames(error: BaseException) -> BaseException:
    """The error without its tracebacks: their frames hold what this thread alone may hold."""
    for each in _chain(error):
        each.__traceback__ = None
    return error


def clear_frames(error: BaseException) -> None:
    """Lets go of what the frames that raised it hold, a gathered chunk say: the error may be kept for long. Frames that
    still run keep theirs. The traceback reads as before."""
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)


def _chain(error: BaseException) -> list[BaseException]:
    """The error and all that it came from."""
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is not None and not any(each is other for other in seen):
            seen.append(each)
            todo += [each.__cause__, each.__context__]
    return seen


class NativeThread:
    """A daemon thread that runs native calls, one after the other. Whoever waits for one may leave it behind.

    Args:
        last: called by the thread before it lets go of what it holds, however it comes to that.

    Raises:
        StateError: `MAX_LEFT_BEHIND` threads of this process are left behind in calls that have not come back, or it
            can have no more.
    """

    def __init__(self, name: str, *, last: Callable[[dict[str, Any]], None] | None = None) -> None:
        if (number := num_left_behind()) >= MAX_LEFT_BEHIND:
            raise StateError(
                f"{number} native calls of groups that were given up have not come back: restart this process",
                state_left="no group was made",
            )
        self._inside = _Inside()
        self._inside.last = last
        thread = threading.Thread(target=self._inside.run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise StateError(
                f"no thread can be started for a group: {error}", state_left="no group was made"
            ) from error
        weakref.finalize(self, self._inside.jobs.put, None).atexit = False

    @property
    def closed(self) -> threading.Event:
        """Set when it is given up: for a job that can end early."""
        return self._inside.given_up

    def start(self, job: Callable[[dict[str, Any]], _T]) -> Future[_T]:
        """Runs `job` behind those that were started before.

        Args:
            job: is given a dict that lives as long as the thread: native objects lie there, and nowhere else, so that
                they go when the thread goes.

        Returns:
            What it returns or raises; TransferAbortedError where the thread was given up before its turn.
        """
        future: Future[_T] = Future()
        with _lock:
            if self._inside.given_up.is_set():
                future.set_exception(_given_up())
            else:
                self._inside.jobs.put((future, job))
        return future

    def call(
        self, job: Callable[[dict[str, Any]], _T], *, deadline: Deadline, watch: Callable[[], None] | None = None
    ) -> _T:
        """Runs `job` and waits for it until `deadline`, no longer.

        Args:
            watch: called now and then while waiting; may raise to give up early.

        Raises:
            TimeoutError: it did not come back; the thread is left behind.
            BaseException: what `job` raised; what `watch` raised: the thread is left behind.
        """
        future = self.start(job)
        try:
            while not future.done():
                if watch is not None:
                    watch()
                left_s = deadline.remaining_s
                if not left_s and not future.done():
                    raise TimeoutError("a native call did not come back in time")
                wait_for([future], timeout=left_s if watch is None else min(_POLL_S, left_s))
        except BaseException:
            self.close()
            raise
        return future.result()

    def close(self, last: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Ends the thread, which lets go of what it holds; where a call is under way, when that comes back. Idempotent.

        Waits a moment for a thread that is idle, and not for a call: that one is left behind.

        Args:
            last: in place of the one that the thread was made with; not where a call has ended it before.
        """
        inside = self._inside
        with _lock:
            again = inside.given_up.is_set()
            inside.given_up.set()
            left_behind = inside.busy
            if not again:
                (_left_behind if left_behind else _ending).add(inside)
                inside.last = last or inside.last
                inside.jobs.put(None)
        if not left_behind:
            inside.ended.wait(_END_S)


def _forget() -> None:
    """In a forked child, which has none of its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _left_behind.clear()
    _ending.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _let_end() -> None:
    """Before Python ends: a daemon thread that is inside of torch then aborts the process, so those that let go of
    what they hold have a while to."""
    deadline = Deadline(_EXIT_S)
    with _lock:
        ending = tuple(_ending)
    for inside in ending:
        inside.ended.wait(deadline.remaining_s)


def num_left_behind() -> int:
    """How many threads of this process sit in native calls that were given up."""
    with _lock:
        return len(_left_behind)
