"""RangedSource: a place that an immutable publication's bytes can be read from, in blocks. Knows no codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from weightsync.types import Deadline

Destination: TypeAlias = Callable[[int, int], memoryview]
"""(offset, length) of a block in the source -> writable memory of that length, where its bytes are wanted."""

Arrived: TypeAlias = Callable[[int, memoryview], None]
"""Called with a block's index and bytes when its checksum was found right; from several threads."""


class Checksums(Protocol):
    """What says of each block which bytes are right: a `SourceProof`, or a `DeltaLink`."""

    def checksum(self, block: int) -> str:
        """Checksum of one block, as `transfer.blocks.checksum` makes it."""


class RangedSource(Protocol):
    """One source of one granted transfer. Used once, then closed."""

    def read(self, blocks: list[int], into: Destination, arrived: Arrived, *, deadline: Deadline) -> None:
        """Reads blocks; returns when all have arrived and were right.

        Args:
            blocks: indices, any order.
            into: where each is to be written.
            arrived: told of each. What was told of is there, also when this raises.
            deadline: of the whole.

        Raises:
            TransferAbortedError: the transfer is over: superseded, most likely. Start over at the newest.
            DigestMismatchError: a block came wrong several times.
            EngineUnreachableError: the source is gone, or cuts every connection.
            DeadlineExceededError: it took too long.
        """

    def cancel(self) -> None:
        """Ends a `read` under way soon, by TransferAbortedError. From any thread; gives nothing back."""

    def close(self) -> None:
        """Gives connections and leases back, after the last `read` has returned. Idempotent."""
