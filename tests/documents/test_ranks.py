"""The plan's worker on two FSDP2 ranks, each in its process, into an engine in another one, behind HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.documents.kit import config, step
from tests.documents.test_document_2 import FSDPWeightExtractor, Phase4Worker
from tests.multiproc.spine import TOKEN, Engine, build, cast_bytes, shard
from tests.standins.processes import children, run_ranks
from weightsync.adapters.compat import skyrl
from weightsync.handles.http import HttpEngine


def train_and_sync(rank: int, world_size: int, kind: str, url: str) -> None:
    """What the plan's trainer makes of the worker, on every rank alike."""
    model = shard(build(5, dtype=torch.bfloat16), "shard0", world_size)
    cfg = config(use_flashrl=False)
    strategy: Any = getattr(skyrl, kind)()
    worker = Phase4Worker(cfg, model)
    worker._create_extractor = lambda: skyrl.FSDPWeightExtractor(cfg, model)  # type: ignore[method-assign]
    client = skyrl.InferenceEngineClient([HttpEngine(url, engine_id="e", token=TOKEN)])

    async def job() -> None:
        info = await worker.initialize_weight_sync(strategy)
        assert (info is None) == (rank != 0)
        for _ in range(2):
            step(model)
            await worker.broadcast_to_inference_engines(client)
        await worker.sender.close()

    asyncio.run(job())


@pytest.mark.parametrize("kind", ["BroadcastTransferStrategy", "PackedCudaIpcTransferStrategy"])
def test_two_ranks_sync_an_engine_behind_http(kind: str) -> None:
    """Every rank runs the same worker; the engine's bytes are the trainer's after two steps.

    Seen red with a sender that syncs on rank 0 alone.
    """
    with children() as start:
        engine = Engine(start, "e")
        run_ranks(train_and_sync, 2, kind, engine.url)
        reference = build(5, dtype=torch.bfloat16)
        step(reference)
        step(reference)
        assert engine.weights() == cast_bytes(reference)


def gather_with_the_example(rank: int, world_size: int) -> dict[str, bytes]:
    """The plan's own extractor, whose `full_tensor(param, ...)` gathers shards."""
    model = shard(build(5), "shard0", world_size)
    extractor = FSDPWeightExtractor(config(use_flashrl=True), model)
    return {
        name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for chunk in extractor.extract_weights(model)
        for name, tensor in zip(chunk.names, chunk.tensors, strict=True)
    }


def test_the_example_extractor_gathers_what_ranks_hold() -> None:
    """Both ranks get every parameter whole, though seven rows don't divide by two."""
    whole = {
        name: parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, parameter in build(5).named_parameters()
    }
    for found in run_ranks(gather_with_the_example, 2):
        assert found == whole
