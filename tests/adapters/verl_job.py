"""A verl job in verl's own environment: its manager and its rollout workers, two training ranks with a sharded model.

Run from the root as `python -m tests.adapters.verl_job VERSIONS MODE`. It writes a line of JSON for each version, and
"done" at its end. No GPU: where weights go into an engine, workers keep them and say what they are.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
import time
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
import verl
from torch import nn
from torch.distributed.fsdp import fully_shard
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout import BaseRollout, RolloutReplica

from weightsync.codec.digest import shard_sums
from weightsync.codec.model_digest import model_digest
from weightsync.tensors import spec_of
from weightsync.types import HeldTensor

_FILE = Path(verl.__file__).parent / "workers" / "rollout" / "sglang_rollout" / "delta_loader.py"
loader = types.SimpleNamespace(**runpy.run_path(str(_FILE)))
"""verl's own, which its SGLang servers run; the package that it lies in imports SGLang."""
BACKEND, MODULE = "weightsync", "weightsync.adapters.verl"
NUM_RANKS, NUM_WORKERS = 2, 2


def digest_of(weights: dict[str, torch.Tensor]) -> str:
    """Of whole tensors."""
    held = [HeldTensor(spec=spec_of(name, tensor), box=None, tensor=tensor) for name, tensor in weights.items()]
    return model_digest([each.spec for each in held], shard_sums(held))


def build() -> nn.Module:
    """A small model in bfloat16; no two of its elements need be equal."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).bfloat16()


class Rank(Worker):
    """A training rank, as verl's actor workers are: FSDP2, one generator of whole tensors that all ranks walk."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        dist.init_process_group("gloo")
        self._model = self._build()
        fully_shard(self._model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1.0)
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend, is_master=dist.get_rank() == 0, bucket_size=1 << 20, **config.engine_kwargs[config.backend]
        )

    def _build(self) -> nn.Module:
        return build()

    def _weights(self) -> Any:
        for name, tensor in self._model.state_dict().items():
            yield name, tensor.full_tensor()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, rows: int) -> str:
        """A step that changes so many rows of the embedding; the digest of what is to be served next."""
        tokens = torch.arange(rows)
        self._model(tokens).float().square().sum().backward()
        for name, parameter in self._model.named_parameters():
            if not name.startswith("0."):
                parameter.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()
        return digest_of({name: tensor.clone() for name, tensor in self._weights()})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        """As verl's actor does."""
        told: dict[str, float] = await self.checkpoint_engine.send_weights(self._weights(), global_steps=global_steps)
        return told or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **options: Any) -> Any:
        """Likewise."""
        return getattr(self.checkpoint_engine, method)(*args, **options)


class Live:
    """The model that verl's own loader of changes writes into, in an engine."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As an engine's models do: `Tensor.copy_`, which verl's loader makes pass over what stays."""
        for name, tensor in pairs:
            if name in self.weights:
                self.weights[name].copy_(tensor)
            else:
                self.weights[name] = tensor.clone()


class Keeps(BaseRollout):
    """Where verl loads an engine: keeps what came."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self.digest = ""
        self.encodings: list[str] = []
        self.live = Live()

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **_: Any) -> None:
        if wire_format == "delta_flush":
            self.encodings = []
            for named, _ in weights:
                self.encodings.append(json.loads(bytes(dict(named)["__delta_spec__"].numpy()))["encoding"])
                loader.apply_delta(self.live, named)
            self.digest = digest_of(self.live.weights)
            return
        assert wire_format == "named_tensors"
        self.digest = digest_of({name: tensor.clone() async for name, tensor in weights})


class RolloutWorker(CheckpointEngineWorker):
    """verl's own, with an engine that keeps what came."""

    def __init__(self, rollout_config: RolloutConfig) -> None:
        super().__init__(rollout_config, None, Keeps(rollout_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def encodings(self) -> list[str]:
        """Of the flushes that brought it, where flushes did."""
        return self.server_adapter.encodings

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def said(self) -> tuple[str, int, int]:
        """The digest of what it was given last, and how that came: bytes, deltas."""
        receiver = self.checkpoint_engine._receiver
        return self.server_adapter.digest, *((receiver.received_bytes, receiver.num_deltas) if receiver else (0, 0))


class Replica(RolloutReplica):
    """One worker, and no server: there are no requests to abort."""

    def __init__(self, worker: Any) -> None:
        self.workers, self.servers = [worker], []

    async def init_hybrid(self, worker_group: Any) -> None: ...

    def get_ray_class_with_init_args(self) -> Any: ...

    async def launch_servers(self) -> None: ...


async def job(num_versions: int, mode: str) -> None:
    """Trains and updates; one more replica comes in the middle.

    Args:
        num_versions: how many.
        mode: how workers fetch them; "flush": as deltas, and are given them in verl's `delta_flush`.
    """
    options = {"host": "127.0.0.1", "mode": mode, "delta_budget_bytes": 1 << 30}
    if mode == "flush":
        options |= {"mode": "delta", "wire_format": "delta_flush"}
    config = CheckpointEngineConfig(backend=BACKEND, custom_backend_module=MODULE, engine_kwargs={BACKEND: options})
    ranks = group(NUM_RANKS, RayClassWithInitArgs(cls=ray.remote(Rank), config=config))
    rollout_config = RolloutConfig(name="vllm", checkpoint_engine=config)
    worker = RayClassWithInitArgs(cls=ray.remote(RolloutWorker), rollout_config=rollout_config)
    groups = [group(1, worker) for _ in range(NUM_WORKERS + 1)]  # one a replica, as verl makes them
    replicas = [Replica(each.workers[0]) for each in groups]
    manager = CheckpointEngineManager(config=config, actor_wg=ranks, replicas=replicas[:NUM_WORKERS])
    for version in range(1, num_versions + 1):
        if version == num_versions // 2:
            manager.add_replicas(replicas[NUM_WORKERS:])
        digests = ranks.step(512 if version == 1 else 8)
        begun_s = time.monotonic()
        metrics = await manager.update_weights(global_steps=version)
        seconds = time.monotonic() - begun_s
        told = {"version": version, "published": digests, "seconds": seconds, **metrics}
        told["received"] = [one for each in groups for one in each.said()]
        told["encodings"] = [one for each in groups for one in each.encodings()]
        say(json.dumps(told))


def say(line: str) -> None:
    """To whoever runs this."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def group(size: int, made: Any) -> Any:
    """Ray actors of one kind."""
    pool = RayResourcePool(process_on_nodes=[size], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


if __name__ == "__main__":
    paths = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=True, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    asyncio.run(job(int(sys.argv[1]), sys.argv[2]))
    say("done")
    ray.shutdown()
