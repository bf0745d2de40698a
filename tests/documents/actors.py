"""The processes of document 3's call sequences: training ranks, rollout services (its RaaS), the Dataflow service."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.multiproc.pull_kit import Actor, RefusedError, _act, wait_until
from tests.standins.processes import Child, free_port, in_gloo_world
from weightsync.adapters.compat.dataflow import AstraFlowClient, AstraFlowService
from weightsync.adapters.compat.weight_manager import (
    SenderAgentConfig,
    TransferEngineConfig,
    WeightManager,
    WeightManagerConfig,
)
from weightsync.engine.embedded import EmbeddedEngine
from weightsync.host.service import RolloutService
from weightsync.host.settings import RolloutConfig
from weightsync.load.module import ModuleWeightLoader
from weightsync.memory import LeaseReader, ServingLease
from weightsync.tensors import byte_array

WORLD_SIZE = 2
_ROWS = 4001
"""Uneven over two ranks; a step changes a few rows, as deltas like it."""


def small_model(seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(_ROWS, 24), nn.Linear(24, 7, bias=False))


def bytes_of(model: nn.Module) -> dict[str, bytes]:
    """Of each parameter, whole, by torch's own gathering; a collective where it is sharded."""
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()}
    return {name: byte_array(tensor.contiguous()).tobytes() for name, tensor in whole.items()}


# --- training ranks ---


def rank_main(rank: int, world_size: int, model_id: str, conn: Any) -> None:
    """FSDP2, real optimizer steps, and the calls of the document's timeline."""
    model = fully_shard(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    wm = WeightManager(
        WeightManagerConfig(
            SenderAgentConfig(rank, world_size, [TransferEngineConfig("127.0.0.1")], http_bind_port=0),
            strategies=["full", "delta"],
            model_id=model_id,
        ),
        run_id=f"{model_id}-run",
    )
    clients: list[AstraFlowClient] = []

    def start() -> str:
        wm.start(deltas=True)
        return wm.endpoint

    def train_step(number: int) -> None:
        tokens = torch.randint(0, _ROWS, (2, 6), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()

    def step(version: int) -> Any:
        """Returns on every rank the report's fields; on rank 0 also the bytes that are published."""
        train_step(version)
        report = wm.offload(model.named_parameters(), version, rank, world_size)
        torch.save({name: p.to_local() for name, p in model.named_parameters()}, io.BytesIO())  # the checkpoint
        truth = bytes_of(model)
        delta = wm.wait_delta_ready() if rank == 0 else None
        facts = {"published": report.published, "path": report.path, "delta": delta is not None}
        return (facts, truth) if rank == 0 else (facts, None)

    def connect(service_url: str) -> None:
        if rank == 0:
            clients.append(AstraFlowClient(service_url, wm))

    def notify_async(version: int) -> float:
        began_s = time.monotonic()
        if rank == 0:
            clients[-1].notify_version_async(version)
        return time.monotonic() - began_s

    def notify_eval(version: int) -> Any:
        return clients[-1].notify_version(version, run_eval=True, timeout_s=30.0) if rank == 0 else None

    def get_batch(version: int) -> bool | None:
        return clients[-1].wait_version(version, timeout_s=30.0) if rank == 0 else None

    def close() -> None:
        for client in clients:
            client.close()
        wm.close()

    orders = {
        "start": start, "step": step, "connect": connect, "notify_async": notify_async, "notify_eval": notify_eval,
        "get_batch": get_batch, "close": close,
    }  # fmt: skip
    _act(conn, orders)


class Ranks:
    """A trainer: two training ranks that do everything together."""

    def __init__(self, start: Callable[..., Child], model_id: str = "default") -> None:
        port = free_port()
        self.ranks = [
            Actor(start, in_gloo_world, rank, WORLD_SIZE, port, rank_main, (model_id,), name=f"{model_id}-rank{rank}")
            for rank in range(WORLD_SIZE)
        ]
        self.model_id = model_id
        self.endpoint: str = self.ask("start")[0]

    def ask(self, order: str, *args: Any) -> list[Any]:
        """What each rank answers."""
        for rank in self.ranks:
            rank.tell(order, *args)
        return [rank.answer() for rank in self.ranks]

    def step(self, version: int) -> dict[str, bytes]:
        """One training step; what it publishes."""
        answers = self.ask("step", version)
        assert all(facts["published"] and facts["path"] == "shards" for facts, _ in answers), answers
        truth: dict[str, bytes] = answers[0][1]
        return truth


# --- rollout services ---


def raas_main(uid: str, models: tuple[str, ...], folder: str, options: dict[str, Any], conn: Any) -> None:
    """A rollout service with an engine of each model; in a fleet where `options` name a controller."""
    torch.set_num_threads(1)
    leased = "controller" in options
    lease = ServingLease(f"{folder}/{uid}.lease") if leased else None
    modules = {model: small_model(seed=1) for model in models}
    engines = {
        model: EmbeddedEngine.of(
            ModuleWeightLoader(module), engine_id=f"{uid}-{model}", model_id=model,
            lease=LeaseReader(lease.path) if lease is not None else None,
        )
        for model, module in modules.items()
    }  # fmt: skip
    config = RolloutConfig(service_id=uid, lease=lease, pull_timeout_s=20.0, load_timeout_s=20.0, **options)
    service = RolloutService(engines, config)
    url = service.start()

    def serving(model: str) -> tuple[str, dict[str, bytes]]:
        """What a generation is answered with."""
        with engines[model].generation(timeout_s=20.0) as version:
            return str(version), bytes_of(modules[model])

    def status(model: str) -> tuple[str | None, dict[str, str]]:
        said = service.status().models[model]
        return (None if said.version is None else f"{said.run_id}/{said.version}"), dict(said.errors)

    orders = {"url": lambda: url, "serving": serving, "status": status, "pid": os.getpid}
    _act(conn, orders)


class RaaS(Actor):
    """A rollout host."""

    def __init__(
        self, start: Callable[..., Child], uid: str, folder: Any, models: tuple[str, ...] = ("default",), **options: Any
    ) -> None:
        super().__init__(start, raas_main, uid, models, str(folder), options, name=uid)
        self.url: str = self.ask("url")

    def serving(self, model: str = "default") -> tuple[str, dict[str, bytes]]:
        """What a generation is answered with, by whose weights; waits until it is answered."""

        def answered() -> Any:
            try:
                return self.ask("serving", model)
            except RefusedError:  # its lease comes with its next heartbeat
                return None

        found: tuple[str, dict[str, bytes]] = wait_until(answered, f"{self.name} answers")
        return found


# --- the Dataflow service ---


def dataflow_main(config: dict[str, Any], conn: Any) -> None:
    service = AstraFlowService(config)

    def notify(model_id: str, version: int, sender_endpoint: str) -> dict[str, int]:
        found = service.raas_pool.notify_version(model_id, version, sender_endpoint, timeout_s=30.0)
        return {uid: int(status) for uid, status in found.items()}

    orders = {
        "url": lambda: service.url,
        "notify": notify,
        "catchup": lambda uid: service.catchup_raas(uid, timeout_s=30.0),
        "close": service.close,
    }
    _act(conn, orders)


class Dataflow(Actor):
    """The service in a process of its own."""

    def __init__(self, start: Callable[..., Child], **fleet: Any) -> None:
        config = {
            "sync_method": "pull",
            "sync_mode": "fully-async",
            "fleet": {"models": ["default"], "lease_s": 4.0, "port": 0, "retries_s": [0.2, 0.5, 1.0], **fleet},
        }
        super().__init__(start, dataflow_main, config, name="dataflow")
        self.url: str = self.ask("url")
