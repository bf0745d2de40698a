"""Stands in for SGLang's CUDA kernels on a CPU, so that its engine can be imported and run there.

Every name resolves to a function that refuses to work; one is real: the pool of token slots is filled by it. None of
them touches weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from sgl_kernel.pins import unpin

unpin()


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start: Any, end: Any, out_cache_loc: Any, pool_len: int
) -> None:
    """Copies consecutive pieces of `out_cache_loc` into rows of `req_to_token`, from `start` to `end` of each."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        piece = out_cache_loc[taken : taken + last - first]
        req_to_token[row, first:last] = piece.to(req_to_token.dtype)
        taken += last - first


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"there is no kernel {name} on a CPU")

    return missing
