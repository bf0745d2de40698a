"""The demo's engine process: generates all the time, takes weights when they come, reports on held-out text.

Started by `demo.launch`; prints one JSON line with its URLs and ends when its standard input closes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from typing import Any

import msgspec
import torch

from weightsync.demo.data import NUM_HELD_OUT_ROWS, PROMPT, SAMPLE_BYTES, ByteText
from weightsync.demo.model import build_model, held_out_loss, model_size, sample
from weightsync.demo.sglang_engine import SGLangDemoEngine
from weightsync.demo.vllm_engine import VllmDemoEngine
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.errors import NotServingError
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.load.module import ModuleWeightLoader
from weightsync.memory import LeaseReader
from weightsync.observe import Recorder
from weightsync.types.transfer_messages import MODES

MODEL_ID = "demo"
TOKEN_VARIABLE = "WEIGHTSYNC_DEMO_TOKEN"
REPORT_PATH = "/demo/report"
KINDS = ("embedded", "vllm", "sglang")
_REST_S = 0.05


class DemoEngine:
    """A model of bf16 weights behind an `EmbeddedEngine`, a thread that generates, and a report.

    Args:
        engine_id: name of this engine.
        size: name of the model's size.
        lease: of a fleet's service, see `EmbeddedEngine`.
        rest_s: pause between two generations: several engines share few cores.
    """

    def __init__(self, engine_id: str, size: str, *, lease: LeaseReader | None = None, rest_s: float = _REST_S) -> None:
        # Another seed than the trainer's: what the engine serves at first is not what it is sent.
        self._model = build_model(size, dtype=torch.bfloat16, seed=1).eval()
        self._batch = ByteText().held_out(num_rows=NUM_HELD_OUT_ROWS, row_length=model_size(size).row_length)
        self._recorder = Recorder(f"{engine_id}/rollout")
        self._served: dict[str, int] = {}
        self._rest_s = rest_s
        self._num_refused = 0
        self.engine = EmbeddedEngine.of(ModuleWeightLoader(self._model), engine_id=engine_id, lease=lease)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._generate_all_the_time, name="rollout", daemon=True)

    def start(self) -> None:
        """Starts to generate."""
        self._thread.start()

    def close(self) -> None:
        """Stops generating."""
        self._ended.set()
        self._thread.join(60)  # Python's end aborts the process where a thread is inside of torch still

    def report(self) -> dict[str, Any]:
        """Loss on the held-out text and a sample, both under one version; what was generated since the last report."""
        with self.engine.generation() as version, self._recorder.phase("evaluate"):
            loss = held_out_loss(self._model, self._batch)
            text = sample(self._model, PROMPT, SAMPLE_BYTES)
        return {
            "version": None if version is None else version.number,
            "loss": loss,
            "sample": PROMPT + text,
            "num_generations": dict(self._served),
            "num_refused": self._num_refused,
            "phases": msgspec.to_builtins(self._recorder.drain()),
        }

    def _generate_all_the_time(self) -> None:
        while not self._ended.wait(self._rest_s):
            try:
                with self.engine.generation(timeout_s=60.0) as version, self._recorder.phase("generate"):
                    sample(self._model, PROMPT, SAMPLE_BYTES)
            except NotServingError:
                self._num_refused += 1
                continue
            key = "none" if version is None else str(version.number)
            self._served[key] = self._served.get(key, 0) + 1


def start_engine(kind: str, engine_id: str, size: str) -> DemoEngine | VllmDemoEngine:
    """An engine of the demo in this process ("embedded"), or a server beside it ("vllm", "sglang")."""
    torch.set_num_threads(1)
    servers = {"vllm": VllmDemoEngine, "sglang": SGLangDemoEngine}
    return servers[kind](engine_id, size) if kind in servers else DemoEngine(engine_id, size)


def main() -> None:
    """Runs until standard input closes."""
    parser = argparse.ArgumentParser(description="The demo's engine process; `weightsync demo` starts it.")
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--engine-id", required=True)
    parser.add_argument("--size", required=True)
    parser.add_argument("--mode", choices=MODES, default="auto", help="how versions are pulled")
    options = parser.parse_args()
    demo = start_engine(options.kind, options.engine_id, options.size)
    token = os.environ[TOKEN_VARIABLE]
    server = EngineServer(demo.engine, token=token)
    service = RolloutService(
        {MODEL_ID: demo.engine},
        RolloutConfig(service_id=options.engine_id, token=token, sender_token=token, mode=options.mode),
    )

    def report() -> dict[str, Any]:
        said = demo.report()
        return {**said, "phases": [*said["phases"], *msgspec.to_builtins(service.recorder.drain())]}

    server.app.answer("GET", REPORT_PATH, report)
    url = server.start()
    service_url = service.start()
    demo.start()
    # Trainers speak to a vLLM or SGLang server itself; the server here then only reports.
    told: dict[str, str] = {"service_url": service_url}
    told |= {"url": demo.url if isinstance(demo, VllmDemoEngine) else url, "report_url": url + REPORT_PATH}
    sys.stdout.write(json.dumps({"kind": options.kind, "engine_id": options.engine_id, **told}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    service.close()
    demo.close()
    server.close()
    if isinstance(demo, DemoEngine):
        demo.engine.close()


if __name__ == "__main__":
    main()
