"""PatchDecoder: the receiving half of a session on a base. Its values are plain; the proof is the model's digest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weightsync.codec.base import Decoder
from weightsync.errors import InvalidRequestError, UnsupportedError
from weightsync.types import Manifest, Patch, Update


class PatchDecoder(Decoder):
    """Passes patches through, each tensor's once at most."""

    def __init__(self) -> None:
        self._received: set[str] = set()

    def decode(self, updates: Iterable[Update]) -> Iterator[Update]:
        """See `Decoder.decode`.

        Raises:
            UnsupportedError: a whole tensor came.
            InvalidRequestError: a tensor came twice. Updates before it were handed on.
        """
        for update in updates:
            if not isinstance(update, Patch):
                raise UnsupportedError("a session on a base takes patches alone", parameter=update.name)
            if update.name in self._received:
                raise InvalidRequestError("the tensor was patched twice", parameter=update.name)
            self._received.add(update.name)
            yield update

    def check(self, manifest: Manifest) -> None:
        """Nothing by itself: what did not come has not changed, or base + change is not the published digest."""
