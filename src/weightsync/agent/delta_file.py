"""From two segments to a delta in shared memory. Imports numpy and numba: the agent does so when it makes one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weightsync.agent.proved import Proved, StoredDelta
from weightsync.codec.delta import EncodedDelta, Search, encode_delta
from weightsync.codec.delta_cost import CostModel
from weightsync.codec.delta_units import Unit, plan_units
from weightsync.memory import MappedSegment, Segment
from weightsync.threads import map_all
from weightsync.transfer.blocks import checksum
from weightsync.types.publication import Source, fitting_block_bytes

_SMALLEST_BLOCK_BYTES = 16 << 10


def units_of(proved: Proved) -> tuple[Unit, ...]:
    """The units of a source, which its parts alone determine."""
    start = proved.where.data_start
    parts = sorted(proved.publication.parts_of(proved.source), key=lambda part: (part.offset, part.nbytes))
    return plan_units([(part.offset - start, part.nbytes, part.dtype) for part in parts])


def encode_publication(
    old: Proved,
    new: Proved,
    *,
    costs: CostModel,
    max_bytes: int,
    check_cancelled: Callable[[], None],
    search: Search | None = None,
) -> EncodedDelta:
    """What leads from one to the other. Both have to stay as they are meanwhile.

    Raises:
        DeltaTooLargeError: it has more than `max_bytes`.
        WeightSyncError: what `check_cancelled` raises.
        SharedMemoryError: a segment is gone.
    """
    with (
        MappedSegment(old.where.segment, need_bytes=old.where.data_end) as before,
        MappedSegment(new.where.segment, need_bytes=new.where.data_end) as after,
    ):
        was, now = (
            np.frombuffer(mapped.memory, dtype=np.uint8)[new.where.data_start : new.where.data_end]
            for mapped in (before, after)
        )
        try:
            return encode_delta(
                was, now, units_of(new), costs=costs, base=bytes.fromhex(old.proof.digest),
                result=bytes.fromhex(new.proof.digest), check_cancelled=check_cancelled, max_bytes=max_bytes,
                search=search,
            )  # fmt: skip
        finally:
            del was, now


def store(
    encoded: EncodedDelta, old: Proved, new: Proved, *, endpoint: str, block_bytes: int
) -> tuple[StoredDelta, Segment]:
    """Writes it into a segment of its own.

    Raises:
        SharedMemoryError: there is no room.
    """
    segment = Segment(encoded.nbytes)
    try:
        return _stored(encoded, old, new, segment, endpoint=endpoint, block_bytes=block_bytes), segment
    except BaseException:
        segment.close()
        raise


def _stored(
    encoded: EncodedDelta, old: Proved, new: Proved, segment: Segment, *, endpoint: str, block_bytes: int
) -> StoredDelta:
    encoded.write_into(segment.memory)
    blob = Source(
        endpoint=endpoint,
        segment=segment.name,
        data_start=0,
        data_end=encoded.nbytes,
        block_bytes=fitting_block_bytes(encoded.nbytes, at_most=block_bytes, at_least=_SMALLEST_BLOCK_BYTES),
    )

    def one(index: int) -> str:
        start, length = blob.block(index)
        return checksum(segment.memory[start : start + length])

    return StoredDelta(
        run_id=new.run_id,
        base=old.number,
        base_digest=old.proof.digest,
        version=new.number,
        digest=new.proof.digest,
        blob=blob,
        nbytes=encoded.nbytes,
        block_checksums="".join(map_all(one, range(blob.num_blocks))),
        num_changed=encoded.num_changed,
        num_elements=encoded.num_elements,
        seconds=encoded.seconds,
    )
