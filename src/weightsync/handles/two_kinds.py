"""TwoKinds: what a URL of vLLM or SGLang gives: whole models one way, adapters by a `LoraEngine`.

One server may have several models: its base, and adapters. Each has a handle of its own, and which of the two ways it
goes follows from what it is asked for: `InitRequest.artifact` says what will come, and before that the server says
whether it has adapters of that model.
"""

from __future__ import annotations

import contextlib

import msgspec

from weightsync.errors import WeightSyncError
from weightsync.handles.lora_engine import AdapterClient, LoraEngine
from weightsync.handles.lora_messages import AdapterState
from weightsync.handles.stepped import SteppedEngine
from weightsync.types import (
    AbortRequest,
    AuditRequest,
    Deadline,
    DescribeRequest,
    EngineOp,
    EngineReply,
    EngineRequest,
    InitRequest,
)


class TwoKinds(SteppedEngine):
    """Stands before the class that takes whole models. Thread-safe."""

    _adapters: AdapterClient
    _lora: LoraEngine
    _has: str | None = None  # "model" or "lora"; None: nobody has said so

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
                return self._lora.call(EngineOp.DESCRIBE, request, timeout_s=deadline.check("answer"))
        reply = super().call(EngineOp.DESCRIBE, request, timeout_s=deadline.check("answer"))
        return msgspec.structs.replace(reply, artifacts=("model", "lora"))
