"""verl's own NIXL engine on a machine without a GPU: it has `device: cpu`, and asks CUDA for some things.

verl imports this module in every worker, where `custom_backend_module` names it.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch

sys.modules.setdefault("cupy", types.ModuleType("cupy"))  # for its buffers on a GPU
torch.cuda.synchronize = lambda *_: None
_zeros = torch.zeros


def _unpinned(*args: Any, pin_memory: bool = False, **given: Any) -> torch.Tensor:
    return _zeros(*args, **given)


torch.zeros = _unpinned
importlib.import_module("verl.checkpoint_engine.nixl_checkpoint_engine")
