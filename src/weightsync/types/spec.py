"""What a tensor is, without its bytes: Box and TensorSpec."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from weightsync.errors import ConfigError, InvalidRequestError
from weightsync.types.dtypes import itemsize_bytes

MAX_NAME_LENGTH = 1024
MAX_DIMS = 32
_MAX_ID = 256
MAX_NBYTES = 1 << 50
"""Sizes that no tensor has: what claims more is refused before anything is allocated."""


class Box(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rectangular part of a tensor in global coordinates.

    Attributes:
        offset: first index of the part in each dimension.
        shape: extent of the part in each dimension; 0 where it is empty.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise InvalidRequestError(f"box offset {self.offset} and shape {self.shape} differ in dimensions")
        if any(value < 0 for value in (*self.offset, *self.shape)):
            raise InvalidRequestError(f"box offset {self.offset} or shape {self.shape} is negative")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the box lies inside a tensor of `shape`."""
        return len(shape) == len(self.shape) and all(
            start + extent <= size for start, extent, size in zip(self.offset, self.shape, shape, strict=True)
        )

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether the box is the whole of a tensor of `shape`."""
        return self.shape == shape and not any(self.offset)


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """One entry of a manifest.

    Attributes:
        name: the parameter's name as the engine knows it.
        dtype: e.g. "bfloat16".
        shape: the global shape, whatever part of it a source holds.
        box: the part held by `source`; None means the whole tensor.
        source: index of the source (one agent a trainer host); 0 where there is one.
        offset: first byte of the held part within the source, in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box | None = None
    source: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        check_name(self.name)
        check_shape(self.shape, dtype=self.dtype, name=self.name)
        if self.box is not None and not self.box.fits(self.shape):
            raise InvalidRequestError(f"box {self.box} lies outside shape {self.shape}", parameter=self.name)
        if self.offset < 0 or self.source < 0:
            raise InvalidRequestError("offset and source are not negative", parameter=self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of the part held (of the whole tensor where `box` is None)."""
        numel = math.prod(self.shape) if self.box is None else self.box.numel
        return numel * itemsize_bytes(self.dtype)


def check_name(name: str) -> None:
    """Raises InvalidRequestError where `name` can't be a tensor's: empty, too long, or no text that travels."""
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise InvalidRequestError(f"a tensor's name has 1 to {MAX_NAME_LENGTH} characters, got {len(name)}")
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:  # a lone surrogate
            raise InvalidRequestError(f"a tensor's name is text that UTF-8 can say, not {ascii(name)[:100]}") from None


def check_names(names: Sequence[str]) -> None:
    """`check_name` of each."""
    lengths = set(map(len, names))
    if not lengths or (min(lengths) >= 1 and max(lengths) <= MAX_NAME_LENGTH and all(map(str.isascii, names))):
        return
    for name in names:
        check_name(name)


def check_id(what: str, value: str) -> None:
    """Raises InvalidRequestError where `value` can't be an id."""
    # a lone surrogate is not printable
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_ID or not value.isprintable():
        raise InvalidRequestError(f"{what} has 1 to {_MAX_ID} printable characters")


def check_shape(shape: tuple[int, ...], *, dtype: str, name: str) -> int:
    """Checks one shape and returns its bytes.

    Raises:
        InvalidRequestError: a negative or absurd extent, or an unknown dtype. Nothing was allocated.
    """
    try:
        return _nbytes(tuple(shape), dtype)  # of a model's many tensors few differ in these
    except InvalidRequestError as error:
        error.parameter = error.parameter or name
        raise


@functools.lru_cache(maxsize=4096)
def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    if len(shape) > MAX_DIMS or not all(0 <= extent <= MAX_NBYTES for extent in shape):
        raise InvalidRequestError(f"shape {shape} has an extent that can't be, or over {MAX_DIMS} dimensions")
    nbytes = math.prod(shape) * itemsize_bytes(dtype)
    if nbytes > MAX_NBYTES:
        raise InvalidRequestError(f"shape {shape} of {dtype} would take {nbytes} bytes")
    return nbytes


def check_config_id(what: str, value: str) -> None:
    """Raises ConfigError where an id that somebody has configured can't be one."""
    try:
        check_id(what, value)
    except InvalidRequestError as error:
        raise ConfigError(error.message) from None


class HeldTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a tensor that lies in this process's memory, in manifest coordinates. Never serialised.

    Extractors give a training rank's shards as these, loaders an engine's live weights, so one digest
    function serves both.

    Attributes:
        spec: the whole tensor's spec.
        box: which part of it `tensor` is; None means all of it.
        tensor: the bytes, of `spec.dtype` and the box's shape; borrowed, not to be kept.
    """

    spec: TensorSpec
    box: Box | None
    tensor: Any
