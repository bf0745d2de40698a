"""EngineActor: an engine in a Ray actor of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

from weightsync.cluster.ray_calls import here, start_actor
from weightsync.cluster.wire import answer, refusal
from weightsync.errors import ConfigError, EngineError, InvalidRequestError, WeightSyncError, as_weightsync_error
from weightsync.memory.segment import reclaim_dead
from weightsync.net.messages import decode
from weightsync.types import REQUEST_TYPES, EngineHandle, EngineOp

STEPS, URGENT, ASKS = "steps", "urgent", "asks"
_GROUPS = {STEPS: 16, URGENT: 8, ASKS: 8}
"""Threads by kind of call, as the HTTP server has them: a sync has at most five steps under way, and neither
generation (asks) nor chunks (steps) hold up an abort."""
_URGENT = frozenset({EngineOp.DESCRIBE, EngineOp.ABORT, EngineOp.RESUME})


def group_of(op: EngineOp) -> str:
    """The concurrency group that runs this step."""
    return URGENT if op in _URGENT else STEPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineContext:
    """What an engine factory is told.

    Attributes:
        engine_id: name of the engine.
        index: number of the engine, from 0.
    """

    engine_id: str
    index: int


EngineFactory = Callable[[EngineContext], Any]
"""Called in the actor's process. Gives an `EngineHandle` (e.g. an `EmbeddedEngine`), or an object whose attribute
`engine` is one; `RayEngine.ask` calls that object's methods."""


class EngineActor:
    """The actor's class; `start_engine` starts one. Calls overlap: see the concurrency groups above.

    A factory that fails does not fail the constructor: the error is kept and told, typed, to everybody who asks.

    Args:
        context: who this engine is.
        factory: builds it, in this process's main thread.
    """

    def __init__(self, context: EngineContext, factory: EngineFactory) -> None:
        self._context = context
        self._failed: bytes | None = None
        self._built: Any = None
        self._engine: EngineHandle | None = None
        try:
            self._built = factory(context)
            self._engine = engine_of(self._built)
        except Exception as error:
            self._failed = refusal(
                as_weightsync_error(error, EngineError, "building the engine failed", peer=context.engine_id), ""
            )

    def ready(self) -> bytes:
        """Answers node id, IP address and process id once the engine is built."""
        if self._failed is not None:
            return self._failed
        return answer([*here(), os.getpid()])

    def call(self, op: str, body: bytes, timeout_s: float) -> bytes:
        """Runs one step.

        Args:
            op: an `EngineOp`.
            body: JSON of its request.
            timeout_s: how long the caller waits.

        Returns:
            JSON: an `EngineReply`, or a typed error.
        """
        if self._failed is not None or self._engine is None:
            return self._failed or refusal(EngineError("the engine was closed"), "")
        try:
            step = _step(op)
            request = decode(body, REQUEST_TYPES[step], what=f"the request of {step}")
            return answer(self._engine.call(step, request, timeout_s=timeout_s))
        except Exception as error:
            return refusal(error, f"{op} failed", peer=self._context.engine_id)

    def ask(self, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[bytes, Any]:
        """Calls a method of what the factory built.

        Returns:
            An answer without a value (or with the error), and what the method returned.
        """
        if self._failed is not None:
            return self._failed, None
        try:
            return answer(), user_method(self._built, method)(*args, **options)
        except Exception as error:
            facts = {"peer": self._context.engine_id}
            return refusal(as_weightsync_error(error, EngineError, f"{method} failed", **facts), ""), None

    def close(self) -> bytes:
        """Closes what the factory built, where it can be closed; gives back what dead processes of this host held in
        shared memory (a colocated rank that was killed). Idempotent."""
        built, self._built, self._engine = self._built, None, None
        for part in (built, getattr(built, "engine", None)):
            with contextlib.suppress(Exception):  # the process is about to end
                getattr(part, "close", lambda: None)()
        with contextlib.suppress(OSError, WeightSyncError):
            reclaim_dead()
        return answer()


def start_engine(
    context: EngineContext, factory: EngineFactory, *, bundle: tuple[Any, int] | None = None, **options: Any
) -> Any:
    """Starts an engine actor and returns its handle at once. Its answer to `ready` says when it is built.

    Args:
        context: who it is.
        factory: see `EngineFactory`. A function of a module that Ray's workers can import, or one of `__main__`.
        bundle: placement group and number of a bundle.
        options: Ray's own; num_cpus is 0 unless told otherwise. With max_restarts Ray restarts the actor when it dies,
            and it takes part again under the same handle.
    """
    options.setdefault("num_cpus", 0)
    return start_actor(EngineActor, context, factory, groups=_GROUPS, bundle=bundle, **options)


def user_method(built: Any, method: str) -> Callable[..., Any]:
    """A public method of what a user's factory built.

    Raises:
        InvalidRequestError: there is none of that name.
    """
    found = None if method.startswith("_") else getattr(built, method, None)
    if not callable(found):
        raise InvalidRequestError(f"a {type(built).__name__} has no public method {method!r}")
    return found  # type: ignore[no-any-return]


def engine_of(built: Any) -> EngineHandle:
    """The engine that a user's factory built.

    Raises:
        ConfigError: it built none.
    """
    engine = getattr(built, "engine", built)
    if not callable(getattr(engine, "call", None)):
        raise ConfigError(
            "an engine factory returns an EngineHandle, or an object with one as `engine`, "
            f"not a {type(built).__name__}"
        )
    return engine  # type: ignore[no-any-return]


def _step(op: str) -> EngineOp:
    try:
        return EngineOp(op)
    except ValueError:
        raise InvalidRequestError(f"there is no step {op!r}; there are {', '.join(EngineOp)}") from None
