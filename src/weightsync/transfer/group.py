"""The transfer group: training rank 0 and every engine worker, beside whatever groups either side has.

The one file that speaks to `torch.distributed`'s process groups for pushing; what they raise is translated
here. Two facts shape it (both seen with gloo of torch 2.13):

- `abort()` does not end an operation that is under way. What ends it at once is a peer that drops its group: its
  sockets close. So whoever fails closes its group first, and failure runs through all members.
- A receiver that expects fewer bytes than are sent is terminated. So sizes are never agreed by convention:
  every broadcast is announced with its exact size.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from weightsync.clients.fanout import in_thread
from weightsync.errors import DeadlineExceededError, GroupJoinError, TransferError, UnsupportedError
from weightsync.types import Deadline, TorchDistributedWeightSyncInitInfo

_JOIN_POLL_S = 0.05


def open_store(address: str, *, timeout_s: float) -> tuple[TCPStore, int]:
    """Training rank 0: a store that listens on `address` alone, on a port the system chose.

    Returns:
        The store, which lives as long as the group, and its port.

    Raises:
        GroupJoinError: the address is not one of this host's.
    """
    if address in {"0.0.0.0", "::", ""}:
        raise GroupJoinError(
            f"master_addr {address!r} would open the group's store, which knows no password, on every interface: "
            "name the one address that engines reach"
        )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise GroupJoinError(f"can't listen on master_addr {address}: {error}; give an address of this host") from error
    port = int(listener.getsockname()[1])
    store = TCPStore(
        address,
        port,
        None,
        True,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


class TransferGroup:
    """A joined group. One thread at a time runs operations on it.

    Args:
        group: a gloo or NCCL process group.
        store: kept alive with it.
        rank: own rank; 0 is the sender.
        backend: "gloo" or "nccl".
    """

    def __init__(self, group: Any, store: Any, *, rank: int, backend: str) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._group: Any | None = group
        self._store: Any | None = store
        self.rank = rank
        self.backend = backend

    @property
    def device(self) -> torch.device:
        """Where buffers have to lie: the device that was current in the thread that joined."""
        return self._device

    def broadcast(self, buffer: torch.Tensor, *, deadline: Deadline) -> None:
        """Rank 0's bytes of `buffer` (1-D uint8, contiguous, same size everywhere) reach every member's.

        Blocks, with the GIL released.

        Raises:
            TransferError: a member is gone. The group is broken: close it.
            DeadlineExceededError: a member did not take part in time. As above.
        """
        group = self._group
        if group is None:
            raise TransferError("the transfer group is closed", rank=self.rank)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=max(0.001, deadline.check("turn to broadcast", rank=self.rank)))
        try:
            work = group.broadcast([buffer], options)
            if self.backend == "nccl":
                _wait_for_nccl(work, group, deadline)
            else:
                work.wait()
        except RuntimeError as error:
            if deadline.expired or "timed out" in str(error).lower():
                raise DeadlineExceededError(
                    f"a broadcast of {buffer.numel()} bytes did not end in time: a member does not take part",
                    rank=self.rank,
                    state_left="the transfer group is broken",
                ) from error
            raise TransferError(
                f"a member left the transfer group during a broadcast: {_first_line(error)}",
                rank=self.rank,
                state_left="the transfer group is broken",
            ) from error

    def close(self) -> None:
        """Drops the group: its sockets close and the other members' operations fail. Idempotent.

        Where an operation is under way in another thread the sockets close when it ends.
        """
        group, self._group, self._store = self._group, None, None
        if group is not None and self.backend == "nccl":
            group.abort()


def join_group(
    info: TorchDistributedWeightSyncInitInfo,
    *,
    rank: int,
    store: TCPStore | None = None,
    interface: str | None = None,
    watch: Callable[[], None] = lambda: None,
) -> TransferGroup:
    """Joins as `rank` and blocks until everybody has.

    Args:
        info: from `create_init_info`.
        rank: 0 for the sender, rank_offset + worker index for the others.
        store: rank 0's own.
        interface: network interface for gloo; the one that leads to `info.master_addr` where not given.
        watch: called now and then while waiting; may raise to give up early.

    Raises:
        GroupJoinError: somebody did not come within `info.join_timeout_s`; names the missing ranks.
    """
    deadline = Deadline(info.join_timeout_s)
    try:
        if store is None:
            store = TCPStore(
                info.master_addr,
                info.master_port,
                None,
                False,
                timedelta(seconds=info.join_timeout_s),
                wait_for_workers=False,
            )
        prefix = PrefixStore(info.group_name, store)
        prefix.set(f"joined/{rank}", "1")
        _await_members(prefix, info, rank, deadline, watch)
        return TransferGroup(
            _make_group(prefix, info, rank, deadline, interface), store, rank=rank, backend=info.backend
        )
    except RuntimeError as error:  # torch raises DistStoreError and DistNetworkError, both RuntimeErrors
        raise GroupJoinError(
            f"could not join group {info.group_name} at {info.master_addr}:{info.master_port}: {_first_line(error)}",
            rank=rank,
        ) from error


def join_torch_group(
    info: TorchDistributedWeightSyncInitInfo,
    *,
    store: TCPStore,
    interface: str | None = None,
    watch: Callable[[], None] = lambda: None,
) -> TransferGroup:
    """Joins as rank 0 a group that the others build by torch's own `_new_process_group_helper` over a store that has
    the group's name as prefix, as SGLang's, OpenRLHF's and slime's `init_custom_process_group` do; the prefixes are
    torch's (2.4 to 2.13). Blocks until everybody has joined with gloo; NCCL's members meet in the first broadcast.

    Args:
        info, interface, watch: as for `join_group`.
        store: rank 0's own.

    Raises:
        GroupJoinError: somebody did not come within `info.join_timeout_s`. Nobody knows who.
    """
    deadline = Deadline(info.join_timeout_s)
    device = "cuda" if info.backend == "nccl" else "cpu"
    prefix = PrefixStore(f"{device}/", PrefixStore(f"{info.group_name}/", PrefixStore(info.group_name, store)))
    making = in_thread(lambda: _make_group(prefix, info, 0, deadline, interface), name="weightsync-join")
    why = "time is over"
    while not deadline.expired:
        watch()
        with contextlib.suppress(TimeoutError):
            try:
                return TransferGroup(making.result(_JOIN_POLL_S), store, rank=0, backend=info.backend)
            except RuntimeError as error:
                why = _first_line(error)
                break
    raise GroupJoinError(
        f"not all of the {info.world_size - 1} workers joined group {info.group_name} within "
        f"{info.join_timeout_s:g} s: {why}",
        rank=0,
    )


def _await_members(
    prefix: Any, info: TorchDistributedWeightSyncInitInfo, rank: int, deadline: Deadline, watch: Callable[[], None]
) -> None:
    missing = [member for member in range(info.world_size) if member != rank]
    while missing:
        watch()
        missing = [member for member in missing if deadline.expired or not prefix.check([f"joined/{member}"])]
        if missing and deadline.expired:
            shown = f"{missing[:20]} and {len(missing) - 20} more" if len(missing) > 20 else str(missing)
            raise GroupJoinError(
                f"ranks {shown} of {info.world_size} did not join group {info.group_name} within "
                f"{info.join_timeout_s:g} s",
                rank=rank,
                missing_ranks=missing,
            )
        if missing:
            time.sleep(_JOIN_POLL_S)


def _make_group(
    prefix: Any, info: TorchDistributedWeightSyncInitInfo, rank: int, deadline: Deadline, interface: str | None
) -> Any:
    timeout = timedelta(seconds=max(1.0, deadline.remaining_s))
    if info.backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_gloo_device(info.master_addr, interface)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(prefix, rank, info.world_size, options)
    if not torch.cuda.is_available():
        raise UnsupportedError("backend nccl needs a GPU on every member; use backend gloo", rank=rank)
    nccl_options = dist.ProcessGroupNCCL.Options()
    nccl_options._timeout = timedelta(seconds=info.transfer_timeout_s)
    return dist.ProcessGroupNCCL(prefix, rank, info.world_size, nccl_options)


def _gloo_device(master_addr: str, interface: str | None) -> Any:
    if interface is not None:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_device(hostname=_own_address_towards(master_addr))


def _own_address_towards(address: str) -> str:
    """The address of this host that `address` is reached from.

    Gloo's default device binds to whatever the host's own name resolves to, often loopback; other hosts can't
    reach that. Connecting a datagram socket sends nothing and asks the routing table.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise GroupJoinError(f"there is no route to master_addr {address}: {error}") from error
        return str(probe.getsockname()[0])


def _wait_for_nccl(work: Any, group: Any, deadline: Deadline) -> None:
    """NCCL's own wait only orders streams; this one ends at the deadline."""
    while not work.is_completed():
        if deadline.expired:
            group.abort()
            raise RuntimeError("timed out")
        time.sleep(0.0002)
    work.wait()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
