"""SkyRL: a strategy of its `weight_sync` layer (0.3) that publishes instead of broadcasting.

    from weightsync.adapters.skyrl import install
    install(to=["http://host-0:9000"], token=TOKEN)      # in every training worker, before it builds its sender

SkyRL has a strategy layer and no key that names one, so `install` replaces the function that chooses. A sender is made
on all training ranks and walks SkyRL's chunks on all of them; rank 0 keeps a copy and publishes it. SkyRL sends its
inference servers nothing: `weightsync serve` stands beside each, whose vLLM has to have our backend (the key is in
docs/skyrl.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from skyrl.backends.skyrl_train import weight_sync
from skyrl.backends.skyrl_train.weight_sync import WeightSyncInitInfo, WeightTransferSender, WeightTransferStrategy

from weightsync.adapters.gathered import GatheredTransfer
from weightsync.engine.vllm.plugin import WeightSyncTransferEngine
from weightsync.extract.base import training_rank


class PublishInitInfo(WeightSyncInitInfo):  # type: ignore[misc]
    """SkyRL sends one to each inference server; here nobody needs any."""

    def __init__(self) -> None:
        super().__init__(override_existing_receiver=True)

    def for_servers(self, *_: Any, **__: Any) -> list[PublishInitInfo]:
        return []


class PublishSender(WeightTransferSender):  # type: ignore[misc]
    """One training rank's. Rank 0 has the transfer, others walk their chunks."""

    def __init__(self, transfer: GatheredTransfer | None) -> None:
        self.transfer = transfer

    async def send_chunks(
        self, chunks: Iterable[Any], weight_metadata: dict[str, list[Any]] | None = None, **_: Any
    ) -> None:
        """Walks the chunks, publishes on rank 0, and waits until hosts serve it; on all ranks. See `GatheredTransfer`.

        Args:
            _: what releases after 0.3 say besides, of what they do with their servers themselves.

        Raises:
            WeightSyncError: on rank 0; nothing was sent.
        """
        try:
            if self.transfer is None:
                for _ in chunks:
                    pass
            else:
                self.transfer.send(_tensors(chunks))
                await asyncio.to_thread(self.transfer.wait_served)
        finally:  # a rank that fails lets nobody wait for it here
            if dist.is_initialized():
                dist.barrier()

    def teardown(self) -> None:
        """Ends the trainer's agent; hosts go on with the last version."""
        if self.transfer is not None:
            self.transfer.close()


def strategy(model_id: str | None = None, **settings: Any) -> type[WeightTransferStrategy]:
    """The strategy class that SkyRL's workers are given.

    Args:
        model_id, settings: of `GatheredTransfer`: to, token, wait_s, dtype, ...
    """

    class PublishStrategy(WeightTransferStrategy):  # type: ignore[misc]
        """See the module."""

        @staticmethod
        def create_init_info(ie_cfg: Any, inference_world_size: int | None = None) -> PublishInitInfo:
            return PublishInitInfo()

        @staticmethod
        def create_sender(init_info: Any, inference_client: Any) -> PublishSender:
            return PublishSender(GatheredTransfer(model_id, **settings) if training_rank() == 0 else None)

        @staticmethod
        def get_vllm_transfer_engine() -> type:
            return WeightSyncTransferEngine

    return PublishStrategy


def install(model_id: str | None = None, **settings: Any) -> None:
    """Makes SkyRL choose our strategy in this process, whatever its configuration says. See `strategy`."""
    made = strategy(model_id, **settings)
    weight_sync.get_transfer_strategy_cls = lambda *_, **__: made


def _tensors(chunks: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in chunks:
        yield from zip(chunk.names, chunk.tensors, strict=True)
