"""The demo's engine as users run it: a vLLM server of its own, with the `weightsync` weight-transfer backend.

The server is a plain `vllm serve` on loopback: no patch, no worker extension. What is around it here only asks it
over HTTP, as a rollout worker would.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

import httpx
import torch

from weightsync.demo.data import PROMPT, SAMPLE_BYTES
from weightsync.demo.model import build_model, save_byte_tokenizer
from weightsync.demo.rollout import Rollout
from weightsync.errors import DeadlineExceededError, EngineError, EngineUnreachableError, MissingDependencyError
from weightsync.handles.stepped import SteppedEngine
from weightsync.handles.vllm import VllmEngine, VllmHttpApi
from weightsync.types import Deadline, DescribeRequest, EngineOp, Version

_MODEL_NAME = "demo"
_START_S = 240.0
_ASK_S = 60.0
_GUARD = 'exec 3<&0; (read -r word <&3 && exit; kill -TERM "-$0"; sleep 10; kill -KILL "-$0") >/dev/null 2>&1 &'
"""Ends a process group when whoever holds the other end of its standard input dies; a line there lets it go. It is
nobody's child: Ray kills an actor's children, here vLLM's front end, and what those started went on for ever."""


class VllmServer:
    """A vLLM OpenAI server in a process of its own, on loopback; a context manager that leaves nothing behind. Another
    engine's is a subclass with another `name`, `handle`, `check`, `_command` and `_environment`.

    Args:
        model: folder with config, weights and tokenizer.
    """

    name = "vLLM"

    def __init__(self, model: Path) -> None:
        self.check()
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.url = ""

    @staticmethod
    def handle(url: str, engine_id: str) -> SteppedEngine:
        """How a trainer, or a rollout service, reaches the server: by the routes that it has itself."""
        return VllmEngine(VllmHttpApi(url), engine_id=engine_id)

    @staticmethod
    def check() -> None:
        """Raises MissingDependencyError where it can't be started."""
        if importlib.util.find_spec("vllm") is None:
            raise MissingDependencyError("--engine vllm needs vLLM: make engines in a clone; on a GPU pip install vllm")

    def _command(self, port: int) -> tuple[str, ...]:
        return (
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)),
            *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", _MODEL_NAME),
            *("--weight-transfer-config", json.dumps({"backend": "weightsync"})),
            *("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "32", "--dtype", "bfloat16"),
        )

    def _environment(self) -> dict[str, str]:
        return {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TORCH_COMPILE_DISABLE": "1",  # of the sampler; --enforce-eager spares the model alone
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",  # vLLM serves its weight-update routes only so
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def __enter__(self) -> VllmServer:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command(port),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # For killpg, and not a session of its own: Linux schedules sessions as groups (sched_autogroup), and on two
            # cores threads of the trainers' group were seen to wait a minute for a core that vLLM's worker was using.
            process_group=0,
            env=self._environment(),
        )
        try:
            self._guard = subprocess.Popen(
                ("/bin/sh", "-c", _GUARD, str(self._process.pid)), stdin=subprocess.PIPE, process_group=0
            )
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            for sent in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, sent)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
        if self._guard is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.communicate(b"over\n", timeout=5)
        if self._log is not None:
            self._log.close()

    def check_alive(self) -> None:
        """Raises EngineError with the end of the server's log, if its process has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise EngineError(f"{self.name} ended with code {self._process.returncode}; it wrote:\n{self._tail()}")

    def _wait_until_ready(self) -> None:
        deadline = Deadline(_START_S)
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=2.0, trust_env=False).status_code == 200:
                    return
            self.check_alive()
            if deadline.expired:
                raise DeadlineExceededError(
                    f"{self.name} did not answer within {_START_S:g} s; it wrote:\n{self._tail()}"
                )
            threading.Event().wait(0.2)

    def _tail(self) -> str:
        assert self._log is not None
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4000))
        return self._log.read().decode(errors="replace")


class VllmDemoEngine(Rollout):
    """A vLLM server that holds the demo's model. Another engine's is a subclass with another `server`, `_scores` and
    `_text`.
    """

    server = VllmServer
    refusals = (EngineError, EngineUnreachableError)

    def __init__(self, engine_id: str, size: str) -> None:
        super().__init__(engine_id, size)
        self._rows: list[list[int]] = self._batch.tolist()
        self._stack = contextlib.ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-demo-")))
        # Another seed than the trainer's: what the engine serves at first is not what it is sent.
        build_model(size, dtype=torch.bfloat16, seed=1).save_pretrained(folder)  # type: ignore[operator]
        save_byte_tokenizer(folder)
        try:
            self._server = self._stack.enter_context(self.server(folder))
            self.url = self._server.url
            self._http = self._stack.enter_context(httpx.Client(base_url=self.url, timeout=_ASK_S, trust_env=False))
        except BaseException:
            self._stack.close()
            raise
        self.engine = self.server.handle(self.url, engine_id)

    def close(self) -> None:
        super().close()
        self._stack.close()

    def report(self) -> dict[str, Any]:
        """See `Rollout._told`; the loss is by the server's own log-probabilities."""
        before = self._version()
        with self._recorder.phase("evaluate"):
            scores = self._scores(self._rows)
            text = self._text()
        if self._version() != before:
            raise EngineError("the version changed while the engine was asked")
        return self._told(None if before is None else before.number, -sum(scores) / len(scores), text)

    def _version(self) -> Version | None:
        return self.engine.call(EngineOp.DESCRIBE, DescribeRequest(), timeout_s=_ASK_S).version

    def _scores(self, rows: list[list[int]]) -> list[float]:
        """Log-probability of each byte but the first, of all rows."""
        choices = self._complete(rows, max_tokens=1, prompt_logprobs=0)
        return [
            next(iter(scored.values()))["logprob"] for choice in choices for scored in choice["prompt_logprobs"][1:]
        ]

    def _text(self) -> str:
        text: str = self._complete([list(PROMPT.encode())], max_tokens=SAMPLE_BYTES)[0]["text"]
        return text

    def _complete(self, prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
        body = {"model": _MODEL_NAME, "prompt": prompts, "temperature": 0.0, **options}
        choices: list[dict[str, Any]] = self._ask("/v1/completions", body)["choices"]
        return choices

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        name = self.server.name
        try:
            response = self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise EngineUnreachableError(f"{name} does not answer: {error!r}", peer=self.engine.engine_id) from error
        if response.status_code != 200:
            raise EngineError(f"{name} answered {response.status_code}: {response.text[:500]}")
        return response.json()

    def _generate_once(self) -> None:
        with self._recorder.phase("generate"):
            self._text()

    def _refused(self) -> None:
        """Ends this process, which is nothing without its server; whoever started it shows what it wrote."""
        try:
            self._server.check_alive()
        except EngineError as error:
            sys.stderr.write(f"{error}\n")
            sys.stderr.flush()
            os._exit(1)
