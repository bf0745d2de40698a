"""The names of SkyRL's weight sync: interface design, migration plan and call graph, in one place to import from.

Extractors are in `extractors`, strategies, senders, receivers and messages in files of those names; loaders, client and
manager in `engines`. Where two documents spell a name differently, both are here; what is ours already is ours.
"""

from __future__ import annotations

import torch

from weightsync.adapters.compat.engines import (
    ActorEngine,
    InferenceEngine,
    InferenceEngineClient,
    RemoteWeightLoader,
    SGLangWeightLoader,
    VLLMWeightLoader,
    WeightLoader,
    WeightSyncManager,
)
from weightsync.adapters.compat.extractors import (
    Chunks,
    DeepSpeedWeightExtractor,
    FSDPWeightExtractor,
    MegatronWeightExtractor,
    WeightChunk,
    WeightExtractor,
)
from weightsync.adapters.compat.groups import ProcessGroup, init_custom_process_group
from weightsync.adapters.compat.messages import (
    BroadcastWeightUpdateRequest,
    CudaIpcWeightUpdateRequest,
    EmptyWeightSyncInitInfo,
    PackedCudaIpcWeightUpdateRequest,
    TorchDistributedWeightSyncInitInfo,
)
from weightsync.adapters.compat.receiver import (
    BroadcastTransferReceiver,
    CudaIpcTransferReceiver,
    PackedCudaIpcTransferReceiver,
    WeightTransferReceiver,
)
from weightsync.adapters.compat.sender import (
    BroadcastTransferSender,
    CudaIpcTransferSender,
    PackedCudaIpcTransferSender,
    TransferRequest,
    WeightTransferSender,
)
from weightsync.adapters.compat.strategy import (
    BroadcastTransferStrategy,
    CudaIpcTransferStrategy,
    PackedCudaIpcTransferStrategy,
    WeightTransferStrategy,
    create_strategy,
)
from weightsync.tensors import torch_dtype
from weightsync.types import WeightSyncInitInfo, WeightUpdateRequest, dtype_name

# The design's and the plan's own spellings.
WeightSyncInfo = WeightSyncInitInfo
TorchDistributedWeightSyncInfo = TorchDistributedWeightSyncInitInfo
EmptyWeightSyncInfo = EmptyWeightSyncInitInfo
BroadcastWeightTransferSender = BroadcastTransferSender
BroadcastWeightTransferReceiver = BroadcastTransferReceiver
CudaIpcWeightTransferSender = CudaIpcTransferSender
PackedCudaIpcWeightTransferSender = PackedCudaIpcTransferSender


def parse_dtype(dtype: str) -> torch.dtype:
    """torch's dtype of a header's: "bfloat16", or "torch.bfloat16".

    Raises:
        InvalidRequestError: there is no such dtype.
    """
    return torch_dtype(dtype_name(dtype))


__all__ = [
    "ActorEngine",
    "BroadcastTransferReceiver",
    "BroadcastTransferSender",
    "BroadcastTransferStrategy",
    "BroadcastWeightTransferReceiver",
    "BroadcastWeightTransferSender",
    "BroadcastWeightUpdateRequest",
    "Chunks",
    "CudaIpcTransferReceiver",
    "CudaIpcTransferSender",
    "CudaIpcTransferStrategy",
    "CudaIpcWeightTransferSender",
    "CudaIpcWeightUpdateRequest",
    "DeepSpeedWeightExtractor",
    "EmptyWeightSyncInfo",
    "EmptyWeightSyncInitInfo",
    "FSDPWeightExtractor",
    "InferenceEngine",
    "InferenceEngineClient",
    "MegatronWeightExtractor",
    "PackedCudaIpcTransferReceiver",
    "PackedCudaIpcTransferSender",
    "PackedCudaIpcTransferStrategy",
    "PackedCudaIpcWeightTransferSender",
    "PackedCudaIpcWeightUpdateRequest",
    "ProcessGroup",
    "RemoteWeightLoader",
    "SGLangWeightLoader",
    "TorchDistributedWeightSyncInfo",
    "TorchDistributedWeightSyncInitInfo",
    "TransferRequest",
    "VLLMWeightLoader",
    "WeightChunk",
    "WeightExtractor",
    "WeightLoader",
    "WeightSyncInfo",
    "WeightSyncInitInfo",
    "WeightSyncManager",
    "WeightTransferReceiver",
    "WeightTransferSender",
    "WeightTransferStrategy",
    "WeightUpdateRequest",
    "create_strategy",
    "init_custom_process_group",
    "parse_dtype",
]
