"""A CPU build of torch pins no memory, and SGLang's adapters ask for pinned tensors without looking: they get plain
ones of the same values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def _plain(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*words: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return make(*words, **options)

    return made


def unpin() -> None:
    """From here on nothing is pinned, where nothing can be."""
    if torch.cuda.is_available():
        return
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _plain(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
