"""What an engine's receiver needs to meet the sender: made by training rank 0, handed on by the client."""

from __future__ import annotations

from typing import Literal

import msgspec

from weightsync.errors import InvalidRequestError
from weightsync.types.deadline import check_wait_s

MAX_WORLD_SIZE = 65_536


def check_world_size(world_size: int) -> int:
    """`world_size`, if a group could have so many members.

    Raises:
        InvalidRequestError: it could not. Nothing was allocated.
    """
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise InvalidRequestError(f"a world_size is between 1 and {MAX_WORLD_SIZE}, not {world_size}")
    return world_size


class WeightSyncInitInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """The base of all init infos.

    Attributes:
        strategy: which receiver to build.
        group_name: unique for each time that sender and receivers meet, so that a late joiner of a former
            time meets nobody, and so that either side can tell whether they still belong together.
    """

    strategy: str
    group_name: str


class TorchDistributedWeightSyncInitInfo(WeightSyncInitInfo, frozen=True, kw_only=True, tag="torch_distributed"):
    """Where the transfer group meets: training rank 0 is its rank 0, engine workers follow.

    Attributes:
        master_addr: address of training rank 0.
        master_port: port of its store.
        world_size: 1 + the sum of all engines' own world sizes.
        backend: "nccl" or "gloo".
        join_timeout_s: how long every member waits for the others.
        transfer_timeout_s: how long one collective may take.
    """

    master_addr: str
    master_port: int
    world_size: int
    backend: Literal["nccl", "gloo"]
    join_timeout_s: float
    transfer_timeout_s: float

    def __post_init__(self) -> None:
        if not 0 < self.master_port < 65536:
            raise InvalidRequestError(f"master_port {self.master_port} is no port")
        if check_world_size(self.world_size) < 2:
            raise InvalidRequestError(
                f"a transfer group has the sender and a receiver, not world_size {self.world_size}"
            )
        check_wait_s("join_timeout_s", self.join_timeout_s)
        check_wait_s("transfer_timeout_s", self.transfer_timeout_s)


class EmptyWeightSyncInitInfo(WeightSyncInitInfo, frozen=True, kw_only=True, tag="empty"):
    """Nothing to agree on beforehand: every request carries all that is needed (IPC handles).

    Attributes:
        keep_mapped: whether host memory stays mapped from one session to the next, as buckets that are written again do
            best. Else it is let go of with each session: what is mapped keeps its pages, though its owner is dead.
    """

    keep_mapped: bool = True


AnyInitInfo = TorchDistributedWeightSyncInitInfo | EmptyWeightSyncInitInfo
