"""What the contract suites share: a manifest, a request, bytes to compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weightsync.tensors import byte_array, byte_view, spec_of
from weightsync.types import BroadcastWeightUpdateRequest, Manifest, Version

LONG_S = 10.0
"""A deadline that no healthy implementation meets."""


def manifest_of(weights: Mapping[str, torch.Tensor], number: int = 1, **changes: Any) -> Manifest:
    """The manifest of whole tensors, in their order."""
    fields: dict[str, Any] = {
        "version": Version(run_id="contract", number=number),
        "model_id": "default",
        "tensors": tuple(spec_of(name, tensor) for name, tensor in weights.items()),
    }
    return Manifest(**{**fields, **changes})


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in their logical order, whatever its strides."""
    return byte_array(tensor.detach().contiguous()).tobytes()


def change_in_place(weights: Mapping[str, torch.Tensor], *, share: float = 1.0, seed: int = 0) -> None:
    """Flips a bit of some elements of every contiguous tensor that has any, as an optimizer does: where they lie."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        if tensor.numel():
            elements = byte_view(tensor.detach()).reshape(tensor.numel(), -1)  # not every dtype can be indexed
            where = torch.rand(tensor.numel(), generator=generator) < share
            where[-1] = True
            elements[where, -1] ^= 1  # 0 and 1 of a bool stay 0 and 1


SESSION = "a session"


def an_update() -> BroadcastWeightUpdateRequest:
    """Announces one small tensor."""
    return BroadcastWeightUpdateRequest(
        session=SESSION, seq=0, names=("w",), dtypes=("uint8",), shapes=((4,),), offsets=(0,), bucket_bytes=256
    )
