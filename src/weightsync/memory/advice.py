"""What the kernel is told of a mapping (`madvise`), without holding Python's lock, which mmap's own method holds.

docs/huge-pages.md says which advice was measured, and which is not given because nothing came of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import mmap


class Advice(enum.IntEnum):
    """Linux's numbers; a kernel that does not know one refuses it."""

    SEQUENTIAL = 2
    WILLNEED = 3
    REMOVE = 9
    HUGEPAGE = 14
    POPULATE_READ = 22  # Linux 5.14, as the next; without them pages are faulted in one by one
    POPULATE_WRITE = 23


def advise(mapped: mmap.mmap, advice: Advice, *, part: slice = slice(None)) -> None:
    """Gives advice for all of a writable or private mapping, or for a part that begins with a page; nothing happens
    where it is refused.
    """
    with contextlib.suppress(OSError, AttributeError, ValueError):  # among them: it is closed
        start, stop, _ = part.indices(len(mapped))
        first = ctypes.c_char.from_buffer(mapped, start)  # held in the call: nobody unmaps it, or maps another there
        ctypes.CDLL(None).madvise(ctypes.byref(first), ctypes.c_size_t(stop - start), ctypes.c_int(advice))
