"""Document 5's names: its controller is ours, under the same calls and with the same states."""

from __future__ import annotations

from typing import TypeAlias

from weightsync.control.controller import Lockable as Lockable
from weightsync.control.controller import WeightSyncController as WeightSyncController
from weightsync.control.methods.tinker import TinkerServiceHolder as TinkerServiceHolder
from weightsync.control.methods.weaver import WeaverServiceHolder as WeaverServiceHolder
from weightsync.types.control import RolloutServiceState as RolloutServiceState

ModelTag: TypeAlias = str
"""Names a model in calls: `model_id` elsewhere."""
