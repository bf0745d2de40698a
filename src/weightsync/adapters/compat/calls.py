"""Calls between code that waits and code that awaits, and to Ray actors."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from weightsync.config import WeightSyncConfig

_T = TypeVar("_T")


def done(awaited: Awaitable[_T]) -> _T:
    """What a coroutine of a document's gives, in code that is not one."""

    async def whole() -> _T:
        return await awaited

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(whole())
    with ThreadPoolExecutor(1) as beside:
        return beside.submit(asyncio.run, whole()).result()


async def in_thread(step: Callable[[], _T]) -> _T:
    """What blocks, in a thread that has this one's GPU."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def on_device() -> _T:
        if device is not None:
            torch.cuda.set_device(device)
        return step()

    return await asyncio.to_thread(on_device)


def answer_of(actor: Any, method: str, *args: Any, timeout_s: float, **named: Any) -> Any:
    """Calls a method of an object here, be it a coroutine or not, or of a Ray actor, and waits.

    Raises:
        Exception: what it raised.
        TimeoutError: a Ray actor did not answer in time.
    """
    called = getattr(actor, method)
    if hasattr(called, "remote"):
        answer: Future[Any] = called.remote(*args, **named).future()
        return answer.result(timeout_s)
    found = called(*args, **named)
    return done(found) if inspect.isawaitable(found) else found


def config_of(cfg: Any) -> WeightSyncConfig:
    """A document's `cfg` as ours; the defaults where it has none, or the plan's `...`."""
    return WeightSyncConfig.load({} if cfg in (None, ...) else cfg)
