"""The inference side as the documents have it: loaders, and the client of the engines.

A document's actor has one call for weights, `update_named_weights(request_dict)` (or `handle_weight_update`,
`update_weights`). `ActorEngine` takes every step of a push through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from weightsync.adapters.compat.calls import answer_of, arguments_of, in_thread, patience_s, result_of
from weightsync.adapters.compat.receiver import Joining, WeightTransferReceiver
from weightsync.adapters.compat.sender import TransferRequest
from weightsync.adapters.compat.strategy import WeightTransferStrategy
from weightsync.config import WeightSyncConfig
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.remote import RemoteWeightLoader as _RemoteLoader
from weightsync.engine.worker import EngineWorker
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
from weightsync.load import base
from weightsync.load.sglang import SGLangWeightLoader as _SGLangLoader
from weightsync.load.vllm import VLLMWeightLoader as _VLLMLoader
from weightsync.load.whole import check_closed, check_complete, check_open, check_verified, stage, staging_for
from weightsync.tensors import spec_of
from weightsync.types import (
    AnyUpdateRequest,
    EngineHandle,
    EngineOp,
    EngineReply,
    EngineRequest,
    Full,
    HeldTensor,
    Manifest,
    TensorTable,
    Update,
    UpdateRequest,
    Version,
    WeightSyncInitInfo,
    WeightUpdateRequest,
)
from weightsync.types.engine import REQUEST_TYPES

_OPS = {kind: op for op, kind in REQUEST_TYPES.items()}
_CALLS = ("update_named_weights", "handle_weight_update", "update_weights")
_MOMENT_S = 1.0
_NO_ANSWER = "its handler answers nothing: return what receive_and_load_weights returns, and the proof is seen"


class WeightLoader:
    """Loads weights into the model of one worker. A subclass overrides `load_weights(named_tensors)`, or the plan's
    `load_weights(receiver, request)`, as a coroutine or not; it is called once a version, with all of it, while nothing
    is generated. One of ours (`ours`) loads as ours do.

    Generations go through `serving.generation()`.
    """

    def ours(self) -> base.WeightLoader:
        """Our loader under this one."""
        return _Theirs(self)

    @functools.cached_property
    def _loader(self) -> base.WeightLoader:
        return self.ours()

    @functools.cached_property
    def serving(self) -> EmbeddedEngine:
        """The engine that a push drives: its `version`, its `generation()`."""
        self._receiver: WeightTransferReceiver | None = None
        return EmbeddedEngine([EngineWorker(self._loader, strategies=self._strategy)], engine_id=type(self).__name__)

    async def load_weights(self, named_tensors: Any = None, request: Any = None) -> Any:
        """Loads tensors by name (all of a model's, at once, while the caller keeps generations away), pairs of a
        receiver, or one step of a push.

        Args:
            named_tensors: a dict; or a receiver, or what it yields; or a request that a receiver has parsed.

        Raises:
            ManifestMismatchError: tensors are missing, or don't fit. Nothing was changed.
            StateError: pushes load this model.
        """
        if named_tensors is None:
            named_tensors = request
        if isinstance(named_tensors, WeightTransferReceiver):
            return await named_tensors.receive_and_load_weights(request, self)
        if isinstance(named_tensors, AsyncIterator):
            named_tensors = dict([pair async for each in named_tensors for pair in _pairs(*each)])
        if isinstance(named_tensors, Mapping):
            return await in_thread(lambda: self._load(named_tensors))
        return await in_thread(lambda: self.step(named_tensors, None))

    def step(
        self, request: EngineRequest | WeightUpdateRequest, receiver: WeightTransferReceiver | None
    ) -> EngineReply:
        """Runs one step of a push, or the chunk of a header, on the model; of a chunk it receives, too.

        Raises:
            StateError: no receiver has come to this loader yet.
        """
        serving = self.serving
        self._receiver = receiver or self._receiver
        if self._receiver is None:
            raise StateError("no receiver has come here: receiver.receive_and_load_weights(request, loader)")
        is_header = isinstance(request, WeightUpdateRequest)
        step: Any = UpdateRequest(update=request) if is_header else request  # type: ignore[arg-type]
        op, timeout_s = _OPS[type(step)], self._receiver.timeout_s
        if op is EngineOp.INIT:
            timeout_s = max(timeout_s, self._receiver.join_timeout_s)
        return serving.call(op, step, timeout_s=timeout_s)

    def _strategy(self, name: str) -> Joining:
        assert self._receiver is not None
        return Joining(self._receiver, name)

    def _load(self, named_tensors: Mapping[str, torch.Tensor]) -> None:
        if "serving" in self.__dict__:
            raise StateError("pushes load this model: send the weights by one", state_left="nothing was changed")
        version = Version(run_id=f"by-hand-{uuid.uuid4().hex[:8]}", number=0)
        specs = TensorTable.of(spec_of(name, tensor) for name, tensor in named_tensors.items())
        self._loader.begin(Manifest(version=version, model_id="default", tensors=specs))
        try:
            self._loader.load_weights(Full(name=name, tensor=tensor) for name, tensor in named_tensors.items())
            self._loader.verify()
            self._loader.commit(version)
        except BaseException:
            self._loader.abort("it was not loaded")
            raise


class VLLMWeightLoader(WeightLoader):
    """Of one vLLM worker's model. What vLLM has cached of the old weights is dropped at each commit, where it is known
    how; else it is the caller's to drop, behind each sync. Nothing here pauses vLLM itself: see `serving`.

    Args:
        engine: that has the worker, as `engine.worker`: vLLM's own; or an object with a `model`.
        drop_cache: drops the prefix cache, e.g. `llm.reset_prefix_cache`; the engine's own where it has one. No
            coroutine: it is called in a thread beside the event loop.

    Raises:
        ConfigError: it is a coroutine.
    """

    def __init__(self, engine: Any, *, drop_cache: Callable[[], Any] | None = None) -> None:
        if inspect.iscoroutinefunction(drop_cache):
            raise ConfigError("drop_cache is called in a thread beside the event loop: a coroutine would drop nothing")
        own = getattr(engine, "reset_prefix_cache", None)
        self.engine = engine
        self._drop_cache = drop_cache or (None if inspect.iscoroutinefunction(own) else own)

    def ours(self) -> base.WeightLoader:
        worker, model = getattr(self.engine, "worker", self.engine), _model_of(self.engine)
        if not callable(getattr(model, "load_weights", None)):
            raise UnsupportedError(f"{type(model).__name__} has no load_weights", state_left="nothing was changed")
        model_config, vllm_config = (getattr(worker, name, None) for name in ("model_config", "vllm_config"))
        ours = _VllmDropping(model, model_config=model_config, vllm_config=vllm_config)
        ours.drop_cache = self._drop_cache
        return ours


class _VllmDropping(_VLLMLoader):
    drop_cache: Callable[[], Any] | None = None

    def commit(self, version: Version) -> None:
        if self.drop_cache is not None and self.drop_cache() is False:  # before: nothing is generated until the end
            why = "vLLM did not drop its prefix cache: requests run beside serving.generation()"
            raise StateError(why, state_left="nothing was changed")
        super().commit(version)


class SGLangWeightLoader(WeightLoader):
    """Of one SGLang worker's model, by its own `load_weights`.

    Args:
        engine: as for `VLLMWeightLoader`.
        tp_size: how many workers share a tensor.
    """

    def __init__(self, engine: Any, *, tp_size: int = 1) -> None:
        self.engine, self._tp_size = engine, tp_size

    def ours(self) -> base.WeightLoader:
        return _SGLangLoader(_model_of(self.engine), tp_size=self._tp_size)


class RemoteWeightLoader(WeightLoader):
    """Of an engine elsewhere, over HTTP.

    Args:
        engine: its URL (vllm+http://, sglang+http://, ..., see `handles.by_url`), or a handle.
        token, verify, timeout_s: see `engine.remote.RemoteWeightLoader`.
    """

    def __init__(
        self,
        engine: str | EngineHandle,
        *,
        token: str | None = None,
        verify: bool | str = True,
        timeout_s: float = 300.0,
    ) -> None:
        self.engine = engine
        self._options: dict[str, Any] = {"token": token, "verify": verify, "timeout_s": timeout_s}

    def ours(self) -> base.WeightLoader:
        return _RemoteLoader(self.engine, **self._options)


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


class _Theirs(base.WeightLoader):
    """Our bracket over a document's own `load_weights`: staged, then called once at the commit."""

    healthy = True

    def __init__(self, loader: WeightLoader) -> None:
        self._theirs = loader
        self._manifest: Manifest | None = None
        self._staging: dict[str, torch.Tensor] = {}
        self._came: set[str] = set()
        self._verified = False

    def begin(self, manifest: Manifest) -> None:
        check_closed(self._manifest)
        self._staging = staging_for(manifest.by_name(), self._staging)
        self._manifest, self._came, self._verified = manifest, set(), False

    def load_weights(self, updates: Iterable[Update]) -> None:
        stage(updates, check_open(self._manifest).by_name(), self._staging, self._came)

    def verify(self) -> None:
        check_complete(check_open(self._manifest).by_name(), self._came)
        self._verified = True

    def live_tensors(self) -> Iterator[HeldTensor]:
        raise UnsupportedError("what this loader does with tensors is its own affair")

    def commit(self, version: Version) -> None:
        check_verified(self._manifest, version, verified=self._verified)
        self.healthy = self._verified = False  # one that fails is not tried again
        call: Any = self._theirs.load_weights
        staging, self._staging = self._staging, {}  # theirs from here on: who knows where they keep it
        if len(inspect.signature(call).parameters) > 1:
            specs = check_open(self._manifest).tensors
            request = {
                "names": [spec.name for spec in specs],
                "dtypes": [spec.dtype for spec in specs],
                "shapes": [list(spec.shape) for spec in specs],
            }
            result_of(call(_pairwise(staging), request))
        else:
            result_of(call(staging))
        self._manifest, self.healthy = None, True

    def abort(self, reason: str) -> None:
        self._manifest, self._verified = None, False


async def _pairwise(tensors: Mapping[str, torch.Tensor]) -> AsyncIterator[tuple[str, torch.Tensor]]:
    for pair in tensors.items():
        yield pair


def _pairs(name: Any, tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """One pair, or those of a group that came as two lists."""
    yield from zip(name, tensor, strict=True) if isinstance(name, list | tuple) else [(name, tensor)]


def _model_of(engine: Any) -> Any:
    worker = getattr(engine, "worker", engine)
    return worker.get_model() if callable(getattr(worker, "get_model", None)) else getattr(worker, "model", worker)


def _handle(engine: Any, index: int, token: str | None) -> EngineHandle:
    if isinstance(engine, str):
        return engine_at(engine, token=token)
    if callable(getattr(engine, "call", None)) and hasattr(engine, "engine_id"):
        return engine  # type: ignore[no-any-return]
    return ActorEngine(engine, engine_id=f"actor-{index}")
