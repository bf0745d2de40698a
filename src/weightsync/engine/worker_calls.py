"""WorkerCalls: one step of all workers of an engine, at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from typing import Any, Protocol, TypeVar

from weightsync.errors import (
    DeadlineExceededError,
    EngineError,
    WeightSyncError,
    as_weightsync_error,
    error_from_dict,
    is_consequence,
)
from weightsync.handles.fanout import in_thread
from weightsync.types import (
    AnyUpdateRequest,
    BeginRequest,
    Deadline,
    EngineReply,
    InitRequest,
    PhaseRecord,
    StageRequest,
    Version,
)

_T = TypeVar("_T")
_GRACE_S = 1.0
"""So long one that was late is waited for where another one had failed, and says why."""


class Worker(Protocol):
    """What an engine asks of a worker: `EngineWorker`'s methods, there or in a process of its own."""

    def describe(self) -> EngineReply: ...
    def init(self, request: InitRequest) -> None: ...
    def begin(self, request: BeginRequest) -> None: ...
    def update(self, request: AnyUpdateRequest) -> None: ...
    def stage(self, request: StageRequest) -> EngineReply: ...
    def commit(self, name: str) -> Version: ...
    def abort(self, name: str | None, reason: str) -> None: ...
    def rollback(self, name: str, reason: str) -> None: ...
    def audit(self, name: str) -> bool: ...
    def verify(self, timeout_s: float) -> EngineReply: ...
    def drain_phases(self) -> tuple[PhaseRecord, ...]: ...
    def close(self) -> None: ...


class WorkerCalls:
    """Of one engine. Thread-safe.

    Args:
        workers: one a worker rank.
        engine_id: for messages, and the threads' names.
    """

    def __init__(self, workers: Sequence[Worker], engine_id: str) -> None:
        self._workers = tuple(workers)
        self._engine_id = engine_id
        self._lock = threading.Lock()
        self._unanswered: list[Future[Any]] = []  # questions that were late
        self._failed: dict[str, Any] | None = None  # what failed beside them

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def step(self, step: Callable[[Worker], _T], deadline: Deadline, *, settle: bool = False) -> list[_T]:
        """Runs `step` on all workers at once; raises the first failure (after all, where `settle`).

        Raises:
            DeadlineExceededError: a worker did not answer; its thread is left behind until it does.
            WeightSyncError: what a worker raised.
        """
        return self._results(self._begin(step), deadline, settle=settle)

    def ask(self, question: Callable[[Worker], _T], timeout_s: float) -> list[_T]:
        """As `step`, of a question that is asked again and again: where a worker has not answered the one before, that
        is waited for first, so that one which stands still keeps one thread and not one a question.

        Raises:
            DeadlineExceededError, WeightSyncError: as for `step`.
        """
        deadline = Deadline(timeout_s)
        with self._lock:
            before, failed = list(self._unanswered), self._failed
        if wait_for(before, timeout=deadline.remaining_s if failed is None else min(_GRACE_S, timeout_s)).not_done:
            if failed is not None:
                raise error_from_dict(failed)
            raise DeadlineExceededError(
                f"a worker has not answered what it was asked before, nor within {deadline.said}", peer=self._engine_id
            )
        calls = self._begin(question)
        try:
            return self._results(calls, deadline, settle=False)
        except WeightSyncError as error:  # where one fails, others may be late
            with self._lock:
                self._unanswered = [call for call in (*self._unanswered, *calls) if not call.done()]
                beside = self._unanswered and not isinstance(error, DeadlineExceededError)
                self._failed = error.to_dict() if beside else None
            raise

    def _begin(self, step: Callable[[Worker], _T]) -> list[Future[_T]]:
        def bound(worker: Worker) -> Callable[[], _T]:
            return lambda: step(worker)

        return [in_thread(bound(worker), name=f"{self._engine_id}-{i}") for i, worker in enumerate(self._workers)]

    def _results(self, calls: Sequence[Future[_T]], deadline: Deadline, *, settle: bool) -> list[_T]:
        wait_for(calls, timeout=deadline.remaining_s, return_when=ALL_COMPLETED if settle else FIRST_EXCEPTION)
        errors = [error for call in calls if call.done() and (error := call.exception()) is not None]
        if errors:
            first = min(errors, key=is_consequence)
            raise as_weightsync_error(first, EngineError, "a worker failed", peer=self._engine_id) from first
        if late := [index for index, call in enumerate(calls) if not call.done()]:
            raise DeadlineExceededError(f"workers {late} did not answer within {deadline.said}", peer=self._engine_id)
        return [call.result() for call in calls]
