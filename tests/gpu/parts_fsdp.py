"""FSDP2 on a device, its shards offloaded to the host: real steps, pushed into an engine on the device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.gpu.parts_ipc import answer_sums, sum_of
from tests.gpu.timing import HIDDEN, Bench
from tests.standins.processes import children
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.handles.fanout import EngineFanout
from weightsync.handles.http import HttpEngine
from weightsync.trainer.push import PushSync
from weightsync.transfer.registry import strategy_named

NUM_LAYERS = 8
STEPS = 3


def layers(device: str, seed: int) -> nn.Sequential:
    """The model of both sides; the last layer's rows divide among no two ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(NUM_LAYERS)), nn.Linear(HIDDEN, 7)).to(device)


def engine_of_layers(device: str, conn: Any) -> None:
    """An engine behind HTTP; answers what each tensor's bytes are."""
    Bench(device, num_bytes=0)
    answer_sums(layers(device, seed=0), conn)


def rank_main(rank: int, world_size: int, device: str, store: str, url: str, conn: Any) -> None:
    """A training rank: each step is pushed, and said with the sums of the whole weights."""
    Bench(device, num_bytes=0)
    offloaded = device == "cuda"
    backend = "nccl" if offloaded and world_size == 1 else "gloo"  # NCCL refuses two ranks on one GPU
    dist.init_process_group(
        f"cpu:gloo,cuda:{backend}" if offloaded else backend, init_method=f"file://{store}", rank=rank,
        world_size=world_size,
    )  # fmt: skip
    mesh = init_device_mesh(device, (world_size,))
    model = layers(device, seed=1)
    policy = CPUOffloadPolicy(pin_memory=True) if offloaded else OffloadPolicy()
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    push = PushSync(
        FSDPWeightExtractor(model), EngineFanout([HttpEngine(url, engine_id="e")]),
        strategy=strategy_named("packed_cuda_ipc"),
    )  # fmt: skip
    push.initialize()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for version in range(1, STEPS + 1):
        step(model, optimizer, version, with_forward=world_size == 1)
        report = push.sync_weights(version)
        whole = {name: gathered(parameter) for name, parameter in model.named_parameters()}
        kinds = {parameter.to_local().device.type for parameter in model.parameters() if isinstance(parameter, DTensor)}
        if rank == 0:
            conn.send((report.digests_equal, {name: sum_of(tensor) for name, tensor in whole.items()}, sorted(kinds)))
            assert conn.recv() == "go on"
        dist.barrier()
    push.close()
    dist.destroy_process_group()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, *, with_forward: bool) -> None:
    """A real one; or one of made-up gradients, where gloo has no reduce-scatter for a device."""
    optimizer.zero_grad()
    if with_forward:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model(torch.full((4, HIDDEN), float(number), device=device)).square().mean().backward()
    else:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * number
    optimizer.step()


def gathered(parameter: torch.Tensor) -> torch.Tensor:
    """The whole tensor in host memory, by means that are not the library's: shards over gloo."""
    assert isinstance(parameter, DTensor)
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, parameter.to_local().detach().cpu())
    return torch.cat(shards)


def prove_fsdp(bench: Bench) -> None:
    """One rank with its own collectives, then two ranks on the one device by gloo: the engine has the whole weights."""
    for world_size in (1, 2):
        with children() as start, tempfile.TemporaryDirectory() as folder:
            device, store = bench.device.type, str(Path(folder) / "store")
            engine = start(engine_of_layers, device, talk=True)
            url = engine.recv(120)
            ranks = [
                start(rank_main, rank, world_size, device, store, url, talk=True) for rank in range(world_size)
            ]  # fmt: skip
            for _ in range(STEPS):
                proved, wanted, kinds = ranks[0].recv(120)
                engine.conn.send("sums")
                assert proved
                assert engine.recv(60) == wanted
                assert kinds == ["cpu"], "the shards are in host memory"
                ranks[0].conn.send("go on")
            for rank in ranks:
                rank.result(60)
            engine.conn.send("end")
