"""The vocabulary of the library: plain data and protocols, no torch, no I/O."""

from weightsync.types.adapter import Adapter, Base
from weightsync.types.chunk import WeightChunk
from weightsync.types.deadline import Deadline
from weightsync.types.dtypes import dtype_name, itemsize_bytes, target_dtype
from weightsync.types.engine import (
    REQUEST_TYPES,
    AbortRequest,
    AuditRequest,
    BeginRequest,
    CommitRequest,
    DescribeRequest,
    EngineHandle,
    EngineOp,
    EngineReply,
    EngineRequest,
    InferenceEngineClient,
    InitRequest,
    PatchBase,
    PauseRequest,
    PhaseRecord,
    ResumeRequest,
    StageRequest,
    UpdateRequest,
)
from weightsync.types.init_info import (
    AnyInitInfo,
    EmptyWeightSyncInitInfo,
    TorchDistributedWeightSyncInitInfo,
    WeightSyncInitInfo,
)
from weightsync.types.live_layer import LiveLayer
from weightsync.types.manifest import ArtifactKind, Manifest, Version
from weightsync.types.method import Push, SyncReport
from weightsync.types.requests import (
    AnyUpdateRequest,
    BroadcastWeightUpdateRequest,
    CudaIpcWeightUpdateRequest,
    CudaMemoryHandle,
    MemoryHandle,
    PackedCudaIpcWeightUpdateRequest,
    PatchWeightUpdateRequest,
    SharedMemoryHandle,
    WeightUpdateRequest,
)
from weightsync.types.spans import VersionSpan, whole_span
from weightsync.types.spec import Box, HeldTensor, TensorSpec
from weightsync.types.table import TensorTable
from weightsync.types.updates import Full, Patch, Update

__all__ = [
    "REQUEST_TYPES",
    "AbortRequest",
    "Adapter",
    "AnyInitInfo",
    "AnyUpdateRequest",
    "ArtifactKind",
    "AuditRequest",
    "Base",
    "BeginRequest",
    "Box",
    "BroadcastWeightUpdateRequest",
    "CommitRequest",
    "CudaIpcWeightUpdateRequest",
    "CudaMemoryHandle",
    "Deadline",
    "DescribeRequest",
    "EmptyWeightSyncInitInfo",
    "EngineHandle",
    "EngineOp",
    "EngineReply",
    "EngineRequest",
    "Full",
    "HeldTensor",
    "InferenceEngineClient",
    "InitRequest",
    "LiveLayer",
    "Manifest",
    "MemoryHandle",
    "PackedCudaIpcWeightUpdateRequest",
    "Patch",
    "PatchBase",
    "PatchWeightUpdateRequest",
    "PauseRequest",
    "PhaseRecord",
    "Push",
    "ResumeRequest",
    "SharedMemoryHandle",
    "StageRequest",
    "SyncReport",
    "TensorSpec",
    "TensorTable",
    "TorchDistributedWeightSyncInitInfo",
    "Update",
    "UpdateRequest",
    "Version",
    "VersionSpan",
    "WeightChunk",
    "WeightSyncInitInfo",
    "WeightUpdateRequest",
    "dtype_name",
    "itemsize_bytes",
    "target_dtype",
    "whole_span",
]
