"""Named shared memory: the proof of one host, segments with a sign of life, and their readers. No torch."""

from weightsync.memory.host import host_nonce
from weightsync.memory.lease import Lock, Reader, is_read
from weightsync.memory.mapped import MappedSegment, SharedSegment
from weightsync.memory.private_folder import PrivateFolder
from weightsync.memory.segment import Segment, reclaim_dead
from weightsync.memory.serving import LeaseReader, ServingLease, boot_s

__all__ = [
    "LeaseReader",
    "Lock",
    "MappedSegment",
    "PrivateFolder",
    "Reader",
    "Segment",
    "ServingLease",
    "SharedSegment",
    "boot_s",
    "host_nonce",
    "is_read",
    "reclaim_dead",
]
