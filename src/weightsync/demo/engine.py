"""The demo's engine process: generates all the time, takes weights when they come, reports on held-out text.

Started by `demo.launch`; prints one JSON line with its URLs and ends when its standard input closes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec
import torch

from weightsync.demo.data import PROMPT, SAMPLE_BYTES
from weightsync.demo.model import build_model, held_out_loss, sample
from weightsync.demo.processes import TOKEN_VARIABLE, given, tell
from weightsync.demo.rollout import Rollout
from weightsync.demo.sglang_engine import SERVED
from weightsync.demo.vllm_engine import VllmDemoEngine
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.errors import NotServingError
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.load.module import ModuleWeightLoader
from weightsync.memory import LeaseReader

MODEL_ID = "demo"
_REPORT_PATH = "/demo/report"


class DemoEngine(Rollout):
    """A model of bf16 weights behind an `EmbeddedEngine`.

    Args:
        lease: of a fleet's service, see `EmbeddedEngine`.
    """

    refusals = (NotServingError,)
    end_s = 60.0  # Python's end aborts the process where a thread is inside of torch still

    def __init__(self, engine_id: str, size: str, *, lease: LeaseReader | None = None, rest_s: float = 0.05) -> None:
        super().__init__(engine_id, size, rest_s=rest_s)
        # Another seed than the trainer's: what the engine serves at first is not what it is sent.
        self._model = build_model(size, dtype=torch.bfloat16, seed=1).eval()
        self.engine = EmbeddedEngine.of(ModuleWeightLoader(self._model), engine_id=engine_id, lease=lease)

    def report(self) -> dict[str, Any]:
        with self.engine.generation() as version, self._recorder.phase("evaluate"):
            loss, text = held_out_loss(self._model, self._batch), sample(self._model, PROMPT, SAMPLE_BYTES)
        return self._told(None if version is None else version.number, loss, text)

    def close(self) -> None:
        super().close()
        self.engine.close()

    def _generate_once(self) -> None:
        with self.engine.generation(timeout_s=60.0), self._recorder.phase("generate"):
            sample(self._model, PROMPT, SAMPLE_BYTES)


def start_engine(kind: str, engine_id: str, size: str) -> DemoEngine | VllmDemoEngine:
    """An engine of the demo in this process ("embedded"), or a server beside it ("vllm", "sglang")."""
    torch.set_num_threads(1)
    return SERVED[kind](engine_id, size) if kind in SERVED else DemoEngine(engine_id, size)


def main() -> None:
    options = given()
    demo = start_engine(options.kind, options.engine_id, options.size)
    token = os.environ[TOKEN_VARIABLE]
    server = EngineServer(demo.engine, token=token)
    service = RolloutService(
        {MODEL_ID: demo.engine},
        RolloutConfig(service_id=options.engine_id, token=token, sender_token=token, mode=options.mode),
    )

    def report() -> dict[str, Any]:
        facts = demo.report()
        return {**facts, "phases": [*facts["phases"], *msgspec.to_builtins(service.recorder.drain())]}

    server.app.answer("GET", _REPORT_PATH, report)
    url = server.start()
    service_url = service.start()
    demo.start()
    tell({
        "kind": options.kind, "engine_id": options.engine_id, "service_url": service_url,
        "report_url": url + _REPORT_PATH,
        # Trainers speak to a vLLM or SGLang server itself; the server here then only reports.
        "url": demo.url if isinstance(demo, VllmDemoEngine) else url,
    })  # fmt: skip
    sys.stdin.read()
    service.close()
    server.close()
    demo.close()


if __name__ == "__main__":
    main()
