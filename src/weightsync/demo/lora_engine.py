"""The engine process of `demo --lora`: a PEFT model that takes its base and its adapter as a set, and generates.

Started by `demo.lora`; prints one JSON line with its URLs, and one for each report that a line of its standard input
asks for. Ends when that closes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from weightsync.demo.engine import DemoEngine
from weightsync.demo.model import build_model
from weightsync.demo.processes import TOKEN_VARIABLE, given, tell
from weightsync.demo.rollout import Rollout
from weightsync.engine.adapter import AdapterEngine
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.load.peft import PeftAdapterLoader, PeftBaseLoader
from weightsync.peft_model import new_adapter

BASE_ID, ADAPTER_ID = "base", "adapter"


def adapted(model: torch.nn.Module, rank: int) -> Any:
    """The model with a LoRA adapter on attention and MLP; of the base nothing is changed.

    Raises:
        MissingDependencyError: peft is not installed.
    """
    return new_adapter(model, rank=rank, alpha=2 * rank, modules=("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"))


class LoraDemoEngine(DemoEngine):
    """The model with an adapter, and both of its engines."""

    def __init__(self, size: str, rank: int) -> None:
        Rollout.__init__(self, "engine-adapter", size)
        self._model = adapted(build_model(size, dtype=torch.bfloat16, seed=1), rank).eval()
        self.base = EmbeddedEngine.of(PeftBaseLoader(self._model), engine_id="engine-base", model_id=BASE_ID)
        self.engine = AdapterEngine(PeftAdapterLoader(self._model), self.base, engine_id="engine-adapter")

    def report(self) -> dict[str, Any]:
        return {**super().report(), "base": str(self.base.version)}

    def close(self) -> None:
        super().close()
        self.base.close()


def serve(service: RolloutService, report: Callable[[int], dict[str, Any]], **facts: Any) -> None:
    """Says where the service is, and `facts`; then a report for each number of a version that a line of the standard
    input names, until that closes."""
    with contextlib.closing(service):
        tell({"service_url": service.start(), **facts})
        for line in sys.stdin:
            tell(report(int(line)))


def main() -> None:
    options = given()
    torch.set_num_threads(1)
    token = os.environ[TOKEN_VARIABLE]
    demo = LoraDemoEngine(options.size, options.rank)
    engines = {BASE_ID: demo.base, ADAPTER_ID: demo.engine}
    servers = {name: EngineServer(engine, token=token) for name, engine in engines.items()}
    service = RolloutService(engines, RolloutConfig(service_id="engine-0", token=token, sender_token=token))
    demo.start()
    serve(service, lambda _: demo.report(), urls={name: server.start() for name, server in servers.items()})
    for server in servers.values():
        server.close()
    demo.close()


if __name__ == "__main__":
    main()
