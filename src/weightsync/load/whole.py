"""What loaders that take whole tensors alone ask of each update."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from weightsync.errors import ManifestMismatchError, UnsupportedError
from weightsync.types import Full, TensorSpec, Update, dtype_name


def is_of(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Whether the tensor has the dtype and the shape that were announced."""
    return tensor.shape == spec.shape and dtype_name(tensor.dtype) == spec.dtype


def whole_tensor(update: Update, specs: Mapping[str, TensorSpec], came: Collection[str]) -> torch.Tensor:
    """The tensor of an update, where it is one that was announced and is still missing.

    Args:
        update: what came.
        specs: what was announced, by name.
        came: names that came before.

    Raises:
        UnsupportedError: it is a patch.
        ManifestMismatchError: it was not announced, or not so, or came before.
    """
    if not isinstance(update, Full):
        raise UnsupportedError("this loader takes whole tensors alone", parameter=update.name)
    spec = specs.get(update.name)
    if spec is None:
        raise ManifestMismatchError("this tensor is not in the manifest", parameter=update.name)
    if update.name in came:
        raise ManifestMismatchError("this tensor came twice", parameter=update.name)
    if not is_of(update.tensor, spec):
        raise ManifestMismatchError(
            f"got {update.tensor.dtype} {tuple(update.tensor.shape)}, announced was {spec.dtype} {spec.shape}",
            parameter=update.name,
        )
    return update.tensor.detach()
