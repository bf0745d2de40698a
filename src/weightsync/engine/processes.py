"""ProcessWorker: an engine worker in a child process of the engine, as tensor- or data-parallel ranks are.

Parent and child talk JSON over a pipe that nobody else can open; nothing is pickled after the start.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec

from weightsync.engine.worker import EngineWorker
from weightsync.errors import (
    DeadlineExceededError,
    EngineError,
    EngineUnreachableError,
    StateError,
    WeightSyncError,
    as_weightsync_error,
    error_from_dict,
)
from weightsync.handles.fanout import in_thread
from weightsync.load.base import WeightLoader
from weightsync.types import (
    AnyUpdateRequest,
    BeginRequest,
    EngineReply,
    InitRequest,
    PhaseRecord,
    StageRequest,
    Version,
)
from weightsync.types.deadline import MAX_WAIT_S
from weightsync.types.message import learn
from weightsync.types.process import of_one_process

Asks = Mapping[str, Callable[[Any], Any]]
"""What else a worker can be asked (e.g. "generate"), from JSON-able to JSON-able."""
WorkerFactory = Callable[..., tuple[WeightLoader, Asks]]
"""A module-level function that builds a worker's loader in the worker's process."""

_TAKES: Mapping[str, Any] = {
    "describe": tuple[()],
    "init": tuple[InitRequest],
    "begin": tuple[BeginRequest],
    "update": tuple[AnyUpdateRequest],
    "stage": tuple[StageRequest],
    "commit": tuple[str],
    "abort": tuple[str | None, str],
    "rollback": tuple[str, str],
    "audit": tuple[str],
    "verify": tuple[float],
    "drain_phases": tuple[()],
}
"""What the methods of `EngineWorker` that cross take."""
learn(*_TAKES.values())


@of_one_process
class ProcessWorker:
    """Starts a child process that runs an `EngineWorker`, and forwards to it. Thread-safe.

    Args:
        factory: called in the child as `factory(index, *args)`.
        index: which worker of its engine.
        args: for the factory; pickled once, at the start.
        track: name in recorded phases.
        on_death: called once, with a reason, when the child is gone without having been closed, and before anybody is
            told of it. It must not ask this worker.
        start_method: how the child is started.
        start_timeout_s: how long the factory may take.

    Raises:
        EngineUnreachableError: the child died or was too slow to start.
    """

    def __init__(
        self,
        factory: WorkerFactory,
        *,
        index: int = 0,
        args: tuple[Any, ...] = (),
        track: str = "engine/worker-0",
        on_death: Callable[[str], None] = lambda reason: None,
        start_method: Literal["spawn", "fork", "forkserver"] = "spawn",
        start_timeout_s: float = 120.0,
    ) -> None:
        context = multiprocessing.get_context(start_method)
        self._conn, theirs = context.Pipe()
        self._track = track
        self._on_death = on_death
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_serve, args=(theirs, self._conn, factory, index, args, track), name=track, daemon=True
        )
        self._process.start()
        theirs.close()
        self._send_lock = threading.Lock()
        self._lock = threading.Lock()
        self._reaping = threading.Lock()  # of two that wait for a process one would not learn how it ended
        self._ids = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {0: Future()}
        self._closing = self._reaped = False
        self._dead: str | None = None
        ready = self._waiting[0]
        listener = threading.Thread(target=self._listen, name=f"weightsync-{track}", daemon=True)
        try:
            listener.start()
        except RuntimeError as error:
            self._process.kill()
            self._process.join(2)
            self._conn.close()
            raise StateError(f"no thread can be started to listen to {track}: {error}", peer=track) from error
        try:
            ready.result(start_timeout_s)
        except TimeoutError:
            self.close()
            raise EngineUnreachableError(f"{track} did not start within {start_timeout_s:g} s", peer=track) from None

    @property
    def pid(self) -> int:
        """The child's process id."""
        return int(self._process.pid)

    # `EngineWorker`'s methods, in the child.

    def describe(self) -> EngineReply:
        return msgspec.convert(self._ask("describe"), EngineReply)

    def init(self, request: InitRequest) -> None:
        self._ask("init", request)

    def begin(self, request: BeginRequest) -> None:
        self._ask("begin", request)

    def update(self, request: AnyUpdateRequest) -> None:
        self._ask("update", request)

    def stage(self, request: StageRequest) -> EngineReply:
        return msgspec.convert(self._ask("stage", request), EngineReply)

    def commit(self, name: str) -> Version:
        return msgspec.convert(self._ask("commit", name), Version)

    def abort(self, name: str | None, reason: str) -> None:
        self._ask("abort", name, reason)

    def rollback(self, name: str, reason: str) -> None:
        self._ask("rollback", name, reason)

    def audit(self, name: str) -> bool:
        return bool(self._ask("audit", name))

    def verify(self, timeout_s: float = MAX_WAIT_S) -> EngineReply:
        return msgspec.convert(self._ask("verify", timeout_s), EngineReply)

    def drain_phases(self) -> tuple[PhaseRecord, ...]:
        """Empty once the child is gone."""
        if self._dead is not None:
            return ()
        return msgspec.convert(self._ask("drain_phases"), tuple[PhaseRecord, ...])

    def ask(self, name: str, argument: Any) -> Any:
        """Calls one of the factory's asks in the child.

        Raises:
            EngineUnreachableError: the child is gone.
            WeightSyncError: what the ask raised.
        """
        return self._ask("ask", name, argument)

    def close(self) -> None:
        """Ends the child. Idempotent."""
        self._closing = True
        in_thread(
            lambda: self._send([0, "end", None]), name=f"{self._track}-end"
        )  # blocks where a stopped child's pipe is full
        with self._reaping:
            self._process.join(2)
            if self._process.is_alive():
                self._process.kill()
                self._process.join(2)

    def _ask(self, op: str, *arguments: Any) -> Any:
        future: Future[Any] = Future()
        with self._lock:
            if self._dead is not None:
                raise EngineUnreachableError(self._dead, peer=self._track)
            number = next(self._ids)
            self._waiting[number] = future
        try:
            self._send([number, op, arguments])
        except OSError:
            self._died()
        try:
            # Ends with the call's own deadline in the child, or with the child. The engine itself waits no longer
            # than its caller does.
            return future.result(MAX_WAIT_S)
        except TimeoutError:
            raise DeadlineExceededError(f"{self._track} did not answer {op}", peer=self._track) from None

    def _send(self, message: list[Any]) -> None:
        with self._send_lock:
            self._conn.send_bytes(msgspec.json.encode(message))

    def _listen(self) -> None:
        try:
            while True:
                number, ok, body = msgspec.json.decode(self._conn.recv_bytes())
                with self._lock:
                    future = self._waiting.pop(number)
                if ok:
                    future.set_result(body)
                else:
                    future.set_exception(error_from_dict(body, peer=self._track))
        except (EOFError, OSError):
            self._died()

    def _died(self) -> None:
        """Its engine refuses before anybody is told."""
        with self._reaping:
            if self._reaped:
                return  # whoever was first tells all that wait
            self._process.join(2)
            why = f"{self._track} (pid {self._process.pid}) died, exit code {self._process.exitcode}"
            self._reaped = True
        try:
            if not self._closing:
                self._on_death(why)
        finally:
            with self._lock:
                self._dead = why
                waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                future.set_exception(EngineUnreachableError(why, peer=self._track))


def _serve(
    conn: Connection, parents: Connection, factory: WorkerFactory, index: int, args: tuple[Any, ...], track: str
) -> None:
    """The child: one thread a call; ends with its parent, whose end of the pipe must not live on in here."""
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lock = threading.Lock()

    def answer(number: int, ok: bool, body: Any) -> None:
        with lock, contextlib.suppress(OSError):
            conn.send_bytes(msgspec.json.encode([number, ok, body]))

    try:
        loader, asks = factory(index, *args)
        worker = EngineWorker(loader, index=index, track=track)
    except BaseException as error:
        answer(0, False, as_weightsync_error(error, EngineError, "the worker's factory failed", peer=track).to_dict())
        raise
    answer(0, True, None)

    def run(number: int, op: str, body: Any) -> None:
        try:
            answer(number, True, msgspec.to_builtins(_dispatch(worker, asks, op, body)))
        except BaseException as error:
            answer(number, False, as_weightsync_error(error, EngineError, f"{op} failed", peer=track).to_dict())

    try:
        while True:
            number, op, body = msgspec.json.decode(conn.recv_bytes())
            if op == "end":
                os._exit(0)
            threading.Thread(target=run, args=(number, op, body), daemon=True).start()
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone: a collective that still runs must not keep this process


def _dispatch(worker: EngineWorker, asks: Asks, op: str, body: Any) -> Any:
    if op == "ask":
        name, argument = body
        if name not in asks:
            raise StateError(f"this worker can't be asked {name!r}; it can: {sorted(asks)}")
        return asks[name](argument)
    if op not in _TAKES:
        raise WeightSyncError(f"no such step: {op}")
    return getattr(worker, op)(*msgspec.convert(body, _TAKES[op]))
