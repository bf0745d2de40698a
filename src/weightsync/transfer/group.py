"""The transfer group: training rank 0 and every engine worker, beside whatever groups either side has.

The one file that speaks to `torch.distributed`'s process groups for pushing; what they raise is translated
here. Three facts shape it (all seen with gloo of torch 2.13):

- `abort()` does not end an operation that is under way. What ends it at once is a peer that drops its group: its
  sockets close. So whoever fails closes its group first, and failure runs through all members.
- A receiver that expects fewer bytes than are sent is terminated. So sizes are never agreed by convention:
  every broadcast is announced with its exact size.
- Building the mesh, an operation and a store's client all come back later than their time-out, or never. So all of
  them run in the group's own thread (`native`), which is left behind at the deadline: the group is given up then, and
  the next sync builds another.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from weightsync.errors import (
    DeadlineExceededError,
    GroupJoinError,
    TransferError,
    UnsupportedError,
    as_weightsync_error,
)
from weightsync.net.routes import own_address_towards
from weightsync.observe import now_s
from weightsync.transfer.native import NativeThread
from weightsync.types import Deadline, TorchDistributedWeightSyncInitInfo

_JOIN_POLL_S = 0.05
_WATCHDOG_LATER_S = 600.0  # than our own deadline: NCCL's watchdog may make torch end the process
_MAX_CHARS = 600  # of an error of NCCL
_ON_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_environment = threading.Lock()  # groups may be made at once
_STORE, _GROUP = "store", "group"  # what a group's thread holds


class OpenStore(NamedTuple):
    """A store that rank 0 has opened, in the thread of the group to come; it goes when that goes."""

    thread: NativeThread
    port: int


def open_store(address: str, *, port: int = 0, timeout_s: float) -> OpenStore:
    """Training rank 0: a store that listens on `address` alone, on `port` or one that the system chose.

    Raises:
        GroupJoinError: the address is not one of this host's, or the store did not come up in time.
        StateError: too many groups were left behind.
    """
    thread = NativeThread("weightsync-group-0")

    def make(held: dict[str, Any]) -> int:
        held[_STORE], chosen = new_store(address, port=port, timeout_s=timeout_s)
        return chosen

    try:
        return OpenStore(thread, thread.call(make, deadline=Deadline(timeout_s)))
    except (RuntimeError, TimeoutError) as error:
        thread.close()
        raise GroupJoinError(f"the group's store did not open on {address}: {_first_line(error)}") from error


def new_store(address: str, *, port: int = 0, timeout_s: float) -> tuple[TCPStore, int]:
    """A store that listens on `address` alone, and its port. A native call: it may ignore its time-out.

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
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise GroupJoinError(
            f"can't listen on master_addr {address}{f', port {port}' if port else ''}: {error}; give an address of "
            "this host, and a free port"
        ) from error
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
    """A joined group. One operation at a time.

    Args:
        rank: own rank; 0 is the sender.
        backend: "gloo" or "nccl".
        device: where buffers have to lie.
    """

    def __init__(self, thread: NativeThread, *, rank: int, backend: str, device: torch.device) -> None:
        self._thread = thread
        self.rank = rank
        self.backend = backend
        self.device = device

    def start_broadcast(
        self, buffer: torch.Tensor, *, deadline: Deadline, done: Callable[[float], None] = lambda begun_s: None
    ) -> Future[None]:
        """Rank 0's bytes of `buffer` (1-D uint8, contiguous, same size everywhere) reach every member's.

        The future fails with what `broadcast` raises, and may be late: whoever waits for it keeps the deadline. The
        buffer is the group's until then; after a failure for ever.

        Args:
            done: told when it began, once it went well.
        """
        rank, backend, closed = self.rank, self.backend, self._thread.closed

        def job(held: dict[str, Any]) -> None:
            begun_s = now_s()
            try:
                _broadcast(held.get(_GROUP), buffer, deadline, rank, backend, closed)
                done(begun_s)
            except BaseException as error:
                if backend == "nccl":
                    _abort(held)
                held.pop(_GROUP, None)  # now: the other members learn of it by that
                raise as_weightsync_error(error, TransferError, "a broadcast failed") from error

        return self._thread.start(job)

    def broadcast(self, buffer: torch.Tensor, *, deadline: Deadline) -> None:
        """As `start_broadcast`, and waits; after an error the group is given up, and so is `buffer`.

        Raises:
            TransferError: a member is gone. The group is broken: close it.
            DeadlineExceededError: a member did not take part in time. As above.
        """
        future = self.start_broadcast(buffer, deadline=deadline)
        try:
            future.result(deadline.remaining_s)
        except TimeoutError:
            self.close()
            raise _late(buffer, self.rank) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drops the group: its sockets close and the other members' operations fail. Idempotent.

        Where an operation is under way in another thread the sockets close when it ends.
        """
        self._thread.close(_abort if self.backend == "nccl" else None)


def join_group(
    info: TorchDistributedWeightSyncInitInfo,
    *,
    rank: int,
    store: OpenStore | None = None,
    interface: str | None = None,
    watch: Callable[[], None] = lambda: None,
) -> TransferGroup:
    """Joins as `rank` and blocks until everybody has.

    Args:
        rank: 0 for the sender, rank_offset + worker index for the others.
        interface: network interface for gloo; the one that leads to `info.master_addr` where not given.
        watch: called now and then while waiting; may raise to give up early.

    Raises:
        GroupJoinError: somebody did not come within `info.join_timeout_s`; names the missing ranks.
        StateError: too many groups were left behind.
    """
    deadline = Deadline(info.join_timeout_s)
    thread = NativeThread(f"weightsync-group-{rank}") if store is None else store.thread
    missing = [member for member in range(info.world_size) if member != rank]

    def join(held: dict[str, Any]) -> None:
        if _STORE not in held:
            held[_STORE] = TCPStore(
                info.master_addr,
                info.master_port,
                None,
                False,
                timedelta(seconds=info.join_timeout_s),
                wait_for_workers=False,
            )
        prefix = PrefixStore(info.group_name, held[_STORE])
        prefix.set(f"joined/{rank}", "1")
        while missing and not deadline.expired and not closed.is_set():
            missing[:] = [member for member in missing if not prefix.check([f"joined/{member}"])]
            if missing:
                time.sleep(_JOIN_POLL_S)
        if not missing:
            held[_GROUP] = _make_group(prefix, info, rank, deadline, interface)

    def late() -> GroupJoinError:
        ranks = list(missing)  # the thread may go on
        if not ranks:
            return GroupJoinError(
                f"all {info.world_size} members came, and did not connect to each other within "
                f"{info.join_timeout_s:g} s: {_name_of(info)}",
                rank=rank,
            )
        shown = f"{ranks[:20]} and {len(ranks) - 20} more" if len(ranks) > 20 else str(ranks)
        return GroupJoinError(
            f"ranks {shown} of {info.world_size} did not join group {info.group_name} within {info.join_timeout_s:g} s",
            rank=rank,
            missing_ranks=ranks,
        )

    closed = thread.closed
    group = _joined(thread, join, info, rank=rank, deadline=deadline, late=late, watch=watch)
    if missing:
        group.close()
        raise late()
    return group


def join_torch_group(
    info: TorchDistributedWeightSyncInitInfo,
    *,
    store: OpenStore,
    interface: str | None = None,
    watch: Callable[[], None] = lambda: None,
) -> TransferGroup:
    """Joins as rank 0 a group that the others build by torch's own `_new_process_group_helper` over a store that has
    the group's name as prefix, as SGLang's, OpenRLHF's and slime's `init_custom_process_group` do; the prefixes are
    torch's (2.4 to 2.13). Blocks until everybody has joined with gloo; NCCL's members meet in the first broadcast.

    Args:
        info, interface, watch: as for `join_group`.

    Raises:
        GroupJoinError: somebody did not come within `info.join_timeout_s`. Nobody knows who.
    """
    deadline = Deadline(info.join_timeout_s)
    device = "cuda" if info.backend == "nccl" else "cpu"

    def join(held: dict[str, Any]) -> None:
        prefix = PrefixStore(
            f"{device}/", PrefixStore(f"{info.group_name}/", PrefixStore(info.group_name, held[_STORE]))
        )
        held[_GROUP] = _make_group(prefix, info, 0, deadline, interface)

    def late() -> GroupJoinError:
        return GroupJoinError(
            f"not all of the {info.world_size - 1} workers joined group {info.group_name} within "
            f"{info.join_timeout_s:g} s",
            rank=0,
        )

    return _joined(store.thread, join, info, rank=0, deadline=deadline, late=late, watch=watch)


def _joined(
    thread: NativeThread,
    join: Callable[[dict[str, Any]], None],
    info: TorchDistributedWeightSyncInitInfo,
    *,
    rank: int,
    deadline: Deadline,
    late: Callable[[], GroupJoinError],
    watch: Callable[[], None],
) -> TransferGroup:
    """Waits for `join` in its thread, which is given up where it fails; `late` says what was waited for in vain."""
    device = torch.device("cpu")
    if info.backend == "nccl":
        if not torch.cuda.is_available():
            thread.close()
            raise UnsupportedError("backend nccl needs a GPU on every member; use backend gloo", rank=rank)
        device = torch.device("cuda", torch.cuda.current_device())

    def job(held: dict[str, Any]) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        join(held)

    try:
        thread.call(job, deadline=deadline, watch=watch)
    except TimeoutError as error:
        raise late() from error
    except RuntimeError as error:  # torch raises DistStoreError and DistNetworkError, both RuntimeErrors
        thread.close()
        if deadline.expired:
            raise late() from error
        raise GroupJoinError(f"could not join {_name_of(info)}: {_first_line(error)}", rank=rank) from error
    except BaseException:
        thread.close()
        raise
    return TransferGroup(thread, rank=rank, backend=info.backend, device=device)


def _name_of(info: TorchDistributedWeightSyncInitInfo) -> str:
    return f"group {info.group_name} at {info.master_addr}:{info.master_port}"


def _broadcast(
    group: Any, buffer: torch.Tensor, deadline: Deadline, rank: int, backend: str, closed: threading.Event
) -> None:
    """In the group's thread: one broadcast, whole or a typed error."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    later_s = _WATCHDOG_LATER_S if backend == "nccl" else 0.0
    options.timeout = timedelta(seconds=later_s + max(0.001, deadline.check("turn to broadcast", rank=rank)))
    if group is None:
        raise TransferError("the transfer group is closed", rank=rank)
    try:
        work = group.broadcast([buffer], options)
        if backend == "nccl":
            _wait_for_nccl(work, group, deadline, closed)
        else:
            work.wait()
    except RuntimeError as error:
        by_nccl = "NCCL error" in str(error)  # what it could not do stands behind the first line
        if deadline.expired or (not by_nccl and "timed out" in str(error).lower()):
            raise _late(buffer, rank) from error
        raise TransferError(
            f"a broadcast failed: {_all_lines(error)}"
            if by_nccl
            else f"a member left the transfer group during a broadcast: {_first_line(error)}",
            rank=rank,
            state_left="the transfer group is broken",
        ) from error


def _late(buffer: torch.Tensor, rank: int) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"a broadcast of {buffer.numel()} bytes did not end in time: a member does not take part",
        rank=rank,
        state_left="the transfer group is broken",
    )


def _abort(held: dict[str, Any]) -> None:
    if _GROUP in held:
        held[_GROUP].abort()


def _make_group(
    prefix: Any, info: TorchDistributedWeightSyncInitInfo, rank: int, deadline: Deadline, interface: str | None
) -> Any:
    timeout = timedelta(seconds=max(1.0, deadline.remaining_s))
    if info.backend == "gloo":
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_gloo_device(info.master_addr, interface)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(prefix, rank, info.world_size, options)
    nccl_options = dist.ProcessGroupNCCL.Options()
    nccl_options._timeout = timedelta(seconds=info.transfer_timeout_s + _WATCHDOG_LATER_S)
    with _failures_are_ours():
        return dist.ProcessGroupNCCL(prefix, rank, info.world_size, nccl_options)


@contextlib.contextmanager
def _failures_are_ours() -> Iterator[None]:
    """Where a member of a group that is made here dies, or is late, torch's watchdog ends nobody's process: the caller
    gets a typed error (`_wait_for_nccl`). Torch reads the variable as the group is made."""
    with _environment:
        before = os.environ.get(_ON_ERRORS)
        os.environ[_ON_ERRORS] = "0"
        try:
            yield
        finally:
            os.environ.pop(_ON_ERRORS)
            if before is not None:
                os.environ[_ON_ERRORS] = before


def _gloo_device(master_addr: str, interface: str | None) -> Any:
    if interface is not None:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    try:  # gloo's default binds to what the host's own name resolves to: often loopback, which no other host reaches
        own = own_address_towards(master_addr)
    except OSError as error:
        raise GroupJoinError(f"there is no route to master_addr {master_addr}: {error}") from error
    return dist.ProcessGroupGloo.create_device(hostname=own)


def _wait_for_nccl(work: Any, group: Any, deadline: Deadline, closed: threading.Event) -> None:
    """NCCL's own wait only orders streams; this one ends at the deadline, or when the group is closed."""
    while not work.is_completed():
        if deadline.expired or closed.is_set():
            group.abort()
            raise RuntimeError("timed out" if deadline.expired else "the group was closed")
        time.sleep(0.0002)
    work.wait()


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def _all_lines(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MAX_CHARS]
