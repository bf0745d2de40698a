"""The inference actors as the documents have them, and the client of all of them.

A document's actor has one call for weights, `update_named_weights(request_dict)` (or `handle_weight_update`,
`update_weights`). `ActorEngine` takes every step of a push through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weightsync.adapters.compat.calls import answer_of, arguments_of, in_thread, patience_s
from weightsync.adapters.compat.loaders import WeightLoader
from weightsync.adapters.compat.receiver import WeightTransferReceiver
from weightsync.adapters.compat.sender import TransferRequest
from weightsync.adapters.compat.strategy import WeightTransferStrategy
from weightsync.config import WeightSyncConfig
from weightsync.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    StateError,
    UnsupportedError,
    as_weightsync_error,
)
from weightsync.handles.by_url import engine_at
from weightsync.handles.fanout import EngineFanout
from weightsync.types import (
    AnyUpdateRequest,
    EngineHandle,
    EngineOp,
    EngineReply,
    EngineRequest,
    Version,
    WeightSyncInitInfo,
)

_CALLS = ("update_named_weights", "handle_weight_update", "update_weights")
_MOMENT_S = 1.0
_NO_ANSWER = "its handler answers nothing: return what receive_and_load_weights returns, and the proof is seen"


class ActorEngine:
    """An `EngineHandle` of a document's actor: a Ray actor's handle, or an object here, whose coroutines then run in an
    event loop of each call. It has one worker: a receiver is of one.

    Args:
        actor: with one of `update_named_weights`, `handle_weight_update` and `update_weights`. Where it has a method
            `world_size`, that says how many workers it has.
        engine_id: a name for messages.

    Raises:
        ConfigError: it has none of them.
    """

    def __init__(self, actor: Any, *, engine_id: str) -> None:
        name = next((name for name in _CALLS if callable(getattr(actor, name, None))), None)
        if name is None:
            raise ConfigError(f"{engine_id} is neither an engine's handle, nor a URL, nor has it one of {_CALLS}")
        self._actor, self._name, self.engine_id = actor, name, engine_id
        self._group: str | None = None
        self._version: Version | None = None
        self._staged: Version | None = None

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        """See `EngineHandle`. What the actor's own code raises is an EngineError with its words."""
        if op is EngineOp.DESCRIBE and self._group is None:
            with contextlib.suppress(DeadlineExceededError):  # it makes its model, and is asked again before it joins
                self._check_workers(min(_MOMENT_S, timeout_s / 2))
            return self._assumed(op, request)  # it has no receiver yet that could parse a request
        body = msgspec.to_builtins(request)
        message = body["update"] if op is EngineOp.UPDATE_WEIGHTS else {"op": op.value, **body}
        answer = self._answer(self._name, message, timeout_s=timeout_s)
        if op is EngineOp.INIT:
            self._group, self._version = request.info.group_name, None  # type: ignore[union-attr]
        if answer is not None:
            return msgspec.structs.replace(msgspec.convert(answer, EngineReply), engine_id=self.engine_id)
        return self._assumed(op, request)

    def initialize(self, strategy: Any, cfg: Any, info: WeightSyncInitInfo, rank_offset: int) -> None:
        """The document's `initialize_weight_sync`, with the arguments that this actor's has.

        Raises:
            UnsupportedError: it has several workers.
        """
        timeout_s = patience_s(strategy.config(cfg))
        self._check_workers(timeout_s)
        given = {"strategy": strategy, "cfg": cfg, "sync_info": info, "rank_offset": rank_offset}
        takes = arguments_of(self._actor, "initialize_weight_sync")
        named = {name: value for name, value in given.items() if takes is None or name in takes}
        answer_of(self._actor, "initialize_weight_sync", **named, timeout_s=timeout_s)

    def _check_workers(self, timeout_s: float) -> None:
        if not callable(getattr(self._actor, "world_size", None)):
            return
        if (size := self._answer("world_size", timeout_s=timeout_s)) != 1:
            raise UnsupportedError(
                f"{self.engine_id} has {size} workers, and an actor under the documents' names has one: name the "
                "engine by a URL (vllm+http://HOST:PORT), or give a handle of ours, which reaches all of them",
                state_left="nothing was changed",
            )

    def _answer(self, method: str, *args: Any, timeout_s: float) -> Any:
        try:
            return answer_of(self._actor, method, *args, timeout_s=timeout_s)
        except BaseException as error:
            raise as_weightsync_error(error, EngineError, f"its {method} failed", peer=self.engine_id) from error

    def _assumed(self, op: EngineOp, request: Any) -> EngineReply:
        """What can be said of an actor that raised nothing and answered nothing."""
        match op:
            case EngineOp.BEGIN:
                self._staged = request.manifest.version
            case EngineOp.COMMIT:
                self._version = self._staged
            case EngineOp.ABORT:
                self._group = None
        return EngineReply(engine_id=self.engine_id, group=self._group, version=self._version, unprovable=_NO_ANSWER)


class InferenceEngine:
    """A document's inference actor, whole: what `initialize_weight_sync` and `update_named_weights` do there."""

    def __init__(self, loader: WeightLoader) -> None:
        self.loader = loader
        self.receiver: WeightTransferReceiver | None = None

    async def initialize_weight_sync(
        self, strategy: WeightTransferStrategy, sync_info: WeightSyncInitInfo, rank_offset: int, cfg: Any = None
    ) -> None:
        """Makes the receiver; see `WeightTransferStrategy.create_receiver`."""
        self.receiver = await strategy.create_receiver(cfg, sync_info, rank_offset)

    async def update_named_weights(self, request_dict: Mapping[str, Any]) -> dict[str, Any]:
        """One step of a push; its answer has the proof.

        Raises:
            StateError: `initialize_weight_sync` comes first.
        """
        if self.receiver is None:
            raise StateError("initialize_weight_sync comes first", state_left="nothing was changed")
        return await self.receiver.receive_and_load_weights(self.receiver.parse_request(request_dict), self.loader)


class InferenceEngineClient(EngineFanout):
    """The documents' client: our fan-out, with their calls.

    Args:
        engines: in the order of their ranks: handles of ours, URLs, `InferenceEngine`s, Ray's actor handles.
    """

    _step_s = WeightSyncConfig().transfer.transfer_timeout_s

    def __init__(self, engines: Sequence[Any], *, token: str | None = None) -> None:
        handles = [_handle(engine, index, token) for index, engine in enumerate(engines)]
        super().__init__(handles)
        self._own = [handle for handle, engine in zip(handles, engines, strict=True) if isinstance(engine, str)]

    def close(self) -> None:
        """Ends the connections to engines that were named by URLs. Idempotent."""
        for handle in self._own:
            getattr(handle, "close", lambda: None)()

    async def initialize_weight_sync(
        self, strategy: WeightTransferStrategy, sync_info: WeightSyncInitInfo, cfg: Any = None
    ) -> None:
        """Has every actor make its receiver, with the rank that follows from the sizes before it. Engines of ours
        need not be told: they learn all of it from the sender. From here on a chunk has the config's deadline."""
        self._step_s = strategy.config(cfg).transfer.transfer_timeout_s
        rank = 1
        for engine in self._engines.values():
            if isinstance(engine, ActorEngine):
                await in_thread(functools.partial(engine.initialize, strategy, cfg, sync_info, rank))
                rank += 1
            else:
                sizes = EngineFanout([engine]).get_world_sizes
                rank += sum((await in_thread(lambda sizes=sizes: sizes(timeout_s=10.0))).values())  # type: ignore[misc]

    async def update_named_weights(self, request: AnyUpdateRequest) -> Mapping[str, EngineReply]:
        """Announces one chunk to every engine; done when their loaders have let go of it."""
        return await asyncio.wrap_future(super().update_weights(request, timeout_s=self._step_s))

    def update_weights(self, request: Any = None, *, timeout_s: float | None = None, **legacy: Any) -> Any:
        """A sender's announcement of a chunk, as ours; or all that a sender was given (`get_request()`, or its fields),
        to be awaited: it is moved then.

        Raises:
            ConfigError: names alone, without the sender that has the weights.
        """
        if isinstance(request, TransferRequest):
            return request.sender.send_pending(self)
        if request is None:
            if "sender" not in legacy:
                raise ConfigError("update_weights takes what a sender's get_request() gave: names alone move nothing")
            return legacy["sender"].send_pending(self)
        return super().update_weights(request, timeout_s=self._step_s if timeout_s is None else timeout_s)


def _handle(engine: Any, index: int, token: str | None) -> EngineHandle:
    if isinstance(engine, str):
        return engine_at(engine, token=token)
    if callable(getattr(engine, "call", None)) and hasattr(engine, "engine_id"):
        return engine  # type: ignore[no-any-return]
    return ActorEngine(engine, engine_id=f"actor-{index}")
