"""The library's own transports keep the transfer contract, over real process groups on loopback."""

from __future__ import annotations

from weightsync.testing.contracts import WeightTransferContract
from weightsync.transfer.base import WeightTransferStrategy
from weightsync.transfer.broadcast import BroadcastTransferStrategy


class TestBroadcastOverGloo(WeightTransferContract):
    def make_strategy(self, *, join_timeout_s: float) -> WeightTransferStrategy:
        return BroadcastTransferStrategy(backend="gloo", join_timeout_s=join_timeout_s)
