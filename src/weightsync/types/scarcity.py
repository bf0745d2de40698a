"""Scarcity: which errors come from a want that others may end."""

from __future__ import annotations

import errno
from collections.abc import Iterator

_PASSING_SAID = ("start new thread", "out of memory", "can't allocate memory")  # of Python, and of torch
_PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


def is_passing(error: BaseException) -> bool:
    """Whether it comes from a want of descriptors, memory or threads, which others may give back."""
    return any(
        isinstance(cause, MemoryError)
        or (isinstance(cause, OSError) and not isinstance(cause, BlockingIOError) and cause.errno in _PASSING)
        or (isinstance(cause, RuntimeError) and any(said in str(cause) for said in _PASSING_SAID))
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
