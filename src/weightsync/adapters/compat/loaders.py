"""The loaders as the documents have them: what a worker does with the tensors that a push brings."""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from weightsync.adapters.compat.calls import in_thread, result_of
from weightsync.adapters.compat.receiver import Joining, WeightTransferReceiver
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.remote import RemoteWeightLoader as _RemoteLoader
from weightsync.engine.worker import EngineWorker
from weightsync.errors import ConfigError, StateError, UnsupportedError
from weightsync.load import base
from weightsync.load.sglang import SGLangWeightLoader as _SGLangLoader
from weightsync.load.vllm import VLLMWeightLoader as _VLLMLoader
from weightsync.load.whole import check_closed, check_complete, check_open, check_verified, stage, staging_for
from weightsync.tensors import spec_of
from weightsync.types import (
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
    WeightUpdateRequest,
)
from weightsync.types.engine import REQUEST_TYPES

_OPS = {kind: op for op, kind in REQUEST_TYPES.items()}


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
