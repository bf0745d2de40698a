"""Codec: what a chunk becomes before it is moved, and back. Knows no transport and no engine."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping

from weightsync.types import Manifest, Update, WeightChunk


class Encoder(abc.ABC):
    """The sending half, for one version. Training rank 0 alone runs it."""

    @abc.abstractmethod
    def encode(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """Turns chunks into the chunks that travel, lazily, one at a time, in order."""

    @abc.abstractmethod
    def digests(self) -> Mapping[str, str]:
        """Digest of each tensor's plain bytes, by name; complete once `encode` is exhausted."""


class Decoder(abc.ABC):
    """The receiving half, for one version. Every engine worker runs one."""

    @abc.abstractmethod
    def decode(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Turns what travelled into what a loader takes, lazily, in order."""

    @abc.abstractmethod
    def check(self, manifest: Manifest) -> None:
        """Proves that the bytes decoded so far are those of `manifest`, which has its digests filled in.

        Raises:
            DigestMismatchError: some tensor differs or did not come; names the first.
        """


class Codec(abc.ABC):
    """A pair of halves. A codec is chosen for a whole sync; both ends use the same.

    Attributes:
        name: how it is called in messages, e.g. "full".
    """

    name: str

    @abc.abstractmethod
    def encoder(self) -> Encoder:
        """The sending half for one version."""

    @abc.abstractmethod
    def decoder(self) -> Decoder:
        """The receiving half for one version."""
