"""Many small tensors at once: where they lie, and copies of all of them by one compiled loop.

A call into torch or numpy costs a microsecond or more for each tensor, which is nothing beside a large one, and most of
what a model of 100,000 small ones costs. Importing this module does not import numba; the first copy does.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightsync.errors import UnsupportedError

MANY = 1000
"""From so many tensors on it is worth the second that numba takes to be imported."""

_is_cpu = attrgetter("is_cpu")
_nbytes = attrgetter("nbytes")

Int64s = npt.NDArray[np.int64]

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""Whose elements lie where `data_ptr` says. A subclass may be made of other tensors, and have no memory of its own."""


def are_plain(tensors: Sequence[torch.Tensor], *, maybe_complex: bool = True) -> bool:
    """Whether each is what it is in row-major order in this process's memory.

    Args:
        tensors: strided ones.
        maybe_complex: whether any may be of complex numbers, which can be conjugate.
    """
    return (
        _PLAIN_TYPES.issuperset(map(type, tensors))
        and all(map(_is_cpu, tensors))
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
        and not (maybe_complex and any(map(torch.Tensor.is_conj, tensors)))
    )


def addresses(tensors: Sequence[torch.Tensor]) -> Int64s:
    """Address of each tensor's first byte; 0 of an empty one. The tensors are kept by the caller as long as it is used.

    Args:
        tensors: plain ones (`are_plain`).
    """
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), dtype=np.int64, count=len(tensors))


def sizes_bytes(tensors: Sequence[torch.Tensor]) -> Int64s:
    """Bytes of each."""
    return np.fromiter(map(_nbytes, tensors), dtype=np.int64, count=len(tensors))


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
    _kernels().copy_runs(targets, sources, num_bytes)


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("weightsync.many_kernels")
