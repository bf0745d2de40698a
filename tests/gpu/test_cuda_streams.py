"""What a training step has queued on a side stream is what is extracted and lent, and what an engine has queued there
is not written into. Needs a CUDA GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.parts_ipc import CYCLES, prove_streams
from weightsync.handles.fanout import in_thread
from weightsync.transfer.broadcast import BroadcastTransferReceiver
from weightsync.types import BroadcastWeightUpdateRequest, Deadline

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
