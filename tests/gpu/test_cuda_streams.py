"""What a training step has queued on a side stream is what is extracted. Needs a CUDA GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weightsync.extract.module import ModuleWeightExtractor
from weightsync.observe import Recorder
from weightsync.publish.extraction import LockstepExtraction
from weightsync.publish.ranks import TrainingRanks
from weightsync.transfer.ipc import IpcSharer
from weightsync.types import Deadline, WeightChunk

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

_CYCLES = 500_000_000  # a quarter of a second, or so


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_extraction_comes_after_what_the_caller_has_queued_on_its_own_stream(dtype: str | None) -> None:
    model = nn.Linear(512, 512, bias=False).cuda()
    extractor = ModuleWeightExtractor(model)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        torch.cuda._sleep(_CYCLES)
        model.weight.fill_(3.0)
        running = LockstepExtraction(
            extractor,
            dtype=dtype,
            ranks=TrainingRanks(timeout_s=10),
            deadline=Deadline(30),
            recorder=Recorder("t"),
            keep=True,
        )
        running.start()
        seen = [bool((tensor == 3.0).all()) for chunk in running.chunks() for tensor in chunk.tensors]
        running.finish()
    assert seen == [True]


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_lent_is_complete_when_the_handle_is_there(packed: bool) -> None:
    """Another process would read at once, on a stream of its own."""
    weight = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    sharer = IpcSharer(packed=packed)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(_CYCLES)
        weight.fill_(3.0)
        sharer.share(WeightChunk(names=("w",), tensors=(weight,)), 0)
        assert side.query(), "nothing is queued any more"
    sharer.close()
