"""weightsync moves updated weights from a trainer to the rollout engines of RL post-training.

The three verbs, what they give and are given, the base classes of the four axes, and the errors that people catch. All
else is imported from its room. Names are loaded on first use: importing this package imports no torch and has no side
effects.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from weightsync.clients.controller import ControllerClient
    from weightsync.clients.host import RolloutClient
    from weightsync.codec.base import Codec
    from weightsync.config import WeightSyncConfig
    from weightsync.control.build import build_controller
    from weightsync.control.controller import WeightSyncController
    from weightsync.engine.embedded import EmbeddedEngine
    from weightsync.engine.server import EngineServer
    from weightsync.errors import (
        ConfigError,
        DeadlineExceededError,
        EngineUnreachableError,
        NotServingError,
        StateError,
        SyncFailedError,
        VersionError,
        WeightSyncError,
    )
    from weightsync.extract.base import WeightExtractor
    from weightsync.extract.registry import extractor_for
    from weightsync.handles.http import HttpEngine
    from weightsync.handles.sglang import SGLangEngine
    from weightsync.handles.vllm import VllmEngine
    from weightsync.host.service import RolloutService
    from weightsync.host.settings import RolloutConfig
    from weightsync.load.base import WeightLoader
    from weightsync.load.module import ModuleWeightLoader
    from weightsync.memory import ServingLease
    from weightsync.trainer.publisher import OffloadReport, WeightManager
    from weightsync.trainer.push import PushSync
    from weightsync.transfer.base import WeightTransferStrategy
    from weightsync.types import SyncReport, Version
    from weightsync.verbs.publishing import Publisher, publish
    from weightsync.verbs.pushing import Pusher, push
    from weightsync.verbs.serving import Service, serve

_MODULE_OF = {
    "build_controller": "weightsync.control.build",
    "Codec": "weightsync.codec.base",
    "ConfigError": "weightsync.errors",
    "ControllerClient": "weightsync.clients.controller",
    "DeadlineExceededError": "weightsync.errors",
    "EmbeddedEngine": "weightsync.engine.embedded",
    "EngineServer": "weightsync.engine.server",
    "EngineUnreachableError": "weightsync.errors",
    "extractor_for": "weightsync.extract.registry",
    "HttpEngine": "weightsync.handles.http",
    "ModuleWeightLoader": "weightsync.load.module",
    "NotServingError": "weightsync.errors",
    "OffloadReport": "weightsync.trainer.publisher",
    "publish": "weightsync.verbs.publishing",
    "Publisher": "weightsync.verbs.publishing",
    "push": "weightsync.verbs.pushing",
    "Pusher": "weightsync.verbs.pushing",
    "PushSync": "weightsync.trainer.push",
    "RolloutClient": "weightsync.clients.host",
    "RolloutConfig": "weightsync.host.settings",
    "RolloutService": "weightsync.host.service",
    "serve": "weightsync.verbs.serving",
    "Service": "weightsync.verbs.serving",
    "ServingLease": "weightsync.memory",
    "SGLangEngine": "weightsync.handles.sglang",
    "StateError": "weightsync.errors",
    "SyncFailedError": "weightsync.errors",
    "SyncReport": "weightsync.types",
    "Version": "weightsync.types",
    "VersionError": "weightsync.errors",
    "VllmEngine": "weightsync.handles.vllm",
    "WeightExtractor": "weightsync.extract.base",
    "WeightLoader": "weightsync.load.base",
    "WeightManager": "weightsync.trainer.publisher",
    "WeightSyncConfig": "weightsync.config",
    "WeightSyncController": "weightsync.control.controller",
    "WeightSyncError": "weightsync.errors",
    "WeightTransferStrategy": "weightsync.transfer.base",
}

__all__ = [
    "Codec",
    "ConfigError",
    "ControllerClient",
    "DeadlineExceededError",
    "EmbeddedEngine",
    "EngineServer",
    "EngineUnreachableError",
    "HttpEngine",
    "ModuleWeightLoader",
    "NotServingError",
    "OffloadReport",
    "Publisher",
    "PushSync",
    "Pusher",
    "RolloutClient",
    "RolloutConfig",
    "RolloutService",
    "SGLangEngine",
    "Service",
    "ServingLease",
    "StateError",
    "SyncFailedError",
    "SyncReport",
    "Version",
    "VersionError",
    "VllmEngine",
    "WeightExtractor",
    "WeightLoader",
    "WeightManager",
    "WeightSyncConfig",
    "WeightSyncController",
    "WeightSyncError",
    "WeightTransferStrategy",
    "__version__",
    "build_controller",
    "extractor_for",
    "publish",
    "push",
    "serve",
]

if not TYPE_CHECKING:  # a type checker that saw this would take every misspelt name for granted

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'weightsync' has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        return globals().setdefault(name, value)  # a package of that name, which can be called, stays


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
