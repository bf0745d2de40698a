"""Engines as the verbs are given them: URLs, torch modules of this process, or handles."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeAlias, cast

import torch

from weightsync.config import InferenceServiceConfig
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.errors import ConfigError
from weightsync.handles.by_url import engine_at, read_engine_url
from weightsync.handles.fanout import collect, in_thread
from weightsync.load.base import WeightLoader
from weightsync.load.module import ModuleWeightLoader
from weightsync.load.peft import PeftAdapterLoader
from weightsync.memory import LeaseReader
from weightsync.peft_model import peft_model_in
from weightsync.types import EngineHandle

_CLOSE_S = 30.0  # more than a handle tries to end a pause
_logger = logging.getLogger(__name__)

EngineLike: TypeAlias = str | torch.nn.Module | WeightLoader | EngineHandle
"""A URL (see `handles.by_url`), a module of this process, a loader of one, or a handle."""


def handle_of(
    engine: object,
    *,
    name: str,
    token: str | None,
    verify: bool | str,
    made: list[EngineHandle],
    must_answer: bool = True,
    lease: str | None = None,
) -> EngineHandle:
    """A handle of an `EngineLike`.

    Args:
        engine: as a user has given it.
        name: of a module's engine.
        token, verify, must_answer: of a URL, see `engine_at`.
        made: gets what is made here, for `close_all`.
        lease: file by which a module, or a vLLM that was started so, sees that it may answer; None: it always may.

    Raises:
        ConfigError: it is none, or no engine is known by that URL.
    """
    handle: EmbeddedEngine | EngineHandle
    if isinstance(engine, str):
        handle = engine_at(engine, token=token, verify=verify, must_answer=must_answer, leased=lease is not None)
    elif isinstance(engine, torch.nn.Module | WeightLoader):
        reader = None if lease is None else LeaseReader(lease)
        handle = EmbeddedEngine.of(_loader_of(engine), engine_id=name, lease=reader)
    elif hasattr(engine, "call") and hasattr(engine, "engine_id"):
        return cast(EngineHandle, engine)
    else:
        raise ConfigError(f"an engine is a URL, a torch module or a handle, not a {type(engine).__name__}")
    made.append(handle)
    return handle


def close_all(made: Sequence[EngineHandle]) -> None:
    """Closes handles that `handle_of` has made, all at the same time: one that has to end a pause on a server that does
    not answer takes seconds."""
    calls = {f"{handle.engine_id}#{number}": handle.close for number, handle in enumerate(made)}  # type: ignore[attr-defined]
    running = {who: in_thread(close, name=f"weightsync-close-{who}") for who, close in calls.items()}
    for who, call in list(running.items()):
        if call.done() and isinstance(call.exception(), RuntimeError):  # no thread can be started: Python ends
            here: Future[None] = Future()
            running[who] = here
            try:
                here.set_result(calls[who]())
            except Exception as error:
                here.set_exception(error)
    _, errors = collect(running, timeout_s=_CLOSE_S, late="it did not end")
    for failed in errors.values():
        _logger.warning("an engine's handle was not closed: %s", failed)


def _loader_of(engine: torch.nn.Module | WeightLoader) -> WeightLoader:
    """Of a PEFT model its adapter is loaded, of any other module all of it."""
    if isinstance(engine, WeightLoader):
        return engine
    return ModuleWeightLoader(engine) if peft_model_in(engine) is None else PeftAdapterLoader(engine)


def urls_of(service: InferenceServiceConfig, listed: Sequence[str]) -> list[str]:
    """Engines as a configuration has them: those that are listed, or the inference service's own `base_url`; with what
    its `backend` says that they are, where their URLs don't.

    Raises:
        ConfigError: a URL is of another kind than `backend`.
    """
    kind = {None: None, "embedded": "weightsync"}.get(service.backend, service.backend)
    urls = list(listed) or ([service.base_url] if service.base_url else [])
    for url in urls:
        if kind is not None and read_engine_url(url).kind not in (None, kind):
            raise ConfigError(f"inference_service.backend is {service.backend!r}, and {url} says otherwise: keep one")
    return [url if kind is None or read_engine_url(url).kind else f"{kind}+{url}" for url in urls]
