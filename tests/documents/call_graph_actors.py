"""The call graph's two actors, as a user of the documents' names writes them. Plain classes: here, or Ray's."""

from __future__ import annotations

from typing import Any, Dict

import torch

from tests.documents.kit import Model, bytes_of, step
from weightsync.adapters.compat.skyrl import FSDPWeightExtractor, SGLangWeightLoader

generator_dtype = torch.float32


class TrainingActor:
    """Rank 0. `log` is the order of what happens."""

    def __init__(self, seed: int, log: Any = None) -> None:
        self.model, self.log = Model(seed), [] if log is None else log

    async def initialize_weight_sync(self, strategy: Any, cfg: Any, inference_client: Any) -> Any:
        self.log.append("create_sender")
        self.cfg, self.inference_client = cfg, inference_client
        sync_info = await strategy.create_sync_info(cfg, inference_client)
        self.sender = await strategy.create_sender(cfg, inference_client, sync_info)
        return sync_info

    async def sync_weights(self) -> str:
        self.log.append("extract_weights")
        weight_chunks = FSDPWeightExtractor(self.cfg).extract_weights(self.model, generator_dtype)
        self.log.append("send_weights")
        return str(await self.sender.send_weights(weight_chunks, self.inference_client))

    async def train(self) -> Dict[str, bytes]:
        step(self.model)
        return bytes_of(self.model)

    async def close(self) -> None:
        await self.sender.close()


class InferenceActor:
    """One engine of one worker."""

    def __init__(self, seed: int, log: Any = None) -> None:
        self.model, self.log = Model(seed), [] if log is None else log
        self.loader = SGLangWeightLoader(self.model)

    async def initialize_weight_sync(self, strategy: Any, cfg: Any, sync_info: Any, rank_offset: int) -> None:
        self.log.append("create_receiver")
        self.receiver = await strategy.create_receiver(cfg, sync_info, rank_offset)

    async def update_named_weights(self, request_dict: Dict[str, Any]) -> Any:
        request = self.receiver.parse_request(request_dict)
        if "names" in request_dict:
            self.log.append("receive_and_load_weights")
        return await self.receiver.receive_and_load_weights(request, self.loader)

    async def weights(self) -> Dict[str, bytes]:
        return bytes_of(self.model)

    async def version(self) -> int:
        with self.loader.serving.generation() as version:
            return version.number
