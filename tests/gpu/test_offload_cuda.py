"""Offload from a GPU straight into pinned pages of shared memory, on a stream of its own; and from host memory, so that
the test itself is known to work."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from weightsync.host.puller import Puller
from weightsync.memory.folder import path_of
from weightsync.trainer.publisher import WeightManager
from weightsync.types import Deadline
from weightsync.types.transfer_messages import Transport

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))
TWO = pytest.param("two", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"))
_CYCLES = 500_000_000  # a quarter of a second, or so


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize("device", ["cpu", CUDA, TWO])
def test_what_the_step_has_queued_is_what_is_published(device: str, dtype: str | None, transport: Transport) -> None:
    """`two`: the layers lie on two GPUs, and the second one's copies are waited for, too."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 7)).to("cuda" if device == "two" else device)
    if device == "two":
        model[1].to("cuda:1")
    with WeightManager("m", dtype=dtype) as manager:
        for version in (1, 2, 3):
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
                for index in range({"cpu": 0, "cuda": 1, "two": 2}[device]):
                    with torch.cuda.device(index):
                        torch.cuda._sleep(_CYCLES)
                for parameter in model.parameters():
                    parameter.fill_(float(version))
                assert manager.offload(model.named_parameters(), version).published
                for parameter in model.parameters():
                    parameter.fill_(-1.0)  # the next step begins at once
            manager.wait_published(version, timeout_s=30.0)
            puller = Puller(manager.endpoint, "m", receiver_id="r", transport=transport)
            with puller.pull(deadline=Deadline(30.0)) as pulled:
                assert pulled.version.number == version
                found = load_file(path_of(pulled.segment))  # mapped: it is gone when the puller closes
                assert set(found) == {name for name, _ in model.named_parameters()}
                assert all(bool((tensor == float(version)).all()) for tensor in found.values())
            puller.close()
