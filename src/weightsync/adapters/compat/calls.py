"""Calls between code that waits and code that awaits, and to Ray actors."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

import torch

from weightsync.config import WeightSyncConfig
from weightsync.errors import DeadlineExceededError
from weightsync.tensors import own_streams
from weightsync.types.deadline import in_seconds

_T = TypeVar("_T")
_MARGIN_S = 10.0
_END: Any = object()


def done(awaited: Awaitable[_T]) -> _T:
    """What a coroutine of a document's gives, in code that is not one."""

    async def whole() -> _T:
        return await awaited

    with ThreadPoolExecutor(1) as beside:
        return _off_the_loop(asyncio.run, whole(), beside)


def each_of(source: AsyncIterator[_T]) -> Iterator[_T]:
    """What an async generator of a document's yields, one at a time, in code that is not one."""

    async def following() -> Any:
        return await anext(source, _END)

    loop = asyncio.new_event_loop()
    with ThreadPoolExecutor(1) as beside:  # one thread for all of it: what torch holds by thread, no_grad say, lasts
        try:
            while (one := _off_the_loop(loop.run_until_complete, following(), beside)) is not _END:
                yield one
        finally:
            _off_the_loop(loop.run_until_complete, loop.shutdown_asyncgens(), beside)
            loop.close()


def _off_the_loop(run: Callable[[Coroutine[Any, Any, _T]], _T], step: Coroutine[Any, Any, _T], beside: Executor) -> _T:
    """In this thread, or in one beside it where an event loop runs in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run(step)
    return beside.submit(_on_this_gpu(lambda: run(step))).result()


def _on_this_gpu(step: Callable[[], _T]) -> Callable[[], _T]:
    """For another thread, which has none chosen; on this one's streams, where more may be queued for the step."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not in_use:
        return step
    device, streams = torch.cuda.current_device(), own_streams()

    def on_device() -> _T:
        with contextlib.ExitStack() as stack:  # the thread may be a pool's
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            torch.cuda.set_device(device)  # last: a stream's device becomes the current one
            return step()

    return on_device


def result_of(found: Any) -> Any:
    """What a method of a document's gave, be it a coroutine or not."""
    return done(found) if inspect.isawaitable(found) else found


async def in_thread(step: Callable[[], _T], pool: Executor | None = None) -> _T:
    """What blocks, in a thread that has this one's GPU: one of `pool`, or of asyncio's few."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(pool, context.run, _on_this_gpu(step))


def arguments_of(actor: Any, method: str) -> list[str] | None:
    """The names of a method's arguments; None where Ray does not say."""
    called = getattr(actor, method)
    return None if hasattr(called, "remote") else list(inspect.signature(called).parameters)


def answer_of(actor: Any, method: str, *args: Any, timeout_s: float, **named: Any) -> Any:
    """Calls a method of an object here, be it a coroutine or not, or of a Ray actor, and waits.

    Raises:
        Exception: what it raised.
        DeadlineExceededError: a Ray actor did not answer in time.
    """
    called = getattr(actor, method)
    if hasattr(called, "remote"):
        answer: Future[Any] = called.remote(*args, **named).future()
        if not wait_for([answer], timeout_s).done:
            raise DeadlineExceededError(f"no answer to {method} within {in_seconds(timeout_s)}")
        return answer.result()
    return result_of(called(*args, **named))


def config_of(cfg: Any) -> WeightSyncConfig:
    """A document's `cfg` as ours; the defaults where it has none, or the plan's `...`."""
    return WeightSyncConfig.load({} if cfg in (None, ...) else cfg)


def patience_s(config: WeightSyncConfig) -> float:
    """How long an actor's whole call may take: it may join and transfer, and has a margin to say itself what failed."""
    return config.transfer.join_timeout_s + config.transfer.transfer_timeout_s + _MARGIN_S
