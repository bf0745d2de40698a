"""What a sync costs in verl by its own NIXL engine, and by weightsync: `python -m tests.compat.verl_ways WAY STEPS`, in
verl's environment. A line of JSON behind each update.

verl's own manager and workers on Ray and CPUs: two training ranks with FSDP2, two rollout workers that copy what they
are given. verl stops its rollouts for the whole of an update, so its seconds are those of the pause, too. Its rollouts
themselves need a GPU: no tokens are counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2ForCausalLM
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from tests.adapters.verl_job import NUM_RANKS, NUM_WORKERS, Keeps, Replica, RolloutWorker, group, say
from tests.compat.measured_model import config_of

OURS = "weightsync"
WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "nixl": ("nixl", "tests.compat.verl_nixl_cpu", {"device": "cpu"}),
    "mapped": (OURS, "weightsync.adapters.verl", {"host": "127.0.0.1", "mode": "auto"}),
    "deltas": (OURS, "weightsync.adapters.verl", {"host": "127.0.0.1", "mode": "delta", "delta_budget_bytes": 1 << 30}),
}
"""Backend, its module, its options."""
_BUCKET_MB = 128


class Trains(Worker):
    """A training rank: float32, sharded; what rollouts are given is bfloat16."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._model: nn.Module = Qwen2ForCausalLM(config_of())
        fully_shard(self._model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6)
        import_external_libs(config.custom_backend_module)
        options = config.engine_kwargs[config.backend]
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend, is_master=dist.get_rank() == 0, bucket_size=_BUCKET_MB << 20, **options
        )

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._model.state_dict().items():
            yield name, tensor.full_tensor().bfloat16()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, seed: int) -> int:
        """A step; the bytes of a version."""
        torch.manual_seed(seed)
        tokens = torch.randint(0, 97, (2, 16))
        self._model(input_ids=tokens, labels=tokens).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return sum(2 * parameter.numel() for parameter in self._model.parameters())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        """As verl's actor does."""
        told = await self.checkpoint_engine.send_weights(self._weights(), global_steps=global_steps)
        return told or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **options: Any) -> Any:
        """Likewise."""
        return getattr(self.checkpoint_engine, method)(*args, **options)


class Copies(Keeps):
    """What a rollout does with it at least: copies it."""

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        self._held: dict[str, torch.Tensor] = {}

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **_: Any) -> None:
        async for name, tensor in weights:
            if name in self._held:
                self._held[name].copy_(tensor)
            else:
                self._held[name] = tensor.clone()


class Receives(RolloutWorker):
    """verl's own worker, with a rollout that copies."""

    def __init__(self, rollout_config: RolloutConfig) -> None:
        super().__init__(rollout_config)
        self.server_adapter = Copies(rollout_config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def received(self) -> int | None:
        """Bytes that came for the last version; None: its engine does not say."""
        receiver = getattr(self.checkpoint_engine, "_receiver", None)
        return None if receiver is None else int(receiver.received_bytes)


async def run(way: str, steps: int) -> None:
    """Trains and updates."""
    backend, module, options = WAYS[way]
    config = CheckpointEngineConfig(
        backend=backend, custom_backend_module=module, engine_kwargs={backend: options},
        update_weights_bucket_megabytes=_BUCKET_MB,
    )  # fmt: skip
    ranks = group(NUM_RANKS, RayClassWithInitArgs(cls=ray.remote(Trains), config=config))
    rollout_config = RolloutConfig(name="vllm", checkpoint_engine=config)
    workers = group(NUM_WORKERS, RayClassWithInitArgs(cls=ray.remote(Receives), rollout_config=rollout_config))
    manager = CheckpointEngineManager(
        config=config, actor_wg=ranks, replicas=[Replica(worker) for worker in workers.workers]
    )
    for version in range(1, steps + 1):
        size = ranks.step(version)[0]
        began_s = time.monotonic()
        await manager.update_weights(global_steps=version)
        seconds = time.monotonic() - began_s
        received = [size if each is None else each for each in workers.received()]
        say(json.dumps({"seconds": seconds, "bytes": sum(received)}))


if __name__ == "__main__":
    paths = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=True, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    asyncio.run(run(sys.argv[1], int(sys.argv[2])))
    say("done")
    ray.shutdown()
