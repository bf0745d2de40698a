"""The engine process of `demo --lora`: a PEFT model that takes its base and its adapter as a set, and generates.

Started by `demo.lora`; prints one JSON line with its URLs, and one for each report that a line of its standard input
asks for. Ends when that closes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from typing import Any

import torch

from weightsync.demo.data import NUM_HELD_OUT_ROWS, PROMPT, SAMPLE_BYTES, ByteText
from weightsync.demo.engine import TOKEN_VARIABLE
from weightsync.demo.model import build_model, held_out_loss, model_size, sample
from weightsync.engine.adapter import AdapterEngine
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.engine.server import EngineServer
from weightsync.errors import NotServingError
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.load.peft import PeftAdapterLoader, PeftBaseLoader

BASE_ID, ADAPTER_ID = "base", "adapter"
_REST_S = 0.05


def adapted(model: torch.nn.Module, rank: int) -> Any:
    """The model with a LoRA adapter on attention and MLP; of the base nothing is changed.

    Raises:
        MissingDependencyError: peft is not installed.
    """
    from weightsync.peft_model import new_adapter

    return new_adapter(model, rank=rank, alpha=2 * rank, modules=("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"))


class LoraDemoEngine:
    """The model, both of its engines, and a thread that generates with the adapter all the time.

    Args:
        size: name of the model's size.
        rank: of the adapter.
    """

    def __init__(self, size: str, rank: int) -> None:
        self._model = adapted(build_model(size, dtype=torch.bfloat16, seed=1), rank).eval()
        self._batch = ByteText().held_out(num_rows=NUM_HELD_OUT_ROWS, row_length=model_size(size).row_length)
        self.base = EmbeddedEngine.of(PeftBaseLoader(self._model), engine_id="engine-base", model_id=BASE_ID)
        self.adapter = AdapterEngine(PeftAdapterLoader(self._model), self.base, engine_id="engine-adapter")
        self._served: dict[str, int] = {}
        self._num_refused = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._generate_all_the_time, name="rollout", daemon=True)
        self._thread.start()

    def report(self, number: int) -> dict[str, Any]:
        """Loss on the held-out text and a sample, under one version of the adapter; waits for that version."""
        looked = threading.Event()
        while self.adapter.version is None or self.adapter.version.number < number:
            if looked.wait(0.005):
                break
        with self.adapter.generation() as version:
            loss, text = held_out_loss(self._model, self._batch), sample(self._model, PROMPT, SAMPLE_BYTES)
        return {
            "version": None if version is None else version.number,
            "base": None if self.base.version is None else str(self.base.version),
            "loss": loss,
            "sample": PROMPT + text,
            "num_generations": dict(self._served),
            "num_refused": self._num_refused,
        }

    def close(self) -> None:
        """Stops generating."""
        self._ended.set()
        self._thread.join(60)
        self.adapter.close()
        self.base.close()

    def _generate_all_the_time(self) -> None:
        while not self._ended.wait(_REST_S):
            try:
                with self.adapter.generation(timeout_s=60.0) as version:
                    sample(self._model, PROMPT, SAMPLE_BYTES)
            except NotServingError:
                self._num_refused += 1
                continue
            key = "none" if version is None else str(version.number)
            self._served[key] = self._served.get(key, 0) + 1


def main() -> None:
    """Runs until standard input closes."""
    parser = argparse.ArgumentParser(description="The engine of `weightsync demo --lora`, which starts it.")
    parser.add_argument("--size", required=True)
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    token = os.environ[TOKEN_VARIABLE]
    demo = LoraDemoEngine(options.size, options.rank)
    servers = {BASE_ID: EngineServer(demo.base, token=token), ADAPTER_ID: EngineServer(demo.adapter, token=token)}
    service = RolloutService(
        {BASE_ID: demo.base, ADAPTER_ID: demo.adapter},
        RolloutConfig(service_id="engine-0", token=token, sender_token=token),
    )
    urls = {name: server.start() for name, server in servers.items()}
    _tell({"urls": urls, "service_url": service.start()})
    for line in sys.stdin:
        _tell(demo.report(int(line)))
    service.close()
    demo.close()
    for server in servers.values():
        server.close()


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
