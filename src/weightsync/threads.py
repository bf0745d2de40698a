"""One pool of threads for work that releases the GIL (digests, compiled kernels).

Why not numba's own `prange`: its default threading layer ends the process when two Python threads enter
it at once.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from weightsync.types.process import num_cores

Item = TypeVar("Item")
Result = TypeVar("Result")

PIECE_BYTES = 16 << 20
"""What one thread copies at a time where a tensor is not contiguous host memory: the bound on extra memory."""

SMALL_BYTES = 1 << 20
"""Work below this is not worth another thread."""

_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def map_all(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`[function(item) for item in items]`, on all cores; a single item runs in the caller's thread.

    May be called from any number of threads at once: they share the pool, and who came first begins first. `function`
    itself must not call this, or it could wait for a thread that waits for it.

    Raises:
        Exception: what `function` raised first, by the items' order, after all running calls have ended. No call
            begins after one has raised.
    """
    work = list(items)
    count = len(work)
    if count <= 1 or num_cores() == 1:
        return [function(item) for item in work]
    pool, workers, left = _shared_pool(), list[Future[None]](), deque(enumerate(work))
    del work, items  # an item is held until it is done, and no longer
    found: list[Any] = [None] * count  # room for all, before: to note a result, or an error, takes no memory
    failed: list[BaseException | None] = [None] * count
    try:
        for _ in range(min(num_cores(), count)):
            workers.append(Future())  # before: one that is queued by a `submit` that raises can be cancelled
            pool.submit(_run, workers[-1], function, left, found, failed)
        workers[0].result()  # it begins before the others do, and ends when no item is left for them to begin
    except BaseException:
        left.clear()
        _end(workers)
        failed.clear()
        raise
    _end(workers)
    errors = [error for error in failed if error is not None]
    failed.clear()  # an error must not hold itself, and all that was borrowed with it
    if errors:
        del errors[1:]
        raise errors.pop()
    return found


def _run(
    worker: Future[None],
    function: Callable[[Item], Result],
    left: deque[tuple[int, Item]],
    found: list[Any],
    failed: list[BaseException | None],
) -> None:
    """Takes what is left, item by item, beside other threads."""
    if not worker.set_running_or_notify_cancel():
        return
    index = 0
    try:
        while left:
            try:
                index, item = left.popleft()
            except IndexError:  # another thread took the last one
                return
            found[index] = function(item)
    except BaseException as error:
        left.clear()
        failed[index] = error
    finally:
        worker.set_result(None)  # whatever happens: the caller waits for it


def _end(workers: list[Future[None]]) -> None:
    """No worker begins any more, and what they borrow is not in use, however often the caller is interrupted."""
    interrupts: list[BaseException] = []
    while True:
        try:
            for worker in workers:
                worker.cancel()
            for worker in workers:
                if not worker.cancelled():
                    worker.result()
            break
        except BaseException as error:  # of a signal's handler: no worker has one
            interrupts.append(error)
    if interrupts:
        raise interrupts.pop()


def batches(sizes: Sequence[int], most_bytes: int, *, most_items: int | None = None) -> Iterator[slice]:
    """Consecutive items of together at most `most_bytes` (and at most `most_items`); larger ones alone."""
    start, filled_bytes = 0, 0
    for index, size in enumerate(sizes):
        if index > start and (filled_bytes + size > most_bytes or index - start == most_items):
            yield slice(start, index)
            start, filled_bytes = index, 0
        filled_bytes += size
    if sizes:
        yield slice(start, len(sizes))


def _shared_pool() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(num_cores(), thread_name_prefix="weightsync-pool")
        return _pool


def _after_fork() -> None:
    """A child has none of its parent's threads, and a lock may be held by one of them."""
    global _pool, _lock
    _pool = None
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
