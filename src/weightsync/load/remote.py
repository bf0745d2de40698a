"""RemoteWeightLoader, where loaders are looked for. It speaks to an engine, so it lives in `engine.remote`."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name != "RemoteWeightLoader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("weightsync.engine.remote").RemoteWeightLoader
