"""Named shared memory: the proof of one host, segments with a sign of life, and their readers. No torch."""

from weightsync.memory.host import host_nonce
from weightsync.memory.mapped import MappedSegment
from weightsync.memory.segment import Segment, reclaim_dead

__all__ = ["MappedSegment", "Segment", "host_nonce", "reclaim_dead"]
