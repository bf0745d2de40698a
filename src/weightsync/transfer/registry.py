"""From a strategy's name to the strategy."""

from __future__ import annotations

from weightsync.config import WeightSyncConfig, select_strategy
from weightsync.errors import UnsupportedError
from weightsync.transfer.base import WeightTransferStrategy
from weightsync.transfer.broadcast import BroadcastTransferStrategy
from weightsync.transfer.ipc import CudaIpcTransferStrategy, PackedCudaIpcTransferStrategy
from weightsync.transfer.sglang import SGLangTransferStrategy

_GROUPED = {kind.name: kind for kind in (BroadcastTransferStrategy, SGLangTransferStrategy)}
_IPC = {kind.name: kind for kind in (CudaIpcTransferStrategy, PackedCudaIpcTransferStrategy)}


def strategy_named(name: str) -> WeightTransferStrategy:
    """The strategy that an init info names, with its default settings: a receiver needs no others.

    Raises:
        UnsupportedError: this build has no such strategy.
    """
    kind = {**_GROUPED, **_IPC}.get(name)
    if kind is None:
        raise UnsupportedError(f"transfer strategy {name!r} is not there; there are: {', '.join((*_GROUPED, *_IPC))}")
    return kind()


def strategy_for(config: WeightSyncConfig) -> WeightTransferStrategy:
    """The strategy that a config selects (`config.select_strategy`), with the config's settings.

    Raises:
        UnsupportedError: this build has no such strategy.
    """
    name, transfer = select_strategy(config), config.transfer
    if name in _IPC:
        return _IPC[name](join_timeout_s=transfer.join_timeout_s)
    if name not in _GROUPED:
        return strategy_named(name)
    return _GROUPED[name](
        backend="nccl" if transfer.backend == "nccl" else "gloo",
        master_addr=transfer.master_addr,
        interface=transfer.interface,
        join_timeout_s=transfer.join_timeout_s,
        transfer_timeout_s=transfer.transfer_timeout_s,
    )
