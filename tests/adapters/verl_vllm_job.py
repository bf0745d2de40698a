"""A verl job with a real vLLM behind one of its rollout workers: `python -m tests.adapters.verl_vllm_job JSON`, the
JSON of a `Job`, in verl's environment.

verl's own rollouts need a GPU. Here a worker pushes what it is given into a vLLM server over HTTP, by this library; the
other one keeps it, as in `verl_job`. Behind each version a line of JSON says what vLLM computes, and what the training
ranks' model does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import httpx
import msgspec
import ray
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

import weightsync
from tests.adapters.verl_job import BACKEND, MODULE, NUM_RANKS, NUM_WORKERS, Rank, Replica, RolloutWorker, group, say
from tests.adapters.verl_job import Keeps as Kept

PROMPT = tuple((7 * i + 3) % 89 for i in range(24))
CHECKPOINT, SERVER = "WEIGHTSYNC_TEST_CHECKPOINT", "WEIGHTSYNC_TEST_SERVER"
"""Variables that Ray gives to every worker."""


class Job(msgspec.Struct):
    """What is trained, and which vLLM serves it."""

    checkpoint: str
    server: str
    model_name: str
    versions: int


def plain() -> nn.Module:
    """The model of the checkpoint, in float32."""
    return AutoModelForCausalLM.from_pretrained(os.environ[CHECKPOINT], dtype=torch.float32)


class CausalRank(Rank):
    """A training rank whose model is a language model."""

    def _build(self) -> nn.Module:
        torch.manual_seed(0)
        return plain()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, seed: int) -> list[float]:
        """A step; what the model says of the prompt behind it."""
        torch.manual_seed(seed)
        tokens = torch.randint(0, 96, (2, 16))
        self._model(input_ids=tokens, labels=tokens).loss.backward()
        for parameter in self._model.parameters():  # a step that moves what is said by more than a rounding
            if parameter.grad is not None:
                parameter.grad = parameter.grad.sign() * 5e-3
        self._optimizer.step()
        self._optimizer.zero_grad()
        whole = {name: tensor.clone() for name, tensor in self._weights()}
        model = plain()
        model.load_state_dict(whole)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        dist.barrier()
        return [float(logits[at, token]) for at, token in enumerate(PROMPT[1:])]


class Pushes(Kept):
    """Pushes what came into vLLM."""

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        self._held: dict[str, torch.Tensor] = {}
        self._pusher: Any = None
        self.told: str | None = None

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **_: Any) -> None:
        async def kept() -> Any:
            async for name, tensor in weights:
                self._held[name] = tensor.clone()
                yield name, self._held[name]

        await super().update_weights(kept(), wire_format=wire_format)
        if self._pusher is None:
            self._pusher = weightsync.push(self._held, f"vllm+{os.environ[SERVER]}", alone=True, dtype="float32")
        self.told = str(await asyncio.to_thread(self._pusher.step))


class PushingWorker(RolloutWorker):
    """The first of them has a vLLM behind it."""

    def __init__(self, rollout_config: RolloutConfig) -> None:
        super().__init__(rollout_config)
        if self.rank == 0:
            self.server_adapter = Pushes(rollout_config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pushed(self) -> str | None:
        """What the last push reported."""
        return getattr(self.server_adapter, "told", None)


def served(job: Job) -> list[float]:
    """What vLLM computes."""
    body = {
        "model": job.model_name, "prompt": list(PROMPT), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    answer = httpx.post(f"{job.server}/v1/completions", json=body, timeout=60.0, trust_env=False).raise_for_status()
    told = answer.json()["choices"][0]["prompt_logprobs"][1:]
    return [float(each[str(token)]["logprob"]) for each, token in zip(told, PROMPT[1:], strict=True)]


async def run(job: Job) -> None:
    """Trains and updates."""
    options = {"host": "127.0.0.1", "dtype": "float32"}
    config = CheckpointEngineConfig(backend=BACKEND, custom_backend_module=MODULE, engine_kwargs={BACKEND: options})
    ranks = group(NUM_RANKS, RayClassWithInitArgs(cls=ray.remote(CausalRank), config=config))
    rollout_config = RolloutConfig(name="vllm", checkpoint_engine=config)
    workers = group(NUM_WORKERS, RayClassWithInitArgs(cls=ray.remote(PushingWorker), rollout_config=rollout_config))
    replicas = [Replica(worker) for worker in workers.workers]
    manager = CheckpointEngineManager(config=config, actor_wg=ranks, replicas=replicas)
    for version in range(1, job.versions + 1):
        wanted = ranks.train(version)[0]
        await manager.update_weights(global_steps=version)
        digests = [digest for digest, _, _ in workers.said()]
        told = {"version": version, "wanted": wanted, "served": served(job), "digests": digests}
        say(json.dumps({**told, "pushed": workers.pushed()[0]}))


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.argv[1].encode(), type=Job)
    paths = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    variables = {"PYTHONPATH": paths, CHECKPOINT: asked.checkpoint, SERVER: asked.server}
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=True, runtime_env={"env_vars": variables})
    asyncio.run(run(asked))
    say("done")
    ray.shutdown()
