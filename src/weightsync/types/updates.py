"""What a loader is given: a whole tensor (Full) or some elements of one (Patch)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Full:
    """A whole tensor. `tensor` is borrowed from the transport: it is valid until `load_weights` returns."""

    name: str
    tensor: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
    """Some elements of a tensor, as overwrites (so applying it twice is harmless).

    Both tensors are borrowed from the transport: they are valid until `load_weights` returns.

    Attributes:
        name: the parameter's name in manifest coordinates.
        positions: int64 or uint32, 1-D, strictly rising: flat indices into the contiguous global tensor. uint32 is
            what travels: half the bytes, and enough for 2^32 elements.
        values: 1-D, as many as positions, of the manifest's dtype: the new elements.
    """

    name: str
    positions: torch.Tensor
    values: torch.Tensor


Update: TypeAlias = Full | Patch
