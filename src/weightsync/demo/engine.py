"""The demo's engine process: generates all the time, takes weights when they come, reports on held-out text.

Started by `demo.launch`; prints one JSON line with its URL and ends when its standard input closes.
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

from weightsync.demo.data import ByteText
from weightsync.demo.model import build_model, held_out_loss, model_size, sample
from weightsync.errors import NotServingError
from weightsync.load.module import ModuleWeightLoader
from weightsync.observe import Recorder
from weightsync.rollout.engine import EmbeddedEngine
from weightsync.rollout.server import EngineServer

TOKEN_VARIABLE = "WEIGHTSYNC_DEMO_TOKEN"
REPORT_PATH = "/demo/report"
NUM_HELD_OUT_ROWS = 16
_PROMPT = "def "
_SAMPLE_BYTES = 24
_REST_S = 0.05


class DemoEngine:
    """A bf16 model behind an `EmbeddedEngine`, a thread that generates, and a report.

    Args:
        engine_id: name of this engine.
        size: name of the model's size.
    """

    def __init__(self, engine_id: str, size: str) -> None:
        # Another seed than the trainer's: what the engine serves at first is not what it is sent.
        self._model = build_model(size, dtype=torch.bfloat16, seed=1).eval()
        self._batch = ByteText().held_out(num_rows=NUM_HELD_OUT_ROWS, row_length=model_size(size).row_length)
        self._recorder = Recorder(f"{engine_id}/rollout")
        self._served: dict[str, int] = {}
        self._num_refused = 0
        self.engine = EmbeddedEngine.of(ModuleWeightLoader(self._model), engine_id=engine_id)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._generate_all_the_time, name="rollout", daemon=True)

    def start(self) -> None:
        """Starts to generate."""
        self._thread.start()

    def close(self) -> None:
        """Stops generating."""
        self._ended.set()
        self._thread.join(5)

    def report(self) -> dict[str, Any]:
        """Loss on the held-out text and a sample, both under one version; what was generated since the last report."""
        with self.engine.generation() as version, self._recorder.phase("evaluate"):
            loss = held_out_loss(self._model, self._batch)
            text = sample(self._model, _PROMPT, _SAMPLE_BYTES)
        return {
            "version": None if version is None else version.number,
            "loss": loss,
            "sample": _PROMPT + text,
            "num_generations": dict(self._served),
            "num_refused": self._num_refused,
            "phases": msgspec.to_builtins(self._recorder.drain()),
        }

    def _generate_all_the_time(self) -> None:
        while not self._ended.wait(_REST_S):
            try:
                with self.engine.generation(timeout_s=60.0) as version, self._recorder.phase("generate"):
                    sample(self._model, _PROMPT, _SAMPLE_BYTES)
            except NotServingError:
                self._num_refused += 1
                continue
            key = "none" if version is None else str(version.number)
            self._served[key] = self._served.get(key, 0) + 1


def main() -> None:
    """Runs until standard input closes."""
    parser = argparse.ArgumentParser(description="The demo's engine process; `weightsync demo` starts it.")
    parser.add_argument("--engine-id", required=True)
    parser.add_argument("--size", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    demo = DemoEngine(options.engine_id, options.size)
    server = EngineServer(demo.engine, token=os.environ[TOKEN_VARIABLE])
    server.app.add_api_route(REPORT_PATH, demo.report, methods=["GET"])
    url = server.start()
    demo.start()
    sys.stdout.write(json.dumps({"url": url}) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    demo.close()
    server.close()
    demo.engine.close()


if __name__ == "__main__":
    main()
