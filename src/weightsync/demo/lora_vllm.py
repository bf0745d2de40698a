"""The engine process of `demo --lora --engine vllm`: a vLLM server that serves the base from its checkpoint, and a
service that gives it each version of the adapter.

Started by `demo.lora`; prints one JSON line with its service's URL, and one for each report that a line of its standard
input asks for. Ends when that closes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from weightsync.demo.data import PROMPT, SAMPLE_BYTES
from weightsync.demo.lora_engine import ADAPTER_ID, BASE_ID, serve
from weightsync.demo.processes import TOKEN_VARIABLE, given
from weightsync.demo.rollout import Rollout
from weightsync.demo.vllm_engine import VllmServer
from weightsync.errors import EngineError
from weightsync.handles.lora_messages import MIDDLEWARE
from weightsync.handles.two_kinds import TwoKinds, VllmServerEngine
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.types import Deadline

_ASK_S = 60.0
_SLOTS = 3


class LoraVllmServer(VllmServer):
    def _command(self, port: int) -> tuple[str, ...]:
        return (
            *super()._command(port),
            *("--served-model-name", BASE_ID, "--enable-lora", "--max-loras", str(_SLOTS), "--max-lora-rank", "64"),
            *("--middleware", MIDDLEWARE),
        )

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}


class LoraVllmEngine(Rollout):
    """A server that generates with the adapter."""

    refusals = (EngineError, httpx.HTTPError)
    _unknown: tuple[int, ...] = (404,)
    """What the server answers for a model that it has not."""

    def __init__(self, url: str, size: str) -> None:
        super().__init__("engine-0", size)
        self._http = httpx.Client(base_url=url, timeout=_ASK_S, trust_env=False)
        # vLLM's CPU build (0.32) ends at prompt_logprobs of an adapter beside a generation
        self._turn = threading.Lock()
        self._has_one = threading.Event()

    def report(self, number: int) -> dict[str, Any]:
        """See `Rollout._told`, of this version; the loss is by the server's own log-probabilities."""
        deadline = Deadline(_ASK_S)
        while (version := self._generated([1], 1)[1]) != number:
            deadline.check(f"version {number} in the answers, which are by {version}")
            threading.Event().wait(0.02)
        self._has_one.set()
        scores: list[float] = []
        with self._turn:
            for row in self._batch.tolist():
                row_scores, version = self._scores(row)
                scores += row_scores
        text = self._generated(list(PROMPT.encode()), SAMPLE_BYTES)[0]
        return {**self._told(version, -sum(scores) / len(scores), text), "base": "its checkpoint"}

    def close(self) -> None:
        super().close()
        self._http.close()

    def _scores(self, row: list[int]) -> tuple[list[float], int | None]:
        """Log-probabilities of a row's tokens but the first, and the number of the version that made them."""
        (choice,), version = self._asked(row, max_tokens=1, prompt_logprobs=0)
        return [next(iter(each.values()))["logprob"] for each in choice["prompt_logprobs"][1:]], version

    def _generated(self, prompt: list[int], num_tokens: int) -> tuple[str, int | None]:
        """A sample, and the number of the version that made it; None before the first."""
        choices, version = self._asked(prompt, max_tokens=num_tokens)
        return choices[0]["text"] if choices else "", version

    def _asked(self, prompt: list[int], **options: Any) -> tuple[list[dict[str, Any]], int | None]:
        body = {"model": ADAPTER_ID, "prompt": prompt, "temperature": 0.0, **options}
        reply, version = self._ask("/v1/completions", body)
        return reply["choices"] if reply else [], version

    def _ask(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """An answer, and the number of the version that made it; None before the first."""
        response = self._http.post(path, json=body)
        if response.status_code in self._unknown and not self._has_one.is_set():
            return {}, None
        if response.status_code != 200:
            raise EngineError(f"the server answered {response.status_code}: {response.text[:500]}")
        return response.json(), int(response.headers["x-weightsync-version"].rpartition("/")[2])

    def _generate_once(self) -> None:
        if self._has_one.is_set():
            with self._turn:
                self._generated(list(PROMPT.encode()), SAMPLE_BYTES)


def main(server_kind: type[VllmServer], engine_kind: type[LoraVllmEngine], handle: Callable[[str], TwoKinds]) -> None:
    options = given()
    token = os.environ[TOKEN_VARIABLE]
    with server_kind(Path(options.model)) as server, contextlib.closing(handle(server.url)) as engine:
        config = RolloutConfig(service_id="engine-0", token=token, sender_token=token)
        with contextlib.closing(engine_kind(server.url, options.size)) as demo:
            demo.start()
            serve(RolloutService({ADAPTER_ID: engine}, config), demo.report)


if __name__ == "__main__":
    main(LoraVllmServer, LoraVllmEngine, lambda url: VllmServerEngine(url, engine_id="engine-0"))
