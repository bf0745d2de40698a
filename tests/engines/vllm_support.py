"""Real vLLM engines for tests: a tiny model, a server, and the oracle that says what an engine has to answer.

The oracle: an engine's log-probabilities of fixed prompts, against those of a fresh engine that has loaded the same
version from a checkpoint. Trainers of any kind can be compared; `save_checkpoint` takes plain name -> tensor pairs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import httpx
import torch
from safetensors.torch import save_file
from torch import nn

from tests.engines import vllm_faults, vllm_forks, vllm_prefork
from tests.multiproc.trainers import VOCAB, hf_config
from tests.standins.processes import free_port

AnyProcess = vllm_prefork.Process | subprocess.Popen[str]
MODEL_NAME = "tiny"
MAX_LEN = 2048
KV_CACHE_BYTES = 64 << 20  # 131072 tokens
SERVER_MAX_LEN = 16384  # room for a generation that outlasts any sync
PROMPTS: tuple[tuple[int, ...], ...] = (
    tuple((7 * i + 3) % VOCAB for i in range(24)),
    tuple((11 * i + 5) % VOCAB for i in range(40)),
)
SAME, DIFFERENT = 1e-6, 1e-4
CPU_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
START_S = 300.0
RESULT = "RESULT "
ORACLE_FILE = "oracle.json"
NUM_NEXT = 20
LONG_PROMPT: tuple[int, ...] = tuple((5 * i + i // 9) % VOCAB for i in range(300))

vllm_is_there = importlib.util.find_spec("vllm") is not None
NEEDS_VLLM = "vLLM is not installed: pip install weightsync[engines-cpu]"
LIMITED = any(name in os.environ for name in CPU_LIMITS)
"""Whether this process leaves features of the CPU unused. vLLM's do not, see `as_the_cpu_is`."""
NOT_LIMITED = "the limits of this process's CPU features do not hold for a trainer in vLLM's process: it differs"


def _packs() -> bool:
    if not LIMITED:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    code = "import sys, torch; sys.exit(not torch.ops.mkldnn._is_mkldnn_bf16_supported())"
    return subprocess.run([sys.executable, "-c", code], env=as_the_cpu_is(), check=False).returncode == 0


def as_the_cpu_is() -> dict[str, str]:
    """This process's environment without limits of the CPU's features: vLLM chooses its kernels by what the CPU itself
    says, and its engine crashes where torch is told otherwise."""
    return {name: value for name, value in os.environ.items() if name not in CPU_LIMITS}


PACKS = _packs()
"""Whether vLLM's CPU build packs linear weights in bfloat16 on this CPU; with AVX2 alone it keeps them as loaded."""
NEEDS_PACKING = "this CPU has no bfloat16 kernel of oneDNN: vLLM packs no linear weights in bfloat16 here"


def build_model(seed: int = 0, *, tied: bool = False) -> nn.Module:
    """The model of the other tests' trainers, in float32; vLLM runs it at TP 1 and 2."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(hf_config(tied=tied))


def train_step(model: nn.Module, seed: int, *, lr: float = 0.02) -> None:
    """One real AdamW step on random text."""
    torch.manual_seed(1000 + seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    tokens = torch.randint(0, VOCAB, (2, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def cast_weights(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Whole tensors by name, cast, made without any of the library's extraction."""
    return {name: p.detach().to(dtype).clone() for name, p in model.named_parameters()}


def save_checkpoint(folder: Path, model: nn.Module, weights: Mapping[str, torch.Tensor] | None = None) -> Path:
    """A checkpoint that vLLM loads: the model's config, and `weights` (its own in bfloat16 where not given)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict()  # type: ignore[union-attr,operator]
    config.update(architectures=[type(model).__name__], dtype="bfloat16", torch_dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    tensors = cast_weights(model) if weights is None else dict(weights)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


# --- a server ---


class Server:
    """A vLLM server in a process group of its own, on a port that stays the same when it is started again.

    Args:
        checkpoint: what it serves at first.
        folder: for its log, and for the file of planted faults (`vllm_faults`).
        tp: tensor-parallel size.
        env: further environment.
        options: further words of its command line.
        counts: whether it keeps its own statistics, for /metrics.
    """

    def __init__(
        self, checkpoint: Path, folder: Path, *, tp: int = 1, env: Mapping[str, str] | None = None,
        options: Sequence[str] = (), counts: bool = False,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.checkpoint = checkpoint
        self._port = free_port()
        self._tp = tp
        self._options = options if counts else ("--disable-log-stats", *options)
        forks = {vllm_forks.VARIABLE: "1"}
        self._env = {**engine_env(tp), **vllm_faults.install(folder), **forks, **(env or {})}
        self._log = folder / "vllm.log"
        self.url = f"http://127.0.0.1:{self._port}"
        self.http = httpx.Client(
            base_url=self.url, timeout=60.0, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self.process: AnyProcess | None = None

    @property
    def pid(self) -> int:
        """Id of the process, and of its group."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Starts it; `wait_until_ready` waits."""
        words = [
            *("vllm.entrypoints.openai.api_server", "--model", str(self.checkpoint)),
            *("--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", MODEL_NAME),
            *("--skip-tokenizer-init", "--enforce-eager", "--dtype", "bfloat16"),
            *("--max-model-len", str(SERVER_MAX_LEN), "--max-num-seqs", "8", "--tensor-parallel-size", str(self._tp)),
            *("--weight-transfer-config", json.dumps({"backend": "weightsync"})),
            *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
            *("--stream-interval", "20"),  # or its one event loop is busy streaming, and answers nothing else
            *self._options,
        ]
        with self._log.open("ab") as output:
            env = {**as_the_cpu_is(), "VLLM_SERVER_DEV_MODE": "1", **self._env}
            self.process = vllm_prefork.start(words, output, env=env)

    def wait_until_ready(self) -> None:
        """Returns when the server answers."""
        assert self.process is not None
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get("/health", timeout=2.0).status_code == 200:
                    return
            assert self.process.poll() is None, f"vLLM ended:\n{self.tail()}"
            assert time.monotonic() < end, f"vLLM did not start within {START_S} s:\n{self.tail()}"
            time.sleep(0.1)  # between two looks

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """It answers in the body, and has ended behind it."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.stop)
            stack.callback(self.http.close)
            self.start()
            self.wait_until_ready()
            yield

    def stop(self) -> None:
        """Ends it in order, so that vLLM gives back its shared memory; kills what does not end."""
        if self.process is not None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        self.kill()

    def kill(self) -> None:
        """kill -9 of the server and everything it started. Idempotent."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)

    def logprobs(self, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[float]]:
        """Log-probability of every prompt token but the first. vLLM reads no prefix cache for these."""
        return [_scores(self.complete(prompt, prompt_logprobs=0)["prompt_logprobs"]) for prompt in prompts]

    def next_token(self, prompt: Sequence[int]) -> dict[str, float]:
        """Log-probabilities of the likeliest next tokens. vLLM uses its prefix cache for these."""
        told = self.complete(prompt, logprobs=NUM_NEXT)["logprobs"]["top_logprobs"][0]
        return {str(token): float(score) for token, score in told.items()}

    def complete(self, prompt: Sequence[int], **options: Any) -> dict[str, Any]:
        """One completion's choice; see vLLM's /v1/completions for the options."""
        response = self.http.post("/v1/completions", json=completion(prompt, **options))
        assert response.status_code == 200, response.text
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """A GET's answer."""
        response = self.http.get(path, params=params)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def tail(self, chars: int = 6000) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-chars:]


def completion(prompt: Sequence[int], **options: Any) -> dict[str, Any]:
    """The body of a /v1/completions request."""
    return {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0.0,
        "return_tokens_as_token_ids": True,
        **options,
    }


def engine_env(tp: int = 1, *, core: int = 0) -> dict[str, str]:
    """Settings for a small engine on a CPU: one thread a worker, each on a core of its own, from `core` on; engines of
    tests that run at the same time (pytest-xdist numbers its workers) begin at different cores.
    """
    core += int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    cores = [str((core + rank) % (os.cpu_count() or 1)) for rank in range(tp)]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(cores),
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_COMPILE_DISABLE": "1",  # vLLM compiles its count of ranks in every worker, even with --enforce-eager
    }


# --- the oracle ---


class Oracle:
    """Fresh engines, one after the other, in a process of their own; what they answered is remembered by folder.

    Each answer is a file in the checkpoint's folder, see `vllm_scripts.oracle`.

    Args:
        log: takes what they write.
        env: further environment of theirs.
        tp: tensor-parallel size of each.
    """

    def __init__(self, log: IO[str], *, env: Mapping[str, str] | None = None, tp: int = 1) -> None:
        self._env = env
        self._tp = tp
        self._asked: set[Path] = set()
        self._process: AnyProcess | None = None
        self._log = log

    def learn(self, checkpoints: Sequence[Path]) -> None:
        """Asks for a fresh engine for each of them, and does not wait for it."""
        if self._process is None:
            self._process = start_script(
                "oracle", [[list(prompt) for prompt in PROMPTS], list(LONG_PROMPT), self._tp], self._log,
                stdin=subprocess.PIPE, env=self._env,
            )  # fmt: skip
        assert self._process.stdin is not None
        for checkpoint in checkpoints:
            if checkpoint not in self._asked:
                self._asked.add(checkpoint)
                self._process.stdin.write(f"{checkpoint}\n")
        self._process.stdin.flush()

    def logprobs(self, checkpoint: Path) -> list[list[float]]:
        """What a fresh engine that has loaded this checkpoint says of `PROMPTS`, as `Server.logprobs` does."""
        scores: list[list[float]] = self._told(checkpoint)["prompts"]
        return scores

    def next_token(self, checkpoint: Path) -> dict[str, float]:
        """What it says after `LONG_PROMPT`, as `Server.next_token` does."""
        scores: dict[str, float] = self._told(checkpoint)["next"]
        return scores

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            kill_group(self._process)

    def _told(self, checkpoint: Path) -> dict[str, Any]:
        self.learn([checkpoint])
        assert self._process is not None
        end = time.monotonic() + START_S
        while not (answer := checkpoint / ORACLE_FILE).exists():
            why = "ended" if self._process.poll() is not None else "is too slow" if time.monotonic() > end else None
            assert why is None, f"the oracle {why}:\n{tail_of(self._log)}"
            time.sleep(0.02)  # between two looks
        told: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return told


def run_script(name: str, argument: Any, *, env: Mapping[str, str] | None = None, timeout_s: float = START_S) -> Any:
    """Runs a function of `SCRIPTS` in an interpreter of its own (vLLM keeps process-wide state) and gives its result.

    Raises:
        AssertionError: it failed, or took too long; with what it wrote.
    """
    with tempfile.TemporaryFile("w+") as output:
        process = start_script(name, argument, output, env=env)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} took over {timeout_s} s:\n{tail_of(output)}") from None
        finally:
            kill_group(process)
        output.seek(0)
        told = output.read()
    found = told.rpartition(RESULT)[2].partition("\n")[0] if RESULT in told else ""
    assert process.returncode == 0, f"{name} failed:\n{told[-6000:]}"
    assert found, f"{name} gave no result:\n{told[-6000:]}"
    return json.loads(found)


def start_script(
    name: str, argument: Any, output: IO[str], *, env: Mapping[str, str] | None = None, stdin: int = subprocess.DEVNULL
) -> AnyProcess:
    """Starts a function of `SCRIPTS`; see `run_script`."""
    words = ["tests.engines.vllm_scripts", name, json.dumps(argument)]
    env = {**as_the_cpu_is(), **engine_env(core=1), **(env or {})}
    return vllm_prefork.start(words, output, env=env, stdin=stdin)  # `output` is no pipe: engines would keep it open


def kill_group(process: AnyProcess) -> None:
    """kill -9 of a script and everything it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def tail_of(output: IO[str], chars: int = 6000) -> str:
    """The end of what a script wrote."""
    output.seek(0)
    return output.read()[-chars:]


def nudge(model: nn.Module) -> None:
    """Changes a few of its elements, so that a delta is small, and the answers are others."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("down_proj.weight"):
                tensor[:, ::16] += 0.5


OPTIONS = "WEIGHTSYNC_TEST_VLLM_OPTIONS"


def llm_options(checkpoint: Path | str, tp: int = 1, **options: Any) -> dict[str, Any]:
    """Arguments of an offline `LLM` of the tiny model; `OPTIONS` in the environment has further ones, as JSON."""
    options = {**json.loads(os.environ.get(OPTIONS, "{}")), **options}
    return {
        "model": str(checkpoint),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": MAX_LEN,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 8 << 20,  # 16384 tokens
        "dtype": "bfloat16",
        "tensor_parallel_size": tp,
        **options,
    }


def llm_logprobs(llm: Any, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[list[float]]:
    """Log-probability of every prompt token but the first."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outs = [llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)[0] for prompt in prompts]
    return [[next(iter(scored.values())).logprob for scored in out.prompt_logprobs[1:]] for out in outs]


def llm_next_token(llm: Any, prompt: Sequence[int]) -> dict[str, float]:
    """Log-probabilities of the likeliest next tokens, by name as the server gives it."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=NUM_NEXT, detokenize=False)
    out = llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)[0]
    return {f"token_id:{token}": scored.logprob for token, scored in out.outputs[0].logprobs[0].items()}


def distance(one: list[list[float]], other: list[list[float]]) -> float:
    """The greatest difference of any token's log-probability."""
    assert [len(row) for row in one] == [len(row) for row in other]
    return max(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def next_distance(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """The greatest difference among the tokens that both name; infinite where they name no common one."""
    return max((abs(one[token] - other[token]) for token in one.keys() & other.keys()), default=float("inf"))


def _scores(told: list[dict[str, Any] | None]) -> list[float]:
    return [float(next(iter(scored.values()))["logprob"]) for scored in told[1:] if scored]
