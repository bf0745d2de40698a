"""Real processes for tests: started from one warm fork server, joined with a deadline, killed when told.

Functions and arguments cross by pickle between a test and its own children, never anything else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import secrets
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

_PRELOAD = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "weightsync.codec.kernels",
    "weightsync.extract.fsdp",
    "weightsync.trainer.publisher",
    "weightsync.trainer.push",
    "weightsync.engine.processes",
    "weightsync.engine.server",
    "weightsync.host.service",
]  # fmt: skip


_FIRST_PORT, _NUM_PORTS, _SHARES = 20_000, 12_000, 8
"""Above those of Ray's workers, and below what Linux gives to those who ask for any port (`ip_local_port_range`). Each
worker of pytest-xdist has a share of its own: one that was told a port binds it later."""
_turns = itertools.count(secrets.randbelow(_NUM_PORTS // _SHARES))


def preload(*modules: str) -> None:
    """Names what the fork server imports before its first child, so that no child has to; no effect once it runs."""
    _PRELOAD.extend(module for module in modules if module not in _PRELOAD)


class ChildFailedError(AssertionError):
    """A child process ended without a result."""


class Child:
    """One running function in a process of its own.

    Args:
        function: a module-level function; it may take a `conn` keyword to talk with the test while it runs.
        args: its arguments.
        name: for messages.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, name: str = "child", talk: bool = False) -> None:
        context = _context()
        self._result, far_result = context.Pipe(duplex=False)
        self.conn, far_conn = context.Pipe()
        self.name = name
        self.process = context.Process(
            target=_run, args=(function, args, far_result, far_conn if talk else None), name=name, daemon=False
        )
        self.process.start()
        far_result.close()
        far_conn.close()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.process.pid is not None
        return self.process.pid

    def result(self, timeout_s: float = 60.0) -> Any:
        """What the function returned.

        Raises:
            ChildFailedError: it raised, died, or took longer than `timeout_s` (then it is killed).
        """
        try:
            if not self._result.poll(timeout_s):
                self._show_stacks()
                self.kill()
                raise ChildFailedError(f"{self.name} had no result within {timeout_s} s")
            ok, value = self._result.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            raise ChildFailedError(f"{self.name} died with exit code {self.process.exitcode}") from None
        self.process.join(10)
        if not ok:
            raise ChildFailedError(f"{self.name} raised\n{value}")
        return value

    def recv(self, timeout_s: float = 60.0) -> Any:
        """The next thing the child sent on `conn`."""
        if not self.conn.poll(timeout_s):
            self._show_stacks()
            raise ChildFailedError(f"{self.name} said nothing within {timeout_s} s")
        try:
            return self.conn.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            why = self.result(1) if self._result.poll(0) else f"exit code {self.process.exitcode}"
            raise ChildFailedError(f"{self.name} is gone: {why}") from None

    def _show_stacks(self) -> None:
        """Where each of its threads is, on standard error: what hangs once in a thousand runs is not asked twice."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGQUIT)
        self.process.join(0.5)  # until it has written; it does not end of this

    def kill(self) -> None:
        """kill -9, and wait until it is gone. Idempotent."""
        if self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.process.join(10)

    def stop(self) -> None:
        """SIGSTOP: the process is there and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT: goes on after `stop`."""
        os.kill(self.pid, signal.SIGCONT)


@contextlib.contextmanager
def children() -> Iterator[Callable[..., Child]]:
    """A `Child` factory that leaves no process behind, whatever the test does."""
    started: list[Child] = []

    def start(function: Callable[..., Any], *args: Any, **options: Any) -> Child:
        child = Child(function, *args, **options)
        started.append(child)
        return child

    try:
        yield start
    finally:
        for child in started:
            child.kill()


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0) -> list[Any]:
    """Runs `function(rank, world_size, *args)` in `world_size` processes with a gloo default group.

    Returns:
        What each rank returned, by rank.

    Raises:
        ChildFailedError: a rank raised, died or was too slow; all are killed.
    """
    with children() as start:
        port = free_port()
        ranks = [
            start(in_gloo_world, rank, world_size, port, function, args, name=f"rank{rank}")
            for rank in range(world_size)
        ]
        end = time.monotonic() + timeout_s
        return [rank.result(max(0.1, end - time.monotonic())) for rank in ranks]


class RankPool:
    """Processes with a gloo default group that run one function after another: what they import, they import once.

    Args:
        start: a factory of `children`.
        world_size: number of ranks.
    """

    def __init__(self, start: Callable[..., Child], world_size: int) -> None:
        self._start = start
        self._world_size = world_size
        self._ranks: list[Child] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 90.0) -> list[Any]:
        """As `run_ranks`; after a failure the next call starts new processes."""
        if not self._ranks:
            port = free_port()
            self._ranks = [
                self._start(in_gloo_world, rank, self._world_size, port, _serve, (), name=f"rank{rank}", talk=True)
                for rank in range(self._world_size)
            ]
        end = time.monotonic() + timeout_s
        values = []
        try:
            for rank in self._ranks:
                rank.conn.send((function, args))
            for rank in self._ranks:
                ok, value = rank.recv(max(0.1, end - time.monotonic()))
                if not ok:
                    raise ChildFailedError(f"{rank.name} raised\n{value}")
                values.append(value)
        except BaseException:
            ranks, self._ranks = self._ranks, []
            for rank in ranks:
                rank.kill()
            raise
        return values


def _serve(rank: int, world_size: int, conn: Connection) -> None:
    while True:
        function, args = conn.recv()
        try:
            told = (True, function(rank, world_size, *args))
        except Exception:
            told = (False, traceback.format_exc())
        conn.send(told)


def in_gloo_world(
    rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], **options: Any
) -> Any:
    """Runs `function(rank, world_size, *args)` inside a gloo default group on loopback."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
    )
    try:
        return function(rank, world_size, *args, **options)
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """A TCP port that is free, and that the system gives to nobody who asks it for any: neither to another test nor to
    the near end of a connection. So whoever is told this port may bind it later, and again after a restart. None comes
    twice before a thousand others.
    """
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _SHARES
    while True:
        port = _FIRST_PORT + next(_turns) % (_NUM_PORTS // _SHARES) * _SHARES + share
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            return port


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _run(function: Callable[..., Any], args: tuple[Any, ...], result: Connection, conn: Connection | None) -> None:
    faulthandler.enable()  # a crash in native code says where
    faulthandler.register(signal.SIGQUIT)  # see `Child._show_stacks`
    try:
        value = function(*args) if conn is None else function(*args, conn=conn)
        result.send((True, value))
    except BaseException:
        result.send((False, traceback.format_exc()))
        raise SystemExit(1) from None
