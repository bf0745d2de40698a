"""What a server with an adapter says when it is first looked at. All steps: tests/engines/test_lora_vllm.py."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.errors import EngineError
from weightsync.handles.two_kinds import VllmServerEngine
from weightsync.types import DescribeRequest, EngineOp, EngineReply


def test_an_adapter_that_can_not_be_described_is_not_described_as_its_base() -> None:
    """Seen red: the first description was the base's, under the adapter's name."""
    with contextlib.closing(VllmServerEngine("http://127.0.0.1:1")) as engine:
        parts: Any = engine
        parts._describe = lambda deadline: EngineReply(engine_id="base", world_size=1, serving=True)
        parts._adapters.state = lambda deadline: SimpleNamespace(adapters=(SimpleNamespace(model_id="actor"),))

        def lost(*_: Any, **__: Any) -> EngineReply:
            raise EngineError("its state is lost")

        parts._lora.call = lost
        with pytest.raises(EngineError, match="its state is lost"):
            engine.call(EngineOp.DESCRIBE, DescribeRequest(model_id="actor"), timeout_s=5)
