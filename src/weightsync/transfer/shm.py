"""ShmSource: a published segment of this host, mapped under a lease. Nothing is copied unless it is asked for."""

from __future__ import annotations

from weightsync.errors import DigestMismatchError, TransferAbortedError, VersionError
from weightsync.memory import Lock, MappedSegment, Reader
from weightsync.memory.folder import read_head
from weightsync.plan.safetensors import STAMP_WITHIN_BYTES, read_stamp
from weightsync.transfer.blocks import checksum
from weightsync.transfer.source import Arrived, Checksums, Destination
from weightsync.types import Deadline, Version
from weightsync.types.publication import Source


class ShmSource:
    """See `RangedSource`. Holds the lease from construction to `close`: until then nobody can write the segment.

    Args:
        stamp: version and model_id that have to lie there. None: it has no stamp, and only ever held these bytes.

    Raises:
        VersionError: another version lies there by now, or is being written: ask for the newest.
        SharedMemoryError: the segment is gone.
    """

    def __init__(self, source: Source, checksums: Checksums, *, stamp: tuple[Version, str] | None) -> None:
        self.segment = source.segment
        self._source = source
        self._checksums = checksums
        try:
            self._lease = Lock(source.segment, Reader.MAPPED)
        except BlockingIOError:
            raise _superseded("the segment is being written again", stamp) from None
        try:
            if stamp is not None:
                head = read_head(source.segment, STAMP_WITHIN_BYTES, need_bytes=source.data_end)
                if read_stamp(memoryview(head)) != stamp:
                    raise _superseded("another version lies there by now", stamp)
        except BaseException:
            self._lease.close()
            raise
        self._mapped: MappedSegment | None = None  # when its bytes are asked for: page tables of gigabytes take time
        self._closed = False

    def read(self, blocks: list[int], into: Destination, arrived: Arrived, *, deadline: Deadline) -> None:
        """See `RangedSource.read`. Copies; a caller that needs no copy takes `segment`."""
        for block in blocks:
            target = into(*self._source.block(block))
            target[:] = self._checked(block, deadline)
            arrived(block, target)

    def cancel(self) -> None:
        self._closed = True

    def close(self) -> None:
        """Gives the lease back. Idempotent."""
        self._closed = True
        if self._mapped is not None:
            self._mapped.close()
        self._lease.close()

    def _checked(self, block: int, deadline: Deadline) -> memoryview:
        if self._closed:
            raise TransferAbortedError("this source was closed")
        deadline.check("end of the blocks", peer=self._source.endpoint)
        if self._mapped is None:
            self._mapped = MappedSegment(self.segment, need_bytes=self._source.data_end)
        offset, length = self._source.block(block)
        data = self._mapped.memory[offset : offset + length]
        if checksum(data) != self._checksums.checksum(block):
            raise DigestMismatchError(f"block {block} of {self.segment} is not what was published")
        return data


def _superseded(what: str, stamp: tuple[Version, str] | None) -> VersionError:
    return VersionError(f"{what}: ask for the newest", version=None if stamp is None else str(stamp[0]))
