"""Process groups that are joined by hand, as the plan and the call graph do it."""

from __future__ import annotations

import dataclasses
from typing import Literal, cast

from weightsync.config import WeightSyncConfig
from weightsync.errors import InvalidRequestError
from weightsync.transfer.group import TransferGroup, join_group, open_store
from weightsync.types import TorchDistributedWeightSyncInitInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """A transfer group that was joined by hand; a sender or a receiver takes it over."""

    info: TorchDistributedWeightSyncInitInfo
    group: TransferGroup


def init_custom_process_group(
    master_addr: str, master_port: int, world_size: int, rank: int, group_name: str, backend: str
) -> ProcessGroup:
    """Joins a group, and blocks until everybody has; rank 0 is the sender, and opens the store.

    Raises:
        GroupJoinError: somebody did not come, or rank 0 can't listen there.
        InvalidRequestError: a port, world size or backend that can't be.
    """
    info = group_info(master_addr, master_port, world_size, group_name, backend, WeightSyncConfig())
    store = open_store(master_addr, port=master_port, timeout_s=info.join_timeout_s) if rank == 0 else None
    return ProcessGroup(info=info, group=join_group(info, rank=rank, store=store))


def group_info(
    master_addr: str, master_port: int, world_size: int, group_name: str, backend: str, config: WeightSyncConfig
) -> TorchDistributedWeightSyncInitInfo:
    if backend not in ("gloo", "nccl"):
        raise InvalidRequestError(f"a process group's backend is 'gloo' or 'nccl', not {backend!r}")
    return TorchDistributedWeightSyncInitInfo(
        strategy="broadcast",
        group_name=group_name,
        master_addr=master_addr,
        master_port=master_port,
        world_size=world_size,
        backend=cast(Literal["gloo", "nccl"], backend),
        join_timeout_s=config.transfer.join_timeout_s,
        transfer_timeout_s=config.transfer.transfer_timeout_s,
    )
