"""What a sync costs in TRL and in verl by their own means, and by weightsync: the same job each way, in one run.

    python -m tests.compat.before_after [--steps 8]      writes docs/before-after.json; `docs/check.py` makes the table

TRL: `AsyncGRPOTrainer` trains a Qwen2 of random weights in float32 on this machine's CPU, against a real vLLM in
bfloat16 (linear weights as they were loaded, as on a GPU), each way with a server of its own:

  checkpoint  pause, save the weights in safetensors where vLLM reads them, its own `reload_weights`, resume
  push        `WeightTransfer(engines=...)`
  publish     `WeightTransfer(to=...)`, a service beside vLLM that takes each version in full
  deltas      the same, by deltas

TRL's own way, an NCCL group, needs a GPU. While the job runs, a client of its own streams tokens: how long it got none
in a sync, beyond what it waits at other times, is how long the engine stood still for it.

verl: see `verl_ways`; it runs in verl's environment (`make engines-verl`).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import Qwen2ForCausalLM

from tests.compat.measured_model import MAX_LEN, config_of
from tests.engines import vllm_support
from tests.engines.vllm_support import MODEL_NAME, Server, save_checkpoint
from tests.engines.vllm_unpacked import VARIABLE
from weightsync.adapters.trl import WeightTransfer
from weightsync.verbs.serving import Service, serve

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "before-after.json"
VERL = Path(os.environ.get("WEIGHTSYNC_VERL_PYTHON", ROOT / ".venv-verl" / "bin" / "python"))
WAYS = {"trl": ("checkpoint", "push", "publish", "deltas"), "verl": ("nixl", "mapped", "deltas")}
FIRST = 2
"""Syncs that are not counted: the first brings all, and starts what is started once."""
_VERL_S = _START_S = 1800.0
"""On a machine with much else to do."""


class Checkpoint:
    """TRL's protocol by a file: what a trainer without a group does."""

    def __init__(self, server: str, folder: Path) -> None:
        self._http = httpx.Client(base_url=server, timeout=120.0, trust_env=False)
        self._file = folder / "model.safetensors"
        self.sent_bytes = 0

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None:
        self._post("/pause?mode=keep")

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in iterator}
        save_file(weights, f"{self._file}.new", {"format": "pt"})
        os.replace(f"{self._file}.new", self._file)
        self.sent_bytes = self._file.stat().st_size
        self._post("/collective_rpc", {"method": "reload_weights"})

    def resume(self) -> None:
        self._post("/resume")

    def destroy(self) -> None:
        self._http.close()

    def _post(self, path: str, body: Any = None) -> None:
        self._http.post(path, json=body).raise_for_status()


class Timed:
    """Another transfer, with a line of JSON behind each sync."""

    def __init__(self, transfer: Any) -> None:
        self._transfer = transfer
        self._began_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)

    def pause(self) -> None:
        self._began_s = time.monotonic()
        self._transfer.pause()

    def resume(self) -> None:
        self._transfer.resume()
        told = {"began_s": self._began_s, "ended_s": time.monotonic(), "bytes": self._sent_bytes()}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()

    def _sent_bytes(self) -> int | None:
        for what in (self._transfer, getattr(self._transfer, "report", None)):
            if (found := getattr(what, "sent_bytes", None)) is not None:
                return int(found)
        return None


def job(way: str, server: str, checkpoint: str, to: str, steps: int) -> None:
    """The training, in a process of its own."""
    import types

    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    from tests.adapters.trl_job import reward, tokenizer, varlen_attention

    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    if way == "checkpoint":
        transfer: Any = Checkpoint(server, Path(checkpoint))
    elif way == "push":
        transfer = WeightTransfer("actor", engines=f"vllm+{server}")
    else:
        transfer = WeightTransfer("actor", to=[to], port=0, **({} if way == "deltas" else {"delta_budget_bytes": 0}))
    asked = [" ".join(f"w{2 + (step * 7 + at) % 90}" for at in range(8)) for step in range(64)]
    trainer = AsyncGRPOTrainer(
        model=checkpoint,
        reward_funcs=reward,
        args=AsyncGRPOConfig(
            output_dir=f"{checkpoint}/out", max_steps=steps, per_device_train_batch_size=4, num_generations=4,
            max_completion_length=32, vllm_server_base_url=server, token_budget=512, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True, learning_rate=1e-6, bf16=False, gradient_checkpointing=False,
            max_inflight_tasks=4, lr_scheduler_type="constant", logging_steps=100,
        ),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in asked]}),
        processing_class=tokenizer(),
        weight_transfer=Timed(transfer),
    )  # fmt: skip
    trainer.train()


class Probe:
    """A client that streams tokens for as long as it lives."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.arrivals: list[float] = []

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        body = {
            "model": MODEL_NAME, "prompt": [3, 4, 5], "max_tokens": MAX_LEN - 64, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        while not self._over.is_set():
            with httpx.stream("POST", f"{self._server.url}/v1/completions", json=body, timeout=120.0) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.arrivals.append(time.monotonic())
                    if self._over.is_set():
                        return

    def stood_still_s(self, began_s: float, ended_s: float) -> float:
        """The longest wait for a token that touches that time, beyond the middle one of all."""
        gaps = [(b - a, a, b) for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]
        usual_s = statistics.median(gap for gap, _, _ in gaps)
        return max((gap for gap, a, b in gaps if b > began_s and a < ended_s), default=usual_s) - usual_s


def build() -> nn.Module:
    """The model, with random weights."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config_of())


@contextlib.contextmanager
def started(way: str, folder: Path) -> Iterator[tuple[Server, Service | None]]:
    """The server, and the service beside it where one is told."""
    from tests.adapters.trl_job import tokenizer

    checkpoint = save_checkpoint(folder / "model", build())
    tokenizer().save_pretrained(checkpoint)
    options = (
        *("--max-model-len", str(MAX_LEN), "--no-skip-tokenizer-init", "--stream-interval", "1"),
        *("--served-model-name", MODEL_NAME, str(checkpoint), "--kv-cache-memory-bytes", str(256 << 20)),
    )
    server = Server(checkpoint, folder / "server", env={VARIABLE: "1"}, options=options, counts=True)
    with server.running():
        if way not in {"publish", "deltas"}:
            yield server, None
            return
        mode = "delta" if way == "deltas" else "full"
        with serve({"actor": f"vllm+{server.url}"}, port=0, mode=mode) as service:
            yield server, service


def in_trl(way: str, steps: int) -> dict[str, Any]:
    """One way's figures: medians of its syncs."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="weightsync-trl-") as name,
        started(way, Path(name)) as (server, service),
        Probe(server) as probe,
        Path(name, "job.log").open("w+") as log,
    ):
        command = [sys.executable, "-m", "tests.compat.before_after", "--job", way, server.url]
        process = subprocess.Popen(
            [*command, str(server.checkpoint), "" if service is None else service.url, "--steps", str(steps)],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        syncs: list[dict[str, Any]] = []
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{") and "began_s" in line:
                told = json.loads(line)
                if service is not None:
                    status = service.model_status("actor")
                    told["bytes"], told["deltas"] = status.received_bytes, status.num_deltas
                syncs.append({**told, "tokens": _tokens(server), "at_s": time.monotonic()})
        if process.wait() != 0 or len(syncs) <= FIRST + 1:
            raise RuntimeError(Path(log.name).read_text()[-4000:])
        counted = syncs[FIRST:]
        spent_s = counted[-1]["at_s"] - counted[0]["at_s"]
        return {
            "sync_s": round(statistics.median(each["ended_s"] - each["began_s"] for each in counted), 4),
            "stood_still_s": round(
                statistics.median(probe.stood_still_s(each["began_s"], each["ended_s"]) for each in counted), 4
            ),
            "bytes": round(statistics.median(each["bytes"] for each in counted)),
            "deltas": min(each.get("deltas", 0) for each in counted),
            "tokens_per_s": round((counted[-1]["tokens"] - counted[0]["tokens"]) / spent_s, 1),
            "syncs": len(counted),
        }


def _tokens(server: Server) -> float:
    """That the server has made since its start."""
    lines = server.http.get("/metrics").raise_for_status().text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def in_verl(way: str, steps: int) -> dict[str, Any]:
    """One way's figures: medians of its updates. verl stops its rollouts for all of an update."""
    command = [str(VERL), "-m", "tests.compat.verl_ways", way, str(steps)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=_VERL_S, stdin=subprocess.DEVNULL,
        check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    if "done" not in lines:  # workers' logs may come behind it
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
    counted = [json.loads(line) for line in lines if line.startswith("{")][FIRST:]
    sync_s = round(statistics.median(each["seconds"] for each in counted), 4)
    sent = round(statistics.median(each["bytes"] for each in counted))
    return {"sync_s": sync_s, "stood_still_s": sync_s, "bytes": sent, "syncs": len(counted)}


MEASURES = {"trl": in_trl, "verl": in_verl}


def main() -> None:
    """Measures, or trains where it is the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="of training, each with a sync")
    parser.add_argument("--job", nargs=4, metavar=("WAY", "SERVER", "CHECKPOINT", "TO"), help=argparse.SUPPRESS)
    every = [f"{framework}/{way}" for framework, ways in WAYS.items() for way in ways]
    parser.add_argument("--ways", nargs="*", choices=every, default=every, help="without: all, and the file is written")
    asked = parser.parse_args()
    if asked.job:
        job(*asked.job, asked.steps)
        return
    vllm_support.START_S = _START_S
    found: dict[str, dict[str, Any]] = {}
    for framework, way in (each.split("/") for each in asked.ways):
        load = os.getloadavg()[0]
        figures = MEASURES[framework](way, asked.steps)
        found.setdefault(framework, {})[way] = {**figures, "load_before": round(load, 1)}
        sys.stderr.write(f"{framework} {way}: {json.dumps(found[framework][way])}\n")
    told = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "parameters": sum(parameter.numel() for parameter in build().parameters()),
        "cores": os.cpu_count(),
        "frameworks": found,
    }
    sys.stdout.write(json.dumps(told, indent=1) + "\n")
    if asked.ways == every:
        RESULTS.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
