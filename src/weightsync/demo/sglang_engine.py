"""The demo's engine as an SGLang server of its own; on CPUs from the environment of `make engines-sglang`."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from typing import Any

from weightsync.demo.data import PROMPT, SAMPLE_BYTES
from weightsync.demo.vllm_engine import VllmDemoEngine, VllmServer
from weightsync.errors import MissingDependencyError
from weightsync.handles.sglang import SGLangEngine
from weightsync.handles.sglang_api import SGLangApi

COMMAND_VARIABLE = "WEIGHTSYNC_SGLANG"


class SGLangServer(VllmServer):
    """See `VllmServer`. The command is that of `WEIGHTSYNC_SGLANG`; where there is none, this environment's SGLang."""

    name = "SGLang"

    @staticmethod
    def handle(url: str, engine_id: str) -> SGLangEngine:
        return SGLangEngine(SGLangApi(url), engine_id=engine_id)

    @staticmethod
    def check() -> None:
        if COMMAND_VARIABLE not in os.environ and importlib.util.find_spec("sglang") is None:
            raise MissingDependencyError(
                "--engine sglang needs SGLang: in a clone on a CPU make engines-sglang, and "
                f"{COMMAND_VARIABLE}=tests/engines/sglang_cpu/serve.sh before the command; on a GPU pip install sglang"
            )

    def _command(self, port: int) -> tuple[str, ...]:
        start = os.environ.get(COMMAND_VARIABLE) or f"{shlex.quote(sys.executable)} -m sglang.launch_server"
        return (
            *shlex.split(start),
            *("--model-path", str(self._model), "--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init"),
            *("--dtype", "float32"),  # the values of the bf16 weights, as the embedded engine computes
        )

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "HF_HUB_OFFLINE": "1"}


class SGLangDemoEngine(VllmDemoEngine):
    server = SGLangServer

    def _scores(self, rows: list[list[int]]) -> list[float]:
        replies = self._generate(rows, 1, return_logprob=True, logprob_start_len=0)
        return [scored[0] for each in replies for scored in each["meta_info"]["input_token_logprobs"][1:]]

    def _text(self) -> str:
        (reply,) = self._generate([list(PROMPT.encode())], SAMPLE_BYTES)
        return bytes(reply["output_ids"]).decode("utf-8", "replace")

    def _generate(self, prompts: list[list[int]], num_tokens: int, **options: Any) -> list[dict[str, Any]]:
        sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        replies: list[dict[str, Any]] = self._ask(
            "/generate", {"input_ids": prompts, "sampling_params": sampling, **options}
        )
        return replies


SERVED = {"vllm": VllmDemoEngine, "sglang": SGLangDemoEngine}
"""Engines that are servers of their own, by the names that the command has for them."""
