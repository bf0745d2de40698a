"""Native calls that come back late, or never: whoever waits keeps the deadline, and nothing late does harm."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import psutil
import pytest
import torch
from torch._C._distributed_c10d import PrefixStore

from tests.standins.processes import Child, children
from tests.standins.threads import fail_starts
from weightsync.errors import GroupJoinError, StateError, TransferAbortedError, TransferError
from weightsync.handles.fanout import in_thread
from weightsync.transfer import group, native
from weightsync.transfer.broadcast import BroadcastTransferStrategy
from weightsync.transfer.group import OpenStore, join_group
from weightsync.transfer.native import NativeThread, num_left_behind
from weightsync.types import Deadline, TorchDistributedWeightSyncInitInfo

JOIN_S = 2.0
SCHEDULING_S = 6.0  # between a moment and the thread that waits for it, on a machine where everything else runs too


@pytest.fixture
def start() -> Iterator[Any]:
    with children() as start:
        yield start


@pytest.fixture(autouse=True)
def nobody_left_behind() -> None:
    """What an earlier test left behind has come back: gloo gives up in the end."""
    wait_until_left(0)


def wait_until_left(number: int) -> None:
    end = time.monotonic() + 60
    while num_left_behind() > number:
        assert time.monotonic() < end
        time.sleep(0.01)  # between two looks


class Group:
    """Something that a thread holds."""


class OfWork(Deadline):
    """Begins when the work does: how late its thread is does not count."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self.begun = False

    @property
    def remaining_s(self) -> float:
        return super().remaining_s if self.begun else self.timeout_s

    def begin(self) -> None:
        super().__init__(self.timeout_s)
        self.begun = True


def test_a_call_that_never_comes_back_costs_the_deadline_and_is_left_behind() -> None:
    """When it does come back it finds that it was given up: what it held and made goes, in its own thread."""
    released, dropped_by = threading.Event(), []
    thread, deadline = NativeThread("late"), OfWork(1.0)

    def hang(held: dict[str, Any]) -> Group:
        deadline.begin()
        held["group"] = Group()
        weakref.finalize(held["group"], lambda: dropped_by.append(threading.current_thread().name))
        released.wait()
        return held["group"]

    with pytest.raises(TimeoutError):
        thread.call(hang, deadline=deadline)
    assert time.monotonic() - deadline._end < SCHEDULING_S
    assert num_left_behind() == 1
    assert thread.closed.is_set()
    with pytest.raises(TransferAbortedError):
        thread.call(lambda held: None, deadline=Deadline(60))
    released.set()
    assert thread._inside.ended.wait(30)
    assert num_left_behind() == 0
    assert dropped_by == ["late"]


def test_what_a_thread_that_was_given_up_holds_is_ended_when_it_comes_back() -> None:
    """Also where nobody closes it. Seen red: a call that ran out of time ended the thread, and nothing else."""
    go, ended = threading.Event(), threading.Event()
    thread = NativeThread("late", last=lambda _: ended.set())
    with pytest.raises(TimeoutError):
        thread.call(lambda _: go.wait(60.0), deadline=Deadline(0.05))
    go.set()
    assert ended.wait(30.0)
    wait_until_left(0)


def test_who_looks_beside_the_call_may_give_up_early() -> None:
    released = threading.Event()
    thread = NativeThread("watched")

    def look() -> None:
        raise GroupJoinError("an engine said no")

    with pytest.raises(GroupJoinError):
        thread.call(lambda held: released.wait(), deadline=Deadline(60), watch=look)
    assert thread.closed.is_set()
    released.set()


def test_what_fails_holds_nothing_back() -> None:
    """An error's frames would keep a group, and so its sockets, as long as anybody keeps the error."""
    alive: list[weakref.ref[Group]] = []

    def fail(held: dict[str, Any]) -> None:
        group = Group()
        alive.append(weakref.ref(group))
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise RuntimeError("outer") from error

    thread = NativeThread("fails")
    with pytest.raises(RuntimeError, match="outer") as caught:
        thread.call(fail, deadline=Deadline(30))
    assert isinstance(caught.value.__cause__, ValueError)
    assert alive[0]() is None
    thread.close()


def leave_behind(thread: NativeThread, released: threading.Event) -> None:
    """A call that hangs is given up once it has begun."""
    begun = threading.Event()

    def hang(held: dict[str, Any]) -> None:
        begun.set()
        released.wait()

    def look() -> None:
        if begun.is_set():
            raise TimeoutError

    with pytest.raises(TimeoutError):
        thread.call(hang, deadline=Deadline(60), watch=look)


def test_only_so_many_may_be_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(native, "MAX_LEFT_BEHIND", 3)
    left = []
    try:
        for _ in range(3):
            left.append(NativeThread("left"))
            leave_behind(left[-1], released)
        with pytest.raises(StateError, match="restart this process"):
            NativeThread("one too many")
        with pytest.raises(StateError, match="restart this process"):
            BroadcastTransferStrategy().create_init_info({"e": 1})
    finally:
        released.set()
    assert all(thread._inside.ended.wait(30) for thread in left)
    NativeThread("fine again").close()


def join_all(info: TorchDistributedWeightSyncInitInfo, ranks: tuple[int, ...], conn: Any) -> None:
    """Every worker of an engine joins; says how each fared."""
    joins = [in_thread(lambda rank=rank: join_group(info, rank=rank), name=f"rank-{rank}") for rank in ranks]
    conn.send([str(join.exception()) for join in joins])


def stopped(child: Child) -> None:
    child.stop()
    end = time.monotonic() + 30
    while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < end


def mesh_of_stopped_workers(start: Any) -> GroupJoinError | None:
    """Why rank 0 could not join; None: it could, for gloo lets the one whose port is higher connect, and if that is
    rank 0 towards all of them, nobody needs them to do anything."""
    workers = (1, 2, 3)
    info, token = BroadcastTransferStrategy(join_timeout_s=60).create_init_info({"e": len(workers)})
    assert isinstance(token, OpenStore)
    child = start(join_all, info, workers, talk=True)

    def let_them_connect(held: dict[str, Any]) -> None:
        store = PrefixStore(info.group_name, held["store"])
        store.set("joined/0", "1")
        store.wait([f"joined/{rank}" for rank in workers] + [f"0/{rank}" for rank in workers])

    token.thread.call(let_them_connect, deadline=Deadline(60))
    stopped(child)
    began = time.monotonic()
    try:
        join_group(msgspec.structs.replace(info, join_timeout_s=JOIN_S), rank=0, store=token).close()
    except GroupJoinError as error:
        return error
    finally:
        assert time.monotonic() - began < JOIN_S + SCHEDULING_S
    child.kill()
    return None


def test_a_mesh_that_does_not_come_up_costs_the_join_timeout_and_no_more(start: Any) -> None:
    """Three workers come, say where they listen, and are stopped: TCP takes connections to them, nobody shakes hands.

    Gloo waits for each of them in turn: its connectFullMesh of a time-out of 2 s came back after 10 s with 'Connect
    timeout', on an idle machine. Seen red with a group that is made by the thread that waits.
    """
    for _ in range(12):
        refused = mesh_of_stopped_workers(start)
        if refused is not None and "did not join" not in str(refused):  # else it was late for who had come
            break
    assert refused is not None, "it came up each time"
    assert f"did not connect to each other within {JOIN_S:g} s" in str(refused)
    assert num_left_behind() == 1

    strategy = BroadcastTransferStrategy(join_timeout_s=30)  # and the next one is as good as any
    info, token = strategy.create_init_info({"e": 1})
    other = in_thread(lambda: strategy.create_receiver(info, rank=1), name="join")
    group = join_group(info, rank=0, store=token)  # type: ignore[arg-type]
    received = torch.zeros(8, dtype=torch.uint8)
    receiver = other.result(30)
    arrived = in_thread(lambda: receiver._group.broadcast(received, deadline=Deadline(30)), name="receive")  # type: ignore[attr-defined]
    group.broadcast(torch.arange(8, dtype=torch.uint8), deadline=Deadline(30))
    arrived.result(30)
    assert received.tolist() == list(range(8))
    group.close()
    receiver.close()


def open_and_wait(conn: Any) -> None:
    conn.send(BroadcastTransferStrategy(join_timeout_s=60).create_init_info({"e": 1})[0])
    conn.recv()


def test_a_trainer_that_is_stopped_costs_a_worker_the_join_timeout_and_no_more(start: Any) -> None:
    """Its store takes the connection and never answers. Seen red with a store's client in the worker's own thread."""
    child = start(open_and_wait, talk=True)
    info = msgspec.structs.replace(child.recv(), join_timeout_s=JOIN_S)
    stopped(child)
    began = time.monotonic()
    with pytest.raises(GroupJoinError, match=r"ranks \[0\] of 2"):
        join_group(info, rank=1)
    assert time.monotonic() - began < JOIN_S + SCHEDULING_S
    child.kill()
    wait_until_left(0)  # the dead trainer's connection broke


def test_without_a_thread_no_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a bare RuntimeError."""
    fail_starts(monkeypatch, "t")
    with pytest.raises(StateError, match="no thread can be started for a group"):
        NativeThread("t")


@pytest.mark.parametrize("before", [None, "1"])
def test_torch_ends_no_process_where_a_member_of_an_nccl_group_dies(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watchdog does, as a group is made without this variable; other groups of the process keep what they have.
    NCCL itself does not run here."""
    name, seen = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, *args: Any) -> None:
            seen.append(os.environ.get(name))

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv(name, before) if before else monkeypatch.delenv(name, raising=False)
    info = SimpleNamespace(backend="nccl", transfer_timeout_s=3.0, world_size=2)
    group._make_group(None, cast(Any, info), 0, Deadline(5), None)
    assert (seen, os.environ.get(name)) == (["0"], before)


class NcclGroup:
    """What torch makes of a group, with NCCL's own answer to a broadcast."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def broadcast(self, buffers: list[torch.Tensor], options: Any) -> NcclGroup:
        self.timeout_s = options.timeout.total_seconds()
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


@pytest.mark.parametrize("timeout_s", [3.0, 300.0])
def test_our_deadline_comes_before_that_of_nccls_watchdog(timeout_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL itself does not run here. Seen red: both were the same moment, and where the watchdog looked first torch
    could end the trainer."""
    made: list[Any] = []
    nccl_group = type("Nccl", (), {"Options": SimpleNamespace, "__init__": lambda self, *args: made.append(args[-1])})
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", nccl_group, raising=False)
    info = SimpleNamespace(backend="nccl", transfer_timeout_s=timeout_s, world_size=2)
    group._make_group(None, cast(Any, info), 0, Deadline(5), None)
    assert made[0]._timeout.total_seconds() > timeout_s + 60
    one = NcclGroup()
    broadcast_by(one, Deadline(timeout_s))
    assert one.timeout_s > timeout_s + 60


def broadcast_by(nccl: NcclGroup, deadline: Deadline) -> None:
    group._broadcast(nccl, torch.zeros(8, dtype=torch.uint8), deadline, 0, "nccl", threading.Event())


@pytest.mark.parametrize("reason", ["Duplicate GPU detected : rank 0", "socketConnect: connection timed out"])
def test_an_error_of_nccl_is_told_with_its_reason(reason: str) -> None:
    """As torch words it; NCCL itself does not run here. Seen red: a member had left, and the reason was cut away."""
    text = f"NCCL error in: x.cpp:94, invalid usage, NCCL version 2\nncclInvalidUsage: a call.\nLast error:\n{reason}"
    with pytest.raises(TransferError, match=f"a broadcast failed: NCCL error in: x.cpp:94, .* Last error: {reason}"):
        broadcast_by(NcclGroup(text), Deadline(30))


_ENDS_WHILE_IT_LETS_GO = """
import threading
from weightsync.transfer.native import NativeThread
from weightsync.types import Deadline

def lets_go(held):
    threading.Event().wait(1.0)  # on a busy machine torch takes as long for a group
    print("let go", flush=True)

thread = NativeThread("t", last=lets_go)
thread.call(lambda held: None, deadline=Deadline(30.0))
thread.close()
print("closed", flush=True)
"""


def test_python_does_not_end_while_a_thread_lets_go_of_its_group() -> None:
    """Seen red: it ended first, and with a thread inside of torch that is an abort of a rank that had done its work."""
    ended = subprocess.run([sys.executable, "-c", _ENDS_WHILE_IT_LETS_GO], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.split("\n")[:2]) == (0, ["closed", "let go"]), ended.stderr
