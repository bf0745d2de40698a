"""One pool of threads for work that releases the GIL (digests, compiled kernels).

Why not numba's own `prange`: its default threading layer ends the process when two Python threads enter
it at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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

    May be called from any number of threads at once: they share the pool. `function` itself must not call
    this, or it could wait for a thread that waits for it.

    Raises:
        Exception: what `function` raised first, by the items' order, after all running calls have ended.
    """
    work = list(items)
    if len(work) <= 1 or num_cores() == 1:
        return [function(item) for item in work]
    pool, futures = _shared_pool(), list[Future[Result]]()
    try:
        for item in work:
            futures.append(Future())  # before: one that is queued by a `submit` that raises can be cancelled
            pool.submit(_run, futures[-1], function, item)
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.exception()  # what they borrow must not be in use when we return
        raise


def _run(future: Future[Result], function: Callable[[Item], Result], item: Item) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(item))
    except BaseException as error:
        future.set_exception(error)


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
