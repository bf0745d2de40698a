"""VllmServerEngine and SGLangServerEngine: what `vllm+http://` and `sglang+http://` URLs give: whole models one way,
adapters by a `LoraEngine`.

One server may have several models: its base, and adapters. Each has a handle of its own, and which of the two ways it
goes follows from what it is asked for: `InitRequest.artifact` says what will come, and before that the server says
whether it has adapters of that model.
"""

from __future__ import annotations

import contextlib

import msgspec

from weightsync.errors import EngineUnreachableError, WeightSyncError
from weightsync.handles.lora_engine import AdapterClient, LoraEngine
from weightsync.handles.lora_messages import SGLANG_VARIABLE, AdapterState, LoadedAdapter
from weightsync.handles.sglang import SGLangEngine
from weightsync.handles.sglang_api import SGLangApi
from weightsync.handles.stepped import SteppedEngine
from weightsync.handles.vllm import VllmEngine
from weightsync.handles.vllm_api import VllmHttpApi
from weightsync.handles.vllm_lora import HOW_TO_START, VllmLoraEngine
from weightsync.types import (
    AbortRequest,
    AuditRequest,
    Deadline,
    DescribeRequest,
    EngineOp,
    EngineReply,
    EngineRequest,
    InitRequest,
    Manifest,
)

_START_SGLANG = (
    f"start SGLang with {SGLANG_VARIABLE}=1, --enable-lora, --max-lora-rank and --lora-target-modules, in an "
    "environment where weightsync is installed; its log says whether the plug-in is there"
)


class TwoKinds(SteppedEngine):
    """Stands before the class that takes whole models. Thread-safe."""

    _adapters: AdapterClient
    _lora: LoraEngine
    _has: str | None = None  # "model" or "lora"; None: nobody has said so

    @property
    def how_to_take_adapters(self) -> str:
        """How a server is started that takes them."""
        return f"{self._lora.how_to_start}; with {self._lora.slots_option} or more"

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        if isinstance(request, InitRequest):
            self._has = request.artifact
        elif isinstance(request, DescribeRequest) and self._has is None and request.model_id is not None:
            return self._first_look(request, Deadline(timeout_s))
        if self._has == "lora" and not isinstance(request, AuditRequest):
            return self._lora.call(op, request, timeout_s=timeout_s)
        if self._has is None and isinstance(request, AbortRequest):  # of whichever there was
            with contextlib.suppress(WeightSyncError):
                self._lora.call(op, request, timeout_s=timeout_s)
        reply = super().call(op, request, timeout_s=timeout_s)
        return msgspec.structs.replace(reply, artifacts=("model", "lora"))

    def adapters(self, *, timeout_s: float) -> AdapterState:
        """What the server has of adapters, and places for them.

        Raises:
            UnsupportedError: it takes none.
            WeightSyncError: it does not answer.
        """
        return self._adapters.state(Deadline(timeout_s))

    def close(self) -> None:
        self._lora.close()
        super().close()  # type: ignore[safe-super]

    def _first_look(self, request: DescribeRequest, deadline: Deadline) -> EngineReply:
        """What a server is that a service before this one may have given an adapter."""
        assert request.model_id is not None
        with contextlib.suppress(WeightSyncError):
            if any(each.model_id == request.model_id for each in self._adapters.state(deadline).adapters):
                self._has = "lora"
                self._lora.of_model(request.model_id)
        if self._has == "lora":  # and where that fails, nobody hears of the base instead
            return self._lora.call(EngineOp.DESCRIBE, request, timeout_s=deadline.check("answer"))
        reply = super().call(EngineOp.DESCRIBE, request, timeout_s=deadline.check("answer"))
        return msgspec.structs.replace(reply, artifacts=("model", "lora"))


class VllmServerEngine(TwoKinds, VllmEngine):
    """Thread-safe.

    Args:
        url: of the server.
        token: bearer token of the proxy before it, or vLLM's `--api-key`.
        verify: see `JsonClient`.
        engine_id: name for messages; the URL where not given.
        leased: whether it is asked, behind a description, if it answers under a lease alone.
        options: of `VllmEngine`.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        verify: bool | str = True,
        engine_id: str | None = None,
        leased: bool = False,
        **options: object,
    ) -> None:
        api = VllmHttpApi(url, token=token, verify=verify)
        self._http, self._is_asked = api, leased
        self._leased: bool | None = None  # as it said; None: it was not asked since it was away
        super().__init__(api, engine_id=engine_id, **options)  # type: ignore[arg-type]
        self._adapters = AdapterClient(url, how_to_start=HOW_TO_START, token=token, verify=verify)
        self._lora = VllmLoraEngine(api, self._adapters, engine_id=engine_id)

    def call(self, op: EngineOp, request: EngineRequest, *, timeout_s: float) -> EngineReply:
        deadline = Deadline(timeout_s)
        try:
            reply = super().call(op, request, timeout_s=timeout_s)
        except EngineUnreachableError:
            self._leased = None
            raise
        if not self._is_asked or not isinstance(request, DescribeRequest):
            return reply
        if self._leased is None:
            with contextlib.suppress(WeightSyncError):  # it is asked again
                self._leased = self._http.looks_at_lease(timeout_s=deadline.check("say whether it looks at a lease"))
        return msgspec.structs.replace(reply, leased=self._leased)


class SGLangLoraEngine(LoraEngine):
    """The adapters of one model in an SGLang server. Our plug-in in it (`engine.sglang_lora`) checks the base before it
    loads, and its workers prove what they loaded with the load itself. Thread-safe; see `LoraEngine` for arguments."""

    kind = "SGLang"
    how_to_start = _START_SGLANG
    slots_option = "--max-loras-per-batch 3"
    with_manifest = True

    def _check_at_workers(self, manifest: Manifest, deadline: Deadline) -> None:
        """They check with the load."""

    def _proved(self, manifest: Manifest, folder: str, held: LoadedAdapter, deadline: Deadline) -> str | None:
        return held.unprovable


class SGLangServerEngine(TwoKinds, SGLangEngine):
    """Thread-safe.

    Args:
        url: of the server.
        token: the server's `--admin-api-key`, or its `--api-key`.
        verify: see `JsonClient`.
        engine_id: name for messages; the URL where not given.
        options: of `SGLangEngine`.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        verify: bool | str = True,
        engine_id: str | None = None,
        **options: object,
    ) -> None:
        super().__init__(SGLangApi(url, token=token, verify=verify), engine_id=engine_id, **options)  # type: ignore[arg-type]
        self._adapters = AdapterClient(url, how_to_start=_START_SGLANG, token=token, verify=verify)
        self._lora = SGLangLoraEngine(url, self._adapters, engine_id=engine_id)
