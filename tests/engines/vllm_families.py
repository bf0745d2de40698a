"""Families of models in real vLLM engines, one after the other: a trainer that publishes, an engine that pulls.

    test -- Trainer (a child: AdamW, WeightManager) -- deltas, TCP --> EngineProcess (RolloutService, offline `LLM`)

The engine is in the script's own process at TP 1, so that one starts in two seconds.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.engines import vllm_faults
from tests.engines.vllm_support import (
    START_S,
    cast_weights,
    kill_group,
    llm_logprobs,
    llm_options,
    save_checkpoint,
    start_script,
    tail_of,
)
from tests.multiproc.trainers import VOCAB
from weightsync.codec.digest import shard_sums
from weightsync.codec.model_digest import model_digest
from weightsync.tensors import spec_of
from weightsync.types import AuditRequest, EngineOp, HeldTensor
from weightsync.types.service import NotifyRequest, RegisterSenderRequest
from weightsync.types.transfer_messages import Transport

SYNC_S = 60.0
LEARNING_RATES = {1: 1e-3, 2: 1e-6, 3: 1e-6}
"""By the tensor's dimensions. A step changes a few percent of the elements in bfloat16, as in RL; norms, which are near
1, would stay as they are at the others' rate."""

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 16384,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {"hidden_size": 128},  # its heads are as wide as its hidden size says; vLLM has no kernel for 16
    "Qwen3": {"head_dim": 32},
    "Llama": {"head_dim": 32},
    "Gemma": {"head_dim": 32},
    "Gemma3": {"head_dim": 32, "sliding_window": 4096, "vocab_size": VOCAB + 3},  # vLLM pads its vocabulary
    "Qwen3Moe": {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def build(family: str, *, tied: bool) -> nn.Module:
    """A tiny model of a family, in float32; no two of its parameters are equal, so that none can be swapped unseen."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))
    made = getattr(transformers, f"{family}ForCausalLM")
    model: nn.Module = made(config(**{**COMMON, **FAMILIES[family], "tie_word_embeddings": tied}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


# --- the trainer ---


def trainer_main(conn: Any) -> None:
    """Runs the orders of a `_Trainer`, and publishes after each: ["begin", ...], ["step", ...], ["again"].

    Answers with what came of it: the run, the version's number, its checkpoint's folder, its digest, the share of
    elements that the order has changed in bfloat16, and the tensors that no step has changed yet.
    """
    torch.set_num_threads(1)
    trainer = _Trainer()
    while True:
        name, *args = conn.recv()
        getattr(trainer, name)(*args)
        conn.send(trainer.publish())


class _Trainer:
    """One model after the other, with its optimiser."""

    _model: nn.Module
    _optimizer: torch.optim.Optimizer

    def __init__(self) -> None:
        self._manager: Any = None
        self._version = 0

    def begin(self, family: str, tied: bool, folder: str, as_files: bool = False) -> None:
        """A run with a new model; published under its own names, or under those of its files, as an exporter does."""
        self._as_files = as_files
        self._model, self._folder, self._version = build(family, tied=tied), Path(folder), 0
        self._before = self._weights()
        self._never = set(self._before)
        groups = [
            {"params": [parameter], "lr": LEARNING_RATES[parameter.dim()]} for parameter in self._model.parameters()
        ]
        self._optimizer = torch.optim.AdamW(groups)
        self.again()

    def again(self) -> None:
        """A run with the model as it is: its first version is loaded in full."""
        from weightsync.trainer.publisher import WeightManager

        if self._manager is not None:
            self._manager.close()
        self._manager = WeightManager("m", dtype="bfloat16", delta_budget_bytes=1 << 30)
        self._manager.start(deltas=True)

    def step(self, only: str = "") -> None:
        """One of AdamW; of the tensors alone that have `only` in their names."""
        tokens = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1000 + self._version))
        self._model(input_ids=tokens, labels=tokens).loss.backward()
        for name, parameter in self._model.named_parameters():
            if only not in name:
                parameter.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _weights(self) -> dict[str, torch.Tensor]:
        weights = cast_weights(self._model)
        if not self._as_files:
            return weights
        from transformers.core_model_loading import revert_weight_conversion

        named: dict[str, torch.Tensor] = revert_weight_conversion(self._model, weights)
        return {name: tensor.contiguous() for name, tensor in named.items()}

    def publish(self) -> dict[str, Any]:
        """What was published, and saved as a checkpoint."""
        self._version += 1
        weights = self._weights()
        checkpoint = save_checkpoint(self._folder / f"v{self._version}", self._model, weights)
        sent = weights if self._as_files else dict(self._model.named_parameters())
        assert self._manager.offload(sent.items(), self._version).published
        self._manager.wait_published(self._version, timeout_s=120)
        changed = {name: int((weights[name] != old).sum()) for name, old in self._before.items()}
        self._before, self._never = weights, {name for name in self._never if not changed[name]}
        return {
            "run_id": self._manager.run_id,
            "endpoint": self._manager.endpoint,
            "version": self._version,
            "checkpoint": str(checkpoint),
            "digest": digest_of(weights),
            "changed": sum(changed.values()) / sum(tensor.numel() for tensor in weights.values()),
            "never": sorted(self._never),
        }


def digest_of(weights: Mapping[str, torch.Tensor]) -> str:
    """Of whole tensors, as a checkpoint has them."""
    held = [HeldTensor(spec=spec_of(name, tensor), box=None, tensor=tensor) for name, tensor in weights.items()]
    return model_digest([each.spec for each in held], shard_sums(held))


# --- the engine ---


class EngineProcess:
    """A process that runs one engine after the other, each behind a service that pulls.

    Args:
        folder: for its answers.
        env: further environment.
    """

    def __init__(self, folder: Path, *, env: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._folder = folder
        self._num_orders = 0
        env = {**vllm_faults.install(folder), **env}
        self._process = start_script("families", [str(folder)], self._log, env=env, stdin=subprocess.PIPE)

    def order(self, **order: Any) -> dict[str, Any]:
        """Gives an order of `families` and waits for its answer."""
        assert self._process.stdin is not None
        answer = _answer(self._folder, self._num_orders)
        self._num_orders += 1
        self._process.stdin.write(f"{json.dumps(order)}\n")
        self._process.stdin.flush()
        end = time.monotonic() + START_S
        while not answer.exists():
            why = "ended" if self._process.poll() is not None else "is too slow" if time.monotonic() > end else None
            assert why is None, f"the engine {why}:\n{tail_of(self._log)}"
            time.sleep(0.02)  # between two looks
        told: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return told

    def close(self) -> None:
        """Ends the process, and what it started."""
        kill_group(self._process)
        self._log.close()


def _answer(folder: Path, number: int) -> Path:
    return folder / f"answer-{number}.json"


def families(folder: str) -> None:
    """Answers in `folder` what each line of standard input orders, see `_Engine`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm  # noqa: F401

    _override_kernels_once()
    collect: Any = lambda *_: 0  # noqa: E731
    gc.collect = collect  # see `vllm_scripts.oracle`
    engine = _Engine()
    for number, line in enumerate(sys.stdin):
        order = json.loads(line)
        told = getattr(engine, order.pop("do"))(**order) or {}
        fresh = Path(folder) / "answer.new"
        fresh.write_text(json.dumps(told), encoding="utf-8")
        fresh.rename(_answer(Path(folder), number))


def _override_kernels_once() -> None:
    """vLLM's CPU build looks through every module for kernels to replace, for every engine anew, and fails at an object
    of llvmlite that has every attribute (seen with 0.32): so once llvmlite was imported. They are replaced by then."""
    from vllm.platforms import cpu

    kind: Any = cpu.CpuPlatform
    override = kind.register_triton_kernel_overrides
    done: list[bool] = []

    def once(_: Any) -> None:
        if not done:
            done.append(True)
            override()

    kind.register_triton_kernel_overrides = classmethod(once)


class _Engine:
    """The orders: `start`, `sync` for each version, `stop`."""

    def start(self, checkpoint: str, endpoint: str, tp: int) -> None:
        """An engine that serves a checkpoint, and its service."""
        from vllm import LLM

        from weightsync.clients.host import RolloutClient
        from weightsync.handles.vllm import OfflineVllmApi, VllmEngine
        from weightsync.host.service import RolloutService
        from weightsync.host.settings import RolloutConfig

        self._llm: Any = LLM(**llm_options(checkpoint, tp, weight_transfer_config={"backend": "weightsync"}))
        torch.set_num_threads(1)
        self._api = OfflineVllmApi(self._llm)
        self._handle = VllmEngine(self._api, engine_id="vllm")
        config = RolloutConfig(senders=(endpoint,), transport=Transport.TCP, mode="delta")
        self._service = RolloutService({"m": self._handle}, config)
        self._client = RolloutClient(self._service.start())

    def sync(self, run_id: str, endpoint: str, version: int) -> dict[str, Any]:
        """Brings a version, reads the live weights again, and says how the engine answers."""
        notice = NotifyRequest(run_id=run_id, model_id="m", version=version, sender_endpoint=endpoint, wait_s=SYNC_S)
        self._client.register_sender(RegisterSenderRequest(model_id="m", sender_endpoint=endpoint))
        status = self._client.notify_version(notice)
        said = self._handle.call(EngineOp.AUDIT, AuditRequest(), timeout_s=SYNC_S)
        with self._api.lock:  # its service looks at it now and then
            logprobs = llm_logprobs(self._llm)
        return {
            "version": status.version,
            "errors": {name: str(error) for name, error in status.errors.items()},
            "num_patched": status.num_patched,
            "num_deltas": status.num_deltas,
            "unprovable": status.unprovable,
            "equal": said.digests_equal,
            "digest": said.model_digest,
            "why_unknown": said.unprovable,
            "logprobs": logprobs,
        }

    def stop(self) -> None:
        """Ends the engine and its service."""
        self._client.close()
        self._service.close()
        self._handle.close()
        self._llm.llm_engine.engine_core.shutdown()
