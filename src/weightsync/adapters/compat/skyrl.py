"""The names of SkyRL's weight sync: interface design, migration plan and call graph, in one place to import from.

Extractors are in `extractors`, strategies, senders, receivers, messages and the manager in files of those names;
loaders and client in `engines`. Where two documents spell a name differently, both are here; what is ours already is
ours.
"""

from __future__ import annotations

import torch

from weightsync.adapters.compat.engines import ActorEngine as ActorEngine
from weightsync.adapters.compat.engines import InferenceEngine as InferenceEngine
from weightsync.adapters.compat.engines import InferenceEngineClient as InferenceEngineClient
from weightsync.adapters.compat.extractors import Chunks as Chunks
from weightsync.adapters.compat.extractors import DeepSpeedWeightExtractor as DeepSpeedWeightExtractor
from weightsync.adapters.compat.extractors import FSDPWeightExtractor as FSDPWeightExtractor
from weightsync.adapters.compat.extractors import MegatronWeightExtractor as MegatronWeightExtractor
from weightsync.adapters.compat.extractors import WeightChunk as WeightChunk
from weightsync.adapters.compat.extractors import WeightExtractor as WeightExtractor
from weightsync.adapters.compat.groups import ProcessGroup as ProcessGroup
from weightsync.adapters.compat.groups import init_custom_process_group as init_custom_process_group
from weightsync.adapters.compat.loaders import RemoteWeightLoader as RemoteWeightLoader
from weightsync.adapters.compat.loaders import SGLangWeightLoader as SGLangWeightLoader
from weightsync.adapters.compat.loaders import VLLMWeightLoader as VLLMWeightLoader
from weightsync.adapters.compat.loaders import WeightLoader as WeightLoader
from weightsync.adapters.compat.manager import WeightSyncManager as WeightSyncManager
from weightsync.adapters.compat.messages import BroadcastWeightUpdateRequest as BroadcastWeightUpdateRequest
from weightsync.adapters.compat.messages import CudaIpcWeightUpdateRequest as CudaIpcWeightUpdateRequest
from weightsync.adapters.compat.messages import EmptyWeightSyncInitInfo as EmptyWeightSyncInitInfo
from weightsync.adapters.compat.messages import PackedCudaIpcWeightUpdateRequest as PackedCudaIpcWeightUpdateRequest
from weightsync.adapters.compat.messages import TorchDistributedWeightSyncInitInfo as TorchDistributedWeightSyncInitInfo
from weightsync.adapters.compat.receiver import BroadcastTransferReceiver as BroadcastTransferReceiver
from weightsync.adapters.compat.receiver import CudaIpcTransferReceiver as CudaIpcTransferReceiver
from weightsync.adapters.compat.receiver import PackedCudaIpcTransferReceiver as PackedCudaIpcTransferReceiver
from weightsync.adapters.compat.receiver import WeightTransferReceiver as WeightTransferReceiver
from weightsync.adapters.compat.sender import BroadcastTransferSender as BroadcastTransferSender
from weightsync.adapters.compat.sender import CudaIpcTransferSender as CudaIpcTransferSender
from weightsync.adapters.compat.sender import PackedCudaIpcTransferSender as PackedCudaIpcTransferSender
from weightsync.adapters.compat.sender import TransferRequest as TransferRequest
from weightsync.adapters.compat.sender import WeightTransferSender as WeightTransferSender
from weightsync.adapters.compat.strategy import BroadcastTransferStrategy as BroadcastTransferStrategy
from weightsync.adapters.compat.strategy import CudaIpcTransferStrategy as CudaIpcTransferStrategy
from weightsync.adapters.compat.strategy import PackedCudaIpcTransferStrategy as PackedCudaIpcTransferStrategy
from weightsync.adapters.compat.strategy import WeightTransferStrategy as WeightTransferStrategy
from weightsync.adapters.compat.strategy import create_strategy as create_strategy
from weightsync.tensors import torch_dtype
from weightsync.types import WeightSyncInitInfo as WeightSyncInitInfo
from weightsync.types import WeightUpdateRequest as WeightUpdateRequest
from weightsync.types import dtype_name

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
