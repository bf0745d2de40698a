"""What a training step has queued on a side stream is what is extracted and lent, and what an engine has queued there
is not written into. Needs a CUDA GPU."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.gpu.parts_ipc import CYCLES, prove_streams
from weightsync.adapters.compat import calls
from weightsync.handles.fanout import in_thread
from weightsync.load.module import ModuleWeightLoader
from weightsync.testing.contracts import manifest_of
from weightsync.transfer.broadcast import BroadcastTransferReceiver
from weightsync.types import BroadcastWeightUpdateRequest, Deadline, Full, Patch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_extraction_and_lending_come_after_what_the_caller_has_queued() -> None:
    prove_streams()


class OtherStream:
    """A group whose thread writes into a buffer at once, on its own stream, as NCCL does."""

    device = torch.device("cuda", 0)

    def broadcast(self, buffer: torch.Tensor, *, deadline: Deadline) -> None:
        def write() -> None:
            buffer.fill_(7)
            torch.cuda.current_stream().synchronize()

        in_thread(write, name="group").result(30)

    def close(self) -> None:
        """There is nothing to close."""


def test_a_broadcast_is_not_received_into_memory_that_queued_kernels_write_yet() -> None:
    """The bucket is what torch took back from a forward pass that is queued."""
    num_bytes = 64 << 20
    group: Any = OtherStream()
    with torch.cuda.stream(torch.cuda.Stream(group.device)):
        activations = torch.ones(num_bytes, dtype=torch.uint8, device=group.device)
        torch.cuda._sleep(CYCLES)
        activations.add_(1)
        del activations
        request = BroadcastWeightUpdateRequest(
            session="s", seq=0, names=("w",), dtypes=("uint8",), shapes=((num_bytes,),), offsets=(0,),
            bucket_bytes=num_bytes,
        )  # fmt: skip
        (update,) = BroadcastTransferReceiver(group).receive_weights(request, deadline=Deadline(30))
        torch.cuda.synchronize()
        assert bool((update.tensor == 7).all())  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["patch", "in place"])
def test_what_a_generation_has_queued_is_computed_with_the_old_weights(kind: str) -> None:
    """Its block has ended, and its answer is computed yet, on a stream of its own."""
    model = torch.nn.Linear(64, 64, bias=False, device="cuda")
    model.requires_grad_(False)
    model.weight.fill_(1.0)
    x = torch.ones(8, 64, device="cuda")
    loader = ModuleWeightLoader(model, in_place=True)
    new = torch.full((64, 64), 2.0, device="cuda")
    manifest = manifest_of({"weight": new}, 1)

    def write() -> None:
        if kind == "patch":
            loader.commit(manifest.version)
        else:
            loader.load_weights([Full(name="weight", tensor=new)])

    if kind == "patch":
        loader.begin_patch(manifest)
        everywhere = torch.arange(new.numel(), device="cuda")
        loader.load_weights([Patch(name="weight", positions=everywhere, values=new.reshape(-1))])
        list(loader.prepare_patch())
    else:
        loader.begin(manifest)
    model(x)  # the first call of a kernel may wait for the device
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(CYCLES)
        answer = model(x)
    in_thread(write, name="server").result(60)
    torch.cuda.synchronize()
    assert bool((answer == 64.0).all())
    assert bool((model.weight == 2.0).all())


def test_what_the_documents_calls_run_in_a_thread_is_on_the_callers_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        there = asyncio.run(calls.in_thread(torch.cuda.current_stream))
    assert there == stream
