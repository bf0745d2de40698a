"""WeightLoader: how weights enter one engine worker. Knows no transport and no codec."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from typing import ClassVar

from weightsync.types import HeldTensor, Manifest, Update, Version


class WeightLoader(abc.ABC):
    """Loads weights into the model of one engine worker.

    The bracket, driven by one thread at a time, in this order:

    1. `begin(manifest)` checks everything that can be checked before a byte moves.
    2. `load_weights(updates)` for each chunk, in the stream's order. When it returns, the loader has let
       go of the updates' memory: the transport reuses it.
    3. `verify()` after the last chunk: everything arrived.
    4. `live_tensors()` gives what `commit` will serve, so that it can be proved.
    5. `commit(version)`: from here on the engine serves it. Called while generation is paused.
       Or `abort(reason)` at any point after begin.

    Attributes:
        accepts: kinds of updates it takes, of "full" and "patch".
        writes_live: whether `load_weights` touches weights that are being served. Then the engine is paused
            before the first chunk, and an abort leaves it refusing to serve (`healthy` is False) until
            a later sync commits.
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"full"})
    writes_live: bool = False

    @property
    def healthy(self) -> bool:
        """Whether the live weights are those of one committed version (or of construction)."""
        return True

    @abc.abstractmethod
    def begin(self, manifest: Manifest) -> None:
        """Opens the bracket.

        Raises:
            ManifestMismatchError: wrong shape or dtype, a missing or an extra name. Nothing was changed.
            StateError: a bracket is open already.
        """

    @abc.abstractmethod
    def load_weights(self, updates: Iterable[Update]) -> None:
        """Takes the updates of one chunk.

        Raises:
            WeightSyncError: the update doesn't fit; the caller aborts.
        """

    @abc.abstractmethod
    def verify(self) -> None:
        """Checks that every tensor of the manifest was loaded exactly once.

        Raises:
            ManifestMismatchError: some did not arrive; the caller aborts.
        """

    @abc.abstractmethod
    def live_tensors(self) -> Iterator[HeldTensor]:
        """The memory that serves, in manifest coordinates; between `verify` and `commit` that which will serve.

        Raises:
            UnsupportedError: the engine repacked or quantised them, so they are unprovable; says why.
        """

    @abc.abstractmethod
    def commit(self, version: Version) -> None:
        """Makes the loaded weights the served ones and closes the bracket. Keep it short: generation is paused."""

    @abc.abstractmethod
    def abort(self, reason: str) -> None:
        """Closes the bracket without serving what was loaded. Idempotent; the next `begin` works."""
