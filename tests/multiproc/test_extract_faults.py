"""What extraction refuses, what a dead rank does to the others, and in which dtype bytes travel."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

from tests.standins.processes import children, free_port, in_gloo_world, run_ranks
from weightsync.errors import ExtractError, WeightSyncError
from weightsync.extract import fsdp
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.extract.module import ModuleWeightExtractor


def _refusals(rank: int, world_size: int) -> list[tuple[str, str | None]]:
    mesh = init_device_mesh("cpu", (world_size,))
    partial = nn.Module()
    partial.register_buffer("fine", torch.ones(2))
    partial.register_buffer("summand", DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    sharded = fully_shard(nn.Linear(4, 4))
    seen = []
    for kind, model in ((FSDPWeightExtractor, partial), (ModuleWeightExtractor, sharded)):
        try:
            kind(model)
        except WeightSyncError as error:
            seen.append((type(error).__name__, error.parameter))
    return seen


def test_a_partial_and_a_sharded_tensor_in_the_wrong_extractor_are_refused_on_every_rank() -> None:
    expected = [("UnsupportedError", "summand"), ("UnsupportedError", "weight")]
    assert run_ranks(_refusals, 2) == [expected, expected]


def _moved_bytes(rank: int, world_size: int) -> tuple[int, int]:
    moved = 0
    gather = fsdp._all_gather

    def counting(output: torch.Tensor, own: torch.Tensor, **options: Any) -> Any:
        nonlocal moved
        moved += output.nbytes
        return gather(output, own, **options)

    fsdp._all_gather = counting
    extractor = FSDPWeightExtractor(fully_shard(nn.Linear(64, 64, bias=False)), chunk_bytes=None)
    for _ in extractor.extract_weights("bfloat16"):
        pass
    return moved, extractor.metadata("bfloat16")[0].nbytes


def test_shards_are_converted_before_they_travel() -> None:
    for moved, size in run_ranks(_moved_bytes, 2):
        assert moved == size == 64 * 64 * 2


def _die_mid_extract(rank: int, world_size: int) -> tuple[str, str | None, int | None]:
    chunks = FSDPWeightExtractor(fully_shard(nn.Linear(8, 8)), chunk_bytes=None).extract_weights("bfloat16")
    next(chunks)
    if rank == 1:
        os._exit(9)
    try:
        for _ in chunks:
            pass
    except ExtractError as error:
        return type(error).__name__, error.parameter, error.rank
    return "no error", None, None


def test_a_rank_that_dies_mid_extract_is_a_typed_error_on_the_others() -> None:
    with children() as start:
        port = free_port()
        first, _ = [start(in_gloo_world, rank, 2, port, _die_mid_extract, ()) for rank in range(2)]
        kind, parameter, rank = first.result(20)
    assert kind == "ExtractError"
    assert parameter in ("weight", "bias")
    assert rank == 0
