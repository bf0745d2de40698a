"""What extraction adds to a rank's physical memory, read from the kernel's own high-water mark.

That counts what the allocators of torch and gloo take in C++ too, which no Python hook sees.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from tests.standins.processes import run_ranks
from weightsync.extract.fsdp import FSDPWeightExtractor
from weightsync.types import WeightChunk

MIB = 1 << 20
CHUNK_BYTES = 32 * MIB
SLACK_BYTES = 4 * MIB
"""Socket buffers, the interpreter, allocator rounding."""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux: the high-water mark of /proc/self/status"
)


def _status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _peak_of_extraction(rank: int, world_size: int, columns: bool, keep_all: bool) -> tuple[int, int, int]:
    """Returns the extra bytes at the peak, the bound, and the model's bytes as extracted."""
    # Freed blocks above 64 KiB go straight back to the kernel, so the mark is what is live (M_MMAP_THRESHOLD).
    assert ctypes.CDLL(None).mallopt(-3, 1 << 16) == 1
    model = nn.ModuleList()
    # Chunks of 24 MiB as bfloat16: pairs of 12 MiB, and one parameter of its own that can't be gathered in place.
    last = (3072, 4096) if columns else (3071, 4096)
    for shape in [(3072, 2048)] * 8 + [last]:
        layer = nn.Module()
        layer.weight = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        model.append(layer)
    for layer in model:
        fully_shard(layer, shard_placement_fn=lambda parameter: Shard(int(columns and parameter.shape == last)))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(rank + 1)  # type: ignore[attr-defined]
    extractor = FSDPWeightExtractor(model, chunk_bytes=CHUNK_BYTES)
    plan = extractor.chunk_plan("bfloat16")
    assert len(plan) >= 4
    largest_chunk = max(chunk.nbytes for chunk in plan)
    largest = max(spec.nbytes for chunk in plan for spec in chunk.specs)
    next(extractor.extract_weights("bfloat16"))

    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    held: list[WeightChunk] = []
    for chunk in extractor.extract_weights("bfloat16"):
        if not keep_all:
            held.clear()
        held.append(chunk)
        del chunk
    return _status_bytes("VmHWM") - before, 2 * largest_chunk + largest, sum(chunk.nbytes for chunk in plan)


@pytest.mark.parametrize("columns", [False, True])
def test_extraction_takes_two_chunks_and_the_largest_parameter(columns: bool) -> None:
    for peak, bound, total in run_ranks(_peak_of_extraction, 2, columns, False):
        assert bound < total, "the bound must be able to fail"
        assert peak <= bound + SLACK_BYTES, f"{peak / MIB:.1f} MiB at the peak, the bound is {bound / MIB:.1f}"


def test_the_measurement_sees_a_consumer_that_keeps_everything() -> None:
    for peak, bound, _ in run_ranks(_peak_of_extraction, 2, False, True):
        assert peak > bound + SLACK_BYTES
