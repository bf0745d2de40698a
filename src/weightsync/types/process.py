"""What belongs to one process: objects that own memory, sockets, threads or other processes.

A forked child has a copy of each. Its copy has no threads, and what it writes, sends or unlinks is its parent's. So it
is refused there, and closing it does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import select
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from weightsync.errors import StateError

_T = TypeVar("_T")
_LOOK_EVERY_S = 0.5  # for a parent that is gone
_CLOSES = frozenset({"close", "remove", "__exit__"})

_forgotten: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def lines_from(fd: int, parent: int) -> Iterator[bytes]:
    """The lines that a parent writes into a pipe; ends when it is gone, though its forked child keeps the pipe open."""
    held = b""
    while True:
        is_gone = os.getppid() != parent  # what it said before is read
        if select.select([fd], [], [], 0.0 if is_gone else _LOOK_EVERY_S)[0]:
            if not (more := os.read(fd, 1 << 16)):
                return
            *lines, held = (held + more).split(b"\n")
            yield from lines
        elif is_gone:
            return


def of_one_process(kind: type[_T]) -> type[_T]:
    """Class decorator: in a forked child every public method and property raises `StateError`, and changes nothing.

    `close`, `remove` and `__exit__` do nothing there, so that a child may leave the blocks that it was forked in. Nor
    can it be copied or pickled.
    """
    kind.__reduce_ex__ = _not_copied  # type: ignore[method-assign]
    inherited = {name: getattr(kind, name) for name in ("__enter__", "__exit__") if hasattr(kind, name)}  # `Closing`'s
    for name, what in {**inherited, **vars(kind)}.items():
        if name == "__init__":
            setattr(kind, name, _owned(what))
        elif name in _CLOSES:
            setattr(kind, name, _forgetting(what))
        elif name.startswith("_") and name != "__enter__":
            continue
        elif inspect.isfunction(what):
            setattr(kind, name, _refusing(what))
        elif isinstance(what, property) and what.fget is not None:
            setattr(kind, name, property(_refusing(what.fget), what.fset, what.fdel, what.__doc__))
    return kind


def closed_in_children(owner: _T, close: Callable[[_T], None]) -> _T:
    """A forked child calls `close` with its copy, as soon as it is there: a descriptor whose lock or port would go on
    with the child. Only while the owner lives; returns it."""
    _forgotten[owner] = close
    return owner


def _owned(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        self._owner_pid = os.getpid()
        init(self, *args, **options)

    return checked


def _forgetting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        return method(self, *args, **options) if _is_owner(self) else None

    return checked


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        if not _is_owner(self):
            name = type(self).__name__
            raise StateError(
                f"this {name} belongs to process {self._owner_pid}, and this is a forked child of it, {os.getpid()}: "
                f"call {method.__name__} there, or make a {name} of its own here",
                state_left="nothing was changed",
            )
        return method(self, *args, **options)

    return checked


def _not_copied(self: Any, _protocol: object) -> Any:
    name = type(self).__name__
    raise StateError(
        f"this {name} belongs to process {os.getpid()}: it can't be copied or sent, make one where it is used",
        state_left="nothing was changed",
    )


def _is_owner(this: Any) -> bool:
    return getattr(this, "_owner_pid", None) in (None, os.getpid())


def _after_fork() -> None:
    owners = list(_forgotten.items())
    _forgotten.clear()  # a child of this child would close what has these descriptors' numbers by then
    for owner, close in owners:
        with contextlib.suppress(OSError):  # one that was being closed just now; the others are closed all the same
            close(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
