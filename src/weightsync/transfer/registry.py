"""From a strategy's name to the strategy."""

from __future__ import annotations

from weightsync.config import WeightSyncConfig, select_strategy
from weightsync.errors import UnsupportedError
from weightsync.transfer.base import WeightTransferStrategy
from weightsync.transfer.broadcast import BroadcastTransferStrategy


def strategy_named(name: str) -> WeightTransferStrategy:
    """The strategy that an init info names, with its default settings: a receiver needs no others.

    Raises:
        UnsupportedError: this build has no such strategy.
    """
    if name == BroadcastTransferStrategy.name:
        return BroadcastTransferStrategy()
    raise UnsupportedError(f"transfer strategy {name!r} is not there; there is: broadcast")


def strategy_for(config: WeightSyncConfig) -> WeightTransferStrategy:
    """The strategy that a config selects (`config.select_strategy`), with the config's settings.

    Raises:
        UnsupportedError: this build has no such strategy.
    """
    name = select_strategy(config)
    if name != BroadcastTransferStrategy.name:
        return strategy_named(name)
    transfer = config.transfer
    return BroadcastTransferStrategy(
        backend="nccl" if transfer.backend == "nccl" else "gloo",
        master_addr=transfer.master_addr,
        interface=transfer.interface,
        join_timeout_s=transfer.join_timeout_s,
        transfer_timeout_s=transfer.transfer_timeout_s,
    )
