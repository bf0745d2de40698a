"""Runs of bytes by their addresses: checks, one view of many, and copies of many by one compiled loop. No torch.

Importing this module does not import numba; the first copy does.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from weightsync.errors import UnsupportedError
from weightsync.optional import imported

Int64s = npt.NDArray[np.int64]


def pieces(sizes: Int64s, piece_bytes: int) -> list[slice]:
    """Cuts consecutive runs of these sizes into pieces of about so many bytes; a larger run is one by itself."""
    ends = np.cumsum(sizes)
    cuts = np.searchsorted(ends, np.arange(piece_bytes, int(ends[-1]) if len(ends) else 0, piece_bytes)).tolist()
    return [slice(start, end) for start, end in itertools.pairwise([0, *cuts, len(ends)]) if start < end]


def check_addresses(addresses: Int64s, num_bytes: Int64s) -> None:
    """Refuses runs of bytes at address 0, where those of a freed storage lie: a look at them would end the process.

    Raises:
        UnsupportedError: a tensor has elements and no memory.
    """
    if ((addresses == 0) & (num_bytes > 0)).any():
        raise UnsupportedError(
            "a tensor has elements and no memory of its own: its storage was freed, or it stands for a value",
            state_left="nothing was read or written",
        )


def view_of_runs(addresses: Int64s, num_bytes: Int64s) -> tuple[memoryview, list[int], list[int]]:
    """One view of this process's memory from the first of these runs to the last, and where in it each starts and ends.

    What lies between the runs need not be memory at all: whoever takes the view looks at the runs alone, while the
    caller keeps them.

    Raises:
        UnsupportedError: as for `check_addresses`.
    """
    check_addresses(addresses, num_bytes)
    there = addresses[num_bytes > 0]
    first = int(there.min()) if len(there) else 0
    starts = np.where(num_bytes > 0, addresses - first, 0)
    ends = starts + num_bytes
    if not len(there):
        return memoryview(b""), starts.tolist(), ends.tolist()
    return np.asarray(_Memory(first, int(ends.max()))).data, starts.tolist(), ends.tolist()


class _Memory:
    """Bytes at an address, for numpy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__ = {"version": 3, "data": (address, True), "shape": (num_bytes,), "typestr": "|u1"}


def copy_runs(targets: Int64s, sources: Int64s, num_bytes: Int64s) -> None:
    """Copies runs of bytes from address to address, on the caller's thread, without the GIL.

    Args:
        targets, sources: addresses, of memory that the caller keeps; what is written overlaps nothing.
        num_bytes: of each run.

    Raises:
        UnsupportedError: as for `check_addresses`. Nothing was copied.
    """
    check_addresses(targets, num_bytes)
    check_addresses(sources, num_bytes)
    loops("weightsync.address_kernels").copy_runs(targets, sources, num_bytes)


@functools.cache
def loops(module: str, *, needs: str = "this needs numba") -> Any:
    """A module of compiled loops, imported at first use: numba takes a second that most processes need not pay.

    Args:
        module: its full name.
        needs: what is missing where it can't be imported, for the error.

    Raises:
        MissingDependencyError: numba, say, is not installed.
    """
    return imported(module, f"{needs}: pip install 'weightsync[torch]'")
