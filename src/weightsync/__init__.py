"""weightsync moves updated weights from a trainer to the rollout engines of RL post-training.

The public names are loaded on first use: importing this package imports no torch and has no side effects.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from weightsync.clients.agent import AgentClient
    from weightsync.clients.controller import AsyncControllerClient, ControllerClient
    from weightsync.clients.fanout import EngineFanout
    from weightsync.clients.http import HttpEngine
    from weightsync.clients.rollout import RolloutClient
    from weightsync.clients.sglang import SGLangApi, SGLangEngine
    from weightsync.clients.vllm import OfflineVllmApi, VllmEngine, VllmHttpApi
    from weightsync.codec.changes import ChangesCodec
    from weightsync.config import WeightSyncConfig, select_strategy
    from weightsync.control.build import build_controller
    from weightsync.control.controller import WeightSyncController
    from weightsync.control.method import ModelSync
    from weightsync.control.methods.fleet import FleetMethod
    from weightsync.control.pool import RolloutPool
    from weightsync.control.server import ControllerServer
    from weightsync.errors import WeightSyncError
    from weightsync.extract.deepspeed import DeepSpeedWeightExtractor
    from weightsync.extract.fsdp import FSDPWeightExtractor
    from weightsync.extract.megatron import MegatronWeightExtractor
    from weightsync.extract.megatron_export import MegatronCoreExporter
    from weightsync.extract.module import ModuleWeightExtractor
    from weightsync.extract.named import NamedTensorsExtractor
    from weightsync.extract.registry import extractor_for
    from weightsync.load.module import ModuleWeightLoader
    from weightsync.load.vllm import VLLMWeightLoader
    from weightsync.memory import LeaseReader, ServingLease
    from weightsync.observe import Recorder
    from weightsync.publish.manager import OffloadReport, WeightManager
    from weightsync.publish.push import PushSync
    from weightsync.rollout.engine import EmbeddedEngine
    from weightsync.rollout.puller import Puller
    from weightsync.rollout.server import EngineServer
    from weightsync.rollout.service import RolloutService
    from weightsync.rollout.settings import RolloutConfig
    from weightsync.transfer.broadcast import BroadcastTransferStrategy
    from weightsync.transfer.ipc import CudaIpcTransferStrategy, PackedCudaIpcTransferStrategy
    from weightsync.transfer.sglang import SGLangTransferStrategy
    from weightsync.types import (
        BroadcastWeightUpdateRequest,
        CudaIpcWeightUpdateRequest,
        EmptyWeightSyncInitInfo,
        EngineHandle,
        Full,
        InferenceEngineClient,
        Manifest,
        PackedCudaIpcWeightUpdateRequest,
        Patch,
        SyncMethod,
        SyncReport,
        TensorSpec,
        TorchDistributedWeightSyncInitInfo,
        Update,
        Version,
        WeightChunk,
        WeightSyncInitInfo,
        WeightUpdateRequest,
    )
    from weightsync.types.publication import NotifyRequest, Publication

_MODULE_OF = {
    "AgentClient": "weightsync.clients.agent",
    "AsyncControllerClient": "weightsync.clients.controller",
    "BroadcastTransferStrategy": "weightsync.transfer.broadcast",
    "BroadcastWeightUpdateRequest": "weightsync.types",
    "build_controller": "weightsync.control.build",
    "ChangesCodec": "weightsync.codec.changes",
    "ControllerClient": "weightsync.clients.controller",
    "ControllerServer": "weightsync.control.server",
    "CudaIpcTransferStrategy": "weightsync.transfer.ipc",
    "CudaIpcWeightUpdateRequest": "weightsync.types",
    "DeepSpeedWeightExtractor": "weightsync.extract.deepspeed",
    "EmbeddedEngine": "weightsync.rollout.engine",
    "EmptyWeightSyncInitInfo": "weightsync.types",
    "EngineFanout": "weightsync.clients.fanout",
    "EngineHandle": "weightsync.types",
    "EngineServer": "weightsync.rollout.server",
    "extractor_for": "weightsync.extract.registry",
    "FleetMethod": "weightsync.control.methods.fleet",
    "FSDPWeightExtractor": "weightsync.extract.fsdp",
    "Full": "weightsync.types",
    "HttpEngine": "weightsync.clients.http",
    "InferenceEngineClient": "weightsync.types",
    "LeaseReader": "weightsync.memory",
    "Manifest": "weightsync.types",
    "MegatronCoreExporter": "weightsync.extract.megatron_export",
    "MegatronWeightExtractor": "weightsync.extract.megatron",
    "ModelSync": "weightsync.control.method",
    "ModuleWeightExtractor": "weightsync.extract.module",
    "ModuleWeightLoader": "weightsync.load.module",
    "NamedTensorsExtractor": "weightsync.extract.named",
    "NotifyRequest": "weightsync.types.publication",
    "OfflineVllmApi": "weightsync.clients.vllm",
    "OffloadReport": "weightsync.publish.manager",
    "PackedCudaIpcTransferStrategy": "weightsync.transfer.ipc",
    "PackedCudaIpcWeightUpdateRequest": "weightsync.types",
    "Patch": "weightsync.types",
    "Publication": "weightsync.types.publication",
    "Puller": "weightsync.rollout.puller",
    "PushSync": "weightsync.publish.push",
    "Recorder": "weightsync.observe",
    "RolloutClient": "weightsync.clients.rollout",
    "RolloutConfig": "weightsync.rollout.settings",
    "RolloutPool": "weightsync.control.pool",
    "RolloutService": "weightsync.rollout.service",
    "select_strategy": "weightsync.config",
    "ServingLease": "weightsync.memory",
    "SGLangApi": "weightsync.clients.sglang",
    "SGLangEngine": "weightsync.clients.sglang",
    "SGLangTransferStrategy": "weightsync.transfer.sglang",
    "SyncMethod": "weightsync.types",
    "SyncReport": "weightsync.types",
    "TensorSpec": "weightsync.types",
    "TorchDistributedWeightSyncInitInfo": "weightsync.types",
    "Update": "weightsync.types",
    "Version": "weightsync.types",
    "VllmEngine": "weightsync.clients.vllm",
    "VllmHttpApi": "weightsync.clients.vllm",
    "VLLMWeightLoader": "weightsync.load.vllm",
    "WeightChunk": "weightsync.types",
    "WeightManager": "weightsync.publish.manager",
    "WeightSyncConfig": "weightsync.config",
    "WeightSyncController": "weightsync.control.controller",
    "WeightSyncError": "weightsync.errors",
    "WeightSyncInitInfo": "weightsync.types",
    "WeightUpdateRequest": "weightsync.types",
}

__all__ = [
    "AgentClient",
    "AsyncControllerClient",
    "BroadcastTransferStrategy",
    "BroadcastWeightUpdateRequest",
    "ChangesCodec",
    "ControllerClient",
    "ControllerServer",
    "CudaIpcTransferStrategy",
    "CudaIpcWeightUpdateRequest",
    "DeepSpeedWeightExtractor",
    "EmbeddedEngine",
    "EmptyWeightSyncInitInfo",
    "EngineFanout",
    "EngineHandle",
    "EngineServer",
    "FSDPWeightExtractor",
    "FleetMethod",
    "Full",
    "HttpEngine",
    "InferenceEngineClient",
    "LeaseReader",
    "Manifest",
    "MegatronCoreExporter",
    "MegatronWeightExtractor",
    "ModelSync",
    "ModuleWeightExtractor",
    "ModuleWeightLoader",
    "NamedTensorsExtractor",
    "NotifyRequest",
    "OfflineVllmApi",
    "OffloadReport",
    "PackedCudaIpcTransferStrategy",
    "PackedCudaIpcWeightUpdateRequest",
    "Patch",
    "Publication",
    "Puller",
    "PushSync",
    "Recorder",
    "RolloutClient",
    "RolloutConfig",
    "RolloutPool",
    "RolloutService",
    "SGLangApi",
    "SGLangEngine",
    "SGLangTransferStrategy",
    "ServingLease",
    "SyncMethod",
    "SyncReport",
    "TensorSpec",
    "TorchDistributedWeightSyncInitInfo",
    "Update",
    "VLLMWeightLoader",
    "Version",
    "VllmEngine",
    "VllmHttpApi",
    "WeightChunk",
    "WeightManager",
    "WeightSyncConfig",
    "WeightSyncController",
    "WeightSyncError",
    "WeightSyncInitInfo",
    "WeightUpdateRequest",
    "__version__",
    "build_controller",
    "extractor_for",
    "select_strategy",
]

if not TYPE_CHECKING:  # a type checker that saw this would take every misspelt name for granted

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'weightsync' has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
