"""Many small tensors at once: where they lie, and copies of all of them by one compiled loop.

A call into torch or numpy costs a microsecond or more for each tensor, which is nothing beside a large one, and most of
what a model of 100,000 small ones costs. Importing this module does not import numba; the first copy does.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightsync.errors import MissingDependencyError, UnsupportedError

MANY = 1000
"""From so many tensors on it is worth the second that numba takes to be imported."""

_BLOCK = 512
"""So many tensors are looked at together, from every side: for all looks but the first they are in the core's cache."""

_dtype = attrgetter("dtype")
_is_cpu = attrgetter("is_cpu")
_nbytes = attrgetter("nbytes")

Int64s = npt.NDArray[np.int64]

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""Whose elements lie where `data_ptr` says. A subclass may be made of other tensors, and have no memory of its own."""


def are_plain(tensors: Sequence[torch.Tensor], *, maybe_complex: bool = True) -> bool:
    """Whether each is what it is in row-major order in this process's memory.

    Args:
        tensors: strided ones.
        maybe_complex: whether any may be of complex numbers, which can be conjugate.
    """
    return (
        PLAIN_TYPES.issuperset(map(type, tensors))
        and all(map(_is_cpu, tensors))
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
        and not (maybe_complex and any(map(torch.Tensor.is_conj, tensors)))
    )


def blocks(count: int) -> Iterator[slice]:
    """Cuts so many tensors into as many at a time as are looked at together."""
    return (slice(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK))


def plain_addresses(
    tensors: Sequence[torch.Tensor],
    *,
    dtypes: Sequence[torch.dtype],
    sizes_bytes: Sequence[int],
    maybe_complex: bool = True,
) -> Int64s | None:
    """`addresses` of plain tensors of these dtypes and sizes; None where one is not plain, or of another.

    Args:
        tensors: strided ones.
        dtypes, sizes_bytes: lists of what each should be.
        maybe_complex: as for `are_plain`.
    """
    found = np.empty(len(tensors), dtype=np.int64)
    for cut in blocks(len(tensors)):
        some = tensors[cut]
        if not are_plain(some, maybe_complex=maybe_complex) or list(map(_dtype, some)) != dtypes[cut]:
            return None
        if list(map(_nbytes, some)) != sizes_bytes[cut]:
            return None
        found[cut] = addresses(some)
    return found


def addresses(tensors: Sequence[torch.Tensor]) -> Int64s:
    """Address of each tensor's first byte; 0 of an empty one. The tensors are kept by the caller as long as it is used.

    Args:
        tensors: plain ones (`are_plain`).
    """
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), dtype=np.int64, count=len(tensors))


def sizes_bytes(tensors: Sequence[torch.Tensor]) -> Int64s:
    """Bytes of each."""
    return np.fromiter(map(_nbytes, tensors), dtype=np.int64, count=len(tensors))


def sorted_out(tensors: Sequence[torch.Tensor], most_bytes: int) -> tuple[Sequence[int], Sequence[int]]:
    """Places of the plain tensors of at most so many bytes, and of all others."""
    if are_plain(tensors) and int(sizes_bytes(tensors).max(initial=0)) <= most_bytes:
        return range(len(tensors)), ()
    small = [index for index, tensor in enumerate(tensors) if tensor.nbytes <= most_bytes and are_plain((tensor,))]
    return small, sorted(set(range(len(tensors))).difference(small))


def pieces(sizes: Int64s, piece_bytes: int) -> list[slice]:
    """Cuts consecutive runs of these sizes into pieces of about so many bytes; a larger run is one by itself."""
    ends = np.cumsum(sizes)
    cuts = np.searchsorted(ends, np.arange(piece_bytes, int(ends[-1]) if len(ends) else 0, piece_bytes)).tolist()
    return [slice(start, end) for start, end in itertools.pairwise([0, *cuts, len(ends)]) if start < end]


def check_addresses(addresses: Int64s, num_bytes: Int64s) -> None:
    """Refuses runs of bytes that lie nowhere: a compiled loop would end the process.

    Raises:
        UnsupportedError: a tensor has elements and no memory.
    """
    if ((addresses == 0) & (num_bytes > 0)).any():
        raise UnsupportedError(
            "a tensor has elements and no memory of its own: its storage was freed, or it stands for a value",
            state_left="nothing was read or written",
        )


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
    loops("weightsync.many_kernels").copy_runs(targets, sources, num_bytes)


@functools.cache
def loops(module: str, *, needs: str = "this needs numba") -> Any:
    """A module of compiled loops, imported at first use: numba takes a second that most processes need not pay.

    Args:
        module: its full name.
        needs: what is missing where it can't be imported, for the error.

    Raises:
        MissingDependencyError: numba, say, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"{needs}: pip install 'weightsync[torch]' ({error})") from error
