"""SGLang's form of a broadcast: training rank 0 joins the process group that SGLang makes, and packs as it unpacks.

SGLang 0.5.23's workers meet in `init_weights_update_group` by torch's own group builder, and take a chunk as one
`flattened_bucket`: the bytes of its tensors one behind the other, each at a multiple of its itemsize. The handle is
`clients.sglang.SGLangEngine`; windows, buckets and failures are those of `transfer.broadcast`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from weightsync.errors import UnsupportedError
from weightsync.plan.buckets import plan_dense_bucket
from weightsync.transfer.base import RecordPhase
from weightsync.transfer.broadcast import BroadcastTransferReceiver, BroadcastTransferSender, BroadcastTransferStrategy
from weightsync.transfer.group import join_torch_group
from weightsync.types import (
    Deadline,
    InferenceEngineClient,
    TorchDistributedWeightSyncInitInfo,
    WeightChunk,
    WeightSyncInitInfo,
)


class SGLangTransferStrategy(BroadcastTransferStrategy):
    """Makes the sending end for SGLang servers; see `BroadcastTransferStrategy` for the arguments. SGLang has its own
    receivers, so one push has SGLang servers alone. The backend is "nccl" where SGLang runs on GPUs.
    """

    name = "sglang"

    def create_receiver(self, info: WeightSyncInitInfo, *, rank: int) -> BroadcastTransferReceiver:
        """Nobody's.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("SGLang's workers receive by themselves: strategy 'sglang' has no receiver", rank=rank)

    def _join(
        self, info: TorchDistributedWeightSyncInitInfo, store: Any, watch: Callable[[], None], record: RecordPhase
    ) -> BroadcastTransferSender:
        group = join_torch_group(info, store=store, interface=self.interface, watch=watch)
        return SGLangTransferSender(group, record=record, track=self.track, plan=plan_dense_bucket)


class SGLangTransferSender(BroadcastTransferSender):
    def send_chunks(
        self, chunks: Iterable[WeightChunk], client: InferenceEngineClient, *, session: str, deadline: Deadline
    ) -> int:
        return super().send_chunks(_ordered(chunks), client, session=session, deadline=deadline)


def _ordered(chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
    """Tensors by falling itemsize, so that each lies at a multiple of its own."""
    for chunk in chunks:
        tensors = sorted(zip(chunk.names, chunk.tensors, strict=True), key=lambda each: -each[1].itemsize)
        yield WeightChunk(
            names=tuple(name for name, _ in tensors),
            tensors=tuple(tensor for _, tensor in tensors),
            module_name=chunk.module_name,
        )
        del chunk, tensors
