"""The library's own transports keep the transfer contract: real process groups on loopback, real shared memory."""

from __future__ import annotations

from weightsync.testing.contracts import WeightTransferContract
from weightsync.transfer.base import WeightTransferStrategy
from weightsync.transfer.broadcast import BroadcastTransferStrategy
from weightsync.transfer.ipc import CudaIpcTransferStrategy, PackedCudaIpcTransferStrategy


class TestBroadcastOverGloo(WeightTransferContract):
    def make_strategy(self, *, join_timeout_s: float) -> WeightTransferStrategy:
        return BroadcastTransferStrategy(backend="gloo", join_timeout_s=join_timeout_s)


class TestCudaIpcOverSharedMemory(WeightTransferContract):
    ends_meet = False

    def make_strategy(self, *, join_timeout_s: float) -> WeightTransferStrategy:
        return CudaIpcTransferStrategy(join_timeout_s=join_timeout_s)


class TestPackedCudaIpcOverSharedMemory(WeightTransferContract):
    ends_meet = False

    def make_strategy(self, *, join_timeout_s: float) -> WeightTransferStrategy:
        return PackedCudaIpcTransferStrategy(join_timeout_s=join_timeout_s)
