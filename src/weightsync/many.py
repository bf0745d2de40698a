"""Many small tensors at once: whether they are plain, and where they lie. `addresses` copies and views what is there.

A call into torch or numpy costs a microsecond or more for each tensor, which is nothing beside a large one, and most of
what a model of 100,000 small ones costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np
import torch

from weightsync.addresses import Int64s

MANY = 1000
"""From so many tensors on it is worth the second that numba takes to be imported."""

_BLOCK = 512
"""So many tensors are looked at together, from every side: for all looks but the first they are in the core's cache."""

_dtype = attrgetter("dtype")
_is_cpu = attrgetter("is_cpu")
_nbytes = attrgetter("nbytes")

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
    return np.fromiter(map(_nbytes, tensors), dtype=np.int64, count=len(tensors))


def sorted_out(tensors: Sequence[torch.Tensor], most_bytes: int) -> tuple[Sequence[int], Sequence[int]]:
    """Places of the plain tensors of at most so many bytes, and of all others."""
    if are_plain(tensors) and int(sizes_bytes(tensors).max(initial=0)) <= most_bytes:
        return range(len(tensors)), ()
    small = [index for index, tensor in enumerate(tensors) if tensor.nbytes <= most_bytes and are_plain((tensor,))]
    return small, sorted(set(range(len(tensors))).difference(small))
