"""Document 5's names: its controller is ours, under the same calls and with the same states."""

from __future__ import annotations

from typing import TypeAlias

from weightsync.control.controller import Lockable, WeightSyncController
from weightsync.control.methods.tinker import TinkerServiceHolder
from weightsync.control.methods.weaver import WeaverServiceHolder
from weightsync.types.control import RolloutServiceState

__all__ = [
    "Lockable",
    "ModelTag",
    "RolloutServiceState",
    "TinkerServiceHolder",
    "WeaverServiceHolder",
    "WeightSyncController",
]

ModelTag: TypeAlias = str
"""Names a model in calls: `model_id` elsewhere."""
