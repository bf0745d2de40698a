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
    from weightsync.clients.controller import ControllerClient as ControllerClient
    from weightsync.clients.host import RolloutClient as RolloutClient
    from weightsync.codec.base import Codec as Codec
    from weightsync.config import WeightSyncConfig as WeightSyncConfig
    from weightsync.control.build import build_controller as build_controller
    from weightsync.control.controller import WeightSyncController as WeightSyncController
    from weightsync.engine.embedded import EmbeddedEngine as EmbeddedEngine
    from weightsync.engine.server import EngineServer as EngineServer
    from weightsync.errors import ConfigError as ConfigError
    from weightsync.errors import DeadlineExceededError as DeadlineExceededError
    from weightsync.errors import EngineUnreachableError as EngineUnreachableError
    from weightsync.errors import NotServingError as NotServingError
    from weightsync.errors import StateError as StateError
    from weightsync.errors import SyncFailedError as SyncFailedError
    from weightsync.errors import VersionError as VersionError
    from weightsync.errors import WeightSyncError as WeightSyncError
    from weightsync.extract.base import WeightExtractor as WeightExtractor
    from weightsync.extract.registry import extractor_for as extractor_for
    from weightsync.handles.http import HttpEngine as HttpEngine
    from weightsync.handles.sglang import SGLangEngine as SGLangEngine
    from weightsync.handles.vllm import VllmEngine as VllmEngine
    from weightsync.host.service import RolloutService as RolloutService
    from weightsync.host.settings import RolloutConfig as RolloutConfig
    from weightsync.load.base import WeightLoader as WeightLoader
    from weightsync.load.module import ModuleWeightLoader as ModuleWeightLoader
    from weightsync.memory import ServingLease as ServingLease
    from weightsync.trainer.publisher import OffloadReport as OffloadReport
    from weightsync.trainer.publisher import WeightManager as WeightManager
    from weightsync.trainer.push import PushSync as PushSync
    from weightsync.transfer.base import WeightTransferStrategy as WeightTransferStrategy
    from weightsync.types import SyncReport as SyncReport
    from weightsync.types import Version as Version
    from weightsync.verbs.publishing import Publisher as Publisher
    from weightsync.verbs.publishing import publish as publish
    from weightsync.verbs.pushing import Pusher as Pusher
    from weightsync.verbs.pushing import push as push
    from weightsync.verbs.serving import Service as Service
    from weightsync.verbs.serving import serve as serve

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

__all__ = [*_MODULE_OF, "__version__"]

if not TYPE_CHECKING:  # a type checker that saw this would take every misspelt name for granted

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'weightsync' has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        return globals().setdefault(name, value)  # a package of that name, which can be called, stays


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
