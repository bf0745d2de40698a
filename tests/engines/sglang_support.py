"""Real SGLang servers on a CPU for tests: a tiny Qwen2, a server, and what a fresh server of a checkpoint answers.

SGLang has an environment of its own (`make engines-sglang`); `sglang_cpu/serve.sh` starts it. The oracle: a server's
log-probabilities of fixed prompts, and SGLang's own checksum of its live weights, against those of a server that was
started from that version's checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from torch import nn

from tests.engines.vllm_support import as_the_cpu_is
from tests.multiproc.trainers import VOCAB
from tests.standins.processes import free_port
from weightsync.handles.sglang import checksum_of
from weightsync.handles.sglang_api import SGLangApi
from weightsync.handles.sglang_messages import LOADER

ROOT = Path(__file__).parents[2]
SERVE = ROOT / "tests" / "engines" / "sglang_cpu" / "serve.sh"
PROMPTS: tuple[tuple[int, ...], ...] = (
    tuple((7 * i + 3) % VOCAB for i in range(24)),
    tuple((11 * i + 5) % VOCAB for i in range(40)),
)
SAME, DIFFERENT = 1e-5, 1e-3
NUM_NEXT = 8
START_S = 400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """What a server answers.

    Attributes:
        logprobs: of the prompts.
        next: log-probabilities of the likeliest tokens after each prompt; SGLang uses its prefix cache for these.
        checksum: of live weights.
    """

    logprobs: list[list[float]]
    next: list[list[float]]
    checksum: str


sglang_is_there = (ROOT / ".venv-sglang" / ".installed").exists() or "WEIGHTSYNC_SGLANG_PYTHON" in os.environ
NEEDS_SGLANG = "SGLang is not installed: make engines-sglang"


def build_model(seed: int = 0) -> nn.Module:
    """A Qwen2 of two layers, in float32, whose biases are not the zeros that they begin with."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=VOCAB, max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(".bias"):
                tensor.normal_(std=0.2)
    return model


def save_checkpoint(folder: Path, model: nn.Module) -> Path:
    """A checkpoint that SGLang starts from, made without the library."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict()  # type: ignore[union-attr,operator]
    config.update(architectures=[type(model).__name__], dtype="float32", torch_dtype="float32")
    (folder / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


class Starter:
    """The process that servers are forks of; started at its first use, ended by `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """A server's process id."""
        if self._process is None:
            self._process = subprocess.Popen(
                [str(SERVE), "--starter"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
                env=as_the_cpu_is(), process_group=0,
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        told = self._process.stdout.readline()
        assert told, "SGLang can't be imported"
        return int(told)

    def close(self) -> None:
        """Ends it, and with it every server that it has started."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(20)


class Server:
    """An SGLang server in a process group of its own, on a port that stays the same when it is started again.

    Args:
        starter: what it is a fork of.
        checkpoint: what it serves at first.
        folder: for its log.
        tp: tensor-parallel size.
        options: further words of its command line.
        env: further variables of its environment.
    """

    def __init__(
        self, starter: Starter, checkpoint: Path, folder: Path, *, tp: int = 1, options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint = checkpoint
        self._starter = starter
        self._port = free_port()
        self._tp = tp
        self._options = tuple(options)
        self._env = dict(env or {})
        self._log = folder / "sglang.log"
        self.url = f"http://127.0.0.1:{self._port}"
        self.http = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)
        self.api = SGLangApi(self.url)
        self._pid = 0

    def start(self) -> None:
        """Starts it; `wait_until_ready` waits."""
        arguments = (
            *("--model-path", str(self.checkpoint), "--dtype", "float32", "--custom-weight-loader", LOADER),
            *("--host", "127.0.0.1", "--port", str(self._port), "--tp-size", str(self._tp)),
            *self._options,
        )
        # without it SGLang wants a NUMA node for each worker
        cores = [str(rank % (os.cpu_count() or 1)) for rank in range(self._tp)]
        environment = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(cores)} if self._tp > 1 else {}
        environment |= self._env
        self._pid = self._starter.start(arguments, environment, self._log)

    def wait_until_ready(self) -> None:
        """Returns when the server answers."""
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get("/health", timeout=5.0).status_code == 200:
                    return
            assert _is_there(self._pid), f"SGLang ended:\n{self.tail()}"
            assert time.monotonic() < end, f"SGLang did not start within {START_S} s:\n{self.tail()}"
            time.sleep(0.2)  # between two looks

    def kill(self) -> None:
        """kill -9 of the server and everything it started. Idempotent."""
        while self._pid and _is_there(self._pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            time.sleep(0.02)  # between two looks
        self._pid = 0

    def close(self) -> None:
        """Ends it and all connections."""
        self.kill()
        self.http.close()
        self.api.close()

    def generate(self, prompt: Sequence[int], **sampling: Any) -> dict[str, Any]:
        """One generation with the log-probabilities of its prompt."""
        response = self.http.post("/generate", json=generation(prompt, **sampling))
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def logprobs(self, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[float]]:
        """Log-probability of every prompt token but the first."""
        told = [self.generate(prompt)["meta_info"]["input_token_logprobs"] for prompt in prompts]
        return [[float(each[0]) for each in row[1:]] for row in told]

    def next(self, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[float]]:
        """Log-probabilities of the likeliest tokens after each prompt, whose beginnings may be cached."""
        told = []
        for prompt in prompts:
            body = {**generation(prompt, max_new_tokens=NUM_NEXT), "logprob_start_len": -1}
            response = self.http.post("/generate", json=body)
            assert response.status_code == 200, response.text
            told.append([float(each[0]) for each in response.json()["meta_info"]["output_token_logprobs"]])
        return told

    def truth(self) -> Truth:
        """What it answers now."""
        return Truth(logprobs=self.logprobs(), next=self.next(), checksum=self.checksum())

    def checksum(self) -> str:
        """Of its live weights, as the handle has it."""
        return checksum_of(self.api.checksum(timeout_s=30))

    def tail(self, chars: int = 6000) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-chars:]


def generation(prompt: Sequence[int], **sampling: Any) -> dict[str, Any]:
    """The body of a /generate request: greedy, one token where nothing else is said."""
    return {
        "input_ids": list(prompt),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True, **sampling},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def told_by_a_fresh_server(starter: Starter, checkpoint: Path, folder: Path, *, tp: int = 1) -> Truth:
    """What a server that was started from that checkpoint answers."""
    server = Server(starter, checkpoint, folder, tp=tp)
    try:
        server.start()
        server.wait_until_ready()
        return server.truth()
    finally:
        server.close()


def _is_there(pid: int) -> bool:
    """Whether any process of that group is alive."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


def distance(one: list[list[float]], other: list[list[float]]) -> float:
    """The greatest difference of any token's log-probability."""
    return max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
