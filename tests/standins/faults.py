"""Fault injection for engine workers: a real loader that fails where a test tells it to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from typing import Any

import torch

from weightsync.load.module import ModuleWeightLoader
from weightsync.types import Full, Manifest, Update, Version


class FaultyLoader(ModuleWeightLoader):
    """A `ModuleWeightLoader` with a fault that can be armed; each fault fires once.

    Faults, as `arm({"at": point, "chunk": k, "do": what})`. Points: "begin", "load" (of chunk k), "loaded" (after it),
    "commit". What: "raise", "kill" (SIGKILL of this process), "stop" (SIGSTOP of it), "hang" (never returns),
    "corrupt" (one bit of the chunk's first tensor, after it arrived and before it is loaded). "slow" takes `seconds`
    each time, and stays armed, as any does with `"always": True`.
    """

    def __init__(self, module: torch.nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self._fault: dict[str, Any] = {}
        self._chunk = 0

    def arm(self, fault: dict[str, Any]) -> None:
        """Arms a fault; {} disarms."""
        self._fault = fault

    def begin(self, manifest: Manifest) -> None:
        """See `WeightLoader`."""
        self._chunk = 0
        self._fire("begin")
        super().begin(manifest)

    def begin_patch(self, manifest: Manifest) -> None:
        """See `WeightLoader`."""
        self._chunk = 0
        self._fire("begin")
        super().begin_patch(manifest)

    def load_weights(self, updates: Iterable[Update]) -> None:
        """See `WeightLoader`."""
        fault = self._fault
        if fault.get("at") == "load" and fault["chunk"] == self._chunk and fault["do"] == "corrupt":
            self._fault = {}
            updates = list(updates)
            first = updates[0]
            (first.tensor if isinstance(first, Full) else first.values).reshape(-1).view(torch.uint8)[0] ^= 1
        self._fire("load")
        super().load_weights(updates)
        self._fire("loaded")
        self._chunk += 1

    def commit(self, version: Version) -> None:
        """See `WeightLoader`."""
        self._fire("commit")
        super().commit(version)

    def _fire(self, point: str) -> None:
        fault = self._fault
        if fault.get("at") != point or ("chunk" in fault and fault["chunk"] != self._chunk):
            return
        if fault["do"] == "slow":
            threading.Event().wait(fault["seconds"])
            return
        if not fault.get("always"):
            self._fault = {}
        match fault["do"]:
            case "raise":
                raise RuntimeError(f"injected at {point} {self._chunk}")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                threading.Event().wait()
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case unknown:
                raise ValueError(f"no such fault: {unknown}")
